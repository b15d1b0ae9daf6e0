"""What goes wrong around a run: one clear message, the right exit code, and nothing lost."""

import contextlib
import json
import pathlib
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.conftest import GUARD_SECS, Trainer, metrics_of, state_of
from tests.data.test_service import Machine
from tests.gcs import Fault, Gcs, gcs  # noqa: F401
from tests.watch.http_server import HttpServer
from trainer.checkpoints.directory import MARKER

pytestmark = pytest.mark.slow

SHORT = ["--model=mlp", "--train_steps=60", "--eval_every_steps=20", "--log_every_steps=10"]
# Goes on until it is stopped.
ENDLESS = [
    "--model=mlp",
    "--mode=train",
    "--train_steps=10000000",
    "--eval_every_steps=10000000",
    "--checkpoint_every_steps=500",
    "--log_every_steps=500",
]
SECRETS = ("sesame", "opensecret", "tokensecret")


@pytest.fixture(scope="module")
def finished_and_told(
    digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, list[str]]:
    """The model_dir of a run that has finished, and the alerts that it sent."""
    model_dir = tmp_path_factory.mktemp("finished")
    with HttpServer(lambda request: (200, {}, b"")) as server:
        Trainer(digits_dir).run(f"--model_dir={model_dir}", *SHORT, f"--alert_url=http://{server.address}/hook")
        return model_dir, received(server)


@pytest.fixture(scope="module")
def finished(finished_and_told: tuple[pathlib.Path, list[str]]) -> pathlib.Path:
    """The model_dir of a run that has finished."""
    return finished_and_told[0]


