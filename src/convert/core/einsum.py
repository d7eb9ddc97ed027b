"""Derive the layout of a projection from its einsum: which axes of the weight are inputs, outputs or batch axes.

For ``X,W->Y``: a letter of W that is in X and not in Y is an *input* axis; one that is in Y and not in X is an
*output* axis; one in all three is a *batch* axis. ``torch.nn.Linear.weight`` is W with its axes permuted to (output
axes in Y's order, input axes in X's order) and flattened to two. Whether a transpose is needed follows from this alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

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
    """

    equation: str
    weight: str
    outputs: str
    inputs: str
    batch: str
    result: tuple[str, str]

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
    """Parse a two-operand einsum ``X,W->Y`` whose second operand is the weight.

    >>> parse_projection("...NH,DNH->...D").inputs
    'NH'
    >>> parse_projection("BTNH,NHD->BTD").outputs
    'D'

    Raises:
        ValueError: the equation has another form; the text is the reason.
    """
    text = re.sub(r"\s", "", equation)
    left, arrow, y = text.partition("->")
    operands = left.split(",")
    if not arrow or len(operands) != 2:
        raise ValueError(f"{equation!r} is not an einsum of two operands, X,W->Y with the weight second")
    parsed = [_OPERAND.fullmatch(operand) for operand in (*operands, y)]
    for operand, match in zip((*operands, y), parsed, strict=True):
        if match is None:
            raise ValueError(f"{operand!r} in {equation!r} is not letters with at most one '...'")
    (x_head, x_dots, x_tail), (_, w_dots, _), (y_head, y_dots, y_tail) = [m.groups("") for m in parsed if m]
    x, w, y = x_head + x_tail, operands[1], y_head + y_tail
    if w_dots:
        raise ValueError(f"the weight of {equation!r} has an ellipsis; name its axes")
    if bool(x_dots) != bool(y_dots):
        raise ValueError(f"'...' of {equation!r} is on one side only, but the result has the input's batch axes")
    if not w:
        raise ValueError(f"the weight of {equation!r} has no axes")
    for operand in (x, w, y):
        repeated = sorted({letter for letter in operand if operand.count(letter) > 1})
        if repeated:
            raise ValueError(
                f"{', '.join(repeated)} occurs twice in {operand!r} of {equation!r}: a diagonal is not a projection"
            )
    unknown = [letter for letter in y if letter not in x + w]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} of the result of {equation!r} is in no operand")
    lost = [letter for letter in w if letter not in x + y]
    if lost:
        raise ValueError(
            f"{', '.join(lost)} of the weight of {equation!r} is in neither input nor result: it would be summed away; "
            f"add {', '.join(lost)} to the input or to the result"
        )
    summed = [letter for letter in x if letter not in w + y]
    if summed:
        raise ValueError(
            f"{', '.join(summed)} of the input of {equation!r} is summed without the weight: not a projection"
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
