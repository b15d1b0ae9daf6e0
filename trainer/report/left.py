"""What runs left in their directories, as far as it can be read. Writes nothing: a run may be at work there.

Local or gs://. A file that is not there is no fault; one that cannot be understood costs its own part of the page only.
"""

import contextlib
import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainer import run_dir, storage
from trainer.callbacks.evaluations import Evaluation, read
from trainer.checkpoints.directory import CheckpointDir, Marker
from trainer.errors import TrainerError
from trainer.redact import redact
from trainer.watch import status
from trainer.watch.status import Status

_PICTURES = (run_dir.SWEEP_PICTURE, run_dir.INPUT_PICTURE)
_POSTMORTEM = re.compile(rf"{run_dir.POSTMORTEM}-(\d+)\.json")
_LAST_WORDS = re.compile(r"(stall|failure)-.*\.txt")
_FAULTS = (*storage.FILE_ERRORS, TrainerError, ValueError, LookupError, TypeError, AttributeError)

Json = Mapping[str, Any]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Left:
    """The files of one run; None or empty where there are none.

    read_at: when, UTC. is_dead: whether the process of a run that says it runs is known to have ended.
    records: lines of metrics.jsonl. evaluations: of an evaluator. checkpoints: complete ones, by step.
    pictures: name -> SVG. last_words: names of files with stacks and tracebacks. problems: what could not be read.
    """

    path: str
    read_at: datetime.datetime
    status: Status | None = None
    is_dead: bool = False
    config: Json | None = None
    starts: tuple[Json, ...] = ()
    records: tuple[Json, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    receipt: Json | None = None
    alerts: tuple[Json, ...] = ()
    postmortems: tuple[Json, ...] = ()
    examples: Json | None = None
    preflight: Json | None = None
    parity: Json | None = None
    sweep: Json | None = None
    profile: Json | None = None
    pictures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    checkpoints: Mapping[int, Marker] = dataclasses.field(default_factory=dict)
    last_words: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its directory's."""
        return self.path.rpartition("/")[2]

    @property
    def is_run(self) -> bool:
        """Whether something was trained here, or began to be."""
        return self.config is not None or self.status is not None

    @property
    def is_anything(self) -> bool:
        """Whether there is anything to report."""
        before = (self.preflight, self.parity, self.sweep, self.profile)
        return self.is_run or any(found is not None for found in before)


def look(path: str) -> Left:
    """Reads the directory of a run.

    Raises:
        OSError, tf.errors.OpError: the directory itself cannot be read.
    """
    names = storage.names(path)
    reader = _Reader(run_dir.RunDir(path), names)
    last = reader.value(status.NAME, lambda: status.read(path))
    steps = sorted(int(match[1]) for name in names if (match := _POSTMORTEM.fullmatch(name)))
    checkpoints = f"{reader.folder.path}/{run_dir.CHECKPOINTS}"
    evaluations = reader.folder.file(run_dir.EVALUATIONS)
    return Left(
        reader.folder.path,
        datetime.datetime.now(datetime.UTC),
        status=last,
        is_dead=last is not None and last.state == "running" and status.is_dead(last),
        config=reader.json(run_dir.CONFIG),
        starts=tuple(reader.value(run_dir.PROVENANCE, reader.folder.starts) or ()),
        records=reader.lines(run_dir.METRICS),
        evaluations=tuple(reader.value(run_dir.EVALUATOR, lambda: read(evaluations)) or ()),
        receipt=reader.json(run_dir.RECEIPT),
        alerts=reader.lines(run_dir.ALERTS),
        postmortems=tuple(
            found for step in steps if (found := reader.json(f"{run_dir.POSTMORTEM}-{step}.json")) is not None
        ),
        examples=reader.json(run_dir.EXAMPLES),
        preflight=reader.json(run_dir.PREFLIGHT),
        parity=reader.json(run_dir.PARITY),
        sweep=reader.json(run_dir.SWEEP),
        profile=reader.json(run_dir.INPUT_PROFILE),
        pictures={name: text for name in _PICTURES if (text := reader.text(name)) is not None},
        checkpoints=reader.value(run_dir.CHECKPOINTS, CheckpointDir(checkpoints, ()).markers) or {},
        last_words=tuple(name for name in names if _LAST_WORDS.fullmatch(name)),
        problems=tuple(reader.problems),
    )


class _Reader:
    """Reads files of a directory that holds `names`, and notes what it could not."""

    def __init__(self, folder: run_dir.RunDir, names: list[str]):
        self.folder, self._names = folder, names
        self.problems: list[str] = []

    def value(self, name: str, get: Callable[[], _T]) -> _T | None:
        """What `get` makes of a file; None where there is none, or it cannot."""
        if name not in self._names:
            return None
        try:
            return get()
        except _FAULTS as error:
            self.problems.append(f"{name} cannot be read: {redact(storage.reason(error))}")
            return None

    def text(self, name: str) -> str | None:
        # What a crash has made of one line must not cost the others.
        return self.value(name, lambda: storage.read(self.folder.file(name)).decode(errors="replace"))

    def json(self, name: str) -> Json | None:
        """An object."""

        def get() -> Json:
            found = json.loads(storage.read(self.folder.file(name)))
            if not isinstance(found, dict):
                raise ValueError("it holds no JSON object")
            return found

        return self.value(name, get)

    def lines(self, name: str) -> tuple[Json, ...]:
        """An object a line; a line that a kill, or a writer at work, has cut short is left out."""
        found = []
        for line in (self.text(name) or "").splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(value := json.loads(line), dict):
                    found.append(value)
        return tuple(found)
