"""Names in a checkpoint and texts of a rule file are untrusted: what renders them keeps each on its line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def one_line(text: str) -> str:
    """Escape everything that does not print: newlines, tabs, control and direction characters, lone surrogates."""
    return escape(text, keep="")


def escape(text: str, keep: str) -> str:
    """Escape everything that does not print, but the characters in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def shortened(text: str, most: int = 200) -> str:
    """Return the beginning of a text that is longer than any name."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def code_span(text: str) -> str:
    """Return a name as code in Markdown. Nothing can be escaped in a code span, so a backtick, which would end it, goes."""
    name = one_line(text).replace("`", "'")
    return f"`{name}`"


def in_runs(numbers: Iterable[int]) -> list[list[int]]:
    """Group numbers that follow one another.

    >>> in_runs([3, 4, 5, 9])
    [[3, 4, 5], [9]]
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def where_they_differ(ours: Sequence[object], theirs: Sequence[object], most: int) -> tuple[str, str]:
    """Write a few items of two lists: the first ones if they differ there, otherwise from the first that differs on.

    >>> where_they_differ([0, 1, 2, 3, 4], [0, 1, 2, 5, 6], most=2)
    ('..., 3, 4', '..., 5, 6')
    """
    first = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
    begin = first if first >= most else 0
    one, two = (
        f"{'..., ' if begin else ''}{', '.join(map(str, items[begin : begin + most]))}{', ...' if len(items) > begin + most else ''}"
        for items in (ours, theirs)
    )
    return one, two
