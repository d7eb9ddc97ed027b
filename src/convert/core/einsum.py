"""Derive the layout of a projection from its einsum: which axes of the weight are inputs, outputs or batch axes.

For ``X,W->Y``: a letter of W that is in X and not in Y is an *input* axis; one that is in Y and not in X is an
*output* axis; one in all three is a *batch* axis. ``torch.nn.Linear.weight`` is W with its axes permuted to (output
axes in Y's order, input axes in X's order) and flattened to two. Whether a transpose is needed follows from this alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from convert.core.axis_groups import (
    AxisGroup,
    check_one_sum,
    each_part,
    open_letters,
    shown,
    take_groups,
    taken_part,
    with_part,
)

_OPERAND = re.compile(r"([A-Za-z]*)(\.\.\.)?([A-Za-z]*)")


@dataclass(frozen=True)
class Projection:
    """The axes of the weight of an equation.

    Attributes:
        equation: as in the source, without spaces.
        weight: letters of W as stored, such as ``DNH``.
        outputs: output axes, in Y's order.
        inputs: input axes, in X's order.
        batch: axes in all three operands, in W's order; only a target with its own einsum can hold them.
        result: letters of Y before and after its ellipsis, for broadcasting a bias; without an ellipsis, all letters
            are in the second.
        groups: of an equation with composite axes, such as ``(N H)``: the letter of such an axis in `flat` ->
            what it is made of. The letters above are those of the opened axes.
        flat: the equation with one letter for each axis as stored; None: there are no groups.
    """

    equation: str
    weight: str
    outputs: str
    inputs: str
    batch: str
    result: tuple[str, str]
    groups: Mapping[str, AxisGroup] = field(default_factory=dict, hash=False)
    flat: Projection | None = None

    @property
    def parts(self) -> int:
        """Number of parts of an axis that is a sum of parts; 0 where there is none, or one part was chosen."""
        return next((len(group.parts) for group in self.groups.values() if group.letters is None), 0)

    def part(self, k: int) -> Projection:
        """Return the equation of one part of an axis that is a sum of parts."""
        assert self.flat is not None
        return _opened(self.flat, with_part(self.groups, k), self.flat.equation)

    def alone(self, k: int) -> Projection:
        """Return the equation of one part of the axis that is a sum, as if the weight had no other."""
        assert self.flat is not None
        return _plain(open_letters(self.flat.equation, with_part(self.groups, k)), self.equation)

    def taken(self, part: Sequence[tuple[int, int]]) -> Projection:
        """Return the equation of one part of each axis that is a sum: (k, n) is the k-th of n, counted from 1.

        Raises:
            ValueError: the axes of the weight have other sums; the message is the reason.
        """
        groups = taken_part(self.stored.weight, self.groups, part)
        return _opened(self.stored, groups, self.stored.equation)

    def check_one_sum(self) -> None:
        """Check that one axis at most is a sum.

        Raises:
            ValueError: two are.
        """
        check_one_sum(self.stored.weight, self.groups)

    @property
    def stored(self) -> Projection:
        """The equation with one letter for each axis as stored."""
        return self.flat or self

    @property
    def text(self) -> str:
        """The equation as the rule has it."""
        return "".join(str(self.groups.get(letter, letter)) for letter in self.stored.equation)

    @property
    def stored_weight(self) -> str:
        """The axes of the weight as stored, for people: ``D (N H)``."""
        return " ".join(shown(self.stored.weight, self.groups))

    @property
    def bias_rank(self) -> int:
        """Number of axes that a bias has in JAX code: those of the result from its first output or batch axis on.

        Where an output stands before the ellipsis, as in ``...TD,CDF->C...TF``, the ellipsis is one axis.
        """
        head, tail = self.result
        if head:
            return len(head) + 1 + len(tail)
        first = next((k for k, x in enumerate(tail) if x in self.outputs + self.batch), len(tail))
        return len(tail) - first

    def bias_axes(self, shape: tuple[int, ...]) -> str:
        """Return the letters of a bias of this shape. It is added to Y, so it is aligned as NumPy broadcasts it.

        A bias ``(N, H)`` of ``...D,DNH->...NH`` is ``NH``; a bias ``(C, 1, 1, F)`` of ``...TD,CDF->C...TF`` is
        ``C..F``; a dot is an axis that is not an output and must have size 1.

        A batch axis counts as an output here: each block of a block-diagonal matrix has its own bias.

        Raises:
            ValueError: more axes than Y has, an output axis left out, or a size above 1 on an input's axis.
        """
        head, tail = self.result
        if len(shape) <= len(tail):
            letters = tail[len(tail) - len(shape) :]
        else:
            letters = head + "." * (len(shape) - len(head) - len(tail)) + tail
        if len(shape) != len(letters) or ("." in letters and not head):
            raise ValueError(f"a bias with {len(shape)} axes cannot be added to the result of {self.equation}")
        missing = [letter for letter in self.outputs if letter not in letters]
        if missing:
            raise ValueError(
                f"a bias with {len(shape)} axes lines up with {' '.join(letters) or 'no axis'} of the result of "
                f"{self.equation} and leaves out {', '.join(missing)}"
            )
        of_weight = self.outputs + self.batch
        spread = [x for x, size in zip(letters, shape, strict=True) if x not in of_weight and size != 1]
        if spread:
            raise ValueError(
                f"the bias of {self.equation} has a size above 1 on an axis of the input ({', '.join(spread)})"
            )
        return "".join(letter if letter in of_weight else "." for letter in letters)


@lru_cache
def parse_projection(equation: str) -> Projection:
    """Parse a two-operand einsum ``X,W->Y`` whose second operand is the weight. Axes may be groups, such as ``(N H)``.

    >>> parse_projection("...NH,DNH->...D").inputs
    'NH'
    >>> parse_projection("BTNH,NHD->BTD").outputs
    'D'

    Raises:
        ValueError: the equation has another form; the text is the reason.
    """
    if "(" not in equation and ")" not in equation:
        return _plain(equation, equation)
    text, groups = take_groups(equation)
    weight = text.partition("->")[0].partition(",")[2]
    foreign = [str(group) for letter, group in groups.items() if letter not in weight]
    if foreign:
        raise ValueError(
            f"{foreign[0]} of {equation!r} is not an axis of the weight; write a composite axis in the same way in "
            "the weight and in the input or the result"
        )
    others = text.replace(f",{weight}->", ",->")
    unused = [str(group) for letter, group in groups.items() if letter not in others]
    if unused:
        raise ValueError(
            f"{unused[0]} of {equation!r} is an axis of the weight alone; write it in the same way in the input or the result"
        )
    for each in each_part(weight, groups):
        _plain(open_letters(text, each), equation)  # each part is an equation of its own
    return _opened(_plain(text, equation), groups, equation)


def _opened(flat: Projection, groups: Mapping[str, AxisGroup], written: str) -> Projection:
    """Open the groups of an equation."""
    return replace(_plain(open_letters(flat.equation, groups), written), groups=groups, flat=flat)


def _plain(equation: str, written: str) -> Projection:
    """Parse an equation without groups.

    Args:
        written: the equation as the rule has it, for messages.
    """
    text = re.sub(r"\s", "", equation)
    left, arrow, y = text.partition("->")
    operands = left.split(",")
    if not arrow or len(operands) != 2:
        raise ValueError(f"{written!r} is not an einsum of two operands, X,W->Y with the weight second")
    parsed = [_OPERAND.fullmatch(operand) for operand in (*operands, y)]
    for operand, match in zip((*operands, y), parsed, strict=True):
        if match is None:
            raise ValueError(f"{operand!r} in {written!r} is not letters with at most one '...'")
    (x_head, x_dots, x_tail), (_, w_dots, _), (y_head, y_dots, y_tail) = [m.groups("") for m in parsed if m]
    x, w, y = x_head + x_tail, operands[1], y_head + y_tail
    if w_dots:
        raise ValueError(f"the weight of {written!r} has an ellipsis; name its axes")
    if bool(x_dots) != bool(y_dots):
        raise ValueError(f"'...' of {written!r} is on one side only, but the result has the input's batch axes")
    if not w:
        raise ValueError(f"the weight of {written!r} has no axes")
    for operand in (x, w, y):
        repeated = sorted({letter for letter in operand if operand.count(letter) > 1})
        if repeated:
            raise ValueError(
                f"{', '.join(repeated)} occurs twice in {operand!r} of {written!r}: a diagonal is not a projection"
            )
    unknown = [letter for letter in y if letter not in x + w]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} of the result of {written!r} is in no operand")
    lost = [letter for letter in w if letter not in x + y]
    if lost:
        raise ValueError(
            f"{', '.join(lost)} of the weight of {written!r} is in neither input nor result: it would be summed away; "
            f"add {', '.join(lost)} to the input or to the result"
        )
    summed = [letter for letter in x if letter not in w + y]
    if summed:
        raise ValueError(
            f"{', '.join(summed)} of the input of {written!r} is summed without the weight: not a projection"
        )
    return Projection(
        equation=text,
        weight=w,
        outputs="".join(letter for letter in y if letter in w and letter not in x),
        inputs="".join(letter for letter in x if letter in w and letter not in y),
        batch="".join(letter for letter in w if letter in x and letter in y),
        result=(y_head, y_tail) if y_dots else ("", y),
    )


def group(axes: str) -> str:
    """Write axes as einops does: ``(N H)`` for N and H flattened into one, ``1`` for none."""
    return axes if len(axes) == 1 else f"({' '.join(axes)})" if axes else "1"
