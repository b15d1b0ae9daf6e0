"""`--mode=sweep_lr`: the learning rate at which the loss of a training run comes apart, and one to train with."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np

from trainer import console, internals, logs, run_dir, supply, sweep, sweep_picture
from trainer.assembly import Assembly
from trainer.errors import ConfigError
from trainer.modes import initial
from trainer.replicated import GRADIENT_NORM, Replicated
from trainer.sweep import Point, Range, Sweep

# In a row without a gradient norm: a loss scale that overflows so often is below 1, and its step a failure.
_MOST_OVERFLOWS = 64
_LINES = 10  # that say how far it is

_log = logging.getLogger(__name__)


def sweep_lr(run: Assembly) -> None:
    """Trains a run while its learning rate rises; writes what it found, and nothing that a training run writes.

    Raises:
        ConfigError: the learning rate cannot be set, or the very first step is not finite.
    """
    config = run.config
    asked = Range(config.sweep_from, config.sweep_to, config.sweep_steps)
    _log.info("%s", run.summary(0))
    if config.init_from is not None:
        initial.load_weights(run, config.init_from)
    replace_schedule(run.replicated, asked)
    _log.info(
        "sweeping the learning rate from %g to %g in %s steps; the schedule of the run has no effect here",
        *(asked.low, asked.high, f"{asked.steps:,}"),
    )
    with supply.watched(run.inputs.services, grace_secs=config.connect_timeout_secs):
        found = measure(run.replicated, iter(run.train_batches(0, config.seed)), asked, run.devices.agree)
    if run.devices.is_chief:
        _report(run, found)


def replace_schedule(trained: Replicated, asked: Range) -> None:
    """Gives the optimizer the rising learning rate; before the first step, which reads it into its graph.

    Raises:
        ConfigError: it has a learning rate that cannot be set, or there are several optimizers.
    """
    optimizers = internals.optimizers(trained.model)
    if len(optimizers) > 1:
        names = ", ".join(optimizer.name for optimizer in optimizers)
        raise ConfigError(f"sweep_lr sweeps one learning rate, and the model has several optimizers. Received: {names}")
    rising = keras.optimizers.schedules.ExponentialDecay(asked.low, asked.steps - 1, asked.high / asked.low)
    try:
        optimizers[0].learning_rate = rising
        taken = trained.learning_rate()
    except (AttributeError, TypeError) as error:
        raise _not_set(optimizers[0], str(error)) from error
    if not np.isclose(taken, asked.low):
        raise _not_set(optimizers[0], f"{taken:g} after it was set to {asked.low:g}")


def _not_set(optimizer: keras.optimizers.Optimizer, what: str) -> ConfigError:
    return ConfigError(
        f"the learning rate of the optimizer {optimizer.name} cannot be set, so it cannot be swept. Received: {what}. "
        "Let its learning_rate be that of keras.optimizers.Optimizer"
    )


def measure(trained: Replicated, batches: Iterator, asked: Range, agree: Callable[[Sequence[int]], list[int]]) -> Sweep:
    """Trains step by step until the loss comes apart or the last step is done.

    A step a call, so that each has its own loss. A step of mixed float16 whose scaled gradients overflow changes
    nothing but the loss scale, and does not count.

    Args:
        trained: with the rising learning rate of `replace_schedule`; it is of no use afterwards.
        batches: iterator over the global batches.
        asked: the learning rates.
        agree: sums, over all workers, what each of them says; all have to stop at the same step.

    Raises:
        ConfigError: the first step is not finite, or the model does not train by its optimizer, or has no loss.
    """
    points: list[Point] = []
    overflows = 0
    while len(points) < asked.steps:
        learning_rate = trained.learning_rate()
        done = trained.run_train_loop(batches, 1)
        trained.reset_metrics()
        if done.halted_at is not None:
            return _halted(asked, points)
        if GRADIENT_NORM not in done.logs:
            overflows += 1
            if overflows > _MOST_OVERFLOWS:
                raise ConfigError("the model does not train by model.optimizer, so its learning rate has no effect")
            continue
        overflows = 0
        points.append(Point(learning_rate, _loss(done.logs), done.logs[GRADIENT_NORM]))
        smoothed = sweep.smooth([point.loss for point in points], asked.decay)
        if len(points) % max(1, asked.steps // _LINES) == 0:
            place = f"step {len(points):,}/{asked.steps:,}"
            _log.info("%s  lr %.1e  loss %.4g  smoothed %.4g", place, learning_rate, points[-1].loss, smoothed[-1])
        if agree([int(sweep.has_diverged(smoothed))])[0]:
            return Sweep(asked, tuple(points), sweep.DIVERGED)
    return Sweep(asked, tuple(points), sweep.COMPLETE)


def _halted(asked: Range, points: Sequence[Point]) -> Sweep:
    if not points:
        raise ConfigError(
            "loss or gradients of the very first step are not finite, whatever the learning rate: it has changed "
            f"nothing yet. Received: --sweep_from={asked.low:g}. --mode=train names the layer and the records"
        )
    return Sweep(asked, tuple(points), sweep.NOT_FINITE)


def _loss(logs: dict[str, float]) -> float:
    if "loss" not in logs:
        raise ConfigError(
            "sweep_lr looks at the loss, and the train_step of the model reports none by that name. "
            f"Received: {', '.join(logs)}. Name it loss"
        )
    return logs["loss"]


def _report(run: Assembly, found: Sweep) -> None:
    config = run.config
    circumstances = {
        "model": config.model,
        "dataset": run.inputs.dataset.name,
        "global_batch_size": config.global_batch_size,
        "precision": config.precision,
        "devices": run.devices.description,
    }
    run.folder.write(run_dir.SWEEP, json.dumps(sweep.to_json(found, circumstances), indent=2) + "\n")
    title = f"{config.model} on {run.inputs.dataset.name}, {config.global_batch_size:,} examples a step"
    run.folder.write(run_dir.SWEEP_PICTURE, sweep_picture.svg(found, title))
    _log.log(logs.RESULT, "%s", console.columns(sweep.rows(found)))
    notes = [("swept", sweep.extent(found)), ("found", sweep.headline(found))]
    if found.suggestion is not None:
        notes.append(("use", _use(run, found.suggestion)))
    files = [(name, run.folder.file(name)) for name in (run_dir.SWEEP, run_dir.SWEEP_PICTURE)]
    _log.log(logs.RESULT, "%s", console.table([*notes, *files]))


def _use(run: Assembly, suggestion: float) -> str:
    if "optimizer" in run.source.compile_args(run.spec):
        return f"a peak learning rate of {suggestion:.2g} in the optimizer that {run.config.model} brings"
    # The option is what the plan scales to the batch.
    unscaled = suggestion * run.config.learning_rate / run.plan.learning_rate.peak
    return f"--learning_rate={unscaled:.2g}"
