"""The figure of the HTML report."""

from __future__ import annotations

import math

import pytest

from convert.verify.report.html import render
from convert.verify.report.plot import make_plot
from convert.verify.report.report import LevelReport, Verdict
from support.html_page import Page
from support.sample_report import (  # fmt: skip
    measure,
    model_level,
)


def drawn(level: LevelReport) -> Page:
    return Page(render("plot.svg.j2", plot=make_plot(level)))


def test_plot_has_every_point_and_bound() -> None:
    page = drawn(model_level())
    assert len(page.of("a", "float64")) == len(page.of("a", "run")) == 7
    assert len(page.of("circle")) == len(page.of("rect")) == 7
    assert len(page.of("path", "bound")) == 2 and len(page.of("path", "line")) == 2
    assert page.of("line", "first") == [] and page.of("a", "bad") == []
    assert "layers.0.attn.out\nfloat64: 0.00e+00\nallowed: 8.00e-14" in page.words


def test_plot_marks_the_first_failure() -> None:
    page = drawn(model_level(2))
    (mark,) = page.of("line", "first")
    point = page.of("circle")[2]
    assert mark["x1"] == mark["x2"] == point["cx"]
    assert "first difference: layers.1.attn.out" in page.words
    assert len(page.of("a", "bad")) == 10


def heights(page: Page) -> list[float]:
    return [float(circle["cy"] or "nan") for circle in page.of("circle")]


def test_plot_is_logarithmic_with_room_for_zero_and_infinity() -> None:
    errors = (0.0, 1e-16, 1e-14, 1e-12, math.inf, math.nan)
    level = LevelReport("model", Verdict.FAILED, measures=tuple(measure(f"m{e}", float64=e) for e in errors))
    zero, a, b, c, inf, nan = heights(drawn(level))
    assert zero > a > b > c > inf == nan
    assert a - b == pytest.approx(b - c, abs=0.2)  # equal ratios, equal distances
    assert {"0", "∞", "1e-16"} <= set(drawn(level).words)


def test_plot_of_degenerate_levels() -> None:
    """One measure, none in float64, all zero, many: numbers stay within the picture."""
    for measures in (
        (measure("a"),),
        (measure("a", float64=None), measure("b", float64=None)),
        (measure("a", 0.0, 0.0), measure("b", 0.0, 0.0)),
        (measure("a", 1e-300, 1e-300),),
        (measure("a", 1e30, 1e300),),
        tuple(measure(f"layers.{k}.mlp") for k in range(500)),
    ):
        page = drawn(LevelReport("model", Verdict.PASSED, measures=measures))
        for tag in ("circle", "rect", "line", "text"):
            for attributes in page.of(tag):
                numbers = [
                    float(attributes[key] or "nan") for key in ("x", "y", "x1", "y1", "cx", "cy") if key in attributes
                ]
                assert all(-1 <= number <= 961 for number in numbers), (tag, attributes)
    assert sum(word.startswith("layer ") for word in page.words) <= 25


def test_plot_names_the_layers_of_a_stack() -> None:
    assert [word for word in drawn(model_level()).words if word.startswith("layer ")] == [
        "layer 0",
        "layer 1",
        "layer 2",
    ]
