"""A checkpoint is complete and whole or does not count; what fails is told, and nothing is silently lost."""

import contextlib
import dataclasses
import logging
import pathlib
import random
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.checkpoints.worker import Workers, assert_state, state, store, workers
from tests.gcs import Gcs, gcs  # noqa: F401
from trainer import storage
from trainer.checkpoints import bundle
from trainer.checkpoints.store import Checkpoints, load
from trainer.errors import ConfigError, RetryError

KILLED = -9


def _save(checkpoints: Checkpoints, step: int, **facts: Any) -> None:
    checkpoints.save(step, state(step), facts)
    checkpoints.wait()


def _steps(checkpoints: Checkpoints) -> list[int]:
    return sorted(int(path.name) for path in pathlib.Path(checkpoints.directory).iterdir())


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def local_workers() -> Iterator[Workers]:
    with workers() as started:
        yield started


ODD = {
    "bfloat16": np.arange(-2, 3).astype(ml_dtypes.bfloat16),
    "bfloat16 nan": np.array([0x7FC1, 0xFF80], np.uint16).view(ml_dtypes.bfloat16),
    "float8": np.arange(3).astype(ml_dtypes.float8_e4m3fn),
    "int4": np.arange(3).astype(ml_dtypes.int4),
    "float16": np.array([1.5, np.nan, -0.0], np.float16),
    "nan with payload": np.array([0x7F800001, 0xFFC12345], np.uint32).view(np.float32),
    "int64": np.array([2**63 - 1, -(2**63)]),
    "uint64": np.array([2**64 - 1], np.uint64),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "scalar": np.float64(2.5),
    "scalar array": np.array(7, np.int32),
    "empty": np.zeros((0, 3), np.float32),
    "transposed": np.arange(12.0).reshape(3, 4).T,
    "unaligned": np.arange(100, dtype=np.float32)[1:],
    " ": np.ones(1, np.int8),
    "ünïcode/\n'\"*[x], {y}": np.ones(2),
}


def test_every_dtype_shape_and_name_comes_back_bit_for_bit(directory: str) -> None:
    arrays = ODD | {
        "read-only": np.asarray(tf.range(5)),
        "read-only bfloat16": np.asarray(tf.ones(5, tf.bfloat16)),
    }
    checkpoints = store(directory)
    checkpoints.save(3, arrays, {"evaluated": None, "metrics": {"loss": float("nan")}, "passed_over": [[1, 2]]})
    checkpoints.wait()
    saved = store(directory).newest()
    assert saved is not None and saved.step == 3 and saved.path == f"{directory}/3"
    assert saved.facts["passed_over"] == [[1, 2]] and saved.facts["evaluated"] is None
    assert saved.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        got = saved.arrays[name]
        assert got.dtype == array.dtype and got.shape == array.shape, name
        assert got.tobytes() == array.tobytes(), name


def test_nothing_is_saved_yet(directory: str) -> None:
    checkpoints = store(directory)
    assert checkpoints.newest() is None
    assert checkpoints.best() is None
    checkpoints.wait()


def test_a_snapshot_that_shares_memory_keeps_its_moment(directory: str) -> None:
    """What is saved are the values when it was taken, although the variables train on while it is written."""
    variables = [tf.Variable(tf.random.stateless_normal((500, 500), (0, seed))) for seed in range(4)]
    slots = [tf.Variable(tf.zeros_like(variable)) for variable in variables]

    @tf.function
    def train() -> None:
        for variable, slot in zip(variables, slots, strict=True):
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle, accum=slot.handle, lr=0.1, grad=tf.sin(variable), momentum=0.9
            )
            variable.assign_add(tf.ones_like(variable) * 1e-3)
            slot.scatter_nd_add([[0]], tf.ones((1, 500)))

    train()
    everything = {f"model/{n}": variable for n, variable in enumerate([*variables, *slots])}
    checkpoints = store(directory)
    snapshot = {name: np.asarray(variable.value()) for name, variable in everything.items()}
    expected = {name: array.copy() for name, array in snapshot.items()}
    shared = [np.shares_memory(array, np.asarray(everything[name].value())) for name, array in snapshot.items()]
    assert all(shared[:4]), "the slots do not: variables that were scattered to copy when they are read"
    checkpoints.save(1, snapshot, {})
    for _ in range(20):
        train()
    checkpoints.wait()
    saved = checkpoints.newest()
    assert saved is not None
    for name, array in expected.items():
        np.testing.assert_array_equal(saved.arrays[name], array, err_msg=name)
        assert not np.array_equal(everything[name].numpy(), array), "it trained on"


