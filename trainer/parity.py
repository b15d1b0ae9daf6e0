"""Why a model does not learn the same on one and on several replicas, or with and without XLA. Pure.

Causes are found by experiment. Where runs differ, they are made once more in float32 and with the layers inert that
differ by nature, dropout and batch norm. If these *quiet* runs agree, it was those; what is left is a fault. A forward
pass of the whole batch against its shares, layer by layer, says where that begins.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Sequence

import numpy as np

from trainer import diagnose, places
from trainer.comparison import (
    EVALUATION,
    GRADIENTS,
    KINDS,
    LOSS,
    METRICS,
    STATE,
    WEIGHTS,
    Difference,
    apart,
    relative,
)
from trainer.errors import TrainerError

# Of the outputs of layers, in float32: another batch size may choose another algorithm for the same sum.
_LAYER_TOLERANCE = 1e-4
_RATIO_TOLERANCE = 0.02
_MOST_NAMES = 6
OUTPUT = "the model's output"
_NOT_COMPILED = re.compile(r"unsupported operations.*?: (\w+) \(No registered")
_SEED = "Draw with keras.random and a keras.random.SeedGenerator that is an attribute of the layer"


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward pass in training: outputs [rows, ...] of layers in the order of their calls; the loss, if it is Keras
    that computes it."""

    outputs: tuple[tuple[str, np.ndarray], ...]
    loss: float | None


def together(passes: Sequence[Pass]) -> Pass:
    """One pass over all examples, of passes over equal shares of them."""
    outputs = zip(*(each.outputs for each in passes), strict=True)
    losses = [each.loss for each in passes if each.loss is not None]
    return Pass(
        tuple((parts[0][0], np.concatenate([array for _, array in parts])) for parts in outputs),
        statistics.fmean(losses) if losses else None,
    )


@dataclasses.dataclass(frozen=True)
class Passes:
    """Quiet passes over the same examples.

    whole, again: on one replica, twice. shares: on one replica, a share of the batch at a time. replicas: a share on
    each replica. noisy: names of layers that draw random numbers nevertheless.
    """

    whole: Pass
    again: Pass
    shares: Pass
    replicas: Pass
    noisy: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Nature:
    """What of a model differs by nature: names of layers that draw random numbers, of those that normalise by batch
    statistics without exchanging them, and the precision."""

    random: tuple[str, ...]
    statistics: tuple[str, ...]
    precision: str

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing to make inert."""
        return not self.random and not self.statistics and self.precision == "float32"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Why something differs, where, and what to do. `inherent`: it does so for everybody, nothing is wrong."""

    cause: str
    where: tuple[str, ...] = ()
    remedy: str = ""
    inherent: bool = False

    def __str__(self) -> str:
        more = f" and {len(self.where) - _MOST_NAMES} more" if len(self.where) > _MOST_NAMES else ""
        where = f": {', '.join(self.where[:_MOST_NAMES])}{more}" if self.where else ""
        return f"{self.cause}{where}. {self.remedy}".rstrip()


def refused(case: str, xla: bool, error: Exception) -> Finding:
    """A run that fails as the one it is to be compared with does not."""
    if xla and (found := _NOT_COMPILED.search(places.text_of(error))):
        place = places.of_error(error)
        remedy = "No TPU could run this step; replace the operation, or move it to the input pipeline"
        return Finding(f"XLA cannot compile the operation {found[1]}", (str(place),) if place else (), remedy)
    is_ours = isinstance(error, TrainerError)
    return Finding(f"the run on {case} {'is refused' if is_ours else 'fails'}", (), str(diagnose.explain(error)))


