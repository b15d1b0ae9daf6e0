"""Chief, workers and evaluator: what TF_CONFIG and CLUSTER_SPEC mean, and a cluster of real processes on loopback."""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ, metrics_of, state_of
from tests.gcs import Gcs, gcs  # noqa: F401
from trainer import cluster, config, experiment, guard, hardware, inputs, models, run_dir
from trainer.assembly import Assembly
from trainer.callbacks import evaluations
from trainer.callbacks.clock import Clock
from trainer.checkpoints.directory import MARKER
from trainer.checkpoints.reader import Reader
from trainer.checkpoints.store import Checkpoints
from trainer.errors import ConfigError, RetryError, TrainerError
from trainer.modes.follow import Follow
from trainer.modes.use_checkpoint import use_checkpoint
from trainer.watch import status
from trainer.watch.stopping import Stops
from trainer.workers import Workers

EVERY, STEPS = 40, 200
FLAGS = ["--model=mlp", f"--train_steps={STEPS}", f"--eval_every_steps={EVERY}", "--global_batch_size=96"]
FLAGS += ["--checkpoint_every_steps=60", "--keep_checkpoints=100", "--log_every_steps=20", "--steps_per_loop=10"]
EVALUATED = [40, 60, 80, 120, 160, 180, 200]
TASKS = [("chief", 0), ("worker", 0), ("worker", 1), ("evaluator", 0)]
POOLS = {"chief": "workerpool0", "worker": "workerpool1", "evaluator": "workerpool3"}


# --- what the variables mean ---


def resolved(**environ: object) -> hardware.Target:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in environ.items()}
    return hardware.resolve(tpu=None, environ=texts)


def vertex(task: str, index: int = 0, **pools: list[str]) -> dict:
    """As Vertex AI writes CLUSTER_SPEC."""
    task_of_job = {"type": task, "index": index, "trial": "3"}
    return {"cluster": pools, "environment": "cloud", "task": task_of_job, "job": '{"worker_pool_specs": []}'}


