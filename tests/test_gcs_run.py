"""A run of which everything is on gs://, where one request in twenty fails, ends as a quiet one on a local disk."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests import chaos_checks, gcs
from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ, metrics_of, state_of
from tests.gcs import Fault, Gcs

pytestmark = pytest.mark.slow

# TensorFlow's client tries each request so often again (ten times by default). Where it does wait, it adds up to a
# second of its own, retrying_utils.cc; a hundred requests fail here.
MAX_RETRIES, AT_ONCE = 6, {"GCS_RETRY_CONFIG_INIT_DELAY_TIME_US": "0"}
UNWELL = (gcs.NO_BUCKETS_GET, Fault(code=503, times=None, share=0.03), Fault(drop="response", times=None, share=0.02))
RUN = ["--model=cnn", "--train_steps=60", "--eval_every_steps=20", "--checkpoint_every_steps=10", "--steps_per_loop=10"]
RUN += ["--log_every_steps=10", "--keep_checkpoints=2"]
# From the marker of the third checkpoint on the process stands still until it is killed.
HELD = {"phase": "save", "point": "before storage.replace", "skip": 2, "hold": True}
# Serves SavedModels and prints what each answers for the same images.
SERVE = """
import json, sys
import numpy as np
import tensorflow as tf
images = np.random.default_rng(0).integers(0, 17, [64, 8, 8, 1]).astype("uint8")
for directory in sys.argv[1:]:
    answer = tf.saved_model.load(directory).signatures["serving_default"](image=tf.constant(images))
    print(json.dumps({name: tensor.numpy().tolist() for name, tensor in answer.items()}))
