"""The search of the largest batch, against needs of memory that are known."""

import random

import pytest

from trainer.preflight import search

CAPACITY = 16 * 2**30


def searched(need, first: int, *, limit: int = 10**6, probes: int = 6) -> tuple[search.Largest, list[int]]:
    """What is found, and the batches that were compiled for it."""
    tried: list[int] = []

    def probe(batch: int) -> search.Probe:
        tried.append(batch)
        return search.Probe(batch, need(batch) <= CAPACITY, int(need(batch)))

    known = search.Probe(first, need(first) <= CAPACITY, int(need(first)))
    return search.largest(known, CAPACITY, limit, probes, probe), tried


@pytest.mark.parametrize("first", [1, 8, 100, 128, 1024, 4096])
@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_largest_to_a_tile_or_a_sixteenth(first: int, seed: int) -> None:
    dice = random.Random(seed)
    fixed, slope = dice.uniform(0, 0.5) * CAPACITY, dice.uniform(10e6, 200e6)
    largest, tried = searched(lambda batch: fixed + slope * batch * dice.uniform(0.99, 1.01), first)
    truth = (CAPACITY - fixed) / slope
    assert largest.fits is not None and largest.refused is not None
    assert truth * 0.9 - search.TILE <= largest.fits <= truth * 1.02
    assert len(tried) == len(set(tried)) <= 6
    assert all(batch % search.TILE == 0 or batch < search.TILE for batch in tried)


def test_a_batch_that_fits_only_below_a_tile() -> None:
    largest, _ = searched(lambda batch: 3e9 * batch, 8)
    assert (largest.fits, largest.refused) == (4, 8)


def test_nothing_fits() -> None:
    largest, tried = searched(lambda batch: CAPACITY + 1e6 * batch, 64)
    assert (largest.fits, largest.refused) == (None, 1)
    assert tried[-1] == 1


def test_the_limit_is_tried_and_not_passed() -> None:
    largest, tried = searched(lambda batch: 1e6 * batch, 8, limit=200)
    assert (largest, tried) == (search.Largest(200, None), [200])
    assert searched(lambda batch: 1e6 * batch, 8, limit=8) == (search.Largest(8, None), [])


def test_a_need_that_does_not_grow_evenly() -> None:
    largest, tried = searched(lambda batch: 1e9 + 20e6 * batch + (2e9 if batch > 300 else 0), 16)
    assert 600 <= (largest.fits or 0) <= (CAPACITY - 3e9) / 20e6
    assert len(tried) <= 6


def test_the_number_of_compilations_is_bounded() -> None:
    assert searched(lambda batch: 50e6 * batch, 8, probes=1)[1] != []
    assert searched(lambda batch: 50e6 * batch, 8, probes=0) == (search.Largest(8, None), [])


def test_refusals_that_tell_nothing_are_halved() -> None:
    tried: list[int] = []

    def probe(batch: int) -> search.Probe:
        tried.append(batch)
        return search.Probe(batch, batch <= 60, None)

    found = search.largest(search.Probe(512, False, None), CAPACITY, 10**6, 8, probe)
    assert found == search.Largest(56, 64)


def test_it_ends_once_the_answer_is_known_well_enough() -> None:
    largest, tried = searched(lambda batch: 1e9 + 5e6 * batch * (1 + 0.3 * (batch % 64) / 64), 8, probes=50)
    assert largest.fits is not None and largest.refused is not None
    assert search.TILE < largest.refused - largest.fits <= largest.fits / 16
    assert len(tried) < 10


def test_a_compiler_that_computes_again_what_does_not_fit() -> None:
    """As seen of ResNet-50 on a v5e: 768, 800 and 1,024 take about the same, 1,032 is refused."""

    def probe(batch: int) -> search.Probe:
        if batch <= 1024:
            return search.Probe(batch, True, min(20_000_000 * batch, int(0.96 * CAPACITY)))
        return search.Probe(batch, False, 20_000_000 * batch)

    for first in (128, 1024, 2048):
        found = search.largest(probe(first), CAPACITY, 10**6, 6, probe)
        assert found.fits is not None and found.refused is not None
        assert 930 <= found.fits <= 1024 < found.refused
