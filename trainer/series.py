"""Runs of one job, night after night: `--run_id` makes `--model_dir` a directory of runs, a series.

    model_dir/2026-11-29/     a run: all that README names under `model_dir`
    model_dir/2026-11-30/
    model_dir/serving.json    which export serves, moved by `--promote_margin`

Everything is decided from what lies there: no state of its own, no clock but that of the new run's name. A run that
has not finished comes before a new one, so whatever killed it, the next tick goes on with it.
"""

import contextlib
import dataclasses
import datetime
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from data import quarantine
from trainer import config as config_lib
from trainer import run_dir, storage
from trainer.config import Config
from trainer.errors import ConfigError
from trainer.options import LAST_RUN
from trainer.platforms import JOB_ID, TRIAL_ID
from trainer.watch import status

POINTER = "serving.json"
# Those that a run's name may have; they are of the start of the run, in UTC.
_TIMES = {"date": "%Y-%m-%d", "hour": "%Y-%m-%dT%H", "week": "%G-W%V", "month": "%Y-%m"}

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of the series.

    state: of its status.json; None where a removal was cut short. started: of its first start, UTC, ISO 8601.
    data: `inputs.identity()` of its last start. options: of its config.json, none of them before it has got that far.
    """

    path: str
    state: str | None
    reason: str | None
    started: str
    data: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its directory in the series."""
        return self.path.rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class Series:
    """The series that a run is of, as it was when the run was chosen.

    root: its directory. wanted: the options that were given, of the series too.
    current: the run, if it has been begun before. last: the newest finished run.
    """

    root: str
    wanted: Config
    current: Run | None
    last: Run | None

    def can_go_on_with(self, data: str) -> bool:
        """Whether the run can go on with `data`, which is `inputs.identity()` as it is now."""
        return self.current is None or not self.current.data or self.current.data == data

    def has_nothing_new(self, data: str) -> bool:
        """Whether there is nothing to begin a run for; `data` is `inputs.identity()` as it is now, with `if_new_data`.

        Raises:
            ConfigError: that cannot be told.
        """
        if not (self.wanted.if_new_data and self.current is None and self.last):
            return False
        if quarantine.NO_MANIFEST in data:
            raise ConfigError(
                "if_new_data compares checksums, and the dataset has none: python -m data.audit writes a manifest of "
                f"them. Received: {data}"
            )
        return self.last.data == data

    @property
    def pointer(self) -> str:
        """Path of the file that names what serves."""
        return f"{self.root}/{POINTER}"

    def serving(self) -> dict[str, Any] | None:
        """What `promote` wrote last; None before the first time.

        Raises:
            ConfigError: it cannot be understood.
        """
        if not tf.io.gfile.exists(self.pointer):
            return None
        try:
            found = json.loads(storage.read_text(self.pointer))
            return {name: found[name] for name in ("export", "run", "previous")}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.pointer} must be JSON with export, run and previous. Mend or remove it. Received: {error}"
            ) from error

    def promote(self, export: str, run: str, facts: Mapping[str, Any]) -> None:
        """Lets the pointer name `export` from one moment to the next; what it named before is `previous`."""
        before = self.serving()
        if before is not None:
            before = {"export": before["export"], "run": before["run"]}
        content = {"export": export, "run": run, **facts, "previous": before}
        storage.replace(self.pointer, (json.dumps(content, indent=2) + "\n").encode())

    def remove_old(self, current: str) -> list[str]:
        """Removes what `keep_runs` does not keep, and returns the names; never what runs, serves or served before."""
        if self.wanted.keep_runs is None:
            return []
        serving = self.serving() or {"run": None, "previous": None}
        kept = {current, serving["run"], (serving["previous"] or {"run": None})["run"]}
        found = runs(self.root)
        finished = [run for run in found if run.state == "finished" or run.path == current]
        kept |= {run.path for run in finished[: self.wanted.keep_runs]}
        oldest = min(finished[: self.wanted.keep_runs], key=_age, default=None)
        removed = []
        for run in found:
            if run.path in kept or (oldest and _age(run) > _age(oldest)) or _may_live(run, self.wanted.lease_secs):
                continue
            # First what makes it a run: a removal that is cut short leaves nothing that looks like one.
            storage.remove(f"{run.path}/{status.NAME}")
            storage.remove_directory(run.path)
            removed.append(run.name)
        return removed


