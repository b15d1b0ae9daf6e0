"""The largest batch that fits, from few compilations. Pure: what a batch needs is asked of a function.

Memory grows about linearly with the batch: a line through the two nearest sizes whose need is known says which one to
try next. Near the limit it no longer does: XLA computes again what does not fit, so that larger batches may take no
more than smaller ones. From there on the search halves.
"""

import dataclasses
from collections.abc import Callable

# Batches of a replica in multiples of this fill the tiles of a TPU; below it every size counts.
TILE = 8
# The search ends once it knows the largest batch this well.
_PRECISION = 1 / 16
# Of the line's word: it is an estimate, and a compilation that is refused teaches less.
_CAUTION = 0.98
_FULL = 0.9  # of the memory: from here on XLA trades time for memory, and lines tell nothing
_BEYOND_FULL = 5 / 4  # of a batch that fills the memory, where none is known that is too large


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a batch of one replica needs.

    used_bytes: of memory, where it is known.
    """

    batch: int
    fits: bool
    used_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Largest:
    """Batches of one replica.

    fits: the largest that is known to fit; None where none is.
    refused: the smallest that is known not to fit; None where the limit of the search was reached.
    """

    fits: int | None
    refused: int | None


def largest(first: Probe, capacity: int, limit: int, probes: int, probe: Callable[[int], Probe]) -> Largest:
    """Searches for the largest batch that fits.

    Args:
        first: what is known already.
        capacity: bytes that there are.
        limit: a batch beyond which no one would go.
        probes: how often `probe` may be called.
        probe: tells of a batch what it needs.
    """
    known = {first.batch: first}
    for _ in range(probes):
        batch = _next(list(known.values()), capacity, limit)
        if batch is None:
            break
        known[batch] = probe(batch)
    return Largest(*_bounds(list(known.values())))


def _bounds(known: list[Probe]) -> tuple[int | None, int | None]:
    fitting = max((p.batch for p in known if p.fits), default=None)
    refused = min((p.batch for p in known if not p.fits), default=None)
    return fitting, refused


def _next(known: list[Probe], capacity: int, limit: int) -> int | None:
    """The batch to try next; None once the answer is known well enough."""
    fitting, refused = _bounds(known)
    low, high = fitting or 0, refused or limit + 1
    if refused and high - low <= low * _PRECISION:
        return None
    least, most = _size_above(low), _size(high - 1)
    if least > most:
        return None
    fullest = max((probe.used_bytes or 0 for probe in known if probe.fits), default=0)
    if fullest < _FULL * capacity:
        guess = _estimate(known, capacity) or (low + high) // 2
    else:
        guess = (low + high) // 2 if refused else int(low * _BEYOND_FULL)
    return min(max(_size(guess), least), most)


def _size(batch: int) -> int:
    """The largest size worth trying that is not above `batch`: a multiple of TILE, below it a power of two."""
    return batch // TILE * TILE if batch >= TILE else 1 << max(batch, 1).bit_length() - 1 if batch else 0


def _size_above(batch: int) -> int:
    return _size(batch) + TILE if batch >= TILE else 2 * _size(batch) or 1


def _estimate(known: list[Probe], capacity: int) -> int | None:
    """The batch that fills `capacity`, by a line through the two needs nearest to it, or through one and nothing."""
    points = sorted(((p.used_bytes, p.batch) for p in known if p.used_bytes), key=lambda at: abs(at[0] - capacity))
    if not points:
        return None
    (used, batch), (other_used, other_batch) = [*points, (0, 0)][:2]
    if used == other_used:
        return None
    guess = batch + (capacity - used) * (batch - other_batch) / (used - other_used)
    return max(1, int(guess * _CAUTION))
