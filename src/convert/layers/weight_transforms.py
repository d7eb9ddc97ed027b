"""What the source folds into a weight and the target's code does itself: a factor, and the order of the pairs that RoPE turns.

A rule declares what the weight carries; the multiplication and the permutation that undo it follow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convert.core.fields import Choice, Key, MapOf, Scalar
from convert.core.ops import Deinterleave, Interleave, Multiply, Op

if TYPE_CHECKING:
    from convert.layers.base import Rule, TargetLayer

# RoPE turns pairs of a head's H features. interleaved: (0, 1), (2, 3), ...; half-split: (0, H/2), (1, H/2 + 1), ...
PAIRS = ("interleaved", "half-split")
# How torch keeps a weight norm: names in the module, of the scale (role weight_norm) and of the direction (role weight).
PARAMETRIZATIONS: Mapping[str, Mapping[str, str]] = {
    "weight_norm": {"weight_norm": "parametrizations.weight.original0", "weight": "parametrizations.weight.original1"},
    "old_weight_norm": {"weight_norm": "weight_g", "weight": "weight_v"},
}
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


@dataclass(frozen=True)
class Flattened:
    """An axis that the source makes of the axes of a map, such as D of H, W and C.

    Attributes:
        axis: letter of the axis.
        order: letters of the map's axes, the slowest first; the last one are the channels.
    """

    axis: str
    order: str


def _parse_order(text: str) -> str:
    if not (text.isascii() and text.isalpha() and len(set(text)) == len(text) > 1):
        raise ValueError(
            f"expected the letters of a map's axes in the order in which they are flattened, such as HWC, not {text!r}"
        )
    return text


_ORDER = Scalar(str, "letters such as HWC", _parse_order)
FLATTENED = Key(
    MapOf(_ORDER, "a mapping of an axis to the axes that it is made of, such as {D: HWC}"),
    "axis that the source makes by flattening a map -> the map's axes in its order: {D: HWC}. `axes` gives their sizes",
)
TARGET_FLATTENED = Key(
    _ORDER, "the order in which the target's code flattens the map (default: channels first, such as CHW)"
)


def read_flattened(said: Mapping[str, str] | None) -> Flattened | None:
    """The value of `flattened:`.

    Raises:
        ValueError: not one axis, or one made of itself.
    """
    if said is None:
        return None
    if len(said) != 1:
        raise ValueError(f"`flattened:` names one axis, such as {{D: HWC}}, not {len(said)}")
    (axis, order), *_ = said.items()
    if axis in order:
        raise ValueError(
            f"`flattened:` makes {axis} of {order}, which has {axis} itself; give the axes of the map other letters"
        )
    return Flattened(axis, order)


def check_flattened(rule: Rule) -> None:
    """Whether a rule's axes have the one that it says is flattened.

    Raises:
        ValueError: they do not, or a target speaks of it and the rule does not, or of other axes.
    """
    orders = [layer.flattened for layer in rule.targets.values() if layer.flattened is not None]
    if rule.flattened is None:
        if orders:
            raise ValueError("the target has `flattened:` and the rule has none; say what the source does, too")
        return
    equations = getattr(rule.kind, "equations", None)
    weights = [e.weight for e in equations.values()] if equations else [getattr(rule.kind, "axes", None) or ""]
    if any(rule.flattened.axis not in letters for letters in weights):
        raise ValueError(
            f"`flattened:` speaks of {rule.flattened.axis}, and the leaf has the axes {', '.join(map(' '.join, weights)) or 'nothing'}"
        )
    for order in orders:
        if sorted(order) != sorted(rule.flattened.order):
            raise ValueError(
                f"the target flattens {' '.join(order)}, and the source {' '.join(rule.flattened.order)}: not the same axes"
            )


def target_order(rule: Rule, layer: TargetLayer) -> str:
    """How the target's code flattens the map: torch's convolutions have the channels first."""
    assert rule.flattened is not None
    order = rule.flattened.order
    return layer.flattened or order[-1] + order[:-1]


def unflattened(
    rule: Rule,
    layer: TargetLayer,
    letters: str,
    shape: tuple[int, ...],
    groups: tuple[str, ...],
    sizes: Mapping[str, int],
) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
    """The axes of a leaf with the map's in place of the flattened one, and the groups of the target with them in its order.

    Raises:
        ValueError: the sizes of the map's axes are not known, or do not multiply to that of the flattened one.
    """
    if rule.flattened is None or rule.flattened.axis not in letters:
        return letters, shape, groups
    axis, order = rule.flattened.axis, rule.flattened.order
    unknown = [x for x in order if x not in sizes]
    if unknown:
        raise ValueError(
            f"{axis} is {' '.join(order)} flattened, and nothing gives {' and '.join(unknown)} a size; say it in `axes`, such as "
            f"{unknown[0]}: {{is: ..., equals: 7}}, or with --set {unknown[0]}=7"
        )
    at = letters.index(axis)
    inner = tuple(sizes[x] for x in order)
    if math.prod(inner) != shape[at]:
        product = " x ".join(f"{x}={sizes[x]}" for x in order)
        raise ValueError(f"{axis} has {shape[at]} elements, and the map {product} = {math.prod(inner)}")
    moved = tuple(group.replace(axis, target_order(rule, layer)) for group in groups)
    return letters[:at] + order + letters[at + 1 :], (*shape[:at], *inner, *shape[at + 1 :]), moved


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
    if rule.prescaled_by is None:
        return ()
    return (Multiply(1 / rule.prescaled_by.value(sizes)),)


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
    carried = {"weight_carries": rule.prescaled_by.text} if rule.prescaled_by else {}
    pairs = {"source_rope": rule.rope.pairs, "target_rope": target_pairs(layer)} if rule.rope else {}
    orders = (
        {"source_flattens": rule.flattened.order, "target_flattens": target_order(rule, layer)}
        if rule.flattened
        else {}
    )
    return {**carried, **pairs, **orders}
