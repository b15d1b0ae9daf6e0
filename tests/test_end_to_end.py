"""Whole runs as a user starts them: processes, files, exit codes."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import devices
from tests.conftest import GUARD_SECS, ROOT, Trainer, free_ports, metrics_of, state_of

pytestmark = pytest.mark.slow

# Two workers share batch statistics and dropout masks as little as two replicas do, so parity leaves them out.
PLAIN = ["--model=cnn", "--model_options=batch_norm=false, dropout=0", "--train_steps=60", "--eval_every_steps=20"]

SERVE = """
import sys
import numpy as np
import tensorflow as tf
served = tf.saved_model.load(sys.argv[1])
images = np.load(sys.argv[2])
outputs = served.signatures["serving_default"](image=tf.constant(images))
assert not [name for name in sys.modules if name.split(".")[0] in ("trainer", "data")]
np.savez(sys.argv[3], **{key: value.numpy() for key, value in outputs.items()})
"""


IMPORTED = "import time:"


@pytest.fixture(scope="module")
def run_and_imports(
    digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, str, set[str]]:
    """model_dir and console of 60 steps on one replica, and the modules that it has imported."""
    model_dir = tmp_path_factory.mktemp("runs") / "one"
    done = Trainer(digits_dir).run(f"--model_dir={model_dir}", *PLAIN, environ={"PYTHONPROFILEIMPORTTIME": "1"})
    lines = done.stderr.splitlines()
    said = [line for line in lines if not line.startswith(IMPORTED)]
    assert not said, "the console shows only what its user can use"
    return model_dir, done.stdout, {line.rpartition("|")[2].strip() for line in lines}


@pytest.fixture(scope="module")
def one_replica(run_and_imports: tuple[pathlib.Path, str, set[str]]) -> tuple[pathlib.Path, str]:
    """model_dir and console of the same."""
    return run_and_imports[:2]


def test_a_run_imports_nothing_large_that_it_does_not_need(
    run_and_imports: tuple[pathlib.Path, str, set[str]],
) -> None:
    _, _, imported = run_and_imports
    assert {"tensorflow", "trainer.experiment"} <= imported
    # Of scikit-learn, SciPy and JAX TensorFlow and Keras import what is installed by themselves.
    unneeded = {"tensorboard", "keras_hub", "apache_beam", "optax", "sklearn.datasets", "trainer.doctor.checkup"}
    assert not unneeded & imported


def test_a_run_leaves_what_it_promises(one_replica: tuple[pathlib.Path, str]) -> None:
    model_dir, console = one_replica
    config = json.loads((model_dir / "config.json").read_text())
    assert config["train_steps"] == 60
    (start,) = json.loads((model_dir / "provenance.json").read_text())["starts"]
    assert start["step"] == 0
    assert any(argument.startswith("--model_dir=") for argument in start["command"])
    records = metrics_of(model_dir)
    evaluations = [record["step"] for record in records if "eval/accuracy" in record]
    trainings = [record["step"] for record in records if "train/loss" in record]
    assert evaluations == [20, 40, 60]
    assert trainings == [20, 40, 50, 60]
    assert records[-1]["eval/accuracy"] > 0.75
    for text in (
        "2 virtual",
        "digits/1.0.0",
        "parameters",
        "128 = 1 x 128",
        "eval accuracy",
        "examples/s",
        "time, compiling",
    ):
        assert (text in console) != (text == "2 virtual")
    assert list((model_dir / "tensorboard").glob("events.*"))


def test_tensorboard_holds_the_same_scalars(one_replica: tuple[pathlib.Path, str]) -> None:
    import tensorflow as tf

    model_dir, _ = one_replica
    (path,) = (model_dir / "tensorboard").glob("events.*")
    found = {}
    for record in tf.data.TFRecordDataset(str(path)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            found[event.step, value.tag] = value.simple_value
    expected = {(r["step"], k): v for r in metrics_of(model_dir) for k, v in r.items() if k != "step"}
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_finished_run_has_nothing_left_to_do(one_replica: tuple[pathlib.Path, str], trainer: Trainer) -> None:
    model_dir, _ = one_replica
    before = {path: path.stat().st_mtime_ns for path in model_dir.rglob("*") if path.is_file()}
    assert "nothing left to do" in trainer.run(f"--model_dir={model_dir}", *PLAIN).stdout
    assert before == {path: path.stat().st_mtime_ns for path in model_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "flags",
    [
        ["--replicas=2", "--steps_per_loop=1"],
        pytest.param(["--replicas=4", "--steps_per_loop=50"], marks=pytest.mark.nightly),
    ],
)
def test_virtual_replicas_end_with_the_same_weights(
    one_replica: tuple[pathlib.Path, str], trainer: Trainer, tmp_path: pathlib.Path, flags: list[str]
) -> None:
    trainer.run(f"--model_dir={tmp_path}", *PLAIN, *flags)
    _assert_same_run(tmp_path, one_replica[0])


def test_a_run_goes_on_with_another_number_of_replicas(
    one_replica: tuple[pathlib.Path, str], trainer: Trainer, tmp_path: pathlib.Path
) -> None:
    process = trainer.start(f"--model_dir={tmp_path}", *PLAIN, "--replicas=2")
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step 40/60  eval"))
    process.kill()
    process.communicate()
    done = trainer.run(f"--model_dir={tmp_path}", *PLAIN, "--replicas=4")
    assert "20 -> 60," in done.stdout or "40 -> 60," in done.stdout
    _assert_same_run(tmp_path, one_replica[0])


def test_two_workers_end_with_the_same_weights(
    one_replica: tuple[pathlib.Path, str], trainer: Trainer, tmp_path: pathlib.Path
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environ = {"TF_CONFIG": json.dumps(task)}
        workers.append(trainer.start(f"--model_dir={tmp_path}", *PLAIN, "--steps_per_loop=7", environ=environ))
    outputs = [worker.communicate(timeout=GUARD_SECS) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert outputs[1] == ("", ""), "only the chief speaks"
    _assert_same_run(tmp_path, one_replica[0])
    ours, theirs = (json.loads((path / "examples.json").read_text()) for path in (tmp_path, one_replica[0]))
    # Of 297 = 128 + 128 + 41 the chief sees the first 64 of each batch.
    assert (ours["examples"], theirs["examples"]) == (64 + 64 + 41, 297)
    assert all(worst["index"] % 128 < 64 for worst in ours["worst"])


def _assert_same_run(model_dir: pathlib.Path, expected_dir: pathlib.Path) -> None:
    state, expected = state_of(model_dir), state_of(expected_dir)
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, rtol=0, atol=1e-5, err_msg=name)
    # On the same loop ends, the same records.
    ours = {(r["step"], key): v for r in metrics_of(model_dir) for key, v in r.items()}
    theirs = {(r["step"], key): v for r in metrics_of(expected_dir) for key, v in r.items()}
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_export_serves_what_was_trained(
    one_replica: tuple[pathlib.Path, str], digits_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    import tensorflow as tf

    from data import pipeline

    model_dir, _ = one_replica
    dataset = pipeline.open_dataset("digits", str(digits_dir))
    batch = next(iter(pipeline.eval_batches(dataset, global_batch_size=297, per_replica_batch_size=297)))
    np.save(tmp_path / "images.npy", batch[0].numpy())
    served = _serve(model_dir, tmp_path)
    expected = _restored(model_dir, dataset.spec())(batch[0], training=False).numpy()
    np.testing.assert_allclose(served["logits"], expected, atol=1e-5)
    np.testing.assert_allclose(served["probabilities"], tf.nn.softmax(expected), atol=1e-6)


def _restored(model_dir: pathlib.Path, spec):
    """The trained model, from its checkpoint rather than its export."""
    import keras

    from trainer import config, models, optimizers, plan, replicated, tasks
    from trainer.checkpoints import store

    keras.utils.clear_session()  # names of layers are numbered in each process
    model = models.find("cnn", {"batch_norm": False, "dropout": 0.0}).build(spec)
    model.compile(
        optimizers.build(config.Config(), plan.LearningRate("cosine", 1e-3, 60)),
        tasks.loss(spec),
        weighted_metrics=tasks.metrics(spec),
    )
    batch_spec = (keras.KerasTensor((1, 8, 8, 1), "uint8"), keras.KerasTensor((1,), "int32"))
    trained = replicated.Replicated(model, devices.one_replica(), batch_spec)
    saved = store.load(str(model_dir))
    assert saved.step == 60
    trained.restore(saved.arrays, saved.path)
    return model


def _serve(model_dir: pathlib.Path, tmp_path: pathlib.Path) -> dict[str, np.ndarray]:
    """Outputs of the export for tmp_path/images.npy, in a process that has none of our code."""
    out = tmp_path / "served.npz"
    command = [sys.executable, "-I", "-c", SERVE, str(model_dir / "export"), str(tmp_path / "images.npy"), str(out)]
    subprocess.run(command, check=True, timeout=GUARD_SECS, cwd=tmp_path)
    return dict(np.load(out))


def test_eval_and_export_need_only_the_model_dir(
    one_replica: tuple[pathlib.Path, str], tmp_path: pathlib.Path, digits_dir: pathlib.Path
) -> None:
    model_dir, _ = one_replica
    last = [r for r in metrics_of(model_dir) if "eval/accuracy" in r][-1]
    module = [sys.executable, "-m", "trainer.main", f"--model_dir={model_dir}"]
    done = subprocess.run([*module, "--mode=eval"], check=True, capture_output=True, text=True, timeout=GUARD_SECS)
    assert f"{last['eval/accuracy']:.4f}" in done.stdout
    before = (model_dir / "export" / "fingerprint.pb").stat().st_mtime_ns
    subprocess.run([*module, "--mode=export"], check=True, capture_output=True, timeout=GUARD_SECS)
    assert (model_dir / "export" / "fingerprint.pb").stat().st_mtime_ns > before


def test_batch_norm_state_is_one_for_checkpoint_export_and_evaluation(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    import tensorflow as tf

    flags = ["--model=cnn", "--train_steps=30", "--eval_every_steps=15", "--replicas=4"]
    trainer.run(f"--model_dir={tmp_path}", *flags)
    saved = {n: a for n, a in state_of(tmp_path).items() if "moving_" in n}
    assert len(saved) == 4
    served = tf.saved_model.load(str(tmp_path / "export"))
    exported = [v.numpy() for v in served.variables]
    for name, array in saved.items():
        assert any(array.shape == e.shape and (array == e).all() for e in exported), name
    # Evaluation on four replicas saw the same statistics as evaluation on one does.
    four = [r for r in metrics_of(tmp_path) if "eval/loss" in r][-1]
    trainer.run(f"--model_dir={tmp_path}", "--mode=eval", "--model=cnn")
    one = [r for r in metrics_of(tmp_path) if "eval/loss" in r][-1]
    assert one["eval/accuracy"] == four["eval/accuracy"]
    assert one["eval/loss"] == pytest.approx(four["eval/loss"], abs=1e-6)


def flags_of_make_train() -> list[str]:
    makefile = (ROOT / "Makefile").read_text()
    (flags,) = [line.split(":=")[1].split() for line in makefile.splitlines() if line.startswith("TRAIN_FLAGS")]
    return flags


def test_make_train_asks_for_what_there_is(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    done = trainer.run(f"--model_dir={tmp_path}", *flags_of_make_train(), "--print_config")
    assert json.loads(done.stdout)["train_epochs"] == 20


@pytest.mark.nightly
def test_make_train_learns_the_digits(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    # Each time the same model learns for 60 steps above, and another the same digits in tests/test_recipes.py.
    trainer.run(f"--model_dir={tmp_path}", *flags_of_make_train())
    assert metrics_of(tmp_path)[-1]["eval/accuracy"] >= 0.97
