"""Against figures worked out by hand."""

import pytest

from trainer.preflight import slices
from trainer.preflight.estimate import estimate, of_all_parts
from trainer.preflight.verdict import Collective, Compiled, Memory


def compiled(flops, bytes_accessed, *collectives):
    memory = Memory(arguments=0, outputs=0, aliased=0, temporaries=0, code=0, available=1, reserved=0)
    return Compiled(memory, (), flops, bytes_accessed, collectives, seconds=0.0, versions={})


def test_resnet50_on_eight_chips():
    # v5e: 197 TFLOP/s, 819 GB/s, 200 GB/s of links a chip. 102,334,368 bytes, 2 * 7/8 of them on the way.
    step = compiled(2.874e12, 5.65e10, Collective("all-reduce", "f32", 1, 102_334_368))
    found = estimate(step, slices.parse("v5e-8"), 128)
    assert found.compute_secs == pytest.approx(14.589e-3, rel=1e-4)
    assert found.memory_secs == pytest.approx(68.987e-3, rel=1e-4)
    assert found.links_secs == pytest.approx(0.89543e-3, rel=1e-4)
    assert (found.bound_by, found.step_secs) == ("memory", found.memory_secs)
    assert found.least_step_secs == found.compute_secs
    assert found.intensity == pytest.approx(50.87, rel=1e-3)
    assert found.balance == pytest.approx(240.5, rel=1e-3)
    assert found.examples_per_sec == pytest.approx(14_843, rel=1e-3)
    assert found.most_examples_per_sec == pytest.approx(70_190, rel=1e-3)


def test_two_replicas_of_a_chip_share_its_compute_and_memory():
    # v3-32: 16 chips of 123 TFLOP/s and 900 GB/s, 32 replicas; 332 GB/s of links, 4 hosts.
    step = compiled(6.15e12, 4.5e9, Collective("all-reduce", "f32", 2, 1_000_000_000))
    found = estimate(step, slices.parse("v3-32"), 100)
    assert found.compute_secs == pytest.approx(0.1)
    assert found.memory_secs == pytest.approx(0.01)
    assert found.links_secs == pytest.approx(2 * 15 / 16 / 332)  # 16 chips send, not 32 replicas
    assert found.bound_by == "compute"
    assert (found.examples_per_sec, found.examples_per_sec_of_host) == pytest.approx((32_000, 8_000))


def test_one_chip_sends_nothing():
    step = compiled(1.97e12, 1e9, Collective("all-reduce", "f32", 1, 10**9))
    assert estimate(step, slices.parse("v5e-1"), 8).links_secs == 0


def test_links_can_be_the_limit():
    # 3 GB of gradients over 4 chips of 600 GB/s: 2 * 3/4 * 3 / 600 = 7.5 ms.
    step = compiled(
        1e9, 1e6, Collective("all-reduce", "bf16", 1, 3 * 10**9), Collective("all-gather", "f32", 1, 10**12)
    )
    found = estimate(step, slices.parse("v5p-8"), 8)
    assert (found.bound_by, found.least_step_secs) == ("links", pytest.approx(7.5e-3))


def test_a_loop_over_microbatches_is_counted_as_often_as_it_runs():
    # XLA counts its body once. 1 GB of weights and state, read and written by the update behind the loop.
    whole = of_all_parts(compiled(3.0e12, 12.0e9), 4, 1_000_000_000)
    assert whole.flops == 12.0e12
    assert whole.bytes_accessed == 4 * 10.0e9 + 2.0e9
