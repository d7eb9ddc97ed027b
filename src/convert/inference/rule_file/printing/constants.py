"""The rules of numbers that the module has itself, such as the mask of a masked convolution or the places of a window's pairs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.drafting.axis_letters import Letters
from convert.layers.draft import DraftEntry, plain

Array = np.ndarray[Any, np.dtype[Any]]
NUMBER = re.compile(r"[0-9]+")
MOST = 4096  # so many numbers may stand in a file
SHORT = 8  # numbers of this side are written as they are, also a triangle
LACKING = "the source has no such parameter"
OWN = "the module computes it itself, and the source has no such leaf"


def equal_ones(buffers: Mapping[str, Array]) -> Iterator[tuple[list[str], Array]]:
    """Yield the names that differ in one number and have the same values, and these values."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, values in buffers.items():
        groups[NUMBER.sub("#", name), values.shape, values.dtype, values.tobytes()].append(name)
    for names in groups.values():
        changing = {k for k, numbers in enumerate(zip(*map(NUMBER.findall, names), strict=True)) if len({*numbers}) > 1}
        for some in [names] if len(changing) < 2 else [[name] for name in names]:
            yield some, buffers[some[0]]


def pattern_of(names: Sequence[str]) -> str:
    """Return the pattern of names that differ in one number: it is one of several."""
    found = [NUMBER.findall(name) for name in names]
    at = next(k for k, numbers in enumerate(zip(*found, strict=True)) if len({*numbers}) > 1)
    words = re.split(NUMBER, names[0])
    numbers = [*found[0], ""]
    numbers[at] = "{" + ",".join(of[at] for of in found) + "}"
    return "".join(word + number for word, number in zip(words, numbers, strict=True))


def constant(values: Array, letters: Letters, remark: str, because: str) -> DraftEntry | None:
    """Return the rule of such numbers, without its target; None if they are too many."""
    axes: list[str] = []
    rows = values
    for axis, size in enumerate(values.shape):
        repeated = size > 1 and bool((values == values.take([0], axis)).all())
        letter = _letter(letters, size, axes) if repeated else None
        axes.append(letter or ".")
        if letter:
            rows = rows.take([0], axis)
    while rows.ndim and rows.shape[0] == 1:
        rows = rows[0]
    text = _triangle(values, letters, axes) if rows.size > SHORT**2 else None
    if text is None and rows.size <= MOST:
        text = _text(rows)
    if text is None:
        return None
    entry = DraftEntry()
    entry.say("value", text, remark)
    entry.say("axes", plain("".join(axes)))
    if values.dtype.kind != "f":
        entry.say("dtype", str(values.dtype))
    entry.say("because", because)
    return entry


def _letter(letters: Letters, size: int, used: Sequence[str]) -> str | None:
    """Return a letter of the leaves of this size."""
    fitting = (x for (_, n, _), x in letters.sizes if n == size and x in letters.of_leaves and x not in used)
    return next(fitting, None)


def _triangle(values: Array, letters: Letters, axes: list[str]) -> str | None:
    """Return the words for a triangle of the last two axes; they get letters."""
    side = values.shape[-1]
    if values.ndim < 2 or values.shape[-2] != side:
        return None
    one = values.reshape(-1, side, side)
    sign = np.sign(np.arange(side) - np.arange(side)[:, None])
    numbers = [one[0][sign == k][0] for k in (-1, 0, 1)]
    if (one != np.select([sign < 0, sign == 0], numbers[:2], numbers[2])).any():
        return None
    if any(n > 1 and axis == "." for n, axis in zip(values.shape[:-2], axes, strict=False)):
        return None
    if not letters.knows("positions", side):
        letters.fixed.add(letters.named("positions", side))
    axes[-2:] = [letters.named("positions", side), letters.named("positions", side, 1)]
    below, on, above = map(_number, numbers)
    return f"{{below: {below}, diagonal: {on}, above: {above}}}"


def _text(rows: Array) -> str:
    if not rows.ndim:
        return _number(rows)
    return f"[{', '.join(_text(row) for row in rows)}]"


def _number(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if np.isinf(value):
        return "inf" if value > 0 else "-inf"
    return str(int(value)) if value == int(value) else repr(float(value))
