"""Compare the converted tree with a dropped tree of the same paths and shapes, such as a moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator

from convert.checkpoints.source import Source
from convert.numerics.bits import same_bits
from convert.planning.ambiguity import TwinTree, twin_trees
from convert.planning.plan import Plan

MAX_BYTES = 64 << 20  # of each tree: trained averages differ in the first leaf


def twin_notes(plan: Plan) -> Iterator[str]:
    """Say which dropped trees have the paths and shapes of the converted tree, and whether the values are the same."""
    source = plan.checkpoint
    for twin in twin_trees(source.leaves, {drop.leaf for drop in plan.dropped}):
        yield f"{twin.tree} is dropped and has the paths and shapes of {twin.of or 'the converted tree'}; {_values(twin, source)}"


def _values(twin: TwinTree, source: Source) -> str:
    """Compare the smallest leaves first, as far as `MAX_BYTES`."""
    size = 0
    pairs = sorted(twin.leaves, key=lambda pair: source.leaves[pair[0]].spec.nbytes)
    for done, (dropped, converted) in enumerate(pairs):
        size += source.leaves[dropped].spec.nbytes
        if done and size > MAX_BYTES:
            return f"the {done} smallest of its {len(pairs)} leaves have the same values"
        one, other = source.read(dropped), source.read(converted)
        if one.dtype != other.dtype:
            return f"its dtype differs ({dropped}: {one.dtype}, not {other.dtype})"
        if not same_bits(one, other):
            return f"its values differ (first in {dropped})"
    return "its values are the same"
