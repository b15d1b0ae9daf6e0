"""What preflight advises where nothing fits."""

import dataclasses

from trainer.preflight import report, search, slices
from trainer.preflight.verdict import Refusal

V2 = slices.parse("v2-8")
TOO_LARGE = report.Finding(V2, 8, (), Refusal("oom", "too large", 9 * 2**30, V2.chip.hbm_bytes))


def advice(
    finding: report.Finding, precision: str = "float32", copies: float = 2.0, backend: str = "tensorflow"
) -> str:
    return report.remedies([finding], precision=precision, optimizer_copies=copies, backend=backend)


def test_where_a_smaller_batch_fits_or_may_fit_less_memory_of_examples_is_advised() -> None:
    fits = dataclasses.replace(TOO_LARGE, largest=search.Largest(4, 8))
    assert "The largest that fits: --global_batch_size=32 (4 a replica)" in report.problem(fits)
    for finding in (fits, TOO_LARGE):
        assert "--precision=mixed_bfloat16" in advice(finding)
        assert "--microbatches=2" in advice(finding) and "--remat=" in advice(finding)
    assert "mixed_bfloat16" not in advice(fits, precision="mixed_bfloat16")


def test_where_not_one_example_fits_nothing_about_examples_is_advised() -> None:
    nothing = dataclasses.replace(TOO_LARGE, largest=search.Largest(None, 1))
    assert report.problem(nothing).endswith("nor does a single example")
    assert "fewer parameters" in advice(nothing)
    for useless in ("mixed_bfloat16", "remat", "batch"):
        assert useless not in advice(nothing)


def test_an_optimizer_with_less_state_is_advised_where_there_is_one() -> None:
    assert "this one keeps 3 copies" in advice(TOO_LARGE, copies=3.0)  # such as adam's moments and an average
    assert "less state" not in advice(TOO_LARGE, copies=1.2)


def test_larger_chips_are_those_that_are() -> None:
    assert "more HBM (v3, v4, v5e, v5p, v6e)" in advice(TOO_LARGE)
    assert "more HBM (v3, v4, v5e, v5p, v6e, tpu7x)" in advice(TOO_LARGE, backend="jax")
    largest = dataclasses.replace(TOO_LARGE, slice=slices.parse("v5p-8"))
    assert "more HBM" not in advice(largest)
