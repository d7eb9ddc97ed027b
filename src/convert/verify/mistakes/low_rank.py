"""Mistakes with a low-rank pair: not merged into its weight, or with another scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from convert.core.ops import Deinterleave, Interleave, Op, Reorder, apply
from convert.core.path_index import path_template
from convert.core.tensor_spec import numpy_dtype
from convert.core.value_ops import Cast, Multiply
from convert.layers.base import Part, Step
from convert.layers.mistake import Mistake, symmetric
from convert.layers.step_tensor import assemble
from convert.planning.low_rank_source import Form, Merge
from convert.planning.plan import Plan

Array = np.ndarray[Any, np.dtype[Any]]
Scale = Callable[[Merge], float]
OTHER_SCALE = "another scale of a pair"


def pair_mistakes(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Yield mistakes with the pairs that the plan merges into the leaves of a tensor."""
    merges = [_merge_of(part, plan) for part in step.parts]
    first = next((merge for merge in merges if merge is not None), None)
    if first is None:
        return

    def merged(base: float, scale: Scale) -> Callable[[], Array]:
        """Return what computes the tensor with other factors of the weight and of the product."""

        def make() -> Array:
            made = []
            for part, merge in zip(step.parts, merges, strict=True):
                if merge is None:
                    leaf = plan.source.read(part.leaf)
                else:
                    leaf = merge.make(plan.checkpoint.read, base, scale(merge))
                made.append(apply(part.ops, leaf))
            return assemble(step.parts, made)

        return make

    right = f"the weight {first.arithmetic}" if first.base else first.arithmetic
    if first.base is not None:
        variants: tuple[tuple[str, str, float, Scale], ...] = (
            ("LoRA pair not merged", "the weight alone", 1.0, lambda merge: 0.0),
            ("LoRA pair merged twice", "the weight with the product added twice", 1.0, lambda merge: 2 * merge.scale),
            ("LoRA pair subtracted", "the weight without the product", 1.0, lambda merge: -merge.scale),
            ("LoRA pair without its weight", "the product alone", 0.0, lambda merge: merge.scale),
        )
        for name, gives, base, scale in variants:
            yield symmetric(name, gives, right, merged(base, scale))
        yield symmetric(
            "LoRA pair merged in bfloat16",
            "the product and the sum computed in bfloat16",
            right,
            _in_bfloat16(step, plan),
        )
        if (exchanged := _exchanged(step, plan)) is not None:
            yield symmetric("LoRA pair exchanged", "the leaves A and B of the pair exchanged", right, exchanged)
        for left_out in _operations(step):
            yield symmetric(
                "LoRA pair without what is done to its weight",
                f"the product without {' and '.join(dict.fromkeys(str(op) for op in left_out))}",
                right,
                _moved_alone(step, plan, left_out),
            )
        for merge in _of_other_layers(first, plan):
            yield symmetric(
                "LoRA pair of another layer",
                f"the pair of {merge.base} added to this weight",
                right,
                _with_pair_of(step, plan, merge),
            )
        for shift, which in ((1, "before"), (-1, "after")) if first.stacked else ():
            yield symmetric(
                "LoRA pair of another layer",
                f"the pair of the layer {which} added to this weight",
                right,
                _with_pair_moved(step, plan, shift),
            )
    rank = _rank(first, plan)
    scales: dict[str, Scale] = {
        "the product without its scale": lambda merge: 1.0,
        "the scale not divided by the rank": lambda merge: merge.scale * rank,
        "the scale divided by the rank once more": lambda merge: merge.scale / rank,
        "the scale divided by the root of the rank": lambda merge: merge.scale * math.sqrt(rank),
        "the scale divided by the rank, not by its root": lambda merge: merge.scale / math.sqrt(rank),
    }
    others = dict.fromkeys(other.scale for other in plan.merges.values() if isinstance(other, Merge) and other.adapter)
    for other in others if first.adapter else ():
        scales[f"the scale {other:g}, that of other pairs"] = partial(_always, other)
    for gives, scale in scales.items():
        if scale(first) != first.scale:
            yield symmetric(OTHER_SCALE, gives, right, merged(1.0, scale))


def _always(scale: float, merge: Merge) -> float:
    return scale


def _merge_of(part: Part, plan: Plan) -> Merge | None:
    merge = plan.merges.get(part.leaf)
    return merge if isinstance(merge, Merge) else None


def _made(step: Step, plan: Plan, leaf: Callable[[Merge], Array]) -> Array:
    """Compute the tensor with other values of its merged leaves."""
    made = []
    for part in step.parts:
        merge = _merge_of(part, plan)
        made.append(apply(part.ops, plan.source.read(part.leaf) if merge is None else leaf(merge)))
    return assemble(step.parts, made)


def _in_bfloat16(step: Step, plan: Plan) -> Callable[[], Array]:
    def narrow(merge: Merge) -> Array:
        dtype = numpy_dtype("bfloat16")
        product = merge.make(plan.checkpoint.read, base=0.0).astype(dtype)
        kept = plan.checkpoint.read(merge.base or "").astype(dtype)
        return np.asarray(kept + product).astype(merge.spec.dtype)

    return lambda: _made(step, plan, narrow)


