"""Tensors that are their leaf times a number, or plus one: the code of one program has it, and that of the other has not."""

from __future__ import annotations

from collections.abc import Sequence

from convert.inference.derivation import Arithmetic, Part, Role, Tensor
from convert.numerics.roots import factor_text

ADDED = {Arithmetic.ONE_PLUS: 1.0, Arithmetic.MINUS_ONE: -1.0}
MISTAKE = "if it lacks it by mistake, correct that"


def notes(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """Return a note for each number that tensors are multiplied by, signs are none; and for each that is added to biases."""
    times: dict[float, list[str]] = {}
    plus: dict[float, list[str]] = {}
    for tensor in tensors:
        for factor in {part.factor for part in tensor.parts if part.leaf and abs(part.factor) != 1}:
            times.setdefault(factor, []).append(tensor.name)
        for number in {_added(part) for part in tensor.parts} - {0.0}:
            plus.setdefault(number, []).append(tensor.name)
    return (
        *(
            f"{_are(names)} times {factor_text(factor)} (`prescaled_by`): "
            f"the code of one program has this number, or its reciprocal, and that of the other has not; {MISTAKE}"
            for factor, names in times.items()
        ),
        *(
            f"{_are(names)} {'plus' if number > 0 else 'minus'} {abs(number):.7g}, or a part is: "
            f"the code of one program adds or subtracts this number there, and that of the other does not; {MISTAKE}"
            for number, names in plus.items()
        ),
    )


def _are(names: Sequence[str]) -> str:
    more = len(names) - 1
    return f"{names[0]} and {more} more are their leaves" if more else f"{names[0]} is its leaf"


def _added(part: Part) -> float:
    """Return the number that is added to a bias; 0 where none is."""
    return (part.number or ADDED.get(part.arithmetic, 0.0)) if part.evidence.role is Role.SHIFT else 0.0