def by_nature(
    nature: Nature, differences: Sequence[Difference], *, num_replicas: int, quiet_agrees: bool
) -> list[Finding]:
    """Why the runs differ as they are, whatever is left of it in the quiet ones."""
    found = []
    if nature.statistics and num_replicas > 1:
        moved = [d.value for d in apart(differences, STATE, step=1)]
        amount = f", so moving statistics differ by {max(moved):.2g} of their size after a step" if moved else ""
        remedy = "Inherent to data parallelism; layers with synchronized=True use statistics of the global batch"
        cause = f"batch norm normalises each replica's share by that share's own statistics{amount}"
        found.append(Finding(cause, nature.statistics, remedy, inherent=True))
    if nature.random:
        who = "each replica draws random numbers of its own" if num_replicas > 1 else "XLA draws other random numbers"
        remedy = "Inherent: masks differ, their distribution does not"
        found.append(Finding(who, nature.random, remedy, inherent=True))
    if quiet_agrees and not found:
        order = f"{nature.precision} rounds sums of another order"
        cause = order if num_replicas > 1 else "XLA rounds otherwise than TensorFlow's own kernels"
        remedy = "Inherent: in float32, and with dropout and batch norm inert, the runs agree"
        found.append(Finding(cause, (), remedy, inherent=True))
    return found


def of_repeating(repeated: Sequence[Difference], passes: Passes) -> Finding:
    """What makes a run differ from itself."""
    layer = _first_apart(passes.whole, passes.again)
    where = (layer,) if layer else _names(apart(repeated, step=1))
    return Finding("random numbers are drawn that no seed of Keras' decides", where, _SEED)


def of_replicas(quiet: Sequence[Difference], passes: Passes, num_replicas: int) -> list[Finding]:
    """What makes quiet runs on one and on `num_replicas` replicas differ."""
    found = _in_layers(passes) or [
        *_in_loss(quiet, passes, num_replicas),
        *_in_metrics(quiet, passes),
        *_in_evaluation(quiet),
        *_in_state(quiet),
    ]
    return found or [Finding("runs differ for a reason that was not found", _names(apart(quiet)))]


def of_xla(quiet: Sequence[Difference], plain: Pass, compiled: Pass) -> Finding:
    """What makes quiet runs with and without XLA differ, of the same examples through the layers."""
    layer = _first_apart(plain, compiled)
    return Finding(
        "XLA computes something else than TensorFlow's own kernels",
        (layer,) if layer else _names(apart(quiet)),
        "Likely: a cast of what does not fit the new type (XLA takes its nearest value, a CPU any), an index out of "
        "range (XLA takes the nearest), or numbers drawn with tf.random",
    )


def _in_layers(passes: Passes) -> list[Finding]:
    if layer := _first_apart(passes.whole, passes.shares):
        if layer.partition(" ")[0] in passes.noisy:
            cause = "random numbers are drawn in training and outside of it, so nothing behind them can be compared"
            return [Finding(cause, (layer,), "Let the layer's call take `training`, and draw only where it is true")]
        remedy = (
            "On N replicas a layer sees 1/N of the batch. Compute from each example alone, or from an average over "
            "steps that is kept as a weight"
        )
        return [Finding("the output for an example depends on the other examples of the batch", (layer,), remedy)]
    if layer := _first_apart(passes.whole, passes.replicas):
        remedy = "Take out what asks for the replica, the number of replicas or the strategy"
        return [Finding("the output depends on the replica that computes it", (layer,), remedy)]
    return []


def _first_apart(left: Pass, right: Pass) -> str | None:
    """The first output that differs, with the one before it, since models compute between layers too."""
    before = "the input"
    for (name, one), (_, other) in zip(left.outputs, right.outputs, strict=False):
        if relative(one, other) > _LAYER_TOLERANCE:
            return f"{name}, or what is computed between {before} and it"
        before = name
    return None


