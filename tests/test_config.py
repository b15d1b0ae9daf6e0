"""Options from flags and files: precedence, and one error for everything that is wrong."""

import dataclasses
import json
import pathlib

import pytest

from trainer import config, flags
from trainer.errors import ConfigError, UsageError
from trainer.options.optimizer import SCHEDULES

NEEDED = ["--dataset=digits", "--model_dir=run"]


def _resolve(*arguments: str) -> config.Config:
    return flags.merge(flags.layers(flags.parse(["trainer", *arguments]), {}))


def test_precedence_is_default_file_flag(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("dataset = 'digits'\nmodel_dir = 'run'\nlearning_rate = 1e-2\nseed = 3\n")
    merged = _resolve(f"--config={file}", "--seed=4")
    assert (merged.global_batch_size, merged.learning_rate, merged.seed) == (128, 0.01, 4)


def test_config_loads_back_from_its_own_json(tmp_path: pathlib.Path) -> None:
    first = _resolve(*NEEDED, "--model_options=units=[8, 4], dropout=0.5", "--clipnorm=1", "--tpu", "--train_steps=5")
    file = tmp_path / "config.json"
    file.write_text(config.to_json(first))
    assert _resolve(f"--config={file}") == first


def test_a_file_value_can_be_unset_by_flag(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"dataset": "d", "model_dir": "m", "train_steps": 7}))
    assert _resolve(f"--config={file}", "--train_steps=none", "--train_epochs=2").train_epochs == 2.0


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--tpu", "auto"),
        ("--tpu=local", "local"),
        ("--tpu=grpc://10.0.0.2:8470", "grpc://10.0.0.2:8470"),
        ("--notpu", None),
    ],
)
def test_tpu_may_stand_alone(argument: str, expected: str | None) -> None:
    assert _resolve(*NEEDED, argument, "--seed=1").tpu == expected


def test_all_usage_mistakes_in_one_error() -> None:
    with pytest.raises(UsageError) as caught:
        _resolve("--learnin_rate=1", "--train_steps=many", "--mode=trian", "--learning_rate=-1", "local")
    message = str(caught.value)
    for part in (
        "unknown flag --learnin_rate; did you mean 'learning_rate'?",
        "--train_steps takes a whole number. Received: 'many'",
        "did you mean 'train'?",
        "write --tpu=local",
        "learning_rate must be above 0. Received: -1.0",
        "dataset is missing",
    ):
        assert part in message


