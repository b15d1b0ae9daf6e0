"""Which saved weights a new model begins with: all of them, but those that are asked to stay fresh. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from trainer import patterns
from trainer.errors import ConfigError

PREFIX = "model/"


def choose_weights(
    saved: Mapping[str, np.ndarray],
    wanted: Mapping[str, tuple[tuple[int, ...], str]],
    fresh_patterns: Sequence[str] = (),
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Chooses what to load of `saved` into a model that has `wanted`.

    Args:
        saved: arrays of a checkpoint by name; only names under `model/` count.
        wanted: shape and NumPy dtype (or its name) of the model's weights and state by name; likewise.
        fresh_patterns: globs of names, with or without `model/`, that keep their fresh values; a saved array that the
            model lacks needs one too.

    Returns:
        The arrays to load, and the names that stay fresh.

    Raises:
        ConfigError: lists every name that does not fit, with the `--init_fresh` that would leave them fresh; or every
            pattern that matches nothing.
    """
    saved = {name: array for name, array in saved.items() if name.startswith(PREFIX)}
    wanted = {name: form for name, form in wanted.items() if name.startswith(PREFIX)}
    names = sorted({*saved, *wanted})
    unused = [pattern for pattern in fresh_patterns if not any(_matches(name, pattern) for name in names)]
    if unused:
        near = patterns.near(unused[0], [name.removeprefix(PREFIX) for name in names])
        raise ConfigError(f"--init_fresh matches no name. Received: {', '.join(unused)}. There are: {near}")
    fresh = {name for name in names if any(_matches(name, pattern) for pattern in fresh_patterns)}
    wrong = {name: why for name in names if name not in fresh and (why := _mismatch(name, saved, wanted))}
    if wrong:
        listed = "".join(f"\n  {name.removeprefix(PREFIX)}: {why}" for name, why in wrong.items())
        cure = ",".join([*fresh_patterns, *(_literal(name.removeprefix(PREFIX)) for name in wrong)])
        raise ConfigError(
            f"the checkpoint of --init_from does not fit this model:{listed}\nUse the options of the model it is of, "
            f"or leave them fresh: --init_fresh='{cure}'"
        )
    return {name: saved[name] for name in wanted if name not in fresh}, sorted(fresh & wanted.keys())


def _mismatch(
    name: str, saved: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[tuple[int, ...], str]]
) -> str | None:
    if name not in saved:
        return "missing in the checkpoint"
    if name not in wanted:
        return "saved, but the model does not have it"
    had, (shape, dtype) = saved[name], wanted[name]
    if tuple(had.shape) == tuple(shape) and had.dtype == np.dtype(dtype):
        return None
    return f"saved as {had.dtype} {tuple(had.shape)}, wanted as {np.dtype(dtype)} {tuple(shape)}"


def _matches(name: str, pattern: str) -> bool:
    """Glob match; a literal name of `_literal` matches itself."""
    return any(patterns.first_match(known, [pattern]) for known in (name, name.removeprefix(PREFIX)))


def _literal(name: str) -> str:
    """A pattern that matches `name` only, and has no comma: patterns are listed with commas between."""
    return "".join(f"[{c}]" if c in "*?[" else "?" if c == "," else c for c in name)
