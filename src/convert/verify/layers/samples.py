"""What a probe needs of a tensor, read from the checkpoint and the written file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from convert.checkpoints.chunks import Box
from convert.core.ops import Take, apply
from convert.core.weight_norm_ops import operand_leaves
from convert.layers.base import Part, ProbeSample, Rule, Step
from convert.layers.probe import LowRankPair
from convert.layers.transforms.concatenated import in_source_order
from convert.planning.low_rank_source import Merge
from convert.planning.plan import Plan

Array = np.ndarray[Any, np.dtype[Any]]
PRECISIONS = ("float32", "bfloat16", "float16")


def rule_of(part: Part) -> Rule:
    """Return the rule that makes a part of a plan."""
    assert part.rule is not None
    return part.rule


def unstack(part: Part, leaf: Array) -> Array:
    """Take the layer of a part out of a leaf in which layers are stacked."""
    return apply(part.ops[: len(rule_of(part).stacked)], leaf)


def read_layer(plan: Plan, part: Part, rows: slice) -> Array:
    """Read the layer of a part, and nothing else of its leaf.

    Args:
        rows: of the first axis that is not stacked; all of them, or with both ends.
    """
    shape = list(plan.source.leaves[part.leaf].spec.shape)
    origin, axes = [0] * len(shape), list(range(len(shape)))
    for op in part.ops[: len(rule_of(part).stacked)]:
        assert isinstance(op, Take)
        axis = axes.pop(op.axis)
        origin[axis], shape[axis] = op.index, 1
    if rows.stop is not None:
        origin[axes[0]], shape[axes[0]] = rows.start, rows.stop - rows.start
    box = plan.source.read_box(part.leaf, Box(tuple(origin), tuple(shape)))
    return box.reshape([shape[axis] for axis in axes])


def make_sample(
    plan: Plan,
    step: Step,
    part: Part,
    stored: Array,
    written: Array,
    *,
    read_written: Callable[[str], Array],
    device: str,
    seed: int,
) -> ProbeSample:
    """Collect what the probe of a tensor needs.

    Args:
        stored: the leaf, without stacked axes.
        written: the file's tensor; both may be the same rows of a table.
        read_written: reads another tensor of the file.
    """
    rule = rule_of(part)
    layer = rule.layer(plan.target)
    assert layer is not None
    module = step.name.rpartition(".")[0]

    def leaf(role: str) -> Array:
        others = (s.parts[0] for s in plan.steps if s.role == role and s.parts and s.name.rpartition(".")[0] == module)
        other = next(others)
        return _as_used(rule_of(other), role, unstack(other, plan.source.read(other.leaf)))

    def tensor(name: str) -> Array:
        full = f"{module}.{name}"
        other = next((s.parts[0] for s in plan.steps if s.name == full and s.parts), None)
        return read_written(full) if other is None else _in_source_order(plan, other, read_written(full))

    return ProbeSample(
        plan=plan,
        step=step,
        part=part,
        rule=rule,
        layer=layer,
        variant=plan.choices[rule.choice] if rule.choice else None,
        stored=_as_used(rule, step.role, stored),
        operands=tuple(unstack(part, plan.source.read(name)) for name in operand_leaves(part.ops)),
        pair=_pair(plan, part),
        written=_in_source_order(plan, part, part.share(written)),
        precision=step.spec.dtype if step.spec.dtype in PRECISIONS else "float32",
        device=device,
        rng=np.random.default_rng(seed),
        leaf=leaf,
        tensor=tensor,
    )


def _as_used(rule: Rule, role: str, stored: Array) -> Array:
    """Return a leaf with the number that the source adds to it."""
    return stored.astype(np.float64) + rule.numbers[role] if role in rule.numbers else stored


def _in_source_order(plan: Plan, part: Part, written: Array) -> Array:
    """Return what a part fills of a tensor with the parts of its axes as the source concatenates them."""
    rule = rule_of(part)
    layer = rule.layer(plan.target)
    return written if layer is None else in_source_order(written, rule, layer, part.groups, dict(part.axes), plan.sizes)


def _pair(plan: Plan, part: Part) -> LowRankPair | None:
    """Read the leaves that the plan merges into the leaf of a part, as they are stored."""
    merge = plan.merges.get(part.leaf)
    if not isinstance(merge, Merge):
        return None
    taken = {op.axis: op.index for op in part.ops[: len(merge.stacked)] if isinstance(op, Take)}
    elements = [taken[axis] for axis in merge.stacked]
    forms = zip((merge.first, merge.second), merge.pair_forms, strict=True)
    first, second = (form.layer(plan.checkpoint.read(name), elements) for name, form in forms)
    base = None if merge.base is None else unstack(part, plan.checkpoint.read(merge.base))
    return LowRankPair(merge.product.equation, first, second, merge.scale, base)
