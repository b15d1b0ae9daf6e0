"""Options from flags and files: precedence, and one error for everything that is wrong."""

import dataclasses
import json
import pathlib

import pytest

from trainer import config, flags
from trainer.errors import ConfigError, UsageError

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
        _resolve(f"--config={file}", "--momentum=0.5", "--tpu_zone=z")
    message = str(caught.value)
    for part in (
        "unknown option 'learning_rte'; did you mean 'learning_rate'?",
        "seed takes a whole number. Received: 'one'",
        "unknown model 'cnnn'; did you mean 'cnn'?",
        "one kind of clipping at a time",
        "momentum has no effect on adamw",
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
        ("run.toml", "train_steps = 1\ntrain_epochs = 1", "both say when to stop"),
    ],
)
def test_bad_files(tmp_path: pathlib.Path, name: str, text: str | None, problem: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        _resolve(f"--config={file}", *NEEDED)


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


def test_help_tells_every_option_with_its_default() -> None:
    text = flags.help_text()
    for name, field in config.FIELDS.items():
        assert f"--{name}=<" in text
        assert " ".join(field.metadata["help"].split()) in " ".join(text.split())
