"""The error of each layer along the depth, as SVG: logarithmic, both precisions with their bounds, the first failure marked.

Needs no script. What cannot lie on a logarithmic axis has a line of its own: exact agreement below, infinity above.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from convert.verify.numerics.compare import Difference, Tolerance
from convert.verify.report.report import LevelReport, Measure

WIDTH, HEIGHT = 960, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 44, 52
STRIP = 22  # for the lines of zero and infinity
LOWEST = 1e-18  # below the epsilon of float64 an error says nothing more
MOST_LABELS = 12

Figure = Callable[[Measure], tuple[Difference | None, Tolerance | None]]
SERIES: tuple[tuple[str, str, Figure], ...] = (
    ("run", "as users run it", lambda m: (m.difference, m.tolerance)),
    ("lifted", "lifted float64", lambda m: (m.lifted, m.lifted_tolerance)),
)


@dataclass(frozen=True)
class _Axes:
    """Where values go: decades from `low` to `high`, `count` measures from left to right."""

    low: int
    high: int
    count: int

    def x(self, k: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (k + 0.5) / self.count

    def y(self, value: float) -> float:
        top, bottom = TOP + STRIP, HEIGHT - BOTTOM - STRIP
        if math.isnan(value) or value == math.inf:
            return TOP
        if value < LOWEST:
            return HEIGHT - BOTTOM
        at = (math.log10(value) - self.low) / (self.high - self.low)
        return bottom - (bottom - top) * at


def plot(level: LevelReport, text: Callable[[str], str] = escape) -> str:
    """A figure for a level with measures.

    Args:
        text: makes a foreign text safe for HTML.
    """
    measures = level.measures
    axes = _axes(measures)
    first = level.first_failure
    parts = [
        f'<svg class="plot drawn" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(_described(level))}">',
        *_grid(axes),
        *_depths(axes, measures, text),
    ]
    if first is not None:
        parts += _mark(axes, measures.index(first), first, text)
    for name, _, figure in SERIES:
        parts += _bounds(axes, measures, name, figure)
        parts += _points(axes, level, name, figure, text)
    return "\n".join((*parts, "</svg>"))


def _described(level: LevelReport) -> str:
    first = level.first_failure
    said = f"first beyond its bound: {first.name}" if first else "all within their bounds"
    return f"relative error of {len(level.measures)} measures of the level {level.level}; {said}"


def _axes(measures: Sequence[Measure]) -> _Axes:
    values = [
        value
        for measure in measures
        for _, _, figure in SERIES
        for value in _values(figure(measure))
        if LOWEST <= value < math.inf
    ]
    low, high = math.floor(math.log10(min(values, default=1e-16))), math.ceil(math.log10(max(values, default=1.0)))
    return _Axes(low, max(high, low + 1), len(measures))


def _values(figure: tuple[Difference | None, Tolerance | None]) -> Iterator[float]:
    found, allowed = figure
    if found is not None:
        yield found.relative
    if allowed is not None:
        yield allowed.value


def _grid(axes: _Axes) -> Iterator[str]:
    right = WIDTH - RIGHT
    every = math.ceil((axes.high - axes.low) / MOST_LABELS)
    for decade in range(axes.low, axes.high + 1):
        y = axes.y(10.0**decade)
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        if (decade - axes.low) % every == 0:
            yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{decade}</text>'
    for value, label in ((0.0, "0"), (math.inf, "∞")):
        y = axes.y(value)
        yield f'<line class="grid edge" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    every = max(1, math.ceil(axes.count / MOST_LABELS))
    for k in range(0, axes.count, every):
        yield f'<text class="tick" x="{axes.x(k):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{k + 1}</text>'
    yield f'<text class="tick" x="{right}" y="{HEIGHT - 8}" text-anchor="end">number in the table, as data flows →</text>'


def _depths(axes: _Axes, measures: Sequence[Measure], text: Callable[[str], str]) -> Iterator[str]:
    """A line where a new layer of the stack begins, by the first number in the names."""
    starts: list[tuple[int, str]] = []
    for k, measure in enumerate(measures):
        found = re.search(r"(?:^|[._/])(\d+)(?=[._/:\[]|$)", measure.name)
        depth = found[1] if found else ""
        if not starts or starts[-1][1] != depth:
            starts.append((k, depth))
    depths = [depth for _, depth in starts if depth]
    if len(set(depths)) < len(depths):  # no order of layers: a number comes back
        return
    every = max(1, math.ceil(len(starts) / (2 * MOST_LABELS)))
    for n, (k, depth) in enumerate(starts):
        x = axes.x(k - 0.5)
        if k:
            yield f'<line class="depth" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        if depth and n % every == 0:
            yield f'<text class="tick" x="{x + 4:.1f}" y="{TOP + 14}">layer {text(depth)}</text>'


def _mark(axes: _Axes, k: int, first: Measure, text: Callable[[str], str]) -> Iterator[str]:
    x = axes.x(k)
    anchor = "start" if x < WIDTH / 2 else "end"
    yield f'<line class="first" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{HEIGHT - BOTTOM}"/>'
    yield f'<text class="first" x="{x:.1f}" y="{TOP - 16}" text-anchor="{anchor}">first difference: {text(first.name)}</text>'


def _bounds(axes: _Axes, measures: Sequence[Measure], name: str, figure: Figure) -> Iterator[str]:
    """What is allowed, as steps; a gap where there is no bound."""
    path = []
    before = False
    for k, measure in enumerate(measures):
        allowed = figure(measure)[1]
        if allowed is not None:
            y = axes.y(allowed.value)
            path.append(f"{'L' if before else 'M'}{axes.x(k - 0.5):.1f} {y:.1f}H{axes.x(k + 0.5):.1f}")
        before = allowed is not None
    if path:
        yield f'<path class="bound {name}" d="{"".join(path)}"/>'


def _points(axes: _Axes, level: LevelReport, name: str, figure: Figure, text: Callable[[str], str]) -> Iterator[str]:
    """The measured errors, joined; each links to its row and says its numbers when pointed at."""
    line: list[str] = []
    marks: list[str] = []
    before = False
    word = next(word for key, word, _ in SERIES if key == name)
    for k, measure in enumerate(level.measures):
        found, allowed = figure(measure)
        if found is None:
            before = False
            continue
        x, y = axes.x(k), axes.y(found.relative)
        line.append(f"{'L' if before else 'M'}{x:.1f} {y:.1f}")
        before = True
        bad = allowed is not None and not found.relative <= allowed.value
        shape = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if bad else 3}"/>'
            if name == "lifted"
            else f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
        )
        said = f"{measure.name}\n{word}: {found.relative:.2e}" + (f"\nallowed: {allowed.value:.2e}" if allowed else "")
        marks.append(
            f'<a href="#{level.level}-{k + 1}" class="point {name}{" bad" if bad else ""}">'
            f"{shape}<title>{text(said)}</title></a>"
        )
    if line:
        yield f'<path class="line {name}" d="{"".join(line)}"/>'
    yield from marks