def test_cluster_spec_of_vertex() -> None:
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1", "c:1"], "workerpool2": [], "workerpool3": ["d:1"]}
    found = resolved(CLUSTER_SPEC=vertex("workerpool1", 1, **pools))
    assert found.workers is not None
    assert (found.workers.addresses, found.workers.source) == (("a:1", "b:1", "c:1"), "CLUSTER_SPEC")
    assert found.workers.tasks == {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    assert (found.workers.task, found.is_chief, found.evaluation) == (("worker", 1), False, "elsewhere")
    evaluator = resolved(CLUSTER_SPEC=vertex("workerpool3", **pools))
    assert (evaluator.workers, evaluator.is_chief, evaluator.evaluation) == (None, False, "only")
    alone = resolved(CLUSTER_SPEC=vertex("workerpool0", workerpool0=["a:1"]))
    assert (alone.workers, alone.is_chief, alone.evaluation) == (None, True, "here")


def test_tf_config_wins_over_cluster_spec() -> None:
    spec = vertex("workerpool0", workerpool0=["a:1"], workerpool1=["b:1"])
    tf_config = {"cluster": {"worker": ["x:1", "y:1"]}, "task": {"type": "worker", "index": 1}}
    found = resolved(TF_CONFIG=tf_config, CLUSTER_SPEC=spec)
    assert found.workers == Workers(("x:1", "y:1"), 1, (("worker", 2),), "TF_CONFIG")
    unset = resolved(TF_CONFIG="", CLUSTER_SPEC=spec)
    assert unset.workers is not None and unset.workers.source == "CLUSTER_SPEC"


def test_an_evaluator_within_the_cluster_and_outside_of_it() -> None:
    trained = {"chief": ["a:1"], "worker": ["b:1"]}
    inside = {**trained, "evaluator": ["c:1"]}
    for jobs in (trained, inside, {}):
        found = resolved(TF_CONFIG={"cluster": jobs, "task": {"type": "evaluator", "index": 0}})
        assert (found.workers, found.evaluation) == (None, "only")
    chief = {"type": "chief", "index": 0}
    assert resolved(TF_CONFIG={"cluster": inside, "task": chief}).evaluation == "elsewhere"
    assert resolved(TF_CONFIG={"cluster": trained, "task": chief}).evaluation == "here"
    alone = resolved(TF_CONFIG={"cluster": {"chief": ["a:1"], "evaluator": ["c:1"]}, "task": chief})
    assert (alone.workers, alone.is_chief, alone.evaluation) == (None, True, "elsewhere")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{", "CLUSTER_SPEC is not JSON"),
        ({"cluster": ["a:1"]}, 'is not {"cluster": {"workerpool0"'),
        (vertex("workerpool0", workerpool0="a:1"), 'a list of "host:port" for workerpool0'),
        (vertex("workerpool0", workerpool0=["a:1"], workerpool2=["b:1"]), "workerpool2: parameter servers"),
        (vertex("chief", chief=["a:1"]), "tasks of type chief, where it can have workerpool0, workerpool1"),
        (vertex("workerpool0", workerpool0=["a:1", "b:1"]), "one chief at most"),
        (vertex("workerpool0", workerpool0=["a:1"], workerpool3=["b:1", "c:1"]), "one evaluator at most"),
        (vertex("workerpool0", workerpool0=["a:1"], workerpool3=["a:1"]), "each address once"),
        (vertex("workerpool3", 1, workerpool0=["a:1"], workerpool3=["b:1"]), "must name this process"),
        (vertex("workerpool1", workerpool0=["a:1"]), "must name this process"),
    ],
)
def test_cluster_spec_refused(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(CLUSTER_SPEC=spec)
    assert "CLUSTER_SPEC" in str(caught.value) and "Received: {" in str(caught.value)


def test_an_evaluator_takes_no_tpu() -> None:
    environ = {"TF_CONFIG": json.dumps({"cluster": {}, "task": {"type": "evaluator", "index": 0}})}
    with pytest.raises(ConfigError, match=r"must not take the TPU.*--tpu=none. Received: --tpu=my-tpu"):
        hardware.resolve(tpu="my-tpu", environ=environ)


# --- which checkpoint is best ---


def save(store: Checkpoints, step: int, value: float, **facts: object) -> None:
    store.save(step, {"model/x": np.full(3, value, np.float32)}, {"metrics": {}, **facts})
    store.wait()


def test_what_an_evaluator_found_says_which_checkpoints_stay(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "metrics.jsonl")
    reader = Reader(str(tmp_path / "checkpoints"))
    store = Checkpoints(
        str(tmp_path / "checkpoints"),
        keep=1,
        keep_best=1,
        best_metric="loss",
        best_goal="min",
        evaluations=lambda: evaluations.metrics_by_arrays(path),
    )
    for step, loss in ((1, 0.5), (2, 0.25), (3, float("nan")), (4, 0.75), (5, None)):
        save(store, step, float(step))
        [marker] = [marker for marker in reader.complete() if marker.step == step]
        if loss is not None:
            evaluations.add(path, evaluations.Evaluation(step, marker.bundle_name, {"loss": loss}))
    assert [marker.step for marker in reader.complete()] == [2, 5]
    best = store.best()
    assert best is not None and best.step == 2
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[2], parse_constant=pytest.fail)


