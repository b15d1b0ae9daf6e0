"""Durations of training as text: `500 steps`, `5 epochs`, `1e6 examples`, `5%` of the training. Pure."""

import dataclasses
import re

_UNITS = ("steps", "epochs", "examples", "%")
_TEXT = re.compile(r"([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*(steps?|epochs?|examples?|%)")
_ALL = 100  # per cent


@dataclasses.dataclass(frozen=True)
class Duration:
    """An amount of a unit: steps, epochs, examples, or % of the training."""

    amount: float
    unit: str

    def steps(self, *, train_steps: int, steps_per_epoch: float, batch: int) -> int:
        """Whole steps of `batch` examples, to the nearest."""
        one = {"steps": 1.0, "epochs": steps_per_epoch, "examples": 1 / batch, "%": train_steps / _ALL}
        return round(self.amount * one[self.unit])


def parse(name: str, text: str) -> Duration:
    """The duration that `text` means.

    Raises:
        ValueError: it means none; names the option `name`.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{name} is a duration, a number and its unit: '500 steps', '2.5 epochs', '1e6 examples', or '5%' of the "
            f"training. Received: {text!r}"
        )
    amount, unit = float(found[1]), found[2] if found[2] in _UNITS else f"{found[2]}s"
    if unit in ("steps", "examples") and not amount.is_integer():  # infinity is not one either
        raise ValueError(f"{name} counts whole {unit}. Received: {text!r}")
    if unit == "%" and amount > _ALL:
        raise ValueError(f"{name} is a part of the training, {_ALL}% at most. Received: {text!r}")
    return Duration(amount, unit)


def parse_all(name: str, text: str) -> list[Duration]:
    """The durations that `text` lists with commas between; ValueError as of `parse`."""
    return [parse(name, part) for part in text.split(",")]
