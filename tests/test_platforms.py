"""What the environment says fills what flags and file leave open, and the run says who said what."""

import json
import pathlib

import pytest

from tests.conftest import Trainer, metrics_of
from trainer import config, flags
from trainer.errors import ConfigError

BASE = "gs://bucket/job"
VERTEX = {
    "CLOUD_ML_JOB_ID": "123",
    "AIP_MODEL_DIR": f"{BASE}/model/",
    "AIP_CHECKPOINT_DIR": f"{BASE}/checkpoints/",
    "AIP_TENSORBOARD_LOG_DIR": f"{BASE}/logs/",
}
SHARDS = {
    "AIP_TRAINING_DATA_URI": "gs://bucket/digits/1.0.0/digits-train.tfrecord-*",
    "AIP_VALIDATION_DATA_URI": "gs://bucket/digits/1.0.0/digits-validation.tfrecord-00000-of-00001",
    "AIP_TEST_DATA_URI": "gs://bucket/digits/1.0.0/digits-test*",
}


def _resolve(environ: dict[str, str], *arguments: str) -> config.Config:
    return flags.merge(flags.layers(flags.parse(["trainer", *arguments]), environ))


def test_vertex_says_where_things_go() -> None:
    found = _resolve(VERTEX, "--dataset=digits")
    assert found.model_dir == f"{BASE}/checkpoints"
    assert found.tensorboard_dir == f"{BASE}/logs"
    assert found.export_dir == f"{BASE}/model"


