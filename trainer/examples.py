"""What a classifier makes of single examples: which classes it takes for which, and what it is most wrong about.

From labels, outputs and inputs, share by share, to `examples.json`; of the examples only the worst are kept:

    {"step": 240, "split": "test", "examples": 297, "total": 297, "task": "classification", "classes": ["0", ...],
     "confusion": [[30, ...], ...],
     "worst": [{"index": 17, "record": "PATH#17", "label": "3", "predicted": "8", "probability": 0.01,
                "predicted_probability": 0.97, "loss": 4.6, "image": "data:image/png;base64,..."}, ...]}

`examples` of `total` are looked at. `confusion` has a row a label and a column a prediction; null where there are more
than 1,000 classes, or several at once. `probability` is of the label: of several classes at once that all of them are
right, the classes taken as independent. What is shown of an example is its `image`, `text` or `features`.
"""

import base64
import dataclasses
import heapq
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from data.naming import Names
from data.spec import Array, Spec
from data.tokenizer import PADDING

SINGLE, SEVERAL = "classification", "multi_label"

_WORST = 24
_MOST_CLASSES = 1000  # of a confusion matrix
_SIDE = 96  # pixels of an image, at most
_TEXT_CHARS = 200
_FEATURES = 20
_IMAGE_RANK = 3
_IMAGE_CHANNELS = (1, 3, 4)
_LEAST_PROBABILITY = 1e-7  # as Keras' losses take it


@dataclasses.dataclass(frozen=True)
class Judged:
    """n examples, judged: what each is and is taken for, [n] classes, or [n, C] bool of several classes at once.

    loss, and the probabilities of label and prediction: [n] float64.
    """

    label: np.ndarray
    predicted: np.ndarray
    loss: np.ndarray
    probability: np.ndarray
    predicted_probability: np.ndarray


def reads_logits(loss: Any) -> bool | None:
    """Whether a loss takes what a model gives for logits or for probabilities; None where it does not say."""
    function = keras.losses.get(loss) if isinstance(loss, str) else loss
    if hasattr(function, "from_logits"):
        return bool(function.from_logits)
    parameters = inspect.signature(function).parameters if callable(function) else {}
    return bool(parameters["from_logits"].default) if "from_logits" in parameters else None


def num_classes(spec: Spec, outputs: Sequence[np.ndarray]) -> int:
    """Classes that a model tells of by its outputs; 0 where they cannot be held against the label."""
    if len(outputs) != 1 or outputs[0].ndim != 2:
        return 0
    size = outputs[0].shape[1]
    if spec.task == SEVERAL:
        return size if spec.label.shape == (size,) else 0
    if spec.task != SINGLE or spec.label.shape or spec.num_classes is None:
        return 0
    return max(size, spec.num_classes) if size >= spec.num_classes or (size, spec.num_classes) == (1, 2) else 0


def judge(task: str, y: np.ndarray, outputs: np.ndarray, *, from_logits: bool) -> Judged:
    """Holds outputs [n, C] against labels as stored: classes [n], or zeros and ones [n, C] of several at once.

    One output is that of the second of two classes.
    """
    outputs = outputs.astype(np.float64)
    if task == SEVERAL:
        return _judge_several(y > 0, outputs if from_logits else _log_odds(outputs))
    if outputs.shape[1] == 1:
        odds = outputs if from_logits else _log_odds(outputs)
        outputs, from_logits = np.concatenate([np.zeros_like(odds), odds], axis=1), True
    logits = outputs if from_logits else np.log(np.maximum(outputs, _LEAST_PROBABILITY))
    logits = logits - logits.max(axis=1, keepdims=True)
    logarithms = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows, predicted = np.arange(len(y)), logits.argmax(axis=1)
    of_label = logarithms[rows, y]
    return Judged(y, predicted, -of_label, np.exp(of_label), np.exp(logarithms[rows, predicted]))


def _judge_several(y: np.ndarray, odds: np.ndarray) -> Judged:
    wrong = np.logaddexp(0.0, np.where(y, -odds, odds))  # [n, C] cross-entropy
    as_predicted = np.exp(-np.logaddexp(0.0, -np.abs(odds)).sum(axis=1))
    return Judged(y, odds > 0, wrong.mean(axis=1), np.exp(-wrong.sum(axis=1)), as_predicted)