@contextlib.contextmanager
def running(
    trainer: Trainer, model_dir: pathlib.Path, *flags: str, environ: dict[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """A run that goes on until something happens to it, from when it trains and there is a checkpoint."""
    process = trainer.start(f"--model_dir={model_dir}", *ENDLESS, *flags, environ=environ)
    try:
        trains(process, model_dir)
        yield process
    finally:
        process.kill()
        process.communicate()


def trains(process: subprocess.Popen, model_dir: pathlib.Path) -> None:
    """Returns once a process trains, and a checkpoint is complete, which may be of a process before it."""
    assert process.stdout is not None
    assert any("loss" in line for line in process.stdout), process.communicate()
    while not list(model_dir.glob(f"checkpoints/*/{MARKER}")):
        assert process.poll() is None, process.communicate()
        threading.Event().wait(0.01)


def ended(process: subprocess.Popen, code: int) -> str:
    """What a process said on standard error, that ended with this code."""
    out, err = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err, err
    return err


def last_words(err: str) -> list[str]:
    """Lines of the trainer itself, not TensorFlow's."""
    return [line for line in err.splitlines() if line.startswith("trainer: ")]


def files(folder: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


# Several processes.


def test_a_finished_run_is_left_as_it_is(trainer: Trainer, finished: pathlib.Path) -> None:
    before = files(finished)
    done = trainer.run(f"--model_dir={finished}", *SHORT)
    assert done.stdout == f"{finished} holds a finished run of these options: nothing left to do\n"
    assert done.stderr == ""
    assert files(finished) == before


def test_one_directory_has_one_run_and_outlives_it(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    with running(trainer, tmp_path / "run") as first:
        second = trainer.run(f"--model_dir={tmp_path}/run", *ENDLESS, code=75)
        (message,) = second.stderr.splitlines()
        assert f"in use by another run (host {socket.gethostname()}, pid {first.pid}, step " in message
        assert "use another model_dir" in message
        first.kill()
        first.wait()
        third = trainer.start(f"--model_dir={tmp_path}/run", *ENDLESS, "--lease_secs=100000")
        try:
            trains(third, tmp_path / "run")  # without waiting for the lease to end
            (tmp_path / "run").rename(tmp_path / "removed")  # at once: the run removes old checkpoints itself
            err = ended(third, 78)
        finally:
            third.kill()
            third.communicate()
    assert "taking over from a run that is dead" in err
    assert "was removed under the run" in last_words(err)[-1]
    assert err.count("was removed under the run") == 1
    assert not (tmp_path / "run").exists(), "it does not come back with half a run in it"


def two_workers(trainer: Trainer, model_dir: pathlib.Path, *flags: str) -> list[subprocess.Popen]:
    sockets = [socket.socket() for _ in range(2)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    for sock in sockets:
        sock.close()
    tasks = [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}} for index in range(2)]
    environs = [{"TF_CONFIG": json.dumps(task)} for task in tasks]
    return [trainer.start(f"--model_dir={model_dir}", *flags, environ=environ) for environ in environs]


@pytest.mark.nightly  # tests/test_roles.py loses one each time, and brings it back
@pytest.mark.parametrize("victim", [1, 0])
def test_a_lost_worker_ends_the_other(trainer: Trainer, tmp_path: pathlib.Path, victim: int) -> None:
    workers = two_workers(trainer, tmp_path, *ENDLESS)
    try:
        trains(workers[0], tmp_path)
        workers[victim].kill()
        err = ended(workers[1 - victim], 75)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    (message,) = last_words(err)
    assert "lost the connection to a worker" in message
    assert "The same command goes on from the last checkpoint" in message
    assert "TensorFlow says: Graph execution error" not in message, "that says nothing"
    if victim == 1:
        status = json.loads((tmp_path / "status.json").read_text())
        assert (status["state"], status["exit_code"]) == ("stopped", 75)


# Storage.


@pytest.mark.nightly
def test_a_full_disk_ends_the_run_with_what_is_safe(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    with running(trainer, tmp_path) as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))  # what a checkpoint is beyond
        err = ended(process, 75)
    assert "3 saves in a row failed" in last_words(err)[-1]
    assert "no space left" in last_words(err)[-1]
    assert err.count("the checkpoint of step") == 4, "each failure once, and the last again as the last word"
    steps = {int(path.parent.name) for path in (tmp_path / "checkpoints").rglob(MARKER)}
    assert f"The newest that is safe is of step {max(steps)}." in err
    with running(trainer, tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        ended(process, 75)
    recorded = [record["step"] for record in metrics_of(tmp_path)]
    assert recorded == list(range(500, recorded[-1] + 1, 500))


@pytest.mark.nightly
def test_a_disk_without_room_for_the_records_ends_the_run_before_they_are_lost(
    trainer: Trainer, tmp_path: pathlib.Path
) -> None:
    with running(trainer, tmp_path) as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10, 10))
        ended(process, 75)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    newest = max(int(path.parent.name) for path in (tmp_path / "checkpoints").rglob(MARKER))
    assert {json.loads(line)["step"] for line in lines} >= set(range(500, newest + 1, 500))


@pytest.mark.nightly
def test_a_bucket_that_may_not_be_written(trainer: Trainer, gcs: Gcs) -> None:  # noqa: F811
    gcs.set_faults(Fault(code=403, times=None, method="POST|PUT"))
    flags = [f"--model_dir={gcs.url}/run", *SHORT, "--mode=train", "--checkpoint_every_steps=10"]
    err = trainer.run(*flags, code=78, environ=gcs.environ()).stderr
    assert "model_dir cannot be written" in err and "403" in err
    assert len(last_words(err)) == 1 and "Traceback" not in err
    gcs.set_faults(Fault(code=403, times=None, method="POST|PUT", path="checkpoints"))
    err = trainer.run(*flags, "--steps_per_loop=10", code=78, environ=gcs.environ()).stderr
    assert "no permission" in last_words(err)[-1] and "Traceback" not in err


@pytest.mark.nightly
def test_a_bucket_that_is_unwell_for_a_while(
    trainer: Trainer,
    finished: pathlib.Path,
    gcs: Gcs,  # noqa: F811
    tmp_path: pathlib.Path,
) -> None:
    gcs.set_faults(Fault(code=503, times=10, path="checkpoints"))
    trainer.run(f"--model_dir={gcs.url}/run", *SHORT, "--checkpoint_every_steps=10", environ=gcs.environ())
    for name in gcs.objects():
        if name.startswith("run/") and not name.endswith("/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(gcs.read(name))
    expected = state_of(finished)
    for name, array in state_of(tmp_path / "run").items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert metrics_of(tmp_path / "run") == metrics_of(finished)


@pytest.mark.nightly
@pytest.mark.parametrize("path", ["checkpoints", ""])
def test_a_bucket_that_is_unwell_for_ever(trainer: Trainer, gcs: Gcs, path: str) -> None:  # noqa: F811
    gcs.set_faults(Fault(code=503, times=None, method="POST|PUT", path=path))
    flags = [f"--model_dir={gcs.url}/run", *SHORT, "--mode=train", "--checkpoint_every_steps=10"]
    err = trainer.run(*flags, code=75, environ=gcs.environ()).stderr
    assert "503" in last_words(err)[-1] and "Traceback" not in err


# Webhooks and logs.


@pytest.fixture
def webhook() -> Iterator[HttpServer]:
    with HttpServer(lambda request: (200, {}, b"")) as server:
        yield server


def received(webhook: HttpServer) -> list[str]:
    alerts = [json.loads(request.body, parse_constant=pytest.fail) for request in webhook.requests]
    for alert in alerts:
        assert alert["severity"] in ("INFO", "WARNING", "ERROR")
        assert alert["message"] and alert["run"] and alert["time"] and alert["text"]
    return [alert["event"] for alert in alerts]


def assert_json(text: str) -> list[dict]:
    entries = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    for entry in entries:
        assert entry["severity"] in ("INFO", "WARNING", "ERROR", "CRITICAL")
        assert entry["message"] and entry["time"]
    return entries


def test_an_unreachable_webhook_does_not_hurt_and_its_secrets_stay_so(
    trainer: Trainer, finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    url = f"http://{SECRETS[0]}:{SECRETS[1]}@127.0.0.1:9/hooks/{SECRETS[2]}?key={SECRETS[2]}"
    done = trainer.run(f"--model_dir={tmp_path}", *SHORT, f"--alert_url={url}", "--log_format=json")
    assert metrics_of(tmp_path) == metrics_of(finished)
    said = assert_json(done.stdout)
    assert [entry["step"] for entry in said if "eval/loss" in entry] == [20, 40, 60]
    (warning,) = assert_json(done.stderr)
    assert "Alerts do not reach --alert_url=http://127.0.0.1:9/..." in warning["message"]
    written = b"".join(content for _, content in files(tmp_path).values())
    for secret in SECRETS:
        assert secret.encode() not in written
        assert secret not in done.stdout + done.stderr


def test_a_webhook_hears_of_the_end(finished_and_told: tuple[pathlib.Path, list[str]]) -> None:
    assert finished_and_told[1] == ["finished"]


def test_what_fails_is_said_in_json_too(trainer: Trainer, webhook: HttpServer, tmp_path: pathlib.Path) -> None:
    """A bad command line, bad data, a stop, and an end from a thread."""
    bad = trainer.run("--log_format=json", "--no_such=1", code=2)
    assert [entry["exit_code"] for entry in assert_json(bad.stdout + bad.stderr)] == [2]
    bad = trainer.run("--log_format=json", "--dataset=no_such", f"--model_dir={tmp_path}/none", code=78)
    assert [entry["exit_code"] for entry in assert_json(bad.stdout + bad.stderr)] == [78]
    flags = ["--log_format=json", f"--alert_url=http://{webhook.address}/hook"]
    with running(trainer, tmp_path / "run", *flags) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == 75
    assert_json(out)
    assert [entry["severity"] for entry in assert_json(err)] == ["WARNING", "ERROR"]
    assert received(webhook) == ["preempted"]


@pytest.mark.nightly
def test_a_stall_is_told_to_all(trainer: Trainer, webhook: HttpServer, tmp_path: pathlib.Path) -> None:
    """A machine that computes batches stops answering, but is there: only that nothing moves tells."""
    machine = Machine().wait()
    try:
        flags = [f"--data_service={machine.address}", "--stall_secs=4", "--log_format=json"]
        with running(trainer, tmp_path, *flags, f"--alert_url=http://{webhook.address}/hook") as process:
            machine.process.send_signal(signal.SIGSTOP)
            err = ended(process, 75)
    finally:
        machine.process.kill()
        machine.process.communicate()
    (entry,) = [entry for entry in assert_json(err) if "no progress for --stall_secs=4" in entry["message"]]
    assert "run_train_loop" in entry["stack_trace"]
    (stacks,) = tmp_path.glob("stall-*.txt")
    assert "run_train_loop" in stacks.read_text()
    assert received(webhook)[0] == "stall"
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)


@pytest.mark.nightly
def test_failing_saves_are_told(trainer: Trainer, webhook: HttpServer, tmp_path: pathlib.Path) -> None:
    with running(trainer, tmp_path, f"--alert_url=http://{webhook.address}/hook") as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
        ended(process, 75)
    assert received(webhook) == ["failing_saves"] * 3 + ["stopped"]


# Time.

JUMPING_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
/* A day ahead and two days back, by turns of a second. */
int clock_gettime(clockid_t clock, struct timespec *out) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  struct timespec now;
  real(CLOCK_MONOTONIC, &now);
  int code = real(clock, out);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) out->tv_sec += now.tv_sec % 2 ? 86400 : -172800;
  return code;
}
int gettimeofday(struct timeval *out, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
"""


@pytest.mark.nightly
def test_a_clock_that_jumps_does_no_harm(trainer: Trainer, finished: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "clock.c").write_text(JUMPING_CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    jumping = {"LD_PRELOAD": str(library)}
    run = tmp_path / "run"
    with running(trainer, run, "--lease_secs=6", environ=jumping) as first:
        other = trainer.run(f"--model_dir={run}", *ENDLESS, "--lease_secs=6", code=75, environ=jumping)
        assert "is in use by another run" in other.stderr
        first.kill()
        first.wait()
    with running(trainer, run, "--lease_secs=6", environ=jumping) as second:
        second.send_signal(signal.SIGTERM)
        ended(second, 75)
    recorded = [record["step"] for record in metrics_of(run)]
    assert recorded == list(range(500, recorded[-1] + 1, 500))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert 0 < record["train/step_ms"] < GUARD_SECS * 1e3 and record["train/input_wait_ms"] >= 0
    account = json.loads((run / "receipt.json").read_text())
    assert 0 < account["wall_secs"] < GUARD_SECS
    assert all(seconds >= 0 for seconds in account["seconds"].values())
    assert sum(account["seconds"].values()) == pytest.approx(account["wall_secs"], abs=0.1)

    trainer.run(f"--model_dir={tmp_path}/short", *SHORT, environ=jumping)
    assert metrics_of(tmp_path / "short") == metrics_of(finished)


# Checkpoints by choice.


@pytest.mark.nightly
def test_weights_for_another_number_of_classes(
    trainer: Trainer, finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    flags = [f"--model_dir={tmp_path}", "--model=mlp", "--mode=train", "--train_steps=1", "--num_classes=12"]
    flags += [f"--init_from={finished}", "--learning_rate=1e-30"]
    err = trainer.run(*flags, code=78).stderr
    assert "mlp" not in last_words(err)[0]
    (cure,) = [part for part in err.split() if part.startswith("--init_fresh=")]
    names = cure.removeprefix("--init_fresh=").strip("'")
    assert names == "logits/bias,logits/kernel"
    assert "float32 (128, 10), wanted as float32 (128, 12)" in err
    assert not list(tmp_path.iterdir())
    done = trainer.run(*flags, f"--init_fresh={names}")
    assert f"weights of {finished}/checkpoints/60, step 60; as initialised: logits/bias, logits/kernel" in done.stdout
    before, after = state_of(finished), state_of(tmp_path)
    assert after["model/logits/kernel"].shape == (128, 12)
    for name, array in before.items():
        if name.startswith("model/") and "logits" not in name:
            np.testing.assert_array_equal(after[name], array, err_msg=name)


@pytest.mark.nightly
def test_the_best_checkpoint_can_be_asked_for(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    flags = [f"--model_dir={tmp_path}", *SHORT, "--best_metric=accuracy", "--best_goal=min", "--keep_checkpoints=1"]
    trainer.run(*flags, "--keep_best_checkpoints=2")
    evaluated = {r["step"]: r["eval/accuracy"] for r in metrics_of(tmp_path) if "eval/accuracy" in r}
    assert evaluated[20] < evaluated[40] < evaluated[60], "the first is the one with the least"
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"20", "40", "60"}
    trainer.run(
        f"--model_dir={tmp_path}", "--mode=eval", "--checkpoint=best", "--best_metric=accuracy", "--best_goal=min"
    )
    last = metrics_of(tmp_path)[-1]
    assert (last["step"], last["eval/accuracy"]) == (20, evaluated[20])
    export = files(tmp_path / "export")
    trainer.run(f"--model_dir={tmp_path}", "--mode=export", "--checkpoint=best", "--best_goal=min")
    assert files(tmp_path / "export") != export


@pytest.mark.nightly
def test_a_checkpoint_is_due_by_the_clock(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    flags = ["--checkpoint_every_steps=10000000", "--checkpoint_every_secs=0.5", "--keep_checkpoints=100"]
    process = trainer.start(f"--model_dir={tmp_path}", *ENDLESS, *flags)
    try:
        while len(list(tmp_path.glob("checkpoints/*/" + MARKER))) < 3:
            assert process.poll() is None, process.communicate()
            threading.Event().wait(0.01)
    finally:
        process.kill()
        process.communicate()