def test_one_save_at_a_time_and_one_copy(directory: str) -> None:
    """The next state is made only after the save before has let go of its own."""
    go = threading.Event()
    checkpoints = store(directory, fence=go.wait)
    checkpoints.save(1, state(1), {})
    with pytest.raises(RetryError, match=r"not written within 0.01 s.*none"):
        checkpoints.wait(timeout_secs=0.01)
    saving: list[bool] = []

    def make() -> dict[str, np.ndarray]:
        saving.append(any(thread.name == "save-1" for thread in threading.enumerate()))
        return state(2)

    threading.Timer(0.1, go.set).start()
    checkpoints.save(2, make, {})
    checkpoints.wait()
    assert saving == [False]
    assert checkpoints.stall_secs > 0 < checkpoints.write_secs
    assert_state(checkpoints.newest(), 2)


@pytest.mark.parametrize(
    ("goal", "losses", "keep", "keep_best", "kept", "best"),
    [
        ("min", [5, 1, 3, 4, 2], 2, 1, [1, 3, 4], 1),
        ("max", [5, 1, 3, 4, 2], 1, 2, [0, 3, 4], 0),
        ("min", [5, float("nan"), 3, None, 4], 1, 1, [2, 4], 2),
        ("max", [float("nan"), None, float("nan")], 2, 3, [1, 2], None),
        ("min", [1, 2, 1, 3], 1, 1, [2, 3], 2),
        ("min", [1, 2, 3], 1, 0, [2], 2),
    ],
)
def test_newest_and_best_stay(
    directory: str, goal: str, losses: list, keep: int, keep_best: int, kept: list[int], best: int | None
) -> None:
    checkpoints = store(directory, keep=keep, keep_best=keep_best, best_goal=goal)
    for step, loss in enumerate(losses):
        _save(checkpoints, step, metrics={"accuracy": step} | ({} if loss is None else {"loss": loss}))
    assert _steps(checkpoints) == kept
    assert_state(checkpoints.newest(), len(losses) - 1)
    found = checkpoints.best()
    assert (found and found.step) == best


@pytest.mark.parametrize("other_process", [False, True])
def test_facts_are_amended_without_writing_arrays(directory: str, other_process: bool) -> None:
    checkpoints = store(directory, keep=3)
    _save(checkpoints, 1, metrics={"loss": 0.5})
    _save(checkpoints, 2, evaluated=None)
    before = {path: path.stat().st_mtime_ns for path in pathlib.Path(directory, "2").glob("arrays-*")}
    assert before
    if other_process:
        checkpoints = store(directory, keep=3)
    _save(checkpoints, 2, evaluated=2, metrics={"loss": 0.25})
    assert before == {path: path.stat().st_mtime_ns for path in pathlib.Path(directory, "2").glob("arrays-*")}
    best = store(directory).best()
    assert_state(best, 2)
    assert best is not None and best.facts == {"evaluated": 2, "metrics": {"loss": 0.25}}


def test_other_arrays_of_the_same_step_replace_the_old_ones(directory: str) -> None:
    checkpoints = store(directory, keep=1)
    _save(checkpoints, 1)
    checkpoints.save(1, other := state(77), {})
    checkpoints.wait()
    saved = store(directory).newest()
    assert saved is not None
    np.testing.assert_array_equal(saved.arrays["model/dense/bias"], other["model/dense/bias"])
    _save(checkpoints, 1)  # and back: these bytes are no longer there
    assert_state(store(directory).newest(), 1)
    _save(checkpoints, 1)
    assert len(list(pathlib.Path(directory, "1").glob("arrays-*.index"))) == 1


def test_the_newest_is_the_one_committed_last(directory: str) -> None:
    """A run that went back, to its best or before damage, goes on from where it went then."""
    checkpoints = store(directory, keep=2, keep_best=0)
    for step in (10, 20, 15):
        _save(checkpoints, step)
    assert_state(store(directory).newest(), 15)
    _save(checkpoints, 17)
    assert _steps(checkpoints) == [15, 17]


