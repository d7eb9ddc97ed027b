"""Weights that the source keeps as two: low-rank products, LoRA pairs, a kernel and a scale. ``X,A,B->Y`` is ``X,W->Y`` with W = A B.

The product is computed when the leaves are read, and cannot be split into the pair again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convert.core.einsum import Projection, parse_projection
from convert.core.fields import Key, Record, Scalar
from convert.layers.shared_keys import PATTERN, parse_fact

SECOND = "second"  # role of the leaves of `times`, in a pair that replaces the weight
PLUS_FIRST, PLUS_SECOND = "plus_first", "plus_second"  # roles of the leaves of a pair that is added to a weight
_SCALE = re.compile(r"(?P<over>\$?[\w.+-]+?)(?:/(?P<root>sqrt\()?(?P<under>[A-Za-z]|[0-9.]+)(?(root)\)))?")


@dataclass(frozen=True)
class Product:
    """``X,A,B->Y``, as two matrices.

    Attributes:
        equation: as written, spaces removed.
        first, second: letters of A and B as stored.
        whole: the equation with one weight in place of the two, its letters those of A and then those of B.
    """

    equation: str
    first: str
    second: str
    whole: Projection

    @property
    def shared(self) -> str:
        """The axes that A and B share, and the result has not: the rank. None of a kernel and a scale of its inputs or results."""
        return "".join(letter for letter in self.first if letter in self.second and letter not in self.whole.weight)


def parse_product(equation: str) -> Product:
    """Parse a three-operand einsum ``X,A,B->Y`` whose A and B make one weight.

    >>> parse_product("...D,DR,RNH->...NH").whole.equation
    '...D,DNH->...NH'
    >>> parse_product("...D,DF,D->...F").whole.equation
    '...D,DF->...F'

    Raises:
        ValueError: not such an equation, with the reason.
    """
    text = re.sub(r"\s", "", equation)
    left, arrow, y = text.partition("->")
    operands = left.split(",")
    if not arrow or len(operands) != 3:
        raise ValueError(f"{equation!r} is not an einsum of three operands, X,A,B->Y with the two weights after X")
    x, a, b = operands
    for operand in (a, b):
        if not operand.isalpha() or not operand.isascii() or len(set(operand)) < len(operand):
            raise ValueError(f"{operand!r} in {equation!r} is not a sequence of different letters")
    shared = [letter for letter in a if letter in b]
    if not shared:
        raise ValueError(
            f"the two weights of {equation!r} share no axis; a rank is in both, and in neither input nor result. A scale has axes of the other weight"
        )
    kept = [letter for letter in shared if letter in x or letter in y]
    outside = [letter for letter in kept if letter in y or set(b) > set(kept)]
    if outside:
        raise ValueError(
            f"{', '.join(outside)} of {equation!r} is in both weights and in the input or the result as well: their product "
            "is block diagonal, not a single matrix; a scale of the inputs has their axes alone, and comes second"
        )
    whole = "".join(letter for letter in dict.fromkeys(a + b) if letter not in shared or letter in kept)
    return Product(text, a, b, parse_projection(f"{x},{whole}->{y}"))


@dataclass(frozen=True)
class Scale:
    """A factor such as ``16/R`` or ``$lora_alpha/sqrt(R)``.

    Attributes:
        text: as the rule has it.
        over: a number, or the name of a fact.
        under: a number, or a letter whose size it is.
        root: whether it is divided by the square root of that.
    """

    text: str
    over: float | str
    under: float | str = 1.0
    root: bool = False

    @property
    def fact(self) -> str | None:
        return self.over if isinstance(self.over, str) else None

    def value(self, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> float:
        """Return the number.

        Raises:
            ValueError: a fact or a size is not known, or is no number.
        """
        over = facts.get(self.over) if isinstance(self.over, str) else self.over
        known = isinstance(over, int | float) and not isinstance(over, bool)
        if not known:
            raise ValueError(f"the product is scaled by {self.text}; give it with --set {self.fact}=...")
        if isinstance(self.under, str) and self.under not in sizes:
            raise ValueError(f"the product is scaled by {self.text}, and no leaf gives {self.under} a size")
        under = float(sizes[self.under] if isinstance(self.under, str) else self.under)
        return float(over or 0) / (math.sqrt(under) if self.root else under)


def parse_scale(text: str | int | float) -> Scale:
    """Parse ``2``, ``16/R``, ``$lora_alpha/R`` or ``$lora_alpha/sqrt(R)``.

    Raises:
        ValueError: something else, zero, or no finite number.
    """
    bare = re.sub(r"\s", "", str(text))
    found = _SCALE.fullmatch(bare)
    problem = f"expected a factor such as 2, 16/R or $lora_alpha/R, not {text!r}"
    if found is None:
        raise ValueError(problem)
    try:
        over = parse_fact(found["over"]) if found["over"].startswith("$") else float(found["over"])
        under = found["under"] or "1"
        below = under if under.isalpha() else float(under)
    except ValueError:
        raise ValueError(problem) from None
    if any(isinstance(number, float) and (number == 0 or not math.isfinite(number)) for number in (over, below)):
        raise ValueError(problem)
    return Scale(bare, over, below, found["root"] is not None)


ONE = Scale("1", 1.0)


@dataclass(frozen=True)
class Plus:
    """A product that is added to a weight: ``X,W->Y`` plus `scale` times ``X,A,B->Y``."""

    product: Product
    scale: Scale


@dataclass(frozen=True)
class Pair:
    """The two leaves of a low-rank product, which are merged into one weight before it is compiled.

    Attributes:
        product: their equation.
        scale: the factor of the product.
        roles: of the leaves A and B.
        added: whether the product is added to a leaf with the role ``weight``; otherwise it is the weight.
    """

    product: Product
    scale: Scale
    roles: tuple[str, str]
    added: bool


def is_scale(pair: Any) -> bool:
    """Return whether the second leaf of a pair multiplies axes of the first, one by one."""
    return isinstance(pair, Pair) and not pair.added and not pair.product.shared


PLUS = Record(
    {
        "einsum": Key(
            Scalar(str, "an einsum such as ...D,DR,RE->...E", parse_product),
            "Equation of the source, X,A,B->Y, with the pair after the input.",
            required=True,
            example="...D,DR,RE->...E",
        ),
        "from": Key(PATTERN, "Path of A.", required=True),
        "times": Key(PATTERN, "Path of B.", required=True),
        "scale": Key(
            Scalar((str, int, float), "a factor such as 16/R", parse_scale),
            "Factor that the source multiplies the product by: 2, 16/R, $lora_alpha/R or $lora_alpha/sqrt(R). Default: 1.",
        ),
    },
    "a pair that is added",
)
EITHER_EQUATION = Scalar(
    str,
    "an einsum such as ...D,DNH->...NH",
    lambda text: parse_product(text) if text.partition("->")[0].count(",") == 2 else parse_projection(text),
)
