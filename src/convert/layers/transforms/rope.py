"""RoPE: the permutation from the pairs of features that the source rotates to those that the target rotates.

The key `rope` of a rule and the two orders of pairs are in `convert.layers.weight_keys`; `convert.core.ops` permutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from convert.core.ops import Deinterleave, Interleave, Op
from convert.layers.base import Rule
from convert.layers.target import TargetLayer

Factors = tuple[int | str, ...]


def locate_heads(rule: Rule, products: Mapping[str, Factors]) -> Rule:
    """Find the output axis that holds the heads which RoPE rotates, where the leaf has all heads in one axis.

    Args:
        products: letter -> factors of its size, as the rule file declares them.
    """
    if rule.rope is None:
        return rule
    outputs = "".join(dict.fromkeys("".join(outputs for _, outputs in rule.kind.weight_axes)))
    if rule.rope.axis in outputs:
        return rule
    for letter in outputs:
        if rule.rope.axis in _last_factors(letter, products):
            return replace(rule, rope=replace(rule.rope, leaf_axis=letter))
    return rule


def _last_factors(letter: str, products: Mapping[str, Factors]) -> list[str]:
    """Return the last factor of a letter, the last factor of that one, and so on."""
    found: list[str] = []
    while (factors := products.get(letter)) and isinstance(factors[-1], str) and factors[-1] not in found:
        letter = factors[-1]
        found.append(letter)
    return found


def expand_product(letter: str, products: Mapping[str, Factors]) -> Factors:
    """Return the factors of a letter, the slowest axis first; of a factor that is a product of letters, its factors.

    >>> expand_product("E", {"E": ("M", "H"), "M": ("K", 2), "H": (64,)})
    ('K', 2, 'H')
    """
    factors: Factors = products.get(letter, ())
    if not any(isinstance(factor, str) for factor in factors):
        return (letter,)
    rest = {name: of for name, of in products.items() if name != letter}
    return tuple(
        inner
        for factor in factors
        for inner in (expand_product(factor, rest) if isinstance(factor, str) else (factor,))
    )


def check_rope(rule: Rule) -> None:
    """Check that the axis that RoPE rotates is one of the rule's output axes.

    Raises:
        ValueError: the axis is not an output axis, or a target has `rope:` and the rule has none.
    """
    if rule.rope is None:
        if any(layer.rope is not None for _, layer in rule.layers):
            raise ValueError("the target has `rope:` and the rule has none; write the key for the source, too")
        return
    axes = [outputs for _, outputs in rule.kind.weight_axes] or [""]
    if any(rule.rope.leaf_axis not in letters for letters in axes):
        raise ValueError(
            f"RoPE rotates {rule.rope.axis}, which is not among the layer's output axes {', '.join(axes) or 'nothing'}, and is not "
            "the last factor of one of them in `axes`"
        )


def rope_permutation(rule: Rule, layer: TargetLayer, letters: str, sizes: Mapping[str, int]) -> tuple[Op, ...]:
    """Return the permutation from the source's RoPE pairs to the target's, for an array with the axes `letters`.

    Raises:
        ValueError: the heads are in one axis, and the width of a head is unknown.
    """
    rope = rule.rope
    if rope is None or rope.leaf_axis not in letters or rope.pairs == target_rope_pairs(layer):
        return ()
    move = Deinterleave if rope.pairs == "interleaved" else Interleave
    return (move(letters.index(rope.leaf_axis), head_width(rule, sizes)),)


def head_width(rule: Rule, sizes: Mapping[str, int]) -> int | None:
    """Return the number of features of one of several heads in an axis; None: the axis is one head.

    Raises:
        ValueError: it is unknown.
    """
    rope = rule.rope
    if rope is None or rope.leaf_axis == rope.axis:
        return None
    if rope.axis not in sizes:
        raise ValueError(
            f"RoPE rotates {rope.shown}, and nothing gives {rope.axis} a size; declare it in `axes`, such as "
            f"{rope.axis}: {{is: ..., equals: 64}}, or with --set {rope.axis}=64"
        )
    return sizes[rope.axis]


def target_rope_pairs(layer: TargetLayer) -> str:
    """Return how the target's code pairs features; by default feature k of a head with feature k + H/2."""
    return layer.rope or "half-split"