def _flip(path: pathlib.Path, *, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def _truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "a byte of data": lambda data, index, marker: _flip(data, at=1000),
    "a byte of the index": lambda data, index, marker: _flip(index, at=30),
    "a byte at the end of the index": lambda data, index, marker: _flip(index, at=-1),
    "data truncated": lambda data, index, marker: _truncate(data),
    "data empty": lambda data, index, marker: data.write_bytes(b""),
    "index truncated": lambda data, index, marker: _truncate(index),
    "index empty": lambda data, index, marker: index.write_bytes(b""),
    "data gone": lambda data, index, marker: data.unlink(),
    "index gone": lambda data, index, marker: index.unlink(),
    "marker garbage": lambda data, index, marker: marker.write_bytes(b"\xff\x00garbage"),
    "marker empty": lambda data, index, marker: marker.write_bytes(b""),
    "marker of another kind": lambda data, index, marker: marker.write_text('["crc32"]'),
    "marker edited": lambda data, index, marker: marker.write_text(marker.read_text().replace("0.25", "0.26")),
    "bundle of another step": lambda data, index, marker: [
        path.write_bytes(next(pathlib.Path(data.parent.parent, "2").glob(f"*{path.suffix}")).read_bytes())
        for path in (data, index)
    ],
}


def _damage(directory: str, step: int, how: str) -> None:
    path = pathlib.Path(directory, str(step))
    DAMAGE[how](next(path.glob("*.data-*")), next(path.glob("*.index")), path / "COMMIT.json")


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_newest_is_passed_over_with_a_warning(
    directory: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        _save(store(directory, keep=3), step, metrics={"loss": 0.25})
    _damage(directory, 3, how)
    checkpoints = store(directory, keep=1, keep_best=1)
    with caplog.at_level(logging.WARNING, logger="trainer.checkpoints"):
        assert_state(checkpoints.newest(), 2)
        assert_state(checkpoints.best(), 2)
    assert f"{directory}/3 is damaged and passed over" in caplog.text
    assert _steps(checkpoints) == [1, 2, 3], "reading removes nothing"
    # The run goes on from 2. The damaged one neither counts among those that stay nor is taken for complete again.
    _save(checkpoints, 3, metrics={"loss": 0.5})
    assert_state(store(directory).newest(), 3)
    assert _steps(checkpoints) == [2, 3]


def test_a_damaged_one_does_not_outlive_what_is_whole(directory: str) -> None:
    for step in (1, 2):
        _save(store(directory, keep=3), step)
    _damage(directory, 2, "a byte of data")
    checkpoints = store(directory, keep=2, keep_best=1)
    assert_state(checkpoints.newest(), 1)
    _save(checkpoints, 9)
    assert _steps(checkpoints) == [1, 9]


def test_only_damaged_ones_are_an_error(directory: str) -> None:
    for step in (1, 2):
        _save(store(directory, keep=3), step)
    _damage(directory, 1, "data gone")
    _damage(directory, 2, "marker garbage")
    with pytest.raises(ConfigError, match=r"(?s)no checkpoint is whole.*/2: .*/1: ") as error:
        store(directory).newest()
    assert error.value.exit_code == 78


def test_where_none_has_the_metric_damage_does_not_matter(directory: str) -> None:
    for step in (1, 2):
        _save(store(directory), step)
    _damage(directory, 2, "marker garbage")
    assert store(directory).best() is None


def test_a_fence_that_is_lost_commits_nothing(directory: str) -> None:
    class LeaseLostError(RuntimeError):
        pass

    def fence() -> None:
        if not owned:
            raise LeaseLostError("another process has the run")

    owned = True
    checkpoints = store(directory, fence=fence, on_failure=pytest.fail)
    _save(checkpoints, 1)
    owned = False
    checkpoints.save(2, state(2), {})
    checkpoints.close()
    for call in (checkpoints.check, checkpoints.wait, lambda: checkpoints.save(3, state(3), {})):
        with pytest.raises(LeaseLostError):
            call()
    assert_state(store(directory).newest(), 1)


def test_a_fence_that_is_lost_during_the_write_commits_nothing(directory: str) -> None:
    """And it removes nothing that the new owner may be writing."""
    asked: list[int] = []

    def fence() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise RuntimeError("lost")

    checkpoints = store(directory, fence=fence)
    checkpoints.save(1, state(1), {})
    with pytest.raises(RuntimeError, match="lost"):
        checkpoints.wait()
    assert list(pathlib.Path(directory, "1").glob("*.index")), "it was written,"
    assert store(directory).newest() is None, "but never complete"


def test_leftovers_go_with_the_next_save_and_not_before(directory: str) -> None:
    _save(store(directory), 1)
    left = pathlib.Path(directory, "5")
    left.mkdir()
    (left / "arrays-0.data-00000-of-00001.tempstate1").write_bytes(b"x" * 3_000_000)
    checkpoints = store(directory)
    assert_state(checkpoints.newest(), 1)
    assert left.exists()
    _save(checkpoints, 2)
    assert not left.exists()
    assert_state(checkpoints.newest(), 2)


@contextlib.contextmanager
def _small_disk(path: pathlib.Path) -> Iterator[None]:
    """A file system of 1 MiB at `path`; where none may be mounted, a limit on the size of a file."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if mounted:
            subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("mountable", [True, False])
def test_a_full_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, mountable: bool) -> None:
    if not mountable:
        monkeypatch.setenv("PATH", "")
    disk, alerts = tmp_path / "disk", []
    with _small_disk(disk):
        # A try that cannot help would wait for an hour.
        checkpoints = store(str(disk / "checkpoints"), on_failure=alerts.append, retry_waits_secs=(3600.0,))
        _save(checkpoints, 1)
        big = {"model/kernel": np.ones(3 << 20, np.uint8)}
        for step in (2, 3):
            checkpoints.save(step, big, {})
        with pytest.raises(RetryError, match=r"step 3 .*safe is of step 1\. no space left on .* 3 MiB needed"):
            checkpoints.wait()
        assert len(alerts) == 2
        assert not list(disk.glob("*/[23]/*")), "half a checkpoint would keep the disk full"
        _save(checkpoints, 4)  # it fits: the run goes on, and failures are counted anew
        for step in (5, 6, 7):
            checkpoints.save(step, big, {})
        checkpoints.close()
        with pytest.raises(RetryError, match="3 saves in a row failed"):
            checkpoints.save(8, big, {})
        assert_state(store(checkpoints.directory).newest(), 4)


def test_room_is_checked_before_it_is_needed(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store(directory).check_space(1000)
    with pytest.raises(ConfigError, match=r"disk is too small .* 1073741824 MiB needed"):
        store(directory).check_space(1 << 50)
    store("gs://bucket/checkpoints").check_space(1 << 50)
    monkeypatch.setattr(storage, "free_bytes", lambda path: 999)
    with pytest.raises(RetryError, match=r"no space left .* 1 MiB needed, 1 MiB free"):
        store(directory).check_space(1000)


@pytest.mark.parametrize("saved_before", [True, False])
def test_a_directory_that_is_removed_under_the_run(tmp_path: pathlib.Path, saved_before: bool) -> None:
    model_dir, alerts = tmp_path / "run", []
    model_dir.mkdir()
    checkpoints = store(str(model_dir / "checkpoints"), on_failure=alerts.append)
    if saved_before:
        _save(checkpoints, 1)
    shutil.rmtree(model_dir)
    checkpoints.save(2, state(2), {})
    with pytest.raises(ConfigError, match="is gone"):
        checkpoints.wait()
    assert len(alerts) == 1
    assert not model_dir.exists(), "a model_dir without its config would be taken for a run"


def test_a_defect_in_the_background_reaches_the_run(directory: str) -> None:
    checkpoints = store(directory)
    checkpoints.save(1, state(1), {"metrics": {1, 2}})
    with pytest.raises(TypeError, match="set is not JSON"):
        checkpoints.wait()


def test_killed_before_any_file_operation(
    local_workers: Workers, directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is the last thing a save did, the checkpoint before is there, or the new one, bit for bit."""
    step = 1
    assert local_workers.call("save_and_die", directory, 0) == (0, "")
    seen: set[str] = set()
    for operation in range(100):
        code, text = local_workers.call("save_and_die", directory, step, operation)
        saved = store(directory).newest()
        assert saved is not None and saved.step in (step, step + 1), text
        assert_state(saved, saved.step)
        for marker in pathlib.Path(directory).glob("*/COMMIT.json"):
            load(str(marker.parent), only="model/")
        seen.add("new" if saved.step > step else "before")
        if saved.step > step and code == KILLED and "removing" not in seen:
            seen.add("removing")
        if code == 0:
            break
        assert code == KILLED, text
        step = saved.step
    assert "damaged" not in caplog.text, "what has a marker was whole, always"
    assert operation >= 15, "too few operations were seen"
    assert seen == {"new", "before", "removing"}
    assert len(_steps(store(directory))) == 1, "all leftovers are gone"


def test_killed_at_random_moments(local_workers: Workers, directory: str, caplog: pytest.LogCaptureFixture) -> None:
    """Saving without end, each save of 8 MB."""
    step = kills = 0
    while kills < 15 or step < 3:  # later and later, for a machine that is slow
        kills += 1
        after_secs = random.uniform(0.05, 0.25) * (1 + kills / 15)
        code, text = local_workers.call("save_and_die", directory, step, None, after_secs)
        assert code == KILLED, text
        saved = store(directory).newest()
        if saved is not None:
            assert saved.step >= step, "nothing that was complete is lost"
            step = saved.step
            assert_state(saved, step, size=200_000)
    assert "damaged" not in caplog.text


def test_beside_a_remote_worker_files_are_our_own(local_workers: Workers, tmp_path: pathlib.Path) -> None:
    code, text = local_workers.call("save_beside_a_remote_worker", str(tmp_path))
    assert code == 0, text


@pytest.mark.parametrize(
    ("scenario", "max_retries"), [("save_to_bucket", 2), ("save_through_faults", 0), ("fail_on_bucket", 0)]
)
def test_on_a_bucket(gcs: Gcs, scenario: str, max_retries: int) -> None:  # noqa: F811
    server = dataclasses.asdict(gcs) | {"ca": str(gcs.ca)}
    with workers(gcs.environ(max_retries=max_retries)) as started:
        code, text = started.call(scenario, server)
    assert code == 0, text


@pytest.mark.parametrize("fault", [{"code": 503}, {"drop": "response"}, {"drop": "request"}])
def test_a_bucket_that_cannot_be_read_is_not_empty(gcs: Gcs, fault: dict) -> None:  # noqa: F811
    server = dataclasses.asdict(gcs) | {"ca": str(gcs.ca)}
    with workers(gcs.environ(max_retries=0)) as started:
        assert started.call("save_one_to_bucket", server) == (0, "")
        # Another process, for this one remembers for a while which directories there are.
        code, text = started.call("find_nothing_on_bucket", server, fault | {"times": None})
    assert code == 0, text


def test_tensorflow_reads_the_bundle(directory: str) -> None:
    _save(store(directory), 1)
    prefix = str(next(pathlib.Path(directory, "1").glob("*.index"))).removesuffix(".index")
    reader = tf.train.load_checkpoint(prefix)
    assert reader.get_variable_to_shape_map()["model/dense/kernel"] == [1000, 10]


def test_a_batch_of_reads_is_bounded(directory: str, tmp_path: pathlib.Path) -> None:
    """Many small arrays in one operation, large ones one by one, all of them once."""
    arrays = {f"a/{n}": np.full(3 << 20, n, np.float32) for n in range(6)} | {f"b/{n}": np.ones(n) for n in range(50)}
    bundle.write(str(tmp_path / "x"), arrays)
    got = dict(bundle.read(str(tmp_path / "x"), {name: bundle.form(array) for name, array in arrays.items()}))
    assert got.keys() == arrays.keys()
    assert all(np.array_equal(got[name], array) for name, array in arrays.items())


@pytest.mark.parametrize("what", ["", "checkpoints", "checkpoints/2", "checkpoints/1/"])
def test_weights_of_another_run(tmp_path: pathlib.Path, what: str) -> None:
    checkpoints = store(str(tmp_path / "checkpoints"))
    for step in (1, 2):
        _save(checkpoints, step)
    saved = load(str(tmp_path / what), only="model/")
    assert saved.step == (1 if "1" in what else 2)
    assert saved.arrays.keys() == {"model/dense/kernel", "model/dense/bias"}, "the optimizer's are not even read"
    np.testing.assert_array_equal(saved.arrays["model/dense/bias"], state(saved.step)["model/dense/bias"])


def test_weights_that_are_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"no checkpoint is there. Received: {tmp_path}")):
        load(str(tmp_path))
