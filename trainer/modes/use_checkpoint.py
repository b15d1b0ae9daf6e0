"""`--mode=eval` and `--mode=export`: what is done with a run that has been trained."""

import functools
import logging

from trainer import console, logs, run_dir
from trainer.assembly import Assembly
from trainer.callbacks import evaluations
from trainer.callbacks.metrics import MetricsFile
from trainer.callbacks.records import Record
from trainer.checkpoints import store
from trainer.errors import ConfigError
from trainer.modes.worst import write_examples

_log = logging.getLogger(__name__)


def use_checkpoint(run: Assembly) -> None:
    """Evaluates or exports what was trained."""
    config = run.config
    saves = store.Checkpoints(
        run.folder.file(run_dir.CHECKPOINTS),
        keep=config.keep_checkpoints,
        keep_best=config.keep_best_checkpoints,
        best_metric=config.best_metric,
        best_goal=config.best_goal,
        evaluations=lambda: evaluations.metrics_by_arrays(run.folder.file(run_dir.EVALUATIONS)),
    )
    saved = saves.best() if run.config.checkpoint == "best" else saves.newest()
    if saved is None:
        which = "evaluated checkpoint" if run.config.checkpoint == "best" else "checkpoint"
        raise ConfigError(
            f"there is no {which} to {run.config.mode}. Received: --model_dir={run.config.model_dir}. "
            "Train first, or name the model_dir of a trained run"
        )
    run.replicated.restore(saved.arrays, saved.path)
    _log.info("%s", run.summary(saved.step))
    run.clock.start_is_over()
    if run.config.mode == "export":
        _log.log(logs.RESULT, "exported to %s", run.export())
        return
    metrics = run.evaluate() or {}
    if run.devices.is_chief:
        folder = run.folder
        file = MetricsFile(folder.file(run_dir.METRICS), functools.partial(folder.replace, run_dir.METRICS))
        file.write(Record(saved.step, {f"eval/{name}": value for name, value in metrics.items()}))
        file.close()
    write_examples(run, saved.step)
    _log.log(logs.RESULT, "%s", console.results(metrics, None, console.account(run.clock.seconds())))
