"""What is done with a run of a series once it has trained: its export serves if it is better, old runs are removed."""

import json
import logging
from collections.abc import Callable, Mapping

from trainer import config as config_lib
from trainer import inputs, logs, models, run_dir
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


def close_run(
    series: Series,
    folder: run_dir.RunDir,
    step: int,
    metrics: Mapping[str, float],
    evaluate: Callable[[str], Mapping[str, float]],
    *,
    is_chief: bool,
) -> None:
    """Promotes and removes, as the options of the series say; all workers call it together.

    Args:
        series: of the run.
        folder: of the run.
        step: that it has come to.
        metrics: of its evaluation there.
        evaluate: the metrics of the run in a directory, on the same data.
        is_chief: whether this worker is the one that writes.

    Raises:
        ConfigError: the run that serves cannot be evaluated, or one of the two not by `best_metric`.
    """
    if series.wanted.promote_margin is not None:
        _promote(series, folder, series.wanted.promote_margin, step, metrics, evaluate, is_chief)
    if is_chief and (removed := series.remove_old(folder.path)):
        _log.info("removed of %s: %s", series.root, ", ".join(removed))


def _promote(
    series: Series,
    folder: run_dir.RunDir,
    margin: float,
    step: int,
    metrics: Mapping[str, float],
    evaluate: Callable[[str], Mapping[str, float]],
    is_chief: bool,
) -> None:
    serving = series.serving()
    if serving is not None and serving["run"] == folder.path:
        return  # by a start that was ended before it could say that it has finished
    name, goal = series.wanted.best_metric, series.wanted.best_goal
    ours = _value(metrics, name, folder.path)
    before = _value(evaluate(serving["run"]), name, serving["run"]) if serving is not None else None
    better = before is None or (before - ours if goal == "min" else ours - before) > margin
    if not is_chief:
        return
    facts = {"step": step, "metric": name, "value": ours, "value_before": before, "margin": margin}
    folder.replace(run_dir.PROMOTION, json.dumps({"promoted": better, **facts}, indent=2) + "\n")
    if better:
        series.promote(folder.export_dir, folder.path, facts)
    against = f"{before:.6g} of {serving['run']}" if serving is not None else "nothing serves yet"
    verdict = f"{series.pointer} names it" if better else f"not better by more than {margin:g}, it does not serve"
    _log.log(logs.RESULT, "%s %.6g, %s: %s", name, ours, against, verdict)


def _value(metrics: Mapping[str, float], name: str, path: str) -> float:
    if name not in metrics:
        raise ConfigError(
            f"runs are promoted by {name}, and {path} is not evaluated by it. Give another --best_metric. "
            f"Received: {', '.join(metrics) or 'no metric'}"
        )
    return metrics[name]


def evaluate(run: Assembly, served: str) -> Mapping[str, float]:
    """Metrics of the run that serves on the devices and evaluation data of `run`; it may have been evaluated on other.

    Raises:
        ConfigError: today's code or data does not fit it.
    """
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