def test_all_config_mistakes_in_one_error(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("learning_rte = 1e-3\nseed = 'one'\nmodel = 'cnnn'\nclipnorm = 1.0\nclipvalue = 1.0\n")
    with pytest.raises(ConfigError) as caught:
        _resolve(f"--config={file}", "--optimizer_options.momentum=0.5", "--tpu_zone=z")
    message = str(caught.value)
    for part in (
        "unknown option 'learning_rte'; did you mean 'learning_rate'?",
        "seed takes a whole number. Received: 'one'",
        "unknown model 'cnnn'; did you mean 'cnn'?",
        "one kind of clipping at a time",
        "optimizer_options: adamw has no option 'momentum'; it has: beta_1",
        "tpu_zone has no effect without tpu",
        "model_dir is missing",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("run.toml", "seed = ", "does not parse"),
        ("run.json", "[1]", "must hold a table"),
        ("run.yaml", "seed: 1", "ends in .toml or .json"),
        ("absent.toml", None, "cannot be read"),
        ("run.toml", "seed = true", "seed takes a whole number. Received: True"),
        ("run.json", '{"learning_rate": NaN}', "must be finite"),
        ("run.toml", "tpu = ''", "tpu is empty"),
        ("run.toml", "tpu = 'local'\nreplicas = 2", "a TPU slice has the replicas it has"),
        ("run.toml", "mode = 'eval'\ncache = 'memory'", "cache supplies training only; leave it out of eval"),
        ("run.toml", "mode = 'eval'\nlint = 'on'", "lint looks at what is to be trained; leave it out of eval"),
        ("run.toml", "mode = 'export'\ndata_service = 'grpc://a:1'", "data_service supplies training only"),
        ("run.toml", "train_steps = 1\ntrain_epochs = 1", "each say when to stop"),
    ],
)
def test_bad_files(tmp_path: pathlib.Path, name: str, text: str | None, problem: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        _resolve(f"--config={file}", *NEEDED)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--optimizer=adagrad", "--optimizer_options=epsilon=true"], "epsilon of adagrad must be a number"),
        (["--optimizer=sgd", "--optimizer_options.nesterov=1"], "nesterov of sgd must be true or false. Received: 1"),
        (["--optimizer=sgd", "--optimizer_options=weight_decay=0.1"], "--weight_decay is an option of its own"),
        (["--optimizer=lion", "--optimizer_options=beta1=0.1"], "lion has no option 'beta1'; did you mean 'beta_1'?"),
        (["--optimizer=muon", "--optimizer_options=ns_steps=2.5"], "ns_steps of muon must be a whole number"),
        (["--optimizer=muon", "--optimizer_options=exclude_layers='a'"], "exclude_layers of muon must be a list of"),
        (["--optimizer=ftrl", "--weight_decay=0.1"], "weight_decay has no lasting effect on ftrl"),
        (["--optimizer=ftrl", "--warmup=5%"], "ftrl divides by the learning rate"),
        (["--no_decay=*bias"], "no_decay has no effect without weight_decay"),
        (["--learning_rate_scaling=sqrt"], "learning_rate_scaling has no effect without learning_rate_batch_size"),
        (["--warmup=500"], "warmup is a duration, a number and its unit"),
        (["--warmup=5 steps, 6 steps"], "warmup is a duration, a number and its unit"),
        (["--warmup=2.5 steps"], "warmup counts whole steps"),
        (["--warmup=101%"], "warmup is a part of the training, 100% at most"),
        (["--schedule=rsqrt"], "schedule=rsqrt needs warmup"),
        (["--schedule=wsd"], "schedule=wsd needs decay_at"),
        (["--schedule=wsd", "--decay_at=5%, 6%"], "schedule=wsd decays once"),
        (["--schedule=step", "--decay_at=5 epochs, 6"], "decay_at is a duration.* Received: ' 6'"),
        (["--schedule=exponential", "--decay_factor=0.5"], "schedule=exponential needs decay_every"),
        (["--train_steps=5", "--train_examples=5"], "train_steps and train_examples each say when to stop"),
        (["--schedule=cosine", "--decay_power=2"], "decay_power has no effect on schedule=cosine"),
    ],
)
def test_options_of_optimizer_and_schedule_that_do_not_go_together(options: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        _resolve(*NEEDED, *options)


def test_each_schedule_takes_what_it_uses_and_nothing_else() -> None:
    # What the others would use, given to each schedule besides what it needs.
    given = {
        "final_learning_rate_factor": "0.1",
        "decay_power": "2",
        "decay_every": "1 epoch",
        "decay_factor": "0.5",
        "decay_at": "90%",
    }
    for schedule, (needed, used) in SCHEDULES.items():
        fits = [f"--{name}={value}" for name, value in given.items() if name in (*needed, *used)]
        fits += ["--warmup=5%", f"--schedule={schedule}"]
        assert _resolve(*NEEDED, *fits).schedule == schedule
        for name in given.keys() - {*needed, *used}:
            with pytest.raises(ConfigError, match=f"{name} has no effect on schedule={schedule}"):
                _resolve(*NEEDED, *fits, f"--{name}={given[name]}")


def test_entries_of_a_table_are_set_over_what_a_file_says(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("optimizer = 'sgd'\noptimizer_options = {momentum = 0.5}\n")
    merged = _resolve(f"--config={file}", *NEEDED, "--optimizer_options.nesterov=true")
    assert merged.optimizer_options == {"momentum": 0.5, "nesterov": True}
    unset = _resolve(f"--config={file}", *NEEDED, "--optimizer=adam", "--optimizer_options=")
    assert unset.optimizer_options == {}
    said = flags.origins(flags.layers(flags.parse(["trainer", *NEEDED, "--optimizer_options="]), {}))
    assert "optimizer_options" not in said["flags"]
    file.write_text("optimizer_options = 3\n")
    with pytest.raises(ConfigError, match="optimizer_options takes a table. Received: 3"):
        _resolve(f"--config={file}", *NEEDED, "--optimizer_options.nesterov=true")


def test_differences_name_only_what_changes_the_numbers() -> None:
    old = _resolve(*NEEDED, "--seed=1", "--replicas=2", "--model_options=units=[8]")
    new = dataclasses.replace(old, seed=2, replicas=4, model_dir="elsewhere")
    assert config.differences(json.loads(config.to_json(old)), new) == ["seed: 1 -> 2"]
    assert config.differences(json.loads(config.to_json(old)), old) == []


def test_eval_takes_the_options_of_the_run(tmp_path: pathlib.Path) -> None:
    trained = _resolve("--dataset=digits", f"--model_dir={tmp_path}", "--model=mlp", "--replicas=2", "--train_epochs=3")
    (tmp_path / "config.json").write_text(config.to_json(trained))
    evaluated = _resolve("--mode=eval", f"--model_dir={tmp_path}", "--eval_split=train")
    assert (evaluated.dataset, evaluated.model, evaluated.train_epochs) == ("digits", "mlp", 3.0)
    assert evaluated.eval_split == "train"
    assert evaluated.replicas is None, "hardware is of this call"
    other = _resolve("--mode=eval", f"--model_dir={tmp_path}", "--train_steps=5")
    assert (other.train_steps, other.train_epochs) == (5, None)


def test_eval_of_a_run_that_skips_records_needs_no_budget_told_again(tmp_path: pathlib.Path) -> None:
    skip = ["--corrupt_records=skip", "--max_corrupt_records=3"]
    trained = _resolve("--dataset=digits", f"--model_dir={tmp_path}", *skip)
    (tmp_path / "config.json").write_text(config.to_json(trained))
    for mode in ("eval", "export"):
        assert _resolve(f"--mode={mode}", f"--model_dir={tmp_path}").corrupt_records == "skip"


def test_eval_leaves_out_what_has_an_effect_in_training_only(tmp_path: pathlib.Path) -> None:
    trained = _resolve("--dataset=digits", f"--model_dir={tmp_path}", "--adapt_examples=50")
    (tmp_path / "config.json").write_text(config.to_json(trained))
    for mode in ("eval", "export"):
        assert _resolve(f"--mode={mode}", f"--model_dir={tmp_path}").dataset == "digits"
        with pytest.raises(ConfigError, match=f"leave it out of {mode}"):
            _resolve(f"--mode={mode}", f"--model_dir={tmp_path}", "--adapt_examples=50")


def test_help_tells_every_option_with_its_default() -> None:
    text = flags.help_text()
    for name, field in config.FIELDS.items():
        assert f"--{name}=<" in text
        assert " ".join(field.metadata["help"].split()) in " ".join(text.split())
