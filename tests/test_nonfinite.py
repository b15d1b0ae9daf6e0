"""A record that makes a step's numbers NaN, planted in one shard: what each policy does about it, as a user sees it."""

import json
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tests import planted
from tests.conftest import GUARD_SECS, clean_environ, metrics_of, state_of
from tests.planted import EPOCH, Planted
from tests.watch.http_server import HttpServer

pytestmark = pytest.mark.slow

CHECKPOINT_EVERY = 5
FIRST_SCALE = 2.0**15  # of Keras' LossScaleOptimizer


@pytest.fixture(scope="module")
def nan(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """A dataset with NaN in one record."""
    return planted.build(tmp_path_factory.mktemp("nan"), np.nan)


@pytest.fixture(scope="module")
def negative(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """A dataset with one negative number, of which the model's logarithm makes NaN."""
    return planted.build(tmp_path_factory.mktemp("negative"), -1.0)


def start(data: Planted, *flags: str, environ: dict[str, str] | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.main", *flags],
        cwd=data.folder,
        env=clean_environ() | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen, code: int = 0) -> list[str]:
    """Waits for processes that run side by side; returns what each said on standard error."""
    said = [process.communicate(timeout=GUARD_SECS) for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), said
    assert all("Traceback" not in err for _, err in said), said
    return [err for _, err in said]


def run(data: Planted, *flags: str, code: int = 0) -> str:
    return finish(start(data, *flags), code=code)[0]


def kill_at(data: Planted, line_start: str, *flags: str) -> None:
    """Starts a run and kills it as soon as it says a line that starts so."""
    process = start(data, *flags)
    assert process.stdout is not None
    assert any(line.startswith(line_start) for line in process.stdout), process.communicate()
    process.kill()
    process.communicate()


def assert_state(model_dir: pathlib.Path, expected: dict[str, np.ndarray], atol: float = 0.0) -> None:
    state = state_of(model_dir)
    found = {name: array for name, array in state.items() if name.startswith(planted.STATE)}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=atol, err_msg=name)


def skipped(data: Planted, *, norm: bool = True) -> dict[str, np.ndarray]:
    """State at the end of a run in which the bad step does nothing."""
    bad = data.bad_step
    return data.train([(0, bad), (bad + 1, EPOCH)], norm=norm)


def rolled_back(data: Planted, *, norm: bool = True) -> dict[str, np.ndarray]:
    """State at the end of a run in which the bad step and those since the checkpoint before it do nothing."""
    bad = data.bad_step
    newest = bad // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    assert newest < bad, "something has to be undone"
    return data.train([(0, newest), (bad + 1, EPOCH)], norm=norm)


def reported(model_dir: pathlib.Path) -> list[int]:
    return [record["step"] for record in metrics_of(model_dir) if "train/loss" in record]


def postmortem(model_dir: pathlib.Path) -> dict:
    (path,) = model_dir.glob("postmortem-*.json")
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert path.name == f"postmortem-{found['step']}.json"
    return found


def assert_names_the_record(data: Planted, model_dir: pathlib.Path, err: str, code: int) -> None:
    """The post-mortem, and the message of a run that ended over it."""
    found = postmortem(model_dir)
    shard = str(data.dataset / data.shard)
    assert found["step"] == data.bad_step
    assert found["suspects"] == [{"shard": shard, "index": data.index}]
    assert found["suspects"][0] in found["records"]
    assert len(found["records"]) == planted.BATCH
    assert found["first"].startswith("the input, then the output of layer hidden (Dense)")
    progress = found["step"] / 60  # of the model's schedule
    assert found["learning_rate"] == pytest.approx(planted.LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * progress)))
    assert found["loss"] == "nan"
    assert set(found["gradient_norms"].values()) == {"nan"}
    if code:
        last_words = f"\n{err}"[f"\n{err}".rindex("\ntrainer: ") :]
        assert f"of step {data.bad_step} are not finite" in last_words
        assert f"{shard}, record {data.index}." in last_words
        assert "layer hidden (Dense)" in last_words


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_stop_names_the_record_and_skip_goes_on_from_there(
    nan: Planted, tmp_path: pathlib.Path, num_replicas: int
) -> None:
    norm = num_replicas == 1  # batch norm is each replica's own
    flags = [*nan.flags(tmp_path / "run", norm=norm), f"--replicas={num_replicas}"]
    err = run(nan, *flags, code=78)
    assert_names_the_record(nan, tmp_path / "run", err, 78)
    assert "--on_nonfinite=skip" in err
    assert sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())[-1] == nan.bad_step
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 78, nan.bad_step)
    page = (tmp_path / "run" / "report.html").read_text()
    assert ">failed<" in page and f"Step {nan.bad_step:,} was not finite" in page and f"record {nan.index}" in page
    alerts = [json.loads(line) for line in (tmp_path / "run" / "alerts.jsonl").read_text().splitlines()]
    assert [(alert["event"], alert["step"]) for alert in alerts] == [
        ("nonfinite", nan.bad_step),
        ("failed", nan.bad_step),
    ]

    run(nan, *flags, "--on_nonfinite=skip")
    assert_state(tmp_path / "run", skipped(nan, norm=norm), 0.0 if norm else 1e-5)
    assert reported(tmp_path / "run") == list(range(4, EPOCH + 1, 4))


