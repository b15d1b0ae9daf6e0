"""Hurts a training run at random moments until it has finished, and compares it with one that was left in peace.

    python scripts/chaos.py [--kills=25] [--seed=0] [--replicas=1|2] [--workers=1|2] [--storage=local|gs]
                            [--only=SIGTERM] [--data_dir=DIR] [--keep=DIR]

A small CNN with batch norm and dropout learns the digits, with checkpoints every few steps, evaluations and an export.
Its processes run under `tests.chaos_process`, which tells what they do; so a SIGKILL "inside a save" is inside of it,
between two given operations on files. As scripts/supervise would, this program starts each of them again.

    kill PHASE      SIGKILL inside start-up, restore, training, evaluation, a save, the export
    SIGTERM, SIGINT at any moment: exit code 75 within --grace_secs
    flip, truncate, missing   SIGKILL, then the newest checkpoint is damaged
    full disk       a tmpfs that is full for a while, and a start in it; where none can be mounted, no file can grow
    503, drop       gs:// answers so, or breaks connections, for a while (TensorFlow's own client, tests/gcs.py)

Prints a line for each hurt, then what differs (tests/chaos_checks.py), and exits 1 if anything does: weights, optimizer
and all other state are bit-identical on one replica and equal to 1e-5 on several; each record is in the final weights
exactly once an epoch; metrics.jsonl and TensorBoard are the same; receipt, export and exit codes are right; nothing is
left behind, and no process wrote a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from tests import chaos_checks, gcs  # noqa: E402
from tests.conftest import clean_environ  # noqa: E402

GRACE_SECS = 10.0
BATCH, SHUFFLE_MIB, RUN_SEED = 128, 0.05, 0
# At most a start is hurt 20 steps behind where it began, and those to the next evaluation. Where it is killed, most of
# them are done again: half of that will do.
STEPS_A_HURT, STEPS_A_SIGNAL = 16, 32
# Checkpoints, evaluations, reports and epochs (11.7 steps) end on different steps.
EVALUATE, CHECKPOINT, REPORT, LOOP, KEEP, KEEP_BEST = 24, 7, 10, 5, 3, 1
KILLED, RETRY = -signal.SIGKILL, 75
GUARD_SECS = 600.0
DISK_BYTES = 64 << 20
# Where a process can be stopped inside of a phase: parts of the names that tests/chaos_process.py tells.
POINTS = {
    "startup": ["before import", "after import", "open_inputs", "cluster.connect"]
    + ["after lease.acquire", "RunDir.start"],
    "restore": ["reading"],
    "train": ["loop"],
    "evaluate": ["Replicated.evaluate", "before Engine.test", "after Engine.test"],
    "save": ["bundle.write", "reading", "after bundle.verify", "before storage.replace", "after storage.replace"]
    + ["before storage.remove", "after storage.remove", "before storage.remove_directory"],
    "export": ["before export.save", "saved_model.save", "before storage.replace_directory", "after export.save"],
}
LOCAL_POINTS = {"save": ["before os.replace", "after os.replace", "before os.fsync"]}
# Only the chief saves, exports and takes the lease.
WORKERS_POINTS = ["before import", "open_inputs", "cluster.connect"]
DAMAGES = ("flip", "truncate", "missing")
OUTAGES = ("503", "drop")


@dataclasses.dataclass
class Hurt:
    """One thing that is done to a run, and what came of it."""

    kind: str
    phase: str
    point: str = ""
    skip: int = 0
    after_steps: int = 0
    delay_secs: float = 0.0
    worker: int = 0
    hit: str = ""  # the phase and point it was in
    step: int = 0
    code: int | None = None
    exit_secs: float | None = None
    lost_secs: float | None = None

    @property
    def name(self) -> str:
        """What is counted."""
        return f"{self.kind} {self.phase}" if self.kind in ("kill", "SIGTERM") else self.kind

    def orders(self) -> dict:
        """For the process that is to be hurt."""
        fields = {name: getattr(self, name) for name in ("phase", "point", "skip", "after_steps")}
        return fields | {"hold": self.kind == "kill" and self.phase != "train"}


def plan(options: argparse.Namespace) -> list[Hurt]:
    """Every kind once as far as there are so many, then more of them, in an order of the seed; the export last."""
    chance = random.Random(options.seed)
    kinds = [("kill", "save"), ("kill", "restore"), ("kill", "evaluate"), ("SIGTERM", "train"), ("flip", "train")]
    kinds += [("kill", "export"), ("kill", "startup"), ("SIGINT", "train"), ("kill", "train"), ("truncate", "train")]
    kinds += [("missing", "train"), *(("SIGTERM", phase) for phase in ("startup", "save", "evaluate"))]
    more = kinds + [("kill", "save"), ("kill", "restore"), ("kill", "evaluate"), ("kill", "startup")]
    trouble = [("full disk", "save")]
    if options.storage == "gs":
        trouble = [(kind, phase) for phase in ("train", "save") for kind in OUTAGES]
    if options.only:
        kinds = more = [kind for kind in kinds if options.only in kind]
        trouble = []
    chosen = kinds[: options.kills]
    chosen += [chance.choice(more) for _ in range(options.kills - len(chosen))]
    chosen += trouble
    hurts = [_hurt(chance, kind, phase, options) for kind, phase in chosen]
    if options.workers == 2 and not options.only:
        signals = [h for h in hurts if h.phase in ("train", "evaluate") and h.kind in ("kill", "SIGTERM", "SIGINT")]
        for index, hurt in enumerate(signals):
            hurt.worker = (index + 1) % 2
        hurts += [_hurt(chance, "kill", phase, options, worker=1) for phase in ("startup", "restore")]
    chance.shuffle(hurts)
    # There has to be something to restore and to damage, and the export comes last.
    first = next(h for h in hurts if h.phase in ("train", "save", "evaluate") and h.kind not in DAMAGES)
    first.after_steps = max(first.after_steps, 2 * CHECKPOINT + 1)
    hurts.sort(key=lambda hurt: (hurt is not first, hurt.phase == "export"))
    return hurts


def _hurt(chance: random.Random, kind: str, phase: str, options: argparse.Namespace, worker: int = 0) -> Hurt:
    local = LOCAL_POINTS[phase] if options.storage == "local" and phase in LOCAL_POINTS else []
    points = WORKERS_POINTS if worker and phase == "startup" else POINTS[phase] + local
    after = 0 if phase in ("startup", "restore", "export") else chance.randint(0, 20)
    hurt = Hurt(kind, phase, chance.choice(points), after_steps=after, worker=worker)
    if phase == "restore":
        hurt.skip = chance.randint(0, 30)
    if kind in DAMAGES:
        hurt.after_steps = max(after, 2 * CHECKPOINT + 1)
    if kind in ("SIGTERM", "SIGINT") or phase == "train":
        # Anywhere from there on: a start takes seconds, the rest milliseconds.
        hurt.delay_secs = chance.uniform(0, 3.0 if phase == "startup" else 0.02)
    if kind in ("SIGTERM", "SIGINT") and phase == "startup":
        hurt.point = "before import"
    if kind == "SIGTERM" and phase == "train" and chance.random() < 0.2:
        hurt.after_steps = 0
    return hurt


class Worker:
    """One process at a time, and what is known of it. `events` gets (worker, moment), and (worker, None) at its end."""

    def __init__(self, index: int, command: list[str], environ: dict[str, str], folder: pathlib.Path):
        self.index, self._command, self._environ, self._folder = index, command, environ, folder
        self.starts: list[chaos_checks.Start] = []
        self.process: subprocess.Popen | None = None
        self.code: int | None = None  # of the process before
        self.phase, self.point, self.step = "", "", 0  # the step is the last one known, of this process or before
        self.lines: list[str] = []  # of all its processes
        self.began_at: int | None = None
        self.took_over = self.troubled = False
        self.launched = 0.0
        self._orders_fd = -1

    def start(self, events: queue.Queue, number: int, orders: dict) -> None:
        """Starts a process with orders."""
        (events_out, events_in), (orders_out, self._orders_fd) = os.pipe(), os.pipe()
        records = self._folder / f"records-{number:03d}-{self.index}"
        chaos = {"events_fd": events_in, "orders_fd": orders_out, "records": str(records), **orders}
        self.phase, self.point, self.began_at, self.took_over = "startup", "", None, False
        self.troubled = False
        self.lines.append(f"--- start {number}")
        self.launched = time.monotonic()
        self.process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environ | {"CHAOS": json.dumps(chaos)},
            pass_fds=(events_in, orders_out),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.close(events_in)
        os.close(orders_out)
        threading.Thread(target=self._listen, args=(self.process, events_out, events), daemon=True).start()

    def order(self, orders: dict) -> None:
        """Gives orders to the process that runs."""
        with contextlib.suppress(OSError):
            os.write(self._orders_fd, (json.dumps(orders) + "\n").encode())

    def send(self, number: int) -> None:
        """Sends a signal."""
        if self.process is not None:
            self.process.send_signal(number)

    def _listen(self, process: subprocess.Popen, moments: int, events: queue.Queue) -> None:
        def read_log() -> None:
            for line in process.stdout or ():
                self.lines.append(line.rstrip("\n"))

        reader = threading.Thread(target=read_log, daemon=True)
        reader.start()
        with os.fdopen(moments) as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # cut off by a kill
                    events.put((self, json.loads(line)))
        process.wait()
        reader.join()
        events.put((self, None))

    def note(self, moment: dict) -> None:
        """Takes in a moment."""
        self.phase, self.point = moment["phase"], moment["point"]
        if self.point == "begin":
            self.began_at = moment["step"]
        if self.began_at is not None:
            self.step = moment["step"]
        if self.phase == "startup" and self.point == "after RunDir.replace":  # the receipt, written first
            self.took_over = True

    def ended(self, number: int) -> int:
        """Takes in the end of the process; returns its exit code."""
        assert self.process is not None  # noqa: S101
        code = self.process.returncode
        os.close(self._orders_fd)
        self.process, self.code = None, code
        records = self._folder / f"records-{number:03d}-{self.index}"
        self.starts.append(
            chaos_checks.Start(
                self.index,
                records,
                self.began_at,
                self.took_over,
                None if code == KILLED else code,
                self.troubled,
                self.launched,
            )
        )
        return code


class Chaos:
    """A run and all that is done to it."""

    def __init__(self, options: argparse.Namespace, where: Where, folder: pathlib.Path):
        self._options, self._where = options, where
        self._events: queue.Queue = queue.Queue()
        self._numbers: dict[int, int] = {}
        self._number = 0
        self._behind: list[tuple[Hurt, float]] = []  # whose step has not been reached again
        self.rows: list[Hurt] = []
        self.wrong: list[str] = []
        ports = _free_ports(2)
        self.workers = []
        for index in range(options.workers):
            environ = clean_environ() | where.environ
            if options.workers > 1:
                task = {"cluster": {"worker": [f"127.0.0.1:{p}" for p in ports]}}
                environ["TF_CONFIG"] = json.dumps(task | {"task": {"type": "worker", "index": index}})
            self.workers.append(Worker(index, _command(options, where.url), environ, folder))

    def play(self, hurts: Sequence[Hurt]) -> None:
        """Runs to the end, through all of `hurts`."""
        try:
            for hurt in hurts:
                self._endure(hurt)
            self._finish()
        finally:
            for worker in self.workers:
                if worker.process is not None:
                    worker.process.kill()
                    worker.process.wait()

    def _endure(self, hurt: Hurt) -> None:
        target = self.workers[hurt.worker]
        if target.process is not None and hurt.phase in ("startup", "restore"):
            self._endure(Hurt("kill", "train", worker=hurt.worker))  # for these it has to start again
        if target.process is not None:
            target.order(hurt.orders())
        deadline = time.monotonic() + GUARD_SECS
        while True:
            self._start_all({hurt.worker: hurt.orders()})
            worker, moment = self._next(deadline)
            if worker is target and moment is None and target.code == 0:
                raise RuntimeError(f"the run finished before this could be done to it: {hurt}")
            if worker is target and moment is not None and moment["hit"]:
                break
        self._inflict(hurt, target)
        self.rows.append(hurt)
        self._behind.append((hurt, time.monotonic()))
        print(_line(hurt), flush=True)

    def _inflict(self, hurt: Hurt, target: Worker) -> None:
        ends_at = time.monotonic() + hurt.delay_secs
        self._wait(lambda: time.monotonic() >= ends_at or target.process is None, hurt.delay_secs + 1)
        hurt.hit, hurt.step = f"{target.phase}: {target.point}", target.step
        begun = time.monotonic()
        if hurt.kind in ("SIGTERM", "SIGINT"):
            target.send(getattr(signal, hurt.kind))
            self._wait(lambda: target.process is None, GUARD_SECS)
            hurt.exit_secs = time.monotonic() - begun
            if target.code != RETRY or hurt.exit_secs > GRACE_SECS:
                self.wrong.append(f"{hurt.kind} in {hurt.hit}: exit code {target.code} after {hurt.exit_secs:.1f} s")
        elif hurt.kind in OUTAGES or hurt.kind == "full disk":
            for worker in self.workers:
                worker.troubled = True
            with self._where.trouble(hurt.kind, [w.process.pid for w in self.workers if w.process is not None]):
                ends_at = begun + (5.0 if hurt.kind == "full disk" else 1 + 100 * hurt.delay_secs)
                self._wait(lambda: time.monotonic() >= ends_at or target.process is None, GUARD_SECS)
                if target.process is None:
                    hurt.code = target.code
                    if self._where.is_mounted:
                        self._start_all({})  # which comes too early
                        self._wait(lambda: target.process is None, GUARD_SECS)
        else:
            target.send(signal.SIGKILL)
            self._wait(lambda: target.process is None, GUARD_SECS)
            if hurt.kind in DAMAGES:
                hurt.hit += f"; {self._where.damage(hurt.kind)}"
        if hurt.code is None and target.process is None:
            hurt.code = target.code

    def _finish(self) -> None:
        deadline = time.monotonic() + GUARD_SECS
        while self.workers[0].process is not None or any(worker.code != 0 for worker in self.workers):
            self._start_all({})
            self._next(deadline)
        self._wait(lambda: all(worker.process is None for worker in self.workers), GUARD_SECS)

    def _start_all(self, orders: dict[int, dict]) -> None:
        """Starts what neither runs nor has finished, each by itself, as a scripts/supervise for each would."""
        for worker in self.workers:
            if worker.process is None and worker.code != 0:
                self._number += 1
                self._numbers[worker.index] = self._number
                worker.start(self._events, self._number, orders[worker.index] if worker.index in orders else {})

    def _wait(self, until: callable, secs: float) -> None:  # type: ignore[valid-type]
        deadline = time.monotonic() + secs
        while not until():
            with contextlib.suppress(queue.Empty):
                self._next(deadline, 0.01)

    def _next(self, deadline: float, secs: float | None = None) -> tuple[Worker, dict | None]:
        if time.monotonic() > deadline:
            raise RuntimeError("nothing happens any more: " + "; ".join(f"{w.phase}: {w.point}" for w in self.workers))
        if secs is None:
            secs = deadline - time.monotonic()
        worker, moment = self._events.get(timeout=secs)
        if moment is not None:
            worker.note(moment)
            self._catch_up(worker)
        elif (code := worker.ended(self._numbers[worker.index])) not in (0, RETRY, KILLED):
            raise RuntimeError(f"worker {worker.index} ended with exit code {code}: {worker.lines[-5:]}")
        return worker, moment

    def _catch_up(self, worker: Worker) -> None:
        for hurt, since in [*self._behind]:
            if (
                worker.began_at is not None
                and worker.index == 0
                and worker.point == "loop"
                and worker.step >= hurt.step
            ):
                hurt.lost_secs = time.monotonic() - since
                self._behind.remove((hurt, since))


@dataclasses.dataclass
class Where:
    """Where the model_dir is, and what can go wrong there."""

    url: str
    environ: dict[str, str]
    path: pathlib.Path | None = None
    bucket: gcs.Gcs | None = None
    is_mounted: bool = False

    @contextlib.contextmanager
    def trouble(self, kind: str, pids: Sequence[int]) -> Iterator[None]:
        """While this lasts, the disk is full, or the bucket does not answer."""
        if self.bucket is not None:
            fault = gcs.Fault(code=503, times=None) if kind == "503" else gcs.Fault(drop="response", times=None)
            request = [gcs.Fault(drop="request", times=None, method="PUT|POST")] if kind == "drop" else []
            self.bucket.set_faults(*request, fault)
            yield
            self.bucket.set_faults()
            return
        assert self.path is not None  # noqa: S101
        if self.is_mounted:
            ballast = self.path.parent / "ballast"
            _fill(ballast)
            yield
            ballast.unlink()
            return
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
        for pid, (_, hard) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        yield
        for pid, limit in limits.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

    def damage(self, kind: str) -> str:
        """Damages the newest checkpoint; says which file."""
        files = {name: size for name, size in self._files().items() if name.startswith("checkpoints/")}
        markers = {name: json.loads(self._read(name)) for name in files if name.endswith("/COMMIT.json")}
        if len(markers) < 2:
            raise RuntimeError("there is no second checkpoint to fall back to")
        newest = max(markers.values(), key=lambda marker: marker["serial"])
        bundle = f"checkpoints/{newest['step']}/{newest['bundle_name']}"
        name = next(name for name in files if name.startswith(bundle) and ".data" in name)
        content = bytearray(self._read(name))
        content[len(content) // 3] ^= 0x10
        self._write(name, {"flip": bytes(content), "truncate": bytes(content[: len(content) // 2])}.get(kind))
        return f"{name.removeprefix('checkpoints/')}"

    def fetched(self, folder: pathlib.Path) -> pathlib.Path:
        """The model_dir as local files."""
        if self.bucket is None:
            assert self.path is not None  # noqa: S101
            return self.path
        for name in self._files():
            if name and not name.endswith("/"):  # those stand for directories
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(self._read(name))
        return folder

    def _files(self) -> dict[str, int]:
        if self.bucket is not None:
            found = self.bucket.objects()
            return {name.removeprefix("run/"): size for name, size in found.items() if name.startswith("run/")}
        assert self.path is not None  # noqa: S101
        paths = [path for path in self.path.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.path)): path.stat().st_size for path in paths}

    def _read(self, name: str) -> bytes:
        return self.bucket.read(f"run/{name}") if self.bucket else (self.path / name).read_bytes()  # type: ignore

    def _write(self, name: str, content: bytes | None) -> None:
        if self.bucket is not None:
            self.bucket.remove(f"run/{name}") if content is None else self.bucket.write(f"run/{name}", content)
        elif content is None:
            (self.path / name).unlink()  # type: ignore[operator]
        else:
            (self.path / name).write_bytes(content)  # type: ignore[operator]


@contextlib.contextmanager
def somewhere(storage: str, folder: pathlib.Path) -> Iterator[Where]:
    """A place for a model_dir: a bucket on loopback, or a disk of its own where one can be mounted."""
    with contextlib.ExitStack() as stack:
        if storage == "gs":
            (folder / "gcs").mkdir()
            bucket = stack.enter_context(gcs.serve(folder / "gcs"))
            yield Where(f"{bucket.url}/run", bucket.environ(), bucket=bucket)
            return
        disk = folder / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
        is_mounted = shutil.which("mount") is not None and not subprocess.run(mount, capture_output=True).returncode
        if is_mounted:
            stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
        yield Where(str(disk / "run"), {}, path=disk / "run", is_mounted=is_mounted)


def _fill(path: pathlib.Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size) == size:
                    pass


def _command(options: argparse.Namespace, model_dir: str) -> list[str]:
    return [
        *(sys.executable, "-m", "tests.chaos_process", "--dataset=digits", f"--data_dir={options.data_dir}"),
        *("--model=cnn", "--model_options=filters=[8, 16], units=32", f"--model_dir={model_dir}"),
        *(f"--train_steps={options.train_steps}", f"--eval_every_steps={EVALUATE}"),
        *(f"--checkpoint_every_steps={CHECKPOINT}", f"--log_every_steps={REPORT}", f"--steps_per_loop={LOOP}"),
        *(f"--global_batch_size={BATCH}", f"--shuffle_mib={SHUFFLE_MIB}", f"--seed={RUN_SEED}"),
        *(f"--keep_checkpoints={KEEP}", f"--keep_best_checkpoints={KEEP_BEST}", f"--grace_secs={GRACE_SECS}"),
        *([f"--replicas={options.replicas}"] if options.replicas > 1 else []),
    ]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def _line(hurt: Hurt) -> str:
    code = "lived" if hurt.code is None else "killed" if hurt.code == KILLED else str(hurt.code)
    took = "" if hurt.exit_secs is None else f"{hurt.exit_secs:5.2f} s"
    lost = "" if hurt.lost_secs is None else f"{hurt.lost_secs:6.1f} s"
    return f"{hurt.name:<17} {hurt.worker:>6} {hurt.step:>5}  {code:>6} {took:>8} {lost:>9}  {hurt.hit}"


def report(hurts: Sequence[Hurt]) -> None:
    """Prints the table, what was hit how often, and how fast signals ended the run."""
    print(f"\n{'what':<17} {'worker':>6} {'step':>5}  {'code':>6} {'exit':>8} {'lost':>9}  when")
    for hurt in hurts:
        print(_line(hurt))
    print("\nhit: " + ", ".join(f"{count} x {name}" for name, count in sorted(Counter(h.name for h in hurts).items())))
    if took := sorted(hurt.exit_secs for hurt in hurts if hurt.exit_secs is not None):
        codes = Counter(hurt.code for hurt in hurts if hurt.exit_secs is not None)
        least, median, most_of_all, most = (took[int(share * (len(took) - 1))] for share in (0, 0.5, 0.9, 1))
        print(
            f"signals: {len(took)}, exit codes {dict(codes)}; seconds to the exit, of {GRACE_SECS:g}: "
            f"least {least:.2f}, median {median:.2f}, 90% {most_of_all:.2f}, most {most:.2f}"
        )


def differences(
    chaos: Chaos, hurt: pathlib.Path, quiet: pathlib.Path, options: argparse.Namespace, elapsed_secs: float
) -> list[str]:
    """All that is not as in the quiet run."""
    bounds = chaos_checks.Bounds(0.0 if options.replicas * options.workers == 1 else 1e-5)
    starts = sorted((s for worker in chaos.workers for s in worker.starts), key=lambda start: start.launched)
    reading = chaos_checks.Reading(options.data_dir, BATCH, SHUFFLE_MIB, RUN_SEED, options.train_steps)
    found = [*chaos.wrong]
    for worker in chaos.workers:
        found += [f"worker {worker.index}: a traceback in the log" for line in worker.lines if "Traceback" in line]
    for check in (chaos_checks.weights, chaos_checks.log, chaos_checks.tensorboard, chaos_checks.export):
        found += check(hurt, quiet, bounds)
    found += chaos_checks.records(starts, reading, num_workers=options.workers, batches_a_step=options.replicas)
    chiefs = [start for start in starts if start.worker == 0]
    found += chaos_checks.receipt(hurt, chiefs, elapsed_secs)
    return found + chaos_checks.leftovers(hurt, most=KEEP + KEEP_BEST)


def run(options: argparse.Namespace, folder: pathlib.Path) -> int:
    """Both runs and their comparison; returns the exit code."""
    (folder / "quiet").mkdir()
    (folder / "hurt").mkdir()
    with somewhere("local", folder / "quiet") as peace, somewhere(options.storage, folder / "hurt") as where:
        still = Chaos(options, peace, folder / "quiet")
        quiet = threading.Thread(target=still.play, args=([],), daemon=True)
        quiet.start()  # beside the other one, which sleeps a good part of its time
        if options.storage == "local":
            print(f"full disk: {'a tmpfs' if where.is_mounted else 'by RLIMIT_FSIZE, as nothing can be mounted'}")
        chaos = Chaos(options, where, folder / "hurt")
        begun = time.monotonic()
        try:
            chaos.play(plan(options))
            ended = time.monotonic()
            quiet.join(GUARD_SECS)
            first = min(s.launched for s in chaos.workers[0].starts if s.took_over)
            elapsed = ended - first
            found = differences(chaos, where.fetched(folder / "fetched"), peace.fetched(folder), options, elapsed)
        except RuntimeError as error:
            found = [*chaos.wrong, str(error)]
        report(chaos.rows)
        print(f"hurt run: {time.monotonic() - begun:.1f} s, {sum(len(w.starts) for w in chaos.workers)} starts")
        for worker in chaos.workers:
            (folder / f"worker-{worker.index}.log").write_text("\n".join(worker.lines) + "\n")
    for text in found:
        print(f"DIFFERS: {text}")
    print(f"{len(found)} differences" if found else "no difference")
    return 1 if found else 0


def main() -> int:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="kills and signals; storage that fails comes on top")
    parser.add_argument("--seed", type=int, default=0, help="of moments and order")
    parser.add_argument("--replicas", type=int, choices=(1, 2), default=1)
    parser.add_argument("--workers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--storage", choices=("local", "gs"), default="local")
    parser.add_argument("--only", help="one kind only, such as SIGTERM")
    parser.add_argument("--data_dir", type=pathlib.Path, help="where the digits are; built where it is not given")
    parser.add_argument("--keep", type=pathlib.Path, help="directory for logs and runs, to look at later")
    options = parser.parse_args()
    options.train_steps = (options.kills + 5) * (STEPS_A_SIGNAL if options.only else STEPS_A_HURT)
    with tempfile.TemporaryDirectory() as folder:
        if options.data_dir is None:
            options.data_dir = pathlib.Path(folder) / "datasets"
            build = [sys.executable, "-m", "data.build", "digits", f"--data_dir={options.data_dir}"]
            subprocess.run(build, cwd=ROOT, check=True)
        if options.keep is None:
            return run(options, pathlib.Path(folder))
        options.keep.mkdir(parents=True)
        return run(options, options.keep.resolve())


if __name__ == "__main__":
    sys.exit(main())
