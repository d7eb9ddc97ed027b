"""The rules of numbers that the module has itself, such as the mask of a masked convolution or the places of a window's pairs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.core.path_pattern import Pattern
from convert.drafting.axis_letters import Letters, NoLetterError
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


@dataclass(frozen=True)
class Neighbour:
    """A weight that a rule makes, with the letters of its axes.

    Attributes:
        module: pattern of the modules that have it.
        shape: of the weight.
        axes: the letter of each axis; empty where it has none of its own.
        outputs: which axis is that of a bias.
    """

    module: Pattern
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    outputs: int

    def beside(self, last: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Return the letters that the axes of another tensor of the module have; none if the weight does not tell them."""
        if self.shape == shape:
            return self.axes
        rows = slice(self.outputs, self.outputs + 1)
        return self.axes[rows] if last == "bias" and self.shape[rows] == shape else ()


def letters_beside(name: str, shape: tuple[int, ...], neighbours: Sequence[Neighbour]) -> tuple[str, ...]:
    """Return the letters that the axes of a tensor have, as those of a weight of its module; none if there is no such weight, or they differ."""
    module, _, last = name.rpartition(".")
    of_module = [one for one in neighbours if module and one.module.match(module) is not None]
    found = {axes for one in of_module if (axes := one.beside(last, shape))}
    return found.pop() if len(found) == 1 else ()


def constant(
    values: Array, letters: Letters, remark: str, because: str, known: Sequence[str] = ()
) -> DraftEntry | None:
    """Return the rule of such numbers, without its target; None if they are too many.

    Args:
        known: letters of the axes; empty where they are not known.
    """
    axes: list[str] = []
    rows = values
    for axis, size in enumerate(values.shape):
        repeated = size > 1 and bool((values == values.take([0], axis)).all())
        letter = (known[axis] if known else "") or _letter(letters, size, (*axes, *known)) if repeated else ""
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


def _letter(letters: Letters, size: int, used: Sequence[str]) -> str:
    """Return a letter of this size; none where no leaf has the size, so that the numbers are listed, or where there are no more letters."""
    try:
        return letters.of_size(size, used) if letters.roles_of(size) else ""
    except NoLetterError:
        return ""


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