@pytest.mark.nightly
def test_stop_stays_stopped(nan: Planted, tmp_path: pathlib.Path) -> None:
    flags = [*nan.flags(tmp_path / "run"), "--checkpoint_every_steps=1000"]
    with HttpServer(lambda request: (200, {}, b"")) as webhook:
        run(nan, *flags, f"--alert_url=http://{webhook.address}/hook", code=78)
        alerts = [json.loads(request.body) for request in webhook.requests]
    assert [(alert["event"], alert["severity"]) for alert in alerts] == [("nonfinite", "ERROR"), ("failed", "ERROR")]
    assert alerts[0]["step"] == nan.bad_step
    assert f"record {nan.index}" in alerts[0]["message"]
    again = run(nan, *flags, code=78)
    assert_names_the_record(nan, tmp_path / "run", again, 78)
    starts = json.loads((tmp_path / "run" / "receipt.json").read_text())["starts"]
    assert [start["exit_code"] for start in starts] == [78, 78]
    assert [start["from_step"] for start in starts] == [0, nan.bad_step]


@pytest.mark.parametrize("policy", [pytest.param("skip", marks=pytest.mark.nightly), "rollback"])
def test_the_step_does_nothing_however_long_the_loops(nan: Planted, tmp_path: pathlib.Path, policy: str) -> None:
    """Bit for bit what training by hand comes to, and the same records."""
    longest, shortest = tmp_path / "longest", tmp_path / "shortest"
    flags = f"--on_nonfinite={policy}"
    errors = finish(
        start(nan, *nan.flags(longest), flags), start(nan, *nan.flags(shortest), flags, "--steps_per_loop=1")
    )
    expected = skipped(nan) if policy == "skip" else rolled_back(nan)
    for model_dir, err in zip((longest, shortest), errors, strict=True):
        assert_names_the_record(nan, model_dir, err, 0)
        assert_state(model_dir, expected)
        assert reported(model_dir) == list(range(4, EPOCH + 1, 4))
    assert metrics_of(longest) == metrics_of(shortest)
    recomputed = json.loads((longest / "receipt.json").read_text())["seconds"]["recomputed"]
    assert (recomputed > 0) == (policy == "rollback")


@pytest.mark.nightly
def test_two_replicas_agree(nan: Planted, tmp_path: pathlib.Path) -> None:
    dirs = {policy: tmp_path / policy for policy in ("skip", "rollback")}
    commands = [[*nan.flags(path, norm=False), "--replicas=2", f"--on_nonfinite={p}"] for p, path in dirs.items()]
    for (policy, model_dir), err in zip(dirs.items(), finish(*[start(nan, *flags) for flags in commands]), strict=True):
        assert_names_the_record(nan, model_dir, err, 0)
        expected = skipped(nan, norm=False) if policy == "skip" else rolled_back(nan, norm=False)
        assert_state(model_dir, expected, 1e-5)


