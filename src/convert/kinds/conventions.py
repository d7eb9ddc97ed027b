"""What the source folds into a weight and the target's code does itself: a factor, and the order of the pairs that RoPE turns.

A rule declares what the weight carries; the multiplication and the permutation that undo it follow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convert.fields import Choice, Key, MapOf, Scalar
from convert.ops import Deinterleave, Interleave, Multiply, Op

if TYPE_CHECKING:
    from convert.kinds.base import Rule, TargetLayer

# RoPE turns pairs of a head's H features. interleaved: (0, 1), (2, 3), ...; half-split: (0, H/2), (1, H/2 + 1), ...
PAIRS = ("interleaved", "half-split")
_FACTOR = re.compile(r"(?P<over>1/)?(?:sqrt\((?P<root>[^()]+)\)|(?P<plain>[^()/]+))")


@dataclass(frozen=True)
class Factor:
    """A factor that a weight carries, such as ``1/sqrt(H)``.

    Attributes:
        text: as the rule has it.
        of: the letter whose size it is made of, or a number.
        root: whether it is the square root of that.
        over: whether it is one divided by that.
    """

    text: str
    of: str | float
    root: bool
    over: bool

    def value(self, sizes: Mapping[str, int]) -> float:
        """The number.

        Raises:
            ValueError: no leaf gives its letter a size.
        """
        if isinstance(self.of, str) and self.of not in sizes:
            raise ValueError(f"the weight carries {self.text}, and no leaf gives {self.of} a size")
        number = float(sizes[self.of] if isinstance(self.of, str) else self.of)
        number = math.sqrt(number) if self.root else number
        return 1 / number if self.over else number


def parse_factor(text: str | int | float) -> Factor:
    """Reads ``1/sqrt(H)``, ``sqrt(D)``, ``1/8`` or ``0.125``.

    Raises:
        ValueError: something else, or nothing that could be undone.
    """
    said = re.sub(r"\s", "", str(text))
    found = _FACTOR.fullmatch(said)
    inside = (found["root"] or found["plain"]) if found else ""
    of: str | float | None = inside if len(inside) == 1 and inside.isascii() and inside.isalpha() else None
    if of is None and re.fullmatch(r"[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", inside) and 0 < float(inside) < math.inf:
        of = float(inside)
    if found is None or of is None:
        raise ValueError(f"expected a factor above 0 such as 1/sqrt(H), sqrt(D) or 0.125, not {text!r}")
    return Factor(said, of, found["root"] is not None, found["over"] is not None)


@dataclass(frozen=True)
class Rope:
    """A head's features, whose pairs RoPE turns after this layer.

    Attributes:
        axis: letter of the axis.
        pairs: one of `PAIRS`.
    """

    axis: str
    pairs: str


CARRIES = Key(
    Scalar((str, int, float), "a factor such as 1/sqrt(H)", parse_factor),
    "a factor that the source folds into the weight and the target's code applies itself: 1/sqrt(H), sqrt(D), a number",
)
ROPE = Key(
    MapOf(Choice(PAIRS), "a mapping of an axis to its pairs, such as {H: interleaved}"),
    "axis that the source turns by RoPE next -> which features are a pair: interleaved (0, 1), or half-split (0, H/2)",
)
TARGET_ROPE = Key(Choice(PAIRS), "which features the target's code turns as a pair (default: half-split)")


def read_rope(said: Mapping[str, str] | None) -> Rope | None:
    """The value of `rope:`.

    Raises:
        ValueError: not one axis.
    """
    if said is None:
        return None
    if len(said) != 1:
        raise ValueError(f"`rope:` names one axis, such as {{H: interleaved}}, not {len(said)}")
    (axis, pairs), *_ = said.items()
    return Rope(axis, pairs)


def check_rope(rule: Rule) -> None:
    """Whether a rule's axes have the one that it says RoPE turns.

    Raises:
        ValueError: they do not, or a target says how it turns pairs and the rule does not.
    """
    if rule.rope is None:
        if any(layer.rope is not None for layer in rule.targets.values()):
            raise ValueError("the target has `rope:` and the rule has none; say what the source does, too")
        return
    axis = rule.rope.axis
    equations = getattr(rule.kind, "equations", None)
    axes = [e.outputs for e in equations.values()] if equations else [getattr(rule.kind, "axes", None) or ""]
    if any(axis not in letters for letters in axes):
        known = f"output axes {', '.join(axes)}" if equations else f"`axes` {axes[0] or 'nothing'}"
        raise ValueError(f"RoPE turns {axis}, which is not among the layer's {known}")


def undo(rule: Rule, sizes: Mapping[str, int]) -> tuple[Op, ...]:
    """The multiplication that takes the factor out of a weight that carries it."""
    if rule.carries is None:
        return ()
    return (Multiply(1 / rule.carries.value(sizes)),)


def repair(rule: Rule, layer: TargetLayer, letters: str) -> tuple[Op, ...]:
    """The permutation from the source's pairs to the target's, of an array whose axes are called `letters`."""
    if rule.rope is None or rule.rope.axis not in letters or rule.rope.pairs == target_pairs(layer):
        return ()
    axis = letters.index(rule.rope.axis)
    return (Deinterleave(axis) if rule.rope.pairs == "interleaved" else Interleave(axis),)


def target_pairs(layer: TargetLayer) -> str:
    """How the target's code pairs features: PyTorch code for the families here splits a head in halves."""
    return layer.rope or "half-split"


def facts(rule: Rule, layer: TargetLayer) -> dict[str, Any]:
    """What a plan and a header say of them."""
    carried = {"weight_carries": rule.carries.text} if rule.carries else {}
    pairs = {"source_rope": rule.rope.pairs, "target_rope": target_pairs(layer)} if rule.rope else {}
    return {**carried, **pairs}