"""


@dataclasses.dataclass(frozen=True)
class OnGcs:
    """A bucket with the digits in it, and a run that was killed there, went on and finished.

    evaluated: what --mode=eval said of it. local: its files, fetched. quiet: a run on a local disk, left in peace.
    """

    bucket: Gcs
    evaluated: str
    local: pathlib.Path
    quiet: pathlib.Path

    @property
    def environ(self) -> dict[str, str]:
        return self.bucket.environ(max_retries=MAX_RETRIES) | AT_ONCE | {"NO_GCE_CHECK": "true"}

    @property
    def trainer(self) -> Trainer:
        return Trainer(f"{self.bucket.url}/data")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def on_gcs(digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnGcs]:
    folder = tmp_path_factory.mktemp("on_gcs")
    quiet = folder / "quiet"
    Trainer(digits_dir).run(f"--model_dir={quiet}", *RUN)
    with gcs.serve(folder) as bucket:
        for path in (digits_dir / "digits" / "1.0.0").iterdir():
            bucket.write(f"data/digits/1.0.0/{path.name}", path.read_bytes())
        found = OnGcs(bucket, "", folder / "fetched", quiet)
        bucket.set_faults(*UNWELL)
        model_dir = f"--model_dir={bucket.url}/run"
        killed_inside_a_save(found, model_dir, *RUN)
        assert "run/checkpoints/20/COMMIT.json" in bucket.objects()
        assert "run/checkpoints/30/COMMIT.json" not in bucket.objects()
        found.trainer.run(model_dir, *RUN, environ=found.environ)
        evaluated = found.trainer.run("--mode=eval", "--model=cnn", model_dir, environ=found.environ).stdout
        hurt = [request["is_hurt"] for request in bucket.log()]
        assert len(hurt) > 400 and 0.03 < sum(hurt) / len(hurt) < 0.07
        bucket.set_faults()
        fetch(bucket, "run/", found.local)
        yield dataclasses.replace(found, evaluated=evaluated)


def killed_inside_a_save(on_gcs: OnGcs, *flags: str) -> None:
    (moments_out, moments_in), (orders_out, orders_in) = os.pipe(), os.pipe()
    orders = {"events_fd": moments_in, "orders_fd": orders_out, "records": str(on_gcs.local) + "-records", **HELD}
    command = on_gcs.trainer.command(*flags)
    command[command.index("trainer.main")] = "tests.chaos_process"
    environ = clean_environ() | on_gcs.environ | {"CHAOS": json.dumps(orders)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, pass_fds=(moments_in, orders_out), stdout=subprocess.DEVNULL
    )
    os.close(moments_in)
    os.close(orders_out)
    with os.fdopen(moments_out) as moments:
        assert any(json.loads(line)["hit"] for line in moments), "the run ended before it was killed"
        process.kill()
    os.close(orders_in)
    assert process.wait(GUARD_SECS) == -signal.SIGKILL


def fetch(bucket: Gcs, prefix: str, folder: pathlib.Path) -> None:
    for name in bucket.objects():
        if name.startswith(prefix) and not name.endswith("/"):
            path = folder / name.removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bucket.read(name))


def test_it_trained_the_same(on_gcs: OnGcs) -> None:
    assert metrics_of(on_gcs.local) == metrics_of(on_gcs.quiet)
    expected = state_of(on_gcs.quiet)
    for name, array in state_of(on_gcs.local).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    exact = chaos_checks.Bounds(0.0)
    assert chaos_checks.tensorboard(on_gcs.local, on_gcs.quiet, exact) == []
    metrics = metrics_of(on_gcs.quiet)[-1]
    assert f"eval accuracy     {metrics['eval/accuracy']:.4f}" in on_gcs.evaluated


def test_it_tells_how_it_went_and_leaves_nothing_behind(on_gcs: OnGcs) -> None:
    status = json.loads((on_gcs.local / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 60)
    starts = json.loads((on_gcs.local / "receipt.json").read_text())["starts"]
    assert [start["exit_code"] for start in starts] == [None, 0]
    assert starts[1]["from_step"] == 20
    assert len(json.loads((on_gcs.local / "provenance.json").read_text())["starts"]) == 2
    assert chaos_checks.leftovers(on_gcs.local, most=3) == []
    page = (on_gcs.local / "report.html").read_text()
    assert ">finished<" in page and "over 2 starts" in page and "start 2, from step 20: killed" in page
    alerts = [json.loads(line) for line in (on_gcs.local / "alerts.jsonl").read_text().splitlines()]
    assert [alert["event"] for alert in alerts] == ["finished"]


def test_its_export_holds_what_it_trained(on_gcs: OnGcs) -> None:
    assert chaos_checks.export(on_gcs.local, on_gcs.quiet, chaos_checks.Bounds(0.0)) == []


@pytest.mark.nightly
def test_an_export_that_is_killed_leaves_none_and_the_next_one_serves_from_the_bucket(on_gcs: OnGcs) -> None:
    bucket, flags = on_gcs.bucket, ["--mode=export", "--model=cnn", f"--model_dir={on_gcs.bucket.url}/run"]
    names = {name for name in bucket.objects() if name.startswith("run/export")}
    moved, before = "rewriteTo.*o/run/export/variables/variables.index", len(bucket.log())
    with held(bucket, moved), ended(on_gcs.trainer.start(*flags, environ=on_gcs.environ)) as process:
        wait_until(lambda: any(re.search(moved, request["path"]) for request in bucket.log()[before:]))
        process.kill()
    there = {name for name in bucket.objects() if name.startswith("run/export")}
    assert "run/export/saved_model.pb" not in there and "run/export.part/saved_model.pb" in there
    on_gcs.trainer.run(*flags, environ=on_gcs.environ)
    assert {name for name in bucket.objects() if name.startswith("run/export")} == names
    answer, expected = serve(on_gcs, f"{bucket.url}/run/export", str(on_gcs.quiet / "export"))
    assert answer == expected and "probabilities" in answer


def serve(on_gcs: OnGcs, *directories: str) -> list[str]:
    """What each SavedModel answers."""
    environ = clean_environ() | on_gcs.environ
    command = [sys.executable, "-c", SERVE, *directories]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@contextlib.contextmanager
def held(bucket: Gcs, path: str) -> Iterator[None]:
    """Requests for `path` get no answer while a test lasts."""
    bucket.set_faults(Fault(delay_secs=GUARD_SECS, times=None, path=path))
    try:
        yield
    finally:
        bucket.set_faults()


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GUARD_SECS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def flags_of(on_gcs: OnGcs, name: str, *flags: str) -> list[str]:
    return ["--model=cnn", "--train_steps=20", f"--model_dir={on_gcs.bucket.url}/{name}", *flags]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "flags", "left"),
    [
        ("profiled", ["--mode=profile_input"], {"profile_input.json", "profile_input.svg"}),
        ("compared", ["--mode=parity", "--global_batch_size=32"], {"parity.json"}),
        ("checked", ["--mode=doctor"], set()),
        ("traced", ["--mode=train", "--profile_steps=3,5"], {"tensorboard/plugins/profile"}),
        ("warm", ["--mode=train", "--init_from=gs://loopback-bucket/run"], {"checkpoints/20/COMMIT.json"}),
        ("warmer", ["--mode=train", "--init_from=gs://loopback-bucket/run/checkpoints/60"], {"checkpoints/20/COMMIT"}),
    ],
)
def test_modes_and_what_they_leave_on_gs(on_gcs: OnGcs, name: str, flags: list[str], left: set[str]) -> None:
    on_gcs.trainer.run(*flags_of(on_gcs, name, *flags), environ=on_gcs.environ)
    there = [found for found in on_gcs.bucket.objects() if found.startswith(f"{name}/") and not found.endswith("/")]
    for part in left:
        assert any(found.startswith(f"{name}/{part}") for found in there), there
    if "--mode=train" not in flags:
        assert len(there) == len(left)


@pytest.mark.nightly
def test_the_best_checkpoint_and_a_failure_of_the_model(on_gcs: OnGcs) -> None:
    model_dir = f"--model_dir={on_gcs.bucket.url}/run"
    best = ["--mode=eval", "--checkpoint=best", "--model=cnn", model_dir]
    assert "eval accuracy" in on_gcs.trainer.run(*best, environ=on_gcs.environ).stdout
    fails = ["--model=tests.models_that_fail", "--model_options=how='1/0'", f"--model_dir={on_gcs.bucket.url}/failed"]
    err = on_gcs.trainer.run(*fails, code=78, environ=on_gcs.environ).stderr
    (kept,) = [found for found in on_gcs.bucket.objects() if found.startswith("failed/failure-")]
    assert f"(the traceback is in {on_gcs.bucket.url}/{kept})" in err
    assert b"ZeroDivisionError" in on_gcs.bucket.read(kept)


@pytest.mark.nightly
def test_an_export_that_may_not_be_written_is_told_and_leaves_none(on_gcs: OnGcs) -> None:
    bucket = on_gcs.bucket
    flags = flags_of(on_gcs, "denied", "--eval_every_steps=20")
    bucket.set_faults(Fault(code=403, times=None, method="POST", path="rewriteTo.*o/denied/export/variables"))
    try:
        err = on_gcs.trainer.run(*flags, code=78, environ=on_gcs.environ).stderr
    finally:
        bucket.set_faults()
    assert "storage.objects.create is missing for gs://loopback-bucket/denied/export.part/variables" in err
    assert "denied/export/saved_model.pb" not in bucket.objects()
    on_gcs.trainer.run(*flags, environ=on_gcs.environ)
    assert "denied/export/saved_model.pb" in bucket.objects()
    assert not [name for name in bucket.objects() if "export.part" in name]
