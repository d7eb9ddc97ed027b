"""RoPE: the permutation from the pairs of features that the source rotates to those that the target rotates.

The key `rope` of a rule and the two orders of pairs are in `convert.layers.weight_keys`; `convert.core.ops` permutes.
"""

from __future__ import annotations

from convert.core.ops import Deinterleave, Interleave, Op
from convert.layers.base import Rule
from convert.layers.target import TargetLayer


def check_rope(rule: Rule) -> None:
    """Check that the axis that RoPE rotates is one of the rule's output axes.

    Raises:
        ValueError: the axis is not an output axis, or a target has `rope:` and the rule has none.
    """
    if rule.rope is None:
        if any(layer.rope is not None for layer in rule.targets.values()):
            raise ValueError("the target has `rope:` and the rule has none; write the key for the source, too")
        return
    axis = rule.rope.axis
    axes = [outputs for _, outputs in rule.kind.weight_axes] or [""]
    if any(axis not in letters for letters in axes):
        raise ValueError(
            f"RoPE rotates {axis}, which is not among the layer's output axes {', '.join(axes) or 'nothing'}"
        )


def rope_permutation(rule: Rule, layer: TargetLayer, letters: str) -> tuple[Op, ...]:
    """Return the permutation from the source's RoPE pairs to the target's, for an array with the axes `letters`."""
    if rule.rope is None or rule.rope.axis not in letters or rule.rope.pairs == target_rope_pairs(layer):
        return ()
    axis = letters.index(rule.rope.axis)
    return (Deinterleave(axis) if rule.rope.pairs == "interleaved" else Interleave(axis),)


def target_rope_pairs(layer: TargetLayer) -> str:
    """Return how the target's code pairs features; by default feature k of a head with feature k + H/2."""
    return layer.rope or "half-split"
