"""RoPE: the permutation from the pairs of features that the source rotates to those that the target rotates.

The key `rope` of a rule and the two orders of pairs are in `convert.layers.weight_keys`; `convert.core.ops` permutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from convert.core.axis_groups import AxisGroup
from convert.core.ops import Deinterleave, Interleave, Op
from convert.core.path_pattern import Index
from convert.layers.base import Rule
from convert.layers.target import TargetLayer

Factors = tuple[int | str, ...]
_VALUES = re.compile(r"(?:\w+_)?w?v(?:al|alues?)?(?:_?proj)?")  # how modules call what attention does not rotate


@dataclass(frozen=True)
class Heads:
    """Heads that RoPE rotates, along one axis of an array.

    Attributes:
        at: the axis.
        letter: its letter.
        group: of an axis that is a sum of parts: what it is made of.
        part: the part of the sum that the heads are.
    """

    at: int
    letter: str
    group: AxisGroup | None = None
    part: int = 0

    def shown(self, rule: Rule) -> str:
        """Return which features of the array they are, for people."""
        assert rule.rope is not None
        if self.group is not None:
            return f"each {rule.rope.axis} of part {self.part + 1}, {' '.join(self.group.terms[self.part])}"
        return self.letter if self.letter == rule.rope.axis else f"each {rule.rope.axis} of {self.letter}"


def locate_heads(rule: Rule, products: Mapping[str, Factors]) -> Rule:
    """Find the output axes that hold the heads which RoPE rotates; a leaf may have all heads in one axis.

    Args:
        products: letter -> factors of its size, as the rule file declares them.
    """
    if rule.rope is None:
        return rule
    axis, outputs = rule.rope.axis, "".join(dict.fromkeys("".join(outputs for _, outputs in rule.kind.weight_axes)))
    holders = "".join(x for x in outputs if x == axis or axis in _last_factors(x, products))
    return replace(rule, rope=replace(rule.rope, leaf_axes=holders))


def _last_factors(letter: str, products: Mapping[str, Factors]) -> list[str]:
    """Return the last factor of a letter, the last factor of that one, and so on; a factor of 1 does not count."""
    found: list[str] = []
    while factors := [factor for factor in products.get(letter, ()) if factor != 1]:
        last = factors[-1]
        if not isinstance(last, str) or last in found:
            break
        found.append(letter := last)
    return found


def expand_product(letter: str, products: Mapping[str, Factors]) -> Factors:
    """Return the factors of a letter, the slowest axis first; of a factor that is a product of letters, its factors.

    >>> expand_product("E", {"E": ("M", "H"), "M": ("K", 2), "H": (64,)})
    ('K', 2, 'H')
    """
    factors: Factors = tuple(factor for factor in products.get(letter, ()) if factor != 1)
    if not any(isinstance(factor, str) for factor in factors):
        return (letter,)
    rest = {name: of for name, of in products.items() if name != letter}
    return tuple(
        inner
        for factor in factors
        for inner in (expand_product(factor, rest) if isinstance(factor, str) else (factor,))
    )


def check_rope(rule: Rule, layer: TargetLayer) -> None:
    """Check that the axis that RoPE rotates is one of the rule's output axes, and that the rule says which heads RoPE rotates.

    Raises:
        ValueError: it is none, the heads are not known, or a target has `rope:` and the rule has none.
    """
    rope = rule.rope
    if rope is None:
        if any(layer.rope is not None for _, layer in rule.layers):
            raise ValueError("the target has `rope:` and the rule has none; write the key for the source, too")
        return
    axes = [outputs for _, outputs in rule.kind.weight_axes] or [""]
    if any(not set(rope.leaf_axes) & set(letters) for letters in axes):
        raise ValueError(
            f"RoPE rotates {rope.axis}, which is not among the layer's output axes {', '.join(axes) or 'nothing'}, and is not "
            "the last factor of one of them in `axes`"
        )
    sums = [(variant, group) for variant in rule.kind.variants or (None,) for group in _sums(rule, variant)]
    if rope.parts is not None and not sums:
        raise ValueError("`parts` of `rope:` names parts of an axis that is a sum, such as (N H + K H + K H), and the rule has none")  # fmt: skip
    for variant, group in sums:
        _check_parts(rule, layer, variant, group)
    _check_modules(rule, layer)


def _sums(rule: Rule, variant: str | None) -> list[AxisGroup]:
    return [group for group in rule.kind.axis_groups(variant).values() if len(group.parts) > 1]


def _holds_heads(rule: Rule, letters: str) -> bool:
    return rule.rope is not None and not set(rule.rope.leaf_axes).isdisjoint(letters)


def _check_parts(rule: Rule, layer: TargetLayer, variant: str | None, group: AxisGroup) -> None:
    """Check that the rule says which parts of a sum RoPE rotates, and that the target's tensor can have them so.

    Raises:
        ValueError: it does not, or it cannot.
    """
    rope = rule.rope
    assert rope is not None
    inside = [k for k, term in enumerate(group.terms) if _holds_heads(rule, term)]
    outside = not inside and set(group.terms[0]) <= set(
        rule.kind.weight_axes[0][1]
    )  # of an output: all parts have the heads
    having = inside if inside else [*range(len(group.parts))] if outside else []
    wrong = [k for k in rope.parts or () if k not in having]
    if wrong:
        raise ValueError(
            f"RoPE rotates {rope.axis} of part {wrong[0] + 1}, and {group} has {len(group.parts)} parts, of which "
            f"{', '.join(str(k + 1) for k in having) or 'none'} {'has' if len(having) == 1 else 'have'} {rope.axis}"
        )
    if rope.parts is None and len(having) == len(group.parts):
        raise ValueError(
            f"all parts of {group} have {rope.axis}, and RoPE does not rotate values; name the parts that it rotates, such as "
            f"`rope: {{{rope.axis}: {rope.pairs}, parts: [1, 2]}}`"
        )
    if len(layer.path.groups) > len(rule.path.groups):
        return  # each part is a tensor
    rotated = having if rope.parts is None else list(rope.parts)
    if outside and len(rotated) < len(group.parts):
        raise ValueError(
            f"RoPE rotates some parts of {group}, the heads are an axis of their own, and {layer.path} has all parts; name one target for "
            "each part"
        )
    for k in rotated if inside else ():
        if group.terms[k][-1] not in rope.leaf_axes:
            raise ValueError(
                f"{layer.path} has all parts of {group}, and {rope.axis} is not the last axis of part {k + 1}; name one target for each part"
            )


def _check_modules(rule: Rule, layer: TargetLayer) -> None:
    """Check that the rule does not rotate the values of attention together with queries and keys.

    Raises:
        ValueError: elements of one axis go to several modules, or a module is called as values are.
    """
    rope = rule.rope
    assert rope is not None
    if rule.kind.parts:
        return  # `parts` names them
    fix = (
        f"write the axis as a sum of parts, such as (N (1 + 1 + 1) {rope.axis}), and name those that RoPE rotates: "
        f"`rope: {{{rope.axis}: {rope.pairs}, parts: [1, 2]}}`"
    )
    split = [piece for piece in layer.path.pieces if isinstance(piece, Index) and piece.words and piece.name in rule.split_axes(layer)]  # fmt: skip
    if split or len(layer.path.groups) > len(rule.path.groups):
        words = split[0].words if split else layer.path.groups[-1].words
        raise ValueError(f"one leaf holds {', '.join(words)}, and RoPE would rotate all of them; {fix}")
    for group in layer.path.groups or rule.path.groups:
        values = [word for word in group.words if _VALUES.fullmatch(word.rpartition(".")[2])]
        if values:
            raise ValueError(f"RoPE would rotate {', '.join(group.words)}, and {values[0]} is the name of values; write a rule of their own for them, without `rope`")  # fmt: skip


def rotated_heads(rule: Rule, letters: str, variant: str | None = None) -> Iterator[Heads]:
    """Yield the heads of an array that RoPE rotates.

    Args:
        letters: of the array's axes.
    """
    rope = rule.rope
    if rope is None:
        return
    groups = rule.kind.axis_groups(variant)
    chosen = next((group.chosen for group in groups.values() if group.chosen is not None), None)
    if rope.parts is not None and chosen is not None and chosen not in rope.parts:
        return
    for at, letter in enumerate(letters):
        group = groups.get(letter)
        if group is None or group.letters is not None:
            continue
        found = [k for k, term in enumerate(group.terms) if _holds_heads(rule, term)]
        yield from (Heads(at, letter, group, k) for k in found if rope.parts is None or k in rope.parts)
    own = rope.axis if rope.axis in letters else next((x for x in letters if x in rope.leaf_axes), "")
    if own:
        yield Heads(letters.index(own), own)


def rope_permutation(
    rule: Rule, layer: TargetLayer, letters: str, sizes: Mapping[str, int], variant: str | None = None
) -> tuple[Op, ...]:
    """Return the permutation from the source's RoPE pairs to the target's, for an array with the axes `letters`.

    Raises:
        ValueError: an axis holds several heads, and their width or number is unknown.
    """
    if rule.rope is None or rule.rope.pairs == target_rope_pairs(layer):
        return ()
    move = Deinterleave if rule.rope.pairs == "interleaved" else Interleave
    return tuple(
        move(
            heads.at,
            head_width(rule, heads, sizes),
            None if heads.group is None else heads.group.run_of(heads.part, sizes),
        )
        for heads in rotated_heads(rule, letters, variant)
    )


def head_width(rule: Rule, heads: Heads, sizes: Mapping[str, int]) -> int | None:
    """Return the number of features of one of several heads in an axis; None: the axis is one head.

    Raises:
        ValueError: it is unknown.
    """
    rope = rule.rope
    if rope is None or heads.letter == rope.axis:
        return None
    if rope.axis not in sizes:
        raise ValueError(
            f"RoPE rotates {heads.shown(rule)}, and nothing gives {rope.axis} a size; declare it in `axes`, such as "
            f"{rope.axis}: {{is: ..., equals: 64}}, or with --set {rope.axis}=64"
        )
    return sizes[rope.axis]


def target_rope_pairs(layer: TargetLayer) -> str:
    """Return how the target's code pairs features; by default feature k of a head with feature k + H/2."""
    return layer.rope or "half-split"
