"""What is done with a run of a series once it has trained: its export serves if it is better, old runs are removed."""

import json
import logging
from collections.abc import Mapping

from trainer import config as config_lib
from trainer import inputs, models, run_dir
from trainer.assembly import Assembly
from trainer.checkpoints import store
from trainer.config import Config
from trainer.errors import ConfigError
from trainer.series import Series

# Where and how this start evaluates, whatever the run that serves was trained with.
_OF_THIS_START = (
    "dataset",
    "data_dir",
    "train_split",
    "eval_split",
    "corrupt_records",
    "max_corrupt_records",
    "global_batch_size",
    "tpu",
    "tpu_zone",
    "tpu_project",
    "replicas",
    "xla",
    "steps_per_loop",
    "best_metric",
    "best_goal",
)

_log = logging.getLogger(__name__)


def close_run(run: Assembly, series: Series, step: int, metrics: Mapping[str, float]) -> None:
    """Promotes and removes, as the options of the series say; all workers call it together.

    Raises:
        ConfigError: the run that serves cannot be evaluated, or the metric is none of both.
    """
    if series.wanted.promote_margin is not None:
        _promote(run, series, series.wanted.promote_margin, step, metrics)
    if run.devices.is_chief and (removed := series.remove_old(run.folder.path)):
        _log.info("removed of %s: %s", series.root, ", ".join(removed))


def _promote(run: Assembly, series: Series, margin: float, step: int, metrics: Mapping[str, float]) -> None:
    serving = series.serving()
    if serving is not None and serving["run"] == run.folder.path:
        return  # by a start that ended between this and the end
    name, goal = run.config.best_metric, run.config.best_goal
    theirs = _evaluate(run, serving["run"]) if serving is not None else None
    if name not in metrics or (theirs is not None and name not in theirs):
        raise ConfigError(
            f"runs are promoted by {name}, which both have to be evaluated by. Give another --best_metric. "
            f"Received: {', '.join(metrics)}" + (f" here, {', '.join(theirs)} there" if theirs is not None else "")
        )
    ours, before = metrics[name], theirs[name] if theirs is not None else None
    gain = None if before is None else (before - ours if goal == "min" else ours - before)
    better = gain is None or gain > margin
    if not run.devices.is_chief:
        return
    facts = {"step": step, "metric": name, "value": ours, "value_before": before, "margin": margin}
    run.folder.replace(run_dir.PROMOTION, json.dumps({"promoted": better, **facts}, indent=2) + "\n")
    if better:
        series.promote(run.folder.export_dir, run.folder.path, facts)
    against = "nothing serves yet" if serving is None else f"{before:.6g} of {serving['run']}"
    verdict = (
        f"{series.pointer} names its export" if better else f"not better by more than {margin:g}: it does not serve"
    )
    _log.info("%s %.6g, %s: %s", name, ours, against, verdict)


def _evaluate(run: Assembly, served: str) -> dict[str, float]:
    """Metrics of the run that serves on the evaluation data of now; those of its own time may be of other data."""
    try:
        config = _config(run.config, served)
        source = models.find(config.model, config.model_options)
        read = inputs.open_inputs(config, cache_dir=run.folder.file(run_dir.REPAIRED))
        other = Assembly(config, run.clock, source, read, run_dir.RunDir(served), run.devices)
        saved = store.load(served)
        other.replicated.restore(saved.arrays, saved.path)
    except ConfigError as error:
        raise ConfigError(
            f"the run is trained and exported to {run.folder.export_dir}, but the one that serves cannot be evaluated "
            f"beside it. Point serving.json to a run of this code and data, or remove it. Received: {served}: {error}"
        ) from error
    return other.evaluate() or {}


def _config(config: Config, served: str) -> Config:
    stored = run_dir.RunDir(served).read(run_dir.CONFIG)
    if stored is None:
        raise ConfigError("there is no config.json")
    here = {name: getattr(config, name) for name in _OF_THIS_START}
    return config_lib.merge({**config_lib.of_run(json.loads(stored)), **here, "model_dir": served, "mode": "eval"})