def test_a_flag_and_a_file_win_over_the_environment(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("dataset = 'digits'\ntensorboard_dir = 'here'\n")
    found = _resolve(VERTEX | {"TPU_NAME": "mine"}, f"--config={file}", "--model_dir=gs://mine/run", "--notpu")
    assert (found.model_dir, found.tensorboard_dir, found.tpu) == ("gs://mine/run", "here", None)
    assert found.export_dir == f"{BASE}/model"


@pytest.mark.parametrize(("mode", "exports", "draws"), [("train", False, True), ("export", True, False)])
def test_what_a_mode_does_not_write_is_not_filled(mode: str, exports: bool, draws: bool) -> None:
    found = _resolve(VERTEX, "--dataset=digits", f"--mode={mode}")
    assert (found.export_dir is not None, found.tensorboard_dir is not None) == (exports, draws)


@pytest.mark.parametrize(("mode", "split"), [("train_and_eval", "validation"), ("eval", "test")])
def test_shards_name_dataset_and_splits(mode: str, split: str) -> None:
    found = _resolve(VERTEX | SHARDS, f"--mode={mode}")
    assert found.dataset == "gs://bucket/digits/1.0.0"
    assert (found.train_split, found.eval_split) == ("train", split)
    assert _resolve(VERTEX | SHARDS, "--dataset=mine").train_split == "train"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**SHARDS, "AIP_DATA_FORMAT": "jsonl"}, "hands over a managed dataset as jsonl"),
        ({"AIP_TRAINING_DATA_URI": "gs://bucket/all.tfrecord"}, "must name shards as TensorFlow Datasets does"),
        ({**SHARDS, "AIP_VALIDATION_DATA_URI": "gs://bucket/other/other-test*"}, "are of two directories"),
    ],
)
def test_data_that_cannot_be_read_is_refused_before_anything(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(VERTEX | environ)
    assert _resolve(VERTEX | environ, "--dataset=mine").dataset == "mine"


@pytest.mark.parametrize("name", ["TPU_NAME", "TPU_CONFIG", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"])
def test_a_tpu_in_the_environment_is_not_left_idle(name: str) -> None:
    needed = ["--dataset=digits", "--model_dir=run"]
    assert _resolve({name: "local"}, *needed).tpu == "auto"
    assert _resolve({name: "local"}, *needed, "--tpu=other").tpu == "other"
    assert _resolve({name: "local"}, *needed, "--replicas=2").tpu is None
    assert _resolve({}, *needed).tpu is None


def test_each_trial_has_a_run_of_its_own() -> None:
    trial = {"CLOUD_ML_TRIAL_ID": "7"}
    given = ["--dataset=digits", "--model_dir=gs://bucket/tuning"]
    assert _resolve(trial, *given).run_id == "trial-7"
    assert _resolve(trial, *given, "--run_id=x{trial}").run_id == "x{trial}"
    # Vertex AI has the trial in it already.
    assert _resolve(trial | VERTEX, "--dataset=digits").run_id is None
    assert _resolve(trial | VERTEX, *given).run_id == "trial-7"


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--global_batch_size=64.0", "global_batch_size", 64),
        ("--model_options.units=[8, 4]", "model_options", {"units": [8, 4]}),
        ("--model_options.activation=gelu", "model_options", {"activation": "gelu"}),
    ],
)
def test_a_trial_can_set_any_option(argument: str, name: str, value: object) -> None:
    assert getattr(_resolve({}, "--dataset=digits", "--model_dir=run", argument), name) == value


def test_an_option_of_the_model_is_set_over_the_files(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("dataset = 'digits'\nmodel_dir = 'run'\nmodel_options = {units = [8], dropout = 0.5}\n")
    assert _resolve({}, f"--config={file}", "--model_options.dropout=0.1").model_options == {
        "units": [8],
        "dropout": 0.1,
    }


def test_mounted_buckets_are_read_as_buckets() -> None:
    given = ["--dataset=/gcs/data/digits/1.0.0", "--model_dir=/gcs/bucket/run"]
    assert _resolve(VERTEX, *given).model_dir == "gs://bucket/run"
    assert _resolve(VERTEX, *given).dataset == "gs://data/digits/1.0.0"
    assert _resolve({}, *given).model_dir == "/gcs/bucket/run"


def test_the_alert_url_may_come_from_a_secret() -> None:
    url = "https://hooks.example.com/services/SECRET"
    found = flags.layers(flags.parse(["trainer", "--dataset=digits", "--model_dir=run"]), {"TRAINER_ALERT_URL": url})
    assert flags.merge(found).alert_url == url
    assert flags.origins(found)["TRAINER_ALERT_URL"] == {"alert_url": "..."}


@pytest.mark.slow
def test_a_run_on_vertex_says_who_said_what(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("model = 'mlp'\ntrain_steps = 4\n")
    places = {name: str(tmp_path / where) for name, where in _PLACES.items()}
    done = trainer.run(
        f"--config={file}",
        "--seed=3",
        environ=places | {"CLOUD_ML_JOB_ID": "123", "TRAINER_ALERT_URL": "http://[::1]:9"},
    )
    run = tmp_path / "checkpoints"
    assert metrics_of(run)
    assert (tmp_path / "model" / "saved_model.pb").exists()
    assert not (run / "export").exists()
    assert list((tmp_path / "logs").iterdir())
    assert "from AIP_CHECKPOINT_DIR" in done.stderr + done.stdout
    [start] = json.loads((run / "provenance.json").read_text())["starts"]
    assert start["platform"] == {"CLOUD_ML_JOB_ID": "123"}
    assert start["options"]["AIP_CHECKPOINT_DIR"] == {"model_dir": str(run)}
    assert start["options"][str(file)] == {"model": "mlp", "train_steps": "4"}
    assert start["options"]["flags"]["seed"] == "3"
    assert start["options"]["TRAINER_ALERT_URL"] == {"alert_url": "..."}
    again = trainer.run(f"--config={file}", "--seed=3", environ=places)
    assert "nothing left to do" in again.stderr + again.stdout


_PLACES = {"AIP_MODEL_DIR": "model/", "AIP_CHECKPOINT_DIR": "checkpoints/", "AIP_TENSORBOARD_LOG_DIR": "logs/"}
