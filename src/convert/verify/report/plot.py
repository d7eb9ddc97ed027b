"""The relative error of each measure along the depth, as the geometry of a figure; `templates/plot.svg.j2` draws it.

The vertical axis is logarithmic. Values that cannot lie on it have lines of their own: exact agreement below, infinity above.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from convert.numerics.compare import Difference
from convert.numerics.tolerances import Tolerance
from convert.verify.report.report import FLOAT64, NATIVE, LevelReport, Measure

WIDTH, HEIGHT = 960, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 940, 44, 328
STRIP = 22  # height of the lines for zero and infinity
LOWEST = 1e-18  # an error below the epsilon of float64 carries no information
MAX_LABELS = 12
DEPTH = re.compile(r"(?:^|[._/])([0-9]{1,18})(?=[._/:\[]|$)")  # the number of a layer in the name of a measure


@dataclass(frozen=True)
class Tick:
    """A line across the figure, its label, and whether it marks an edge."""

    at: float
    label: str
    edge: bool = False


@dataclass(frozen=True)
class Point:
    """A measured error. `row` is the id of its row in the table; `bad` means above the tolerance; `lines` is its tooltip."""

    x: float
    y: float
    bad: bool
    row: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Series:
    """The errors in one precision: `line` joins the points, `bound` is the tolerance; both are SVG paths."""

    name: str
    label: str
    line: str
    bound: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Plot:
    """Everything that the template draws, in pixels."""

    description: str
    grid: tuple[Tick, ...]
    numbers: tuple[Tick, ...]
    depths: tuple[Tick, ...]
    first: Tick | None
    series: tuple[Series, ...]
    width: int = field(default=WIDTH, init=False)
    height: int = field(default=HEIGHT, init=False)
    left: int = field(default=LEFT, init=False)
    right: int = field(default=RIGHT, init=False)
    top: int = field(default=TOP, init=False)
    bottom: int = field(default=BOTTOM, init=False)


@dataclass(frozen=True)
class _Axes:
    """Map values to pixels: decades from `low` to `high`, `count` measures from left to right."""

    low: int
    high: int
    count: int

    def x(self, k: float) -> float:
        return LEFT + (RIGHT - LEFT) * (k + 0.5) / self.count

    def y(self, value: float) -> float:
        if math.isnan(value) or value == math.inf:
            return TOP
        if value < LOWEST:
            return BOTTOM
        top, bottom = TOP + STRIP, BOTTOM - STRIP
        return bottom - (bottom - top) * (math.log10(value) - self.low) / (self.high - self.low)


def make_plot(level: LevelReport) -> Plot:
    """Lay out the figure for a level with measures."""
    measures = level.measures
    native = [(m.difference, m.tolerance) for m in measures]
    float64 = [(m.float64, m.float64_tolerance) for m in measures]
    axes = _fit_axes([*native, *float64])
    first = level.first_failure
    outcome = f"first above its tolerance: {first.name}" if first else "all within their tolerances"
    return Plot(
        f"relative error of {len(measures)} measures of the level {level.level}; {outcome}",
        _grid(axes),
        tuple(Tick(axes.x(k), str(k + 1)) for k in range(0, axes.count, math.ceil(axes.count / MAX_LABELS))),
        _depths(axes, measures),
        Tick(axes.x(measures.index(first)), f"first difference: {first.name}") if first else None,
        (
            _series(axes, level, "run", NATIVE, native),
            _series(axes, level, "float64", FLOAT64, float64),
        ),
    )


def _fit_axes(figures: Sequence[tuple[Difference | None, Tolerance | None]]) -> _Axes:
    values = [found.relative for found, _ in figures if found] + [allowed.value for _, allowed in figures if allowed]
    finite = [value for value in values if LOWEST <= value < math.inf]
    low, high = math.floor(math.log10(min(finite, default=1e-16))), math.ceil(math.log10(max(finite, default=1.0)))
    return _Axes(low, max(high, low + 1), len(figures) // 2)


def _grid(axes: _Axes) -> tuple[Tick, ...]:
    every = math.ceil((axes.high - axes.low) / MAX_LABELS)
    decades = range(axes.low, axes.high + 1)
    return (
        *(Tick(axes.y(10.0**n), f"1e{n}" if (n - axes.low) % every == 0 else "") for n in decades),
        Tick(axes.y(0.0), "0", edge=True),
        Tick(axes.y(math.inf), "∞", edge=True),
    )


def _depths(axes: _Axes, measures: Sequence[Measure]) -> tuple[Tick, ...]:
    """Mark where a new layer of the stack begins, by the first number in the names; nothing where a number returns."""
    numbers = [found[1] if (found := DEPTH.search(measure.name)) else "" for measure in measures]
    starts = [(0, numbers[0]), *((k + 1, two) for k, (one, two) in enumerate(pairwise(numbers)) if one != two)]
    depths = [number for _, number in starts if number]
    if len(set(depths)) < len(depths):
        return ()
    every = math.ceil(len(starts) / (2 * MAX_LABELS))
    return tuple(
        Tick(axes.x(k - 0.5), f"layer {number}" if number and n % every == 0 else "", edge=k > 0)
        for n, (k, number) in enumerate(starts)
    )


def _series(
    axes: _Axes,
    level: LevelReport,
    name: str,
    label: str,
    figures: Sequence[tuple[Difference | None, Tolerance | None]],
) -> Series:
    line, bound, points = [], [], []
    drawn = bounded = False  # whether the previous measure has a value, and a tolerance: a path continues there
    for k, (found, allowed) in enumerate(figures):
        if allowed is not None:
            start, stop = axes.x(k - 0.5), axes.x(k + 0.5)
            bound.append(f"{'L' if bounded else 'M'}{start:.1f} {axes.y(allowed.value):.1f}H{stop:.1f}")
        if found is not None:
            x, y = axes.x(k), axes.y(found.relative)
            line.append(f"{'L' if drawn else 'M'}{x:.1f} {y:.1f}")
            bad = allowed is not None and not found.relative <= allowed.value
            said: tuple[str, ...] = (level.measures[k].name, f"{label}: {found.relative:.2e}")
            said += (f"allowed: {allowed.value:.2e}",) if allowed else ()
            points.append(Point(x, y, bad, f"{level.level}-{k + 1}", said))
        drawn, bounded = found is not None, allowed is not None
    return Series(name, label, "".join(line), "".join(bound), tuple(points))