def choose(
    config: Config, environ: Mapping[str, str], now: datetime.datetime, data: str | None = None
) -> tuple[Config, Series | None]:
    """The run that this start is of: its config, with a directory of its own, and its series if it is of one.

    Args:
        config: as given.
        environ: for the job and the trial that a name may have.
        now: for a new run's name; aware.
        data: `inputs.identity()`, once that is known: a run of other data is not gone on with under another name.

    Raises:
        ConfigError: the name takes a job or trial that there is none of.
    """
    if config.run_id is None:
        return config, None
    # What serves is looked up from elsewhere.
    root = os.path.abspath(config.model_dir) if storage.is_local(config.model_dir) else config.model_dir.rstrip("/")
    path = f"{root}/{name(config.run_id, environ, now)}"
    found = runs(root)
    last = next((run for run in found if run.state == "finished"), None)
    current = next((run for run in found if run.path == path), None)
    if current is None and any(f"{{{field}}}" in config.run_id for field in _TIMES):
        current = _unfinished(found, config, data)
    if current is not None:
        path = current.path
    init_from = _init_from(config, current, last)
    if current is None and init_from is None and config.init_from:
        _log.info("no run of %s has finished yet: this one begins from new weights", root)
    # What is left is one run's, and reads back as one.
    chosen = dataclasses.replace(
        config,
        model_dir=path,
        init_from=init_from,
        run_id=None,
        if_new_data=False,
        promote_margin=None,
        keep_runs=None,
    )
    return chosen, Series(root, config, current, last)


def name(template: str, environ: Mapping[str, str], now: datetime.datetime) -> str:
    """A run's name, from `run_id`.

    Raises:
        ConfigError: it takes a job or trial that there is none of.
    """
    values = {field: now.astimezone(datetime.UTC).strftime(form) for field, form in _TIMES.items()}
    values |= {field: environ.get(variable) or "" for field, variable in (("job", JOB_ID), ("trial", TRIAL_ID))}
    empty = [field for field, value in values.items() if f"{{{field}}}" in template and not value]
    if empty:
        raise ConfigError(
            f"run_id takes the {' and '.join(empty)} of Vertex AI, and {JOB_ID} or {TRIAL_ID} is not set here. "
            f"Received: {template!r}"
        )
    return template.format(**values)


def runs(root: str) -> list[Run]:
    """The runs of a series, the newest first."""
    found = [_run(f"{root}/{directory}") for directory in storage.names(root)]
    return sorted((run for run in found if run is not None), key=_age, reverse=True)


def _age(run: Run) -> tuple[str, str]:
    return run.started, run.name


def _run(path: str) -> Run | None:
    """None for what is no run: other files, directories of others."""
    folder = run_dir.RunDir(path)
    found = None
    with contextlib.suppress(ValueError, tf.errors.OpError):  # of a run that is just beginning, or not ours
        found = status.read(path)
    stored = folder.read(run_dir.CONFIG)
    if stored is None and found is None:
        return None
    starts = folder.starts()
    first = starts[0]["time"] if starts else found.started if found else ""
    return Run(
        path,
        state=found.state if found else None,
        reason=found.reason if found else None,
        started=first,
        data=starts[-1]["data"] if starts else "",
        options=json.loads(stored) if stored else {},
    )


def _unfinished(found: list[Run], config: Config, data: str | None) -> Run | None:
    """The newest run, if it can and should be gone on with rather than a new one begun."""
    newest = next((run for run in found if run.state is not None), None)
    if newest is None or newest.state == "finished":
        return None
    if newest.state == "failed":
        _log.warning("%s failed (%s): a new run begins", newest.path, newest.reason)
        return None
    own = dataclasses.replace(config, init_from=_init_from(config, newest, None))
    changed = config_lib.differences(newest.options, own)
    if data is not None and newest.data and newest.data != data:
        changed.append(f"data: {newest.data} -> {data}")
    if changed:
        _log.warning("%s has not finished, and was begun otherwise: a new run begins (%s)", newest.path, changed[0])
        return None
    return newest


def _init_from(config: Config, current: Run | None, last: Run | None) -> str | None:
    if config.init_from != LAST_RUN:
        return config.init_from
    if current is not None and current.options:
        return current.options["init_from"]
    return last.path if last else None


def _may_live(run: Run, lease_secs: float) -> bool:
    """Whether a process may be at work on it."""
    return run.state == "running" and status.StatusFile(run.path).age_secs() <= lease_secs
