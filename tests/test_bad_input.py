"""Every mistake of a user ends in one clear message and the right exit code, with nothing written."""

import pathlib
import sys

import pytest

from tests.conftest import Trainer

USAGE, RETRY, CONFIG = 2, 75, 78

CASES = {
    "misspelt flag": (["--modle=cnn"], USAGE, "unknown flag --modle; did you mean"),
    "positional argument": (["--tpu", "local"], USAGE, "write --tpu=local"),
    "misspelt model": (["--model=cnnn"], CONFIG, "unknown model 'cnnn'; did you mean 'cnn'?"),
    "unknown dataset": (["--dataset=digitz"], CONFIG, "holds digits"),
    "no such split": (["--eval_split=validation"], CONFIG, "It has: train, test"),
    "batch and replicas": (["--global_batch_size=130", "--replicas=4"], CONFIG, "Nearest sizes: 128 or 132"),
    "no such application": (["--model=applications/ResNet5"], CONFIG, "did you mean ResNet"),
    "image too small": (["--model=applications/InceptionV3"], CONFIG, "at least 75x75"),
    "image too small for ours": (["--image_size=2"], CONFIG, "Received: 2 x 2. Set image_size"),
    "misspelt model option": (["--model_options=dropuot=0.1"], CONFIG, "did you mean 'dropout'?"),
    "model option of another type": (["--model_options=dropout='a'"], CONFIG, "dropout must be of type"),
    "no such module": (["--model=nowhere.at_all"], CONFIG, "no module of this name"),
    "too few classes": (["--num_classes=5"], CONFIG, "has 10. Received: 5"),
    "no checkpoint": (["--mode=export"], CONFIG, "there is no checkpoint to export"),
    "no TPU here": (["--tpu"], CONFIG, "TPU_NAME"),
    "no local TPU": (["--tpu=local"], CONFIG, "TPU"),
    "nobody listens": (["--tpu=grpc://127.0.0.1:1"], RETRY, "127.0.0.1:1 cannot be reached"),
    "remote TPU, local paths": (["--tpu=grpc://10.0.0.2:8470"], CONFIG, "cannot see local paths; use gs://"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_clear_message(trainer: Trainer, tmp_path: pathlib.Path, name: str) -> None:
    flags, code, message = CASES[name]
    done = trainer.run(f"--model_dir={tmp_path}/run", *flags, code=code)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("trainer: ")
    assert not list(tmp_path.iterdir()), "something was written"


def test_misspelt_config_key(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.toml").write_text("learning_rte = 1.0\n")
    done = trainer.run(f"--config={tmp_path}/run.toml", f"--model_dir={tmp_path}/run", code=CONFIG)
    assert "did you mean 'learning_rate'?" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_unwritable_model_dir(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = trainer.run(f"--model_dir={tmp_path}/file/run", code=CONFIG)
    assert "model_dir cannot be written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_mistakes_are_found_without_tensorflow(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    # A TensorFlow that cannot be imported: whatever is said here is said without it.
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was imported')")
    path = f"{tmp_path}:{pathlib.Path(__file__).parent.parent}"
    for flags, code in ((["--help"], 0), (["--modle=x"], USAGE), (["--model=cnnn"], CONFIG), (["--dataset=x"], CONFIG)):
        done = trainer.run(f"--model_dir={tmp_path}/run", *flags, code=code, environ={"PYTHONPATH": path})
        assert "TensorFlow was imported" not in done.stderr


def test_missing_tensorflow_names_the_extra(tmp_path: pathlib.Path, digits_dir: pathlib.Path) -> None:
    import subprocess

    hide = (
        "import sys; sys.modules['tensorflow'] = None; from trainer import main; from trainer.watch import stopping; "
    )
    hide += (
        f"main.main(['t', '--dataset=digits', '--data_dir={digits_dir}', '--model_dir={tmp_path}/r'], stopping.Stops())"
    )
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, timeout=60)
    assert "TensorFlow is not installed. Run: pip install '.[cpu]'" in done.stderr
