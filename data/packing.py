"""Documents in records of one length: which go together.

Packed when the dataset is built, not when it is read: a packed record is a record like any other, so order, shuffling,
resuming and sharing among hosts are those of every dataset, and no host spends time on it.
"""

from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts pieces into bins: the longest first, each where the least space is left behind it.

    Best-fit decreasing, as Ding et al. 2024 (arXiv:2404.10830) pack documents; what they cut is not cut here either but
    for documents longer than a bin.

    Args:
      lengths: of the pieces, each in [1, capacity].
      capacity: of a bin.

    Returns:
      Of each bin the places of its pieces in `lengths`. The same for the same lengths.
    """
    bins: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins that have so much space
    spaces = 0  # bit s is set where by_space[s] has bins: the least space that suffices is found without a search
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        length = lengths[piece]
        enough = spaces >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1
            chosen = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(piece)
        left = space - length
        if left:
            by_space[left].append(chosen)
            spaces |= 1 << left
    return bins
