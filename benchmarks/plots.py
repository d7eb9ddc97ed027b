"""Draws SVG figures without a library: lines and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1a7f37", "#cf222e", "#0969da", "#bf8700", "#8250df", "#57606a", "#d4a72c", "#116329")
OURS = "convert"  # in bold
FONT = 'font-family="sans-serif" font-size="12"'
GREY = "#808080"  # legible on light and on dark pages


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> str:
    """Draw lines through points (x, y); both axes start at 0.

    Args:
        across, up: units of the axes.
    """
    width, height, left, top = 640, 320, 60, 28
    longest = max((x for points in lines.values() for x, _ in points), default=1.0) or 1.0
    most = max((y for points in lines.values() for _, y in points), default=1.0) or 1.0
    size = f"0 0 {width + left + 30} {height + top + 40 + 15 * len(lines)}"
    drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" {FONT} fill="{GREY}">']
    drawn.append(f'<text x="{left}" y="14">{escape(up)}</text>')
    for k in range(5):
        y = top + height - height * k / 4
        drawn.append(f'<path d="M{left} {y:.0f}H{left + width}" stroke="{GREY}" stroke-opacity="0.3"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{most * k / 4:.2g}</text>')
        label = f"{longest * k / 4:.3g} {escape(across)}"
        drawn.append(
            f'<text x="{left + width * k / 4:.0f}" y="{top + height + 16}" text-anchor="middle">{label}</text>'
        )
    for k, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{left + width * x / longest:.1f},{top + height - height * y / most:.1f}" for x, y in points)
        colour = COLOURS[k % len(COLOURS)]
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(f'<text x="{left}" y="{top + height + 40 + 15 * k}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*drawn, "</svg>\n"])


def bars(title: str, lengths: Mapping[str, tuple[float, str]]) -> str:
    """Draw horizontal bars.

    Args:
        lengths: name -> (length in seconds, text behind the bar).
    """
    left, width, line = 230, 360, 24
    longest = max(seconds for seconds, _ in lengths.values())
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {line * len(lengths) + 40}" {FONT} fill="{GREY}">'
    ]
    drawn.append(f'<text x="8" y="16">{escape(title)}</text>')
    for k, (name, (seconds, label)) in enumerate(lengths.items()):
        y, colour = 28 + line * k, COLOURS[0] if name == OURS else GREY
        weight = ' font-weight="bold"' if name == OURS else ""
        drawn.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end"{weight}>{escape(name)}</text>')
        drawn.append(
            f'<rect x="{left}" y="{y + 2}" width="{max(1, width * seconds / longest):.0f}" height="16" fill="{colour}"/>'
        )
        drawn.append(
            f'<text x="{left + width * seconds / longest + 8:.0f}" y="{y + 14}">{seconds:.1f} s, {escape(label)}</text>'
        )
    return "\n".join([*drawn, "</svg>\n"])