def _exchanged(step: Step, plan: Plan) -> Callable[[], Array] | None:
    """Return what computes the tensor with A in place of B, where the sizes allow it: turned, unless the shapes are the same."""
    merges = [merge for part in step.parts if (merge := _merge_of(part, plan)) is not None]
    leaves = plan.checkpoint.leaves
    if any(math.prod(leaves[merge.first].spec.shape) != math.prod(leaves[merge.second].spec.shape) for merge in merges):
        return None

    def swapped(merge: Merge) -> Array:
        a, b = (plan.checkpoint.read(leaf) for leaf in (merge.first, merge.second))
        if a.shape == b.shape:
            other = {merge.first: b, merge.second: a}
        else:
            first, second = merge.pair_forms
            rank = merge.product.shared
            other = {merge.first: _turned(b, second, a, first, rank), merge.second: _turned(a, first, b, second, rank)}
        return merge.make(lambda leaf: other[leaf] if leaf in other else plan.checkpoint.read(leaf))

    return lambda: _made(step, plan, swapped)


def _turned(leaf: Array, form: Form, place: Array, other: Form, rank: str) -> Array:
    """Return one leaf of a pair with the axes of the other: the same layers and elements of the rank, its own axes as the other's."""

    def order(form: Form) -> list[int]:
        """The stacked axes, those of the rank, and the rest."""
        axes = form.axes
        return sorted(range(len(axes)), key=lambda k: (not isinstance(axes[k], int), str(axes[k]) not in rank))

    opened, wanted = form.opened(leaf).transpose(order(form)), other.opened(place).transpose(order(other))
    back = np.argsort(order(other))
    return np.asarray(opened.reshape(wanted.shape).transpose(back)).reshape(place.shape)


def _operations(step: Step) -> Iterator[tuple[Op, ...]]:
    """Yield what an export of the pair alone may leave out: the order of RoPE's pairs or of parts, a factor, or both."""
    ops = [op for part in step.parts for op in part.ops]
    orders = tuple(op for op in ops if isinstance(op, Deinterleave | Interleave | Reorder))
    factors = tuple(op for op in ops if isinstance(op, Multiply))
    yield from dict.fromkeys(some for some in (orders + factors, orders, factors) if some)


def _moved_alone(step: Step, plan: Plan, left_out: tuple[Op, ...]) -> Callable[[], Array]:
    """Return what computes the tensor with other operations on the product than on the weight."""

    def make() -> Array:
        made = []
        for part in step.parts:
            merge = _merge_of(part, plan)
            if merge is None:
                made.append(apply(part.ops, plan.source.read(part.leaf)))
                continue
            ops = tuple(op for op in part.ops if not isinstance(op, Cast))
            kept = plan.checkpoint.read(merge.base or "").astype(merge.spec.dtype)
            product = apply(tuple(op for op in ops if op not in left_out), merge.make(plan.checkpoint.read, base=0.0))
            made.append((apply(ops, kept) + product).astype(numpy_dtype(step.spec.dtype)))
        return assemble(step.parts, made)

    return make


def _of_other_layers(merge: Merge, plan: Plan) -> Iterator[Merge]:
    """Yield the merges of the same weight in the layers before and after."""
    pairs = (other for other in plan.merges.values() if isinstance(other, Merge))
    names = [other for other in pairs if other.base and path_template(other.base) == path_template(merge.base or "")]  # fmt: skip
    shapes = plan.checkpoint.leaves
    for k, other in enumerate(names):
        if other.base == merge.base:
            near = (*names[k + 1 : k + 2], *names[max(k - 1, 0) : k])
            same = (one for one in near if shapes[one.first].spec == shapes[merge.first].spec)
            yield from (one for one in same if shapes[one.second].spec == shapes[merge.second].spec)


def _with_pair_of(step: Step, plan: Plan, other: Merge) -> Callable[[], Array]:
    def foreign(merge: Merge) -> Array:
        place = {merge.first: other.first, merge.second: other.second}
        return merge.make(lambda leaf: plan.checkpoint.read(place.get(leaf, leaf)))

    return lambda: _made(step, plan, foreign)


def _with_pair_moved(step: Step, plan: Plan, shift: int) -> Callable[[], Array]:
    """Return what computes the tensor of stacked layers with each layer's pair in another one, this many layers on."""

    def moved(merge: Merge) -> Array:
        leaves = {}
        for name, form in zip((merge.first, merge.second), merge.pair_forms, strict=True):
            axis = (form.stacked if form.shape is None else form.places)[-1]
            leaves[name] = np.roll(plan.checkpoint.read(name), shift, axis)
        return merge.make(lambda leaf: leaves[leaf] if leaf in leaves else plan.checkpoint.read(leaf))

    return lambda: _made(step, plan, moved)


def _rank(merge: Merge, plan: Plan) -> int:
    form = merge.pair_forms[0]
    shape = form.shape or plan.checkpoint.leaves[merge.first].spec.shape
    sizes = dict(zip(form.axes, shape, strict=True))
    return math.prod(sizes[letter] for letter in merge.product.shared)
