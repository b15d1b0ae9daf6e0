"""What every option has beside a name and a type."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

TRAINING = ("train", "train_and_eval")
TRYING = ("profile_input", "sweep_lr", "preflight", "parity", "doctor")


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    modes: Sequence[str] = (),
    changes_numbers: bool = True,
    secret: bool = False,
) -> Any:
    """A field of `Config`; limits hold where the value is not None.

    In other `modes`, where some are named, the option would have no effect. `changes_numbers` guards resuming; what is
    `secret` is never written to a file.
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": tuple(choices),
        "minimum": minimum,
        "above": above,
        "below": below,
        "modes": tuple(modes),
        "changes_numbers": changes_numbers,
        "secret": secret,
    }
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default(field: dataclasses.Field) -> Any:
    """What the option is where nobody says anything."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
