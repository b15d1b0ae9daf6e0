"""Shell patterns over the names of variables: the language of init_fresh, freeze and learning_rate_factors. Pure.

A name is a path such as `block_3/mlp/kernel`, as checkpoints have it. `*` stands for any letters, slashes among them.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence

_SHOWN_NAMES = 5
_FACTOR = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def split(text: str) -> list[str]:
    """The patterns of an option, which have commas between."""
    return [part for piece in text.split(",") if (part := piece.strip())]


def first_match(name: str, patterns: Sequence[str]) -> str | None:
    """The first of the patterns that matches `name`."""
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)


def near(pattern: str, names: Iterable[str]) -> str:
    """For a message: the names that a pattern without a match may have meant, else some of all."""
    names = list(dict.fromkeys(names))
    plain = pattern.strip("*")
    holding = [name for name in names if plain and plain.lower() in name.lower()]
    found = holding or difflib.get_close_matches(plain, names, n=_SHOWN_NAMES, cutoff=0.4)
    return shown(found or names)


def shown(names: Sequence[str]) -> str:
    """For a message: the first of many names."""
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")


def factors(text: str) -> dict[str, float]:
    """Pattern -> factor, in order, of `pattern=factor` with commas between.

    Raises:
        ValueError: anything else, or a factor below 0.
    """
    found = {}
    for part in split(text):
        pattern, equals, number = (piece.strip() for piece in part.rpartition("="))
        if not equals or not pattern or not _FACTOR.fullmatch(number):
            raise ValueError(
                "learning_rate_factors must be pattern=factor with commas between, each factor at least 0: "
                f"'logits/*=10, block_*=0.1'. Received: {part!r}"
            )
        if pattern in found:
            raise ValueError(f"learning_rate_factors names a pattern twice. Received: {pattern!r}")
        found[pattern] = float(number)
    return found