def _in_loss(quiet: Sequence[Difference], passes: Passes, num_replicas: int) -> list[Finding]:
    losses, gradients = apart(quiet, LOSS, step=1), apart(quiet, GRADIENTS, step=1)
    if not losses and not gradients:
        return []
    ratios = [d.ratio for d in (gradients or losses) if d.ratio is not None]
    ratio = statistics.median(ratios) if ratios else math.nan
    names = _names([*losses, *gradients])
    if math.isclose(ratio, 1 / num_replicas, rel_tol=_RATIO_TOLERANCE):
        if _splits(passes):
            remedy = "Give the mean over the examples at hand: the trainer averages over replicas itself"
            cause = f"the loss is divided by the {num_replicas} replicas, or by the global batch"
            return [Finding(cause, names, remedy)]
        remedy = "Give a mean over the batch, divided by no number of replicas, and scale the learning rate"
        return [Finding("the loss is a sum over the batch, or multiplied by its size", names, remedy)]
    if math.isclose(ratio, num_replicas, rel_tol=_RATIO_TOLERANCE):
        if _splits(passes):
            remedy = "Take the factor out: the trainer averages over replicas itself"
            return [Finding(f"the loss is multiplied by the {num_replicas} replicas", names, remedy)]
        return [Finding("the loss is divided by the batch size twice", names, "Give a mean over the batch")]
    if not losses and passes.whole.loss is not None and _splits(passes):
        remedy = "A custom gradient or the train_step makes them of something that is no mean over examples"
        return [Finding("gradients differ where the loss agrees", names, remedy)]
    remedy = (
        "Such as a loss divided by the number of positives, masked or weighted examples of the batch, or one that "
        "compares examples with each other; divide by the batch size"
    )
    return [Finding("the loss is no mean over the examples of the batch", names, remedy)]


def _splits(passes: Passes) -> bool:
    """Whether the mean loss of shares is the loss of the whole, on one replica; where Keras computes it."""
    if passes.whole.loss is None or passes.shares.loss is None:
        return False
    return math.isclose(passes.whole.loss, passes.shares.loss, rel_tol=_LAYER_TOLERANCE, abs_tol=_LAYER_TOLERANCE)


def _in_metrics(quiet: Sequence[Difference], passes: Passes) -> list[Finding]:
    metrics = apart(quiet, METRICS, step=1)
    of_loss = passes.whole.loss is None and apart(quiet, LOSS, GRADIENTS, step=1)  # a train_step keeps it as a metric
    if not metrics or of_loss:
        return []
    remedy = (
        "Its variables are summed over replicas: keep sums over examples (a total and a count), and divide them in "
        "result()"
    )
    cause = "the metric averages averages, or keeps something else that is no sum over examples"
    return [Finding(cause, _names(metrics), remedy)]


def _in_evaluation(quiet: Sequence[Difference]) -> list[Finding]:
    explained = {difference.name for difference in apart(quiet, LOSS, METRICS, step=1)}
    metrics = [difference for difference in apart(quiet, EVALUATION) if difference.name not in explained]
    if not metrics:
        return []
    remedy = (
        "The last batch is padded, by examples whose sample_weight is 0, and a share may be all padding: keep sums "
        "over examples, each times its sample_weight, and divide them in result()"
    )
    cause = "evaluation of the same weights differs: a metric averages averages, or sample_weight is left out"
    return [Finding(cause, _names(metrics), remedy)]


def _in_state(quiet: Sequence[Difference]) -> list[Finding]:
    found = []
    state = apart(quiet, STATE, step=1)
    if state:
        remedy = "It is averaged over replicas after each step, so update it by a mean over examples"
        found.append(Finding("state is updated by what is no mean over examples", _names(state), remedy))
    if apart(quiet, LOSS, GRADIENTS, step=1):
        return found  # the rest follows from those
    weights = apart(quiet, WEIGHTS, step=1)
    if weights:
        remedy = "Look for what the train_step, an optimizer or a constraint does besides applying gradients"
        found.append(Finding("weights differ though their gradients agree", _names(weights), remedy))
    later = apart(quiet, LOSS, WEIGHTS, STATE)
    if not found and later and not apart(quiet, METRICS, EVALUATION):
        remedy = "Look for state that one step hands on to the next, or for an unstable learning rate"
        found.append(Finding(f"the first step agrees, step {later[0].step:,} does not", _names(later), remedy))
    return found


def _names(differences: Sequence[Difference]) -> tuple[str, ...]:
    worst = sorted(differences, key=lambda d: (KINDS.index(d.kind), -d.value))
    return tuple(dict.fromkeys(d.name if d.kind == LOSS else f"{d.kind} {d.name}" for d in worst))
