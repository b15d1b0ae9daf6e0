"""`--mode=report`, and the page that a training run leaves when it ends: `report.html`, from the files of runs alone.

Needs no devices, no data and no model. It takes no lease and disturbs no run: it reads, and writes only its page.
"""

import logging
import threading

from trainer import logs, rules, run_dir, storage
from trainer.config import Config
from trainer.errors import EXIT_OK, ConfigError
from trainer.report import one, several
from trainer.report.left import Left, look

# The page of a run that ends. Within the grace of a stop it gives way: what is worth more has been written by then.
_MOST_SECS = 15.0
_LEAST_SECS = 3.0

_log = logging.getLogger(__name__)


def report(config: Config) -> int:
    """Writes the page of the run in `model_dir`, or of `runs` side by side, and returns the exit code.

    Raises:
        ConfigError: there is no such run, or nothing to tell of it; or the page cannot be written.
        RetryError: there is no space for it.
    """
    folder = run_dir.RunDir(config.model_dir)
    with storage.explained(folder.path):
        if config.runs is None:
            page = one.page(_something(folder.path))
        else:
            found = [_run(folder, name) for name in rules.runs(config.runs)]
            page = several.page(found, title=f"Runs of {folder.path.rpartition('/')[2]}")
        folder.write(run_dir.REPORT, page)
    _log.log(logs.RESULT, "report  %s", folder.file(run_dir.REPORT))
    return EXIT_OK


def leave(folder: run_dir.RunDir, remaining_secs: float | None) -> None:
    """Writes the page of a run that ends. It never raises, and gives up in time: the run is over without it.

    Args:
        folder: of the run; all else is written.
        remaining_secs: until the process is ended; None where nothing presses.
    """
    limit = _MOST_SECS if remaining_secs is None else min(_MOST_SECS, remaining_secs - _LEAST_SECS)
    if limit < _LEAST_SECS:
        return
    thread = threading.Thread(target=_write, args=(folder,), name="report", daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        _log.warning("the report is not written within %g s; --mode=report writes it later", limit)


def _write(folder: run_dir.RunDir) -> None:
    try:
        folder.replace(run_dir.REPORT, one.page(look(folder.path)))
    except Exception as error:  # whatever is wrong with a page, the run has ended as it has
        _log.warning("the report is not written: %s; --mode=report tries again", storage.reason(error))


def _something(path: str) -> Left:
    left = look(path)
    if left.is_anything:
        return left
    # By their files alone: one that cannot be read is told of when it is asked for.
    if runs := [name for name in storage.names(path) if run_dir.CONFIG in storage.names(f"{path}/{name}")]:
        raise ConfigError(
            f"model_dir is a series: give the directory of one run, or --runs={','.join(runs[-3:])} for several. "
            f"Received: {path}"
        )
    raise ConfigError(f"{_nothing(left)}. Received: --model_dir={path}")


def _run(folder: run_dir.RunDir, name: str) -> Left:
    """A run by its name below `model_dir`, or else by its directory."""
    below = folder.file(name)
    path = below if storage.names(below) else name
    left = look(path)
    if not left.is_run:
        nor = "" if path == below else f"; nor is there a {below}"
        raise ConfigError(f"{_nothing(left)}{nor}. Received: --runs with {name!r}")
    return left


def _nothing(left: Left) -> str:
    path = left.path
    if left.problems:
        return f"{path} tells nothing of a run: {'; '.join(left.problems)}. Give the model_dir of one that can be read"
    if storage.names(path):
        return f"{path} is no run: it has neither config.json nor status.json. Give the model_dir of one"
    return f"there is no {path}, or nothing in it. Give the model_dir of a run"