def _log_odds(probabilities: np.ndarray) -> np.ndarray:
    clipped = np.clip(probabilities, _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    return np.log(clipped) - np.log1p(-clipped)


class Examples:
    """All that was seen of a split.

    Args:
        spec: of an example; its task is `SINGLE` or `SEVERAL`.
        names: of the split.
        num_classes: see `num_classes`.
        from_logits: see `reads_logits`.
        limit: positions in the split from there on are left out.
    """

    def __init__(self, spec: Spec, names: Names, *, num_classes: int, from_logits: bool, limit: int):
        self._spec, self._names, self._from_logits, self._limit = spec, names, from_logits, limit
        self._num_classes = num_classes
        self._confusion: np.ndarray | None = None
        if spec.task == SINGLE and num_classes <= _MOST_CLASSES:
            self._confusion = np.zeros([num_classes] * 2, np.int64)
        self._count = 0
        self._worst: list[tuple[float, int, dict[str, Any], Any]] = []  # a heap by (loss, -position): least wrong first

    def add(self, first: int, y: np.ndarray, mask: np.ndarray, outputs: np.ndarray, take: Callable[[int], Any]) -> None:
        """Takes a share of b examples into account.

        Args:
            first: position of the first one in the split.
            y: labels as stored; a class below 0 is none.
            mask: [b], 0 for padding.
            outputs: of the model, [b, C] or as `judge` takes them.
            take: from a row to its input, as arrays; asked of few.
        """
        counts = (mask > 0) & (first + np.arange(len(mask)) < self._limit)
        if self._spec.task == SINGLE:
            counts &= (y >= 0) & (y < self._num_classes)
        rows = np.flatnonzero(counts)
        judged = judge(self._spec.task, y[rows], outputs[rows], from_logits=self._from_logits)
        self._count += len(rows)
        if self._confusion is not None:
            np.add.at(self._confusion, (judged.label, judged.predicted), 1)
        ranks = np.where(np.isnan(judged.loss), np.inf, judged.loss)
        for place in np.argsort(-ranks, kind="stable")[:_WORST]:
            rank, row = float(ranks[place]), int(rows[place])
            key = (rank, -(first + row))
            if len(self._worst) == _WORST and key < self._worst[0][:2]:
                break
            entry = (*key, self._facts(judged, int(place), first + row), take(row))
            (heapq.heappushpop if len(self._worst) == _WORST else heapq.heappush)(self._worst, entry)

    def document(self, *, step: int, split: str, total: int) -> str | None:
        """The text of `examples.json`; None where nothing was seen."""
        if not self._count:
            return None
        worst = sorted(self._worst, key=lambda entry: entry[:2], reverse=True)
        found = {
            "step": step,
            "split": split,
            "examples": self._count,
            "total": total,
            "task": self._spec.task,
            "classes": [self._names.of_class(index) for index in range(self._num_classes)],
            "confusion": None if self._confusion is None else self._confusion.tolist(),
            "worst": [facts | self._shown(x) for _, _, facts, x in worst],
        }
        return json.dumps(found, separators=(",", ":")) + "\n"

    def _facts(self, judged: Judged, place: int, position: int) -> dict[str, Any]:
        return {
            "index": position,
            "record": self._names.of_record(position),
            "label": self._named(judged.label[place]),
            "predicted": self._named(judged.predicted[place]),
            "probability": _number(judged.probability[place]),
            "predicted_probability": _number(judged.predicted_probability[place]),
            "loss": _number(judged.loss[place]),
        }

    def _named(self, chosen: np.ndarray) -> str:
        if self._spec.task == SINGLE:
            return self._names.of_class(int(chosen))
        return ", ".join(self._names.of_class(int(index)) for index in np.flatnonzero(chosen)) or "none"

    def _shown(self, x: Any) -> dict[str, Any]:
        """What people see of an example: its first image, its first text, its first numbers."""
        arrays = self._spec.inputs if isinstance(self._spec.inputs, Mapping) else {"": self._spec.inputs}
        given = x if isinstance(self._spec.inputs, Mapping) else {"": x}
        shown: dict[str, Any] = {}
        features: dict[str, Any] = {}
        for name, array in arrays.items():
            value = np.asarray(given[name])
            if _is_image(array):
                shown.setdefault("image", picture(value))
            elif array.below is not None and len(array.shape) == 1:
                shown.setdefault("text", self._text(value))
            elif len(array.shape) <= 1:
                features |= self._features(name, value)
        kept = dict(list(features.items())[:_FEATURES])
        return shown | ({"features": kept} if kept else {})

    def _text(self, tokens: np.ndarray) -> str:
        ids = tokens[: np.flatnonzero(tokens != PADDING).max(initial=-1) + 1]
        reader = self._names.reader
        text = reader.decode(ids) if reader else " ".join(str(token) for token in ids[:_TEXT_CHARS])
        return text[:_TEXT_CHARS]

    def _features(self, name: str, value: np.ndarray) -> dict[str, Any]:
        if not value.shape:
            return {name or "input": self._names.of_category(name, float(value)) or _number(value)}
        label = f"{name} {{}}" if name else "{}"
        return {label.format(index): _number(number) for index, number in enumerate(value[:_FEATURES])}


def picture(image: np.ndarray) -> str:
    """[H, W, 1|3|4] uint8 as a PNG in a data URL, smaller where it is large."""
    factor = _SIDE / max(image.shape[:2])
    pixels = tf.convert_to_tensor(image)
    if factor < 1:
        size = [max(1, round(side * factor)) for side in image.shape[:2]]
        pixels = tf.cast(tf.round(tf.image.resize(pixels, size, tf.image.ResizeMethod.AREA)), tf.uint8)
    return f"data:image/png;base64,{base64.b64encode(tf.io.encode_png(pixels).numpy()).decode()}"


def _is_image(array: Array) -> bool:
    return array.dtype == "uint8" and len(array.shape) == _IMAGE_RANK and array.shape[-1] in _IMAGE_CHANNELS


def _number(value: Any) -> float | str:
    """To six digits; what JSON has no word for as text."""
    number = float(f"{float(value):.6g}")
    return number if math.isfinite(number) else str(number)
