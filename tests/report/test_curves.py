"""Curves of thousands of points, thinned out and drawn."""

import math
import re

import pytest

from trainer import precision
from trainer.report import curves, numbers
from trainer.report.axes import BOTTOM, TOP, Steps, values_axis
from trainer.report.charts import Chart, Mark, figure
from trainer.report.curves import Curve

STEPS = Steps(0, 1000)


def drawn(*values: float, **facts) -> str:
    points = tuple((100 * index, value) for index, value in enumerate(values))
    return figure(Chart("loss", [Curve("train", points)], **facts), STEPS)


def test_thinning_keeps_extremes_ends_and_what_is_not_finite() -> None:
    points = [(step, math.sin(step / 50)) for step in range(100_000)]
    points[31_415] = (31_415, 7.0)
    points[27_182] = (27_182, -7.0)
    points[99_000] = (99_000, math.nan)
    thin = curves.thinned(Curve("train", tuple(points)))
    assert len(thin.points) <= 602
    kept = dict(thin.points)
    assert (kept[31_415], kept[27_182]) == (7.0, -7.0)
    assert math.isnan(kept[99_000])
    assert {0, 99_999} < set(kept)
    assert list(kept) == sorted(kept)
    few = Curve("eval", tuple(points[:600]))
    assert curves.thinned(few) is few


def test_a_value_that_is_not_finite_breaks_the_line_and_is_marked() -> None:
    svg = drawn(1.0, 0.5, math.nan, 0.25, math.inf, 0.125)
    paths = re.findall(r'<path class="c0 line" d="([^"]+)"', svg)
    line, crosses = paths[1:]  # the first is that of the legend
    assert line.count("M") == 3
    assert crosses.count("M") == 2
    assert "nan" not in svg.lower().replace("not finite", "")
    assert "2 not finite" in svg


def test_curves_without_a_finite_value_and_without_any_are_told_in_words() -> None:
    assert "None of its values is finite." in drawn(math.nan, math.inf)
    assert "Nothing was recorded yet." in drawn()


AXES = [(0.0,), (3.0, 3.0), (-1.0, -1.0), (1e-30, 1e30), (5e5, 5e5 + 1e-9)]


@pytest.mark.parametrize(
    ("values", "is_log"),
    [(values, is_log) for values in AXES for is_log in (False, True) if not is_log or min(values) > 0],
)
def test_every_axis_holds_its_values_and_has_few_round_ticks(values: tuple, is_log: bool) -> None:
    axis = values_axis(values, from_zero=False, is_log=is_log)
    assert all(TOP <= axis.y(value) <= BOTTOM for value in values)
    assert 1 <= sum("<text" in part for part in axis.drawn()) <= 12


def test_a_logarithmic_axis_is_there_for_what_is_positive_only() -> None:
    assert "logarithmic" in drawn(1.0, 0.1, log=True)
    assert "logarithmic" not in drawn(1.0, 0.0, log=True)


def test_a_thousand_restarts_are_a_few_marks() -> None:
    marks = [Mark(step, "restart", f"start {step}") for step in range(1000)]
    svg = figure(Chart("loss", [Curve("train", ((0, 1.0), (1000, 0.5)))]), STEPS, marks)
    assert svg.count('class="sign restart"') < 100
    assert "start 999" in svg


def test_what_counts_gradients_is_no_metric() -> None:
    assert curves.PRECISION == precision.NAMES
    assert curves.metric_names({"accuracy": 0, "loss_scale": 0, "step_ms": 0, "loss": 0}) == ["loss", "accuracy"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.12345, "0.1235"),
        (12345.6, "12,346"),
        (1e-5, "1.00e-05"),
        (3, "3"),
        (math.nan, "not finite"),
        (None, "-"),
        (3e37, "3.00e+37"),
    ],
)
def test_numbers_in_words(value: float, words: str) -> None:
    assert numbers.number(value) == words


def test_huge_numbers_fit_beside_an_axis() -> None:
    assert [numbers.short(value) for value in (1.5e12, 5e14, 1e15, -1.5e38)] == ["1.5T", "500T", "1e+15", "-1.5e+38"]
    assert numbers.to_float(10**400) is None, "as a file may have it"


def test_times_in_words() -> None:
    assert [numbers.duration(secs) for secs in (1.25, 59.99, 61, 3600 + 119, 90000)] == [
        "1.2 s", "60.0 s", "1 min 1 s", "1 h 2 min", "1 d 1 h",
    ]  # fmt: skip
