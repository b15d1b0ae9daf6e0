"""What an evaluator found: `evaluator/metrics.jsonl`, one line a checkpoint. It alone writes, the chief reads.

    {"step": 40, "arrays": "arrays-1f2e3d4c", "eval/loss": 0.5, ...}

A step is known by the name of its arrays too: one that is trained anew has others, and is evaluated anew.
"""

import dataclasses
import json
from collections.abc import Mapping

import tensorflow as tf

from trainer import storage
from trainer.callbacks.metrics import valid

_STEP, _ARRAYS, _METRIC = "step", "arrays", "eval/"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was found of one checkpoint. `arrays` is the name of its arrays."""

    step: int
    arrays: str
    metrics: Mapping[str, float]


def read(path: str) -> list[Evaluation]:
    """All evaluations, by step; none where there is no file.

    Raises:
        OSError, tf.errors.OpError: the file system's.
    """
    try:
        lines = storage.read(path).decode().splitlines()
    except tf.errors.NotFoundError:
        return []
    return [_decode(line) for line in lines]


def metrics_by_arrays(path: str) -> dict[str, Mapping[str, float]]:
    """The same as the store of checkpoints wants it. Raises as `read`."""
    return {evaluation.arrays: evaluation.metrics for evaluation in read(path)}


def add(path: str, new: Evaluation) -> list[Evaluation]:
    """Adds an evaluation and returns all; those of its step and of later ones are of a past that the run went behind.

    The file is written whole, in a directory that is there; there are as many lines as evaluations, which is not many.

    Raises:
        OSError, tf.errors.OpError: the file system's.
    """
    kept = [evaluation for evaluation in read(path) if evaluation.step < new.step]
    storage.replace(path, "".join(f"{_encode(evaluation)}\n" for evaluation in [*kept, new]).encode())
    return [*kept, new]


def _encode(evaluation: Evaluation) -> str:
    values = {f"{_METRIC}{name}": valid(value) for name, value in evaluation.metrics.items()}
    return json.dumps({_STEP: evaluation.step, _ARRAYS: evaluation.arrays, **values})


def _decode(line: str) -> Evaluation:
    values = json.loads(line)
    step, arrays = values.pop(_STEP), values.pop(_ARRAYS)
    return Evaluation(step, arrays, {name.removeprefix(_METRIC): float(value) for name, value in values.items()})