def test_a_reader_passes_over_what_is_removed_damaged_or_incomplete(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "checkpoints"
    store = Checkpoints(str(directory), keep=10, keep_best=0, best_metric="loss", best_goal="min")
    reader = Reader(str(directory), retry_waits_secs=())
    assert reader.complete() == []
    for step in (1, 2, 3, 4):
        save(store, step, float(step))
    (directory / "3" / MARKER).unlink()
    one, two, four = reader.complete()
    shutil.rmtree(directory / "1")
    assert reader.read(one) is None
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    [data] = (directory / "2").glob("*.data-*")
    content = bytearray(data.read_bytes())
    content[4] ^= 1
    data.write_bytes(content)
    assert reader.read(two) is None
    assert [record.levelname for record in caplog.records if "damaged" in record.message] == ["WARNING"]
    assert reader.complete() == [four], "what is damaged is not tried again and again"
    saved = reader.read(four)
    assert saved is not None and saved.arrays["model/x"].tolist() == [4.0] * 3


# --- a cluster ---


def free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    for sock in sockets:
        sock.close()
    return addresses


def environs(variable: str) -> list[dict[str, str]]:
    """The environment of each of TASKS, in the form of TF_CONFIG or of CLUSTER_SPEC."""
    chief, first, second, evaluator = free_addresses(4)
    jobs = {"chief": [chief], "worker": [first, second], "evaluator": [evaluator]}
    names = POOLS if variable == "CLUSTER_SPEC" else {job: job for job in jobs}
    tasks = {names[job]: addresses for job, addresses in jobs.items()}
    texts = [json.dumps({"cluster": tasks, "task": {"type": names[job], "index": index}}) for job, index in TASKS]
    return [{variable: text} for text in texts]


@contextlib.contextmanager
def ended_at_last(processes: list[subprocess.Popen]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def until(holds: Callable[[], object], processes: list[subprocess.Popen]) -> None:
    """Returns once it holds; as long as nobody has ended."""
    while not holds():
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, [process.communicate() for process in ended]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def quiet(digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[str]]:
    """The model_dir of a run of four processes as Vertex AI starts them, and what each of them said."""
    model_dir = tmp_path_factory.mktemp("quiet") / "run"
    trainer = Trainer(digits_dir)
    processes = [trainer.start(f"--model_dir={model_dir}", *FLAGS, environ=env) for env in environs("CLUSTER_SPEC")]
    said = [process.communicate(timeout=GUARD_SECS) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert [err for _, err in said] == [""] * 4
    return model_dir, [out for out, _ in said]


def found_in(model_dir: pathlib.Path) -> list[evaluations.Evaluation]:
    return evaluations.read(str(model_dir / run_dir.EVALUATIONS))


def shown_in(model_dir: pathlib.Path) -> list[tuple[int, float]]:
    """What TensorBoard shows of the evaluator's loss."""
    board = EventAccumulator(str(model_dir / "tensorboard/evaluator"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars("eval/loss")]


def assert_evaluated(model_dir: pathlib.Path, steps: list[int]) -> None:
    """Each of the checkpoints once, as it stands there."""
    found = found_in(model_dir)
    assert [evaluation.step for evaluation in found] == steps
    names = {marker.bundle_name for marker in Reader(str(model_dir / "checkpoints")).complete()}
    assert names <= {evaluation.arrays for evaluation in found}
    assert shown_in(model_dir) == [(e.step, pytest.approx(e.metrics["loss"])) for e in found]


@pytest.mark.slow
def test_a_cluster_as_vertex_starts_it(quiet: tuple[pathlib.Path, list[str]]) -> None:
    model_dir, (chief, first, second, evaluator) = quiet
    assert_evaluated(model_dir, EVALUATED)
    evaluations_of_chief = [record for record in metrics_of(model_dir) if "eval/loss" in record]
    assert [record["step"] for record in evaluations_of_chief] == [STEPS], "in the loop it does not evaluate"
    last = found_in(model_dir)[-1]
    assert {"step": last.step, **{f"eval/{name}": value for name, value in last.metrics.items()}} == pytest.approx(
        evaluations_of_chief[-1], abs=1e-6
    )
    assert "3 workers of CLUSTER_SPEC" in chief and "an evaluator evaluates beside them" in chief
    assert first == second == "", "only chief and evaluator speak"
    assert f"evaluator: evaluates each checkpoint of {model_dir}\n" in evaluator
    states = [status.read(str(folder)) for folder in (model_dir, model_dir / run_dir.EVALUATOR)]
    assert [found and found.state for found in states] == ["finished", "finished"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "end_of_evaluator"),
    [(2, signal.SIGTERM), pytest.param(0, signal.SIGKILL, marks=pytest.mark.nightly)],
    ids=["worker", "chief"],
)
def test_a_cluster_that_loses_a_process_ends_as_a_quiet_one(
    quiet: tuple[pathlib.Path, list[str]],
    trainer: Trainer,
    tmp_path: pathlib.Path,
    victim: int,
    end_of_evaluator: signal.Signals,
) -> None:
    """One is killed, its peers lose it, the evaluator is sent away too; scripts/supervise brings all back."""
    model_dir = tmp_path / "run"
    command = [str(ROOT / "scripts/supervise"), "--max_backoff_secs=1", "--"]
    command += trainer.command(f"--model_dir={model_dir}", *FLAGS)
    pipe, processes = subprocess.PIPE, list[subprocess.Popen]()
    with ended_at_last(processes):
        for environ in environs("TF_CONFIG"):
            env = clean_environ() | environ
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
                )
            )
        until((model_dir / "checkpoints" / str(EVERY) / MARKER).exists, processes)
        os.kill(child(processes[victim]), signal.SIGKILL)
        until((model_dir / run_dir.EVALUATIONS).exists, processes)
        os.kill(child(processes[3]), end_of_evaluator)
        said = [process.communicate(timeout=GUARD_SECS)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert "killed by signal 9" in said[victim] and "exit code 75" in said[2 - victim]
    assert "lost the connection to a worker" in said[2 - victim]
    if end_of_evaluator == signal.SIGTERM:
        assert "stopped by SIGTERM while it evaluated; run again" in said[3] and "exit code 75" in said[3]
    assert len(json.loads((model_dir / "provenance.json").read_text())["starts"]) > 1
    assert_same(model_dir, quiet[0])
    assert_evaluated(model_dir, EVALUATED)
    for ours, theirs in zip(found_in(model_dir), found_in(quiet[0]), strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-5)


def child(supervisor: subprocess.Popen) -> int:
    """The process that a supervisor runs now."""
    return int(pathlib.Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text())


def assert_same(model_dir: pathlib.Path, expected_dir: pathlib.Path) -> None:
    """metrics.jsonl and the newest checkpoint, but for the rounding of workers."""
    records, expected = metrics_of(model_dir), metrics_of(expected_dir)
    assert [list(record) for record in records] == [list(record) for record in expected]
    for ours, theirs in zip(records, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    arrays = state_of(expected_dir)
    assert state_of(model_dir).keys() == arrays.keys()
    for name, array in state_of(model_dir).items():
        np.testing.assert_allclose(array, arrays[name], rtol=0, atol=1e-5, err_msg=name)


# --- the evaluator alone, on what the quiet run has left ---


@pytest.fixture
def left(quiet: tuple[pathlib.Path, list[str]], tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the quiet run."""
    shutil.copytree(quiet[0], tmp_path / "run")
    return tmp_path / "run"


def assembled(digits_dir: pathlib.Path, model_dir: pathlib.Path, **options: object) -> Assembly:
    values = dict(flag.removeprefix("--").split("=") for flag in FLAGS)
    parsed = {name: config.parse(name, text) for name, text in values.items()}
    files = {"dataset": "digits", "data_dir": str(digits_dir), "model_dir": str(model_dir)}
    settings = config.merge(files, parsed, {"stall_secs": 30.0}, options)
    devices = cluster.connect(resolved(), connect_timeout_secs=settings.connect_timeout_secs)
    read = inputs.open_inputs(settings, cache_dir=str(model_dir / "repaired"))
    source = models.find(settings.model, settings.model_options)
    return Assembly(settings, Clock(time.monotonic()), source, read, run_dir.RunDir(str(model_dir)), devices)


def follow(digits_dir: pathlib.Path, model_dir: pathlib.Path, **options: object) -> None:
    """An evaluator in this process."""
    run = assembled(digits_dir, model_dir, **options)
    own = run_dir.RunDir(run.folder.file(run_dir.EVALUATOR))
    with guard.watching(run.config, own, run.clock, Stops(), is_chief=True) as watched:
        Follow(run, watched).go()


def say(model_dir: pathlib.Path, **changes: object) -> None:
    """Changes what the run says of itself."""
    found = status.read(str(model_dir))
    assert found is not None
    status.StatusFile(str(model_dir)).store(dataclasses.replace(found, **changes))  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_evaluator_goes_on_where_it_was_killed(digits_dir: pathlib.Path, left: pathlib.Path) -> None:
    """After the points of TensorBoard, before the line; and no step is evaluated twice, nor an incomplete one."""
    lines = (left / run_dir.EVALUATIONS).read_text().splitlines(keepends=True)
    (left / run_dir.EVALUATIONS).write_text("".join(lines[:2]))
    (left / "checkpoints" / str(EVALUATED[3]) / MARKER).unlink()
    shutil.rmtree(left / "checkpoints" / str(EVALUATED[1]))  # its line stays
    follow(digits_dir, left)
    assert (left / run_dir.EVALUATIONS).read_text().splitlines(keepends=True)[:2] == lines[:2]
    assert_evaluated(left, [step for step in EVALUATED if step != EVALUATED[3]])


@pytest.mark.slow
def test_a_step_that_was_trained_anew_is_evaluated_anew(digits_dir: pathlib.Path, left: pathlib.Path) -> None:
    lines = (left / run_dir.EVALUATIONS).read_text().splitlines(keepends=True)
    past = [line.replace('"arrays": "arrays-', '"arrays": "arrays-of-a-past-') for line in lines[5:]]
    (left / run_dir.EVALUATIONS).write_text("".join([*lines[:5], *past]))
    follow(digits_dir, left)
    found = found_in(left)
    assert not [evaluation for evaluation in found if "past" in evaluation.arrays]
    assert_evaluated(left, EVALUATED)


@pytest.mark.slow
def test_an_evaluator_ends_with_the_run(
    digits_dir: pathlib.Path, left: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(left / "evaluator")
    shutil.rmtree(left / "checkpoints" / str(STEPS))
    follow(digits_dir, left)  # finished: there is nothing to wait for
    assert_evaluated(left, EVALUATED[:-1])
    say(left, state="failed", exit_code=78, reason="a bad record")
    with pytest.raises(ConfigError, match="has failed, and its evaluator ends with it: a bad record"):
        follow(digits_dir, left, connect_timeout_secs=0.01)
    say(left, exit_code=1)
    with pytest.raises(TrainerError, match="a bad record") as caught:
        follow(digits_dir, left, connect_timeout_secs=0.01)
    assert caught.value.exit_code == 1
    with pytest.raises(RetryError, match=r"nothing was heard of the run for --stall_secs=1, .*failed"):
        follow(digits_dir, left, stall_secs=1.0)  # it may be starting again


@pytest.mark.slow
def test_an_evaluator_ends_at_once_with_a_run_that_fails_beside_it(
    digits_dir: pathlib.Path, left: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fail(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == f"waiting for a checkpoint after step {EVALUATED[-2]}":
                say(left, state="failed", exit_code=78, reason="a bad record")

    shutil.rmtree(left / "checkpoints" / str(STEPS))
    (left / run_dir.EVALUATIONS).unlink()
    say(left, state="running", exit_code=None)
    caplog.set_level(logging.INFO, "trainer")
    logger, fail = logging.getLogger("trainer.modes.follow"), Fail()
    logger.addHandler(fail)
    try:
        with pytest.raises(ConfigError, match="a bad record"):
            follow(digits_dir, left)
    finally:
        logger.removeHandler(fail)
    assert_evaluated(left, EVALUATED[:-1])


@pytest.mark.slow
def test_an_evaluator_of_a_run_that_never_begins_or_differs(
    digits_dir: pathlib.Path, left: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(RetryError, match=r"waiting for the run to begin.*\(it has not begun\)"):
        follow(digits_dir, tmp_path / "none", stall_secs=1.0)
    assert not (tmp_path / "none").exists(), "it does not make the directory before the run does"
    with pytest.raises(ConfigError, match="learning_rate: 0.001 -> 0.5"):
        follow(digits_dir, left, learning_rate=0.5)


@pytest.mark.slow
def test_one_evaluator_at_a_time(digits_dir: pathlib.Path, left: pathlib.Path) -> None:
    before = (left / run_dir.EVALUATIONS).read_bytes()
    say(left / run_dir.EVALUATOR, **dataclasses.asdict(status.new_status(None)))  # this process is alive
    with pytest.raises(RetryError, match=f"{run_dir.EVALUATOR} is in use by another run .*pid {os.getpid()}"):
        follow(digits_dir, left)
    assert (left / run_dir.EVALUATIONS).read_bytes() == before


@pytest.mark.slow
def test_what_the_evaluator_found_is_the_best(digits_dir: pathlib.Path, trainer: Trainer, left: pathlib.Path) -> None:
    """A run that goes on without its evaluator keeps the best that it found; the chief's own file says nothing."""
    best = {"best_metric": "accuracy", "best_goal": "min"}  # which is the first
    flags = ["--train_steps=220", "--keep_checkpoints=1", *(f"--{name}={value}" for name, value in best.items())]
    trainer.run(f"--model_dir={left}", *FLAGS, *flags, "--allow_config_change")
    assert {path.name for path in (left / "checkpoints").iterdir()} == {str(EVERY), "220"}
    use_checkpoint(assembled(digits_dir, left, mode="eval", checkpoint="best", **best))
    last = metrics_of(left)[-1]
    assert (last["step"], last["eval/loss"]) == (EVERY, pytest.approx(found_in(left)[0].metrics["loss"], abs=1e-6))


@pytest.mark.parametrize("task", [0, 3])
def test_an_evaluator_has_to_have_something_to_evaluate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, task: int
) -> None:
    for name, text in environs("TF_CONFIG")[task].items():
        monkeypatch.setenv(name, text)
    settings = config.merge({"mode": "train", "model_dir": str(tmp_path), "dataset": "digits"})
    with pytest.raises(ConfigError, match="has nothing to do in others. Received: --mode=train"):
        experiment.run(settings, {}, [], time.monotonic(), Stops())


# --- for long ---


@pytest.mark.nightly
def test_workers_that_disagree_about_an_evaluator(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    chief, worker, evaluator = free_addresses(3)
    jobs = {"chief": [chief], "worker": [worker]}
    tasks = [
        {"cluster": jobs | {"evaluator": [evaluator]}, "task": {"type": "chief", "index": 0}},
        {"cluster": jobs, "task": {"type": "worker", "index": 0}},
    ]
    texts = [json.dumps(task) for task in tasks]
    flags = [f"--model_dir={tmp_path}", *FLAGS]
    processes = [trainer.start(*flags, environ={"TF_CONFIG": text}) for text in texts]
    said = [process.communicate(timeout=GUARD_SECS)[1] for process in processes]
    assert [process.returncode for process in processes] == [78, 78], said
    assert all("1 of the 2 workers know of an evaluator" in err for err in said), said


@pytest.mark.nightly
def test_a_chief_and_its_evaluator_on_gs(trainer: Trainer, gcs: Gcs) -> None:  # noqa: F811
    chief, evaluator = free_addresses(2)
    jobs = {"workerpool0": [chief], "workerpool3": [evaluator]}
    processes = [
        trainer.start(
            f"--model_dir={gcs.url}/run",
            *FLAGS,
            environ={**gcs.environ(), "CLUSTER_SPEC": json.dumps(vertex(pool, **jobs))},
        )
        for pool in jobs
    ]
    said = [process.communicate(timeout=GUARD_SECS) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    lines = gcs.read(f"run/{run_dir.EVALUATIONS}").decode().splitlines()
    assert [json.loads(line)["step"] for line in lines] == EVALUATED
    own = [json.loads(line) for line in gcs.read("run/metrics.jsonl").decode().splitlines()][-1]
    assert json.loads(lines[-1])["eval/loss"] == pytest.approx(own["eval/loss"], abs=1e-6)