def two_workers() -> Iterator[dict[str, str]]:
    """What each of two workers finds in its environment."""
    sockets = [socket.socket() for _ in range(2)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    for sock in sockets:
        sock.close()
    for index in range(2):
        yield {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})}


@pytest.mark.nightly
def test_two_workers_go_back_together(nan: Planted, tmp_path: pathlib.Path) -> None:
    flags = [*nan.flags(tmp_path, norm=False), "--on_nonfinite=rollback"]
    chief, other = finish(*[start(nan, *flags, environ=environ) for environ in two_workers()])
    assert_names_the_record(nan, tmp_path, chief, 0)
    assert "worker 1: " in other
    assert_state(tmp_path, rolled_back(nan, norm=False), 1e-5)


@pytest.mark.nightly
def test_two_workers_stop_together(nan: Planted, tmp_path: pathlib.Path) -> None:
    flags = nan.flags(tmp_path, norm=False)
    chief, _ = finish(*[start(nan, *flags, environ=environ) for environ in two_workers()], code=78)
    assert_names_the_record(nan, tmp_path, chief, 78)


@pytest.mark.nightly
def test_killed_before_and_after_it_comes_to_the_same(nan: Planted, tmp_path: pathlib.Path) -> None:
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    flags = ["--on_nonfinite=rollback", "--eval_every_steps=6", "--keep_best_checkpoints=0"]
    kill_at(nan, f"step 12/{EPOCH}  eval", *nan.flags(killed), *flags)
    kill_at(nan, f"step 18/{EPOCH}  eval", *nan.flags(killed), *flags)
    finish(start(nan, *nan.flags(killed), *flags), start(nan, *nan.flags(quiet), *flags))
    assert_state(killed, rolled_back(nan))
    assert metrics_of(killed) == metrics_of(quiet)
    assert state_of(killed).keys() == state_of(quiet).keys()
    for name, array in state_of(quiet).items():
        np.testing.assert_array_equal(state_of(killed)[name], array, err_msg=name)


@pytest.mark.nightly
def test_the_budget_is_that_of_the_run_whatever_its_starts(nan: Planted, tmp_path: pathlib.Path) -> None:
    """The record comes again in the second epoch."""
    flags = [*nan.flags(tmp_path), f"--train_steps={2 * EPOCH}", "--on_nonfinite=skip", "--max_nonfinite=1"]
    err = run(nan, *flags, code=78)
    assert "--max_nonfinite=1 is used up" in err
    steps = sorted(int(path.stem.partition("-")[2]) for path in tmp_path.glob("postmortem-*.json"))
    assert steps[0] == nan.bad_step
    assert len(steps) == 2 and EPOCH <= steps[1] < 2 * EPOCH
    assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == steps[1]
    assert "--max_nonfinite=1 is used up" in run(nan, *flags, code=78)
    run(nan, *flags, "--max_nonfinite=2")


def test_the_layer_that_makes_it_is_named(negative: Planted, tmp_path: pathlib.Path) -> None:
    err = run(negative, *negative.flags(tmp_path, log=True), code=78)
    found = postmortem(tmp_path)
    assert found["first"] == "the output of layer log (Log)"
    assert found["suspects"] == [{"shard": str(negative.dataset / negative.shard), "index": negative.index}]
    assert "the output of layer log (Log)" in err


def test_an_overflow_of_scaled_gradients_is_no_failure(negative: Planted, tmp_path: pathlib.Path) -> None:
    """Gradients of this gain, times the first loss scale, are beyond float16."""
    flags = [*negative.flags(tmp_path, gain=16.0), "--precision=mixed_float16"]
    err = run(negative, *flags)
    assert "not finite" not in err
    assert not list(tmp_path.glob("postmortem-*"))
    (scale,) = [array for name, array in state_of(tmp_path).items() if name.endswith("dynamic_scale")]
    assert scale < FIRST_SCALE, "there was no overflow to pass over"


@pytest.mark.nightly
def test_nan_is_a_failure_in_mixed_float16_too(nan: Planted, tmp_path: pathlib.Path) -> None:
    err = run(nan, *nan.flags(tmp_path), "--precision=mixed_float16", code=78)
    assert f"record {nan.index}" in err
    assert postmortem(tmp_path)["step"] == nan.bad_step
