"""Mistakes with the optional keys of a weight: prescaled_by, rope, flattened, weight_norm, spectral_norm.

Where a rule has no such key, the opposite mistake is tried: the key was wrongly applied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.ops import Deinterleave, Interleave, Op, Permute, Reshape, Take, apply
from convert.core.tensor_spec import numpy_dtype
from convert.core.value_ops import Cast, Multiply
from convert.core.weight_norm_ops import SpectralNorm, Standardize, WeightNorm
from convert.layers.base import PlanView, Rule, Step
from convert.layers.leaf_reader import LeafReader
from convert.layers.mistake import Mistake, symmetric
from convert.layers.step_tensor import expected, maker
from convert.layers.transforms.rope import Heads, head_width, rotated_heads
from convert.layers.transforms.weight_normalization import kept
from convert.layers.transforms.weight_transforms import target_order
from convert.layers.weight_keys import Factor

Array = np.ndarray[Any, np.dtype[Any]]
NOT_REMOVED = "prescale not removed"
NEEDLESS_FACTOR = "weight rescaled although the source does not prescale it"
TWICE = "prescale applied twice"
STILL_INTERLEAVED = "RoPE pairs still interleaved"
DEINTERLEAVED = "RoPE pairs de-interleaved needlessly"
INTERLEAVED = "RoPE pairs interleaved needlessly"
OTHER_WIDTH = "RoPE pairs of heads of another width"
MAX_WIDTH = 512  # of a head; known ones have at most 256 features
ACROSS_HEADS = "RoPE pairs reordered over all heads at once"
SOURCE_ORDER, NEEDLESS_ORDER = "flattened in the source's order", "flattened in another order needlessly"
NOT_FOLDED, STORED_SIGMA = "normalisation of the weight left out", "divided by the stored sigma"
STEPPED = "a step of the power iteration too many"
NORM_FOR_SCALE = "the norm of the kernel for its scale"


def with_ops(step: Step, source: LeafReader, ops: tuple[Op, ...]) -> Callable[[], Array]:
    """Return what computes the tensor of a step of one part by other operations."""
    return maker(step, source, (replace(step.parts[0], ops=ops),))


def without_norms(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return the operations without those that normalise or standardise the weight."""
    return tuple(op for op in ops if not isinstance(op, (Standardize, WeightNorm, SpectralNorm)))


# ---- a factor


def factor_mistakes(step: Step, rule: Rule, source: LeafReader, likely: Factor | None) -> Iterator[Mistake]:
    """Yield mistakes with the factor that a weight carries.

    Args:
        likely: a factor that sources fold into such a weight; it is tried where the rule names none.
    """
    part = step.parts[0]
    if rule.prescaled_by is not None:
        text = rule.prescaled_by.text
        instead = f"the weight without the factor {text} that the source folds into it"
        left_in = with_ops(step, source, tuple(op for op in part.ops if not isinstance(op, Multiply)))
        yield Mistake(NOT_REMOVED, NEEDLESS_FACTOR, f"the weight with its factor {text}", instead, left_in, NOT_REMOVED)
        inverted = tuple(Multiply(1 / op.value) if isinstance(op, Multiply) else op for op in part.ops)
        if inverted != part.ops:  # -1 twice is none
            made = with_ops(step, source, inverted)
            yield symmetric(TWICE, f"the weight with the factor {text} twice", instead, made, TWICE)
    elif likely is not None:
        wide = "float64" if step.spec.dtype == "float64" else "float32"
        bare = tuple(op for op in part.ops if not isinstance(op, Cast))
        undone = (*bare, Cast(wide), Multiply(1 / likely.value(dict(part.axes))), Cast(step.spec.dtype))
        gives = f"the weight without a factor {likely.text}, as if the source had folded it in"
        make = with_ops(step, source, undone)
        yield Mistake(NEEDLESS_FACTOR, NOT_REMOVED, gives, "the weight as the source stores it", make, NEEDLESS_FACTOR)


def fact_factor_mistakes(step: Step, rule: Rule, plan: PlanView) -> Iterator[Mistake]:
    """Yield factors that a fact gives, once or squared, in place of the one that the rule names, or of none."""
    part, plain = step.parts[0], replace(rule, prescaled_by=None)
    stored = replace(step, parts=(replace(part, ops=tuple(op for op in part.ops if not isinstance(op, Multiply))),))
    declared = rule.prescaled_by.text if rule.prescaled_by is not None else ""
    found: dict[float, list[Factor]] = {}
    for name, value in sorted(plan.facts.items(), key=lambda fact: f"${fact[0]}" not in declared):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0 or value == 1:
            continue
        for power, inverse in itertools.product((2, 1), (True, False)):
            shown = f"{'1/' if inverse else ''}${name}{'^2' if power == 2 else ''}"
            factor = Factor(shown, float(value), power, inverse)
            found.setdefault(factor.value({}), []).append(factor)
    for equal in found.values():
        if declared not in (texts := [factor.text for factor in equal]):
            text = f"{texts[0]} (the same number as {' and '.join(texts[1:])})" if texts[1:] else texts[0]
            for mistake in factor_mistakes(stored, plain, plan.source, replace(equal[0], text=text)):
                made = f"the weight without the factor {declared}" if declared else mistake.instead
                yield replace(mistake, instead=made)


# ---- RoPE


def rope_mistakes(step: Step, rule: Rule, plan: PlanView, *, heads: bool = False) -> Iterator[Mistake]:
    """Yield mistakes with the order of the pairs that RoPE rotates.

    Args:
        heads: whether the outputs may be heads, though the rule says nothing of RoPE.
    """
    part, source = step.parts[0], plan.source
    letter = rule.rope.axis if rule.rope is not None else part.groups[0][-1:] if part.groups else ""
    halves, neighbours = f"pairs of features (0, {letter}/2)", "pairs of features (0, 1)"
    moves = [op for op in part.ops if isinstance(op, (Deinterleave, Interleave))]
    if moves:
        bare = with_ops(step, source, tuple(op for op in part.ops if op not in moves))
        split = isinstance(moves[0], Deinterleave)
        name, converse = (STILL_INTERLEAVED, DEINTERLEAVED) if split else (DEINTERLEAVED, STILL_INTERLEAVED)
        stored, wanted = (neighbours, halves) if split else (halves, neighbours)
        gives, instead = f"in the source's order, {stored}", f"in the order of the target, {wanted}"
        yield Mistake(name, converse, gives, instead, bare, name)
        if moves[0].width is not None:
            flat = tuple(
                replace(op, width=None) if isinstance(op, (Deinterleave, Interleave)) else op for op in part.ops
            )
            gives = f"with all of {part.groups[0]} reordered as one head"
            yield symmetric(
                ACROSS_HEADS, gives, "with each head reordered by itself", with_ops(step, source, flat), ACROSS_HEADS
            )
            yield from _other_widths(step, source)
        return
    if rule.rope is None and rule.kind_name == "linear" and len(part.groups[0]) == 1 and rule.flattened is None:
        yield from _undeclared_heads(step, plan)
    letters = "".join(letter for letter, _ in part.axes)
    found = next(rotated_heads(rule, letters), None) if rule.rope is not None else Heads(letters.find(letter), letter)
    axis = -1 if found is None or found.group is not None else found.at
    if (rule.rope is None and not heads) or axis < 0 or part.axes[axis][1] % 2:
        return
    width = head_width(rule, found, plan.sizes) if found is not None else None
    moved = _deinterleaved(step, source, axis, width)
    gives = f"in the order of {halves}, as if the source had {neighbours}"
    yield Mistake(DEINTERLEAVED, STILL_INTERLEAVED, gives, "in the source's order", moved, DEINTERLEAVED)


def _deinterleaved(step: Step, source: LeafReader, axis: int, width: int | None) -> Callable[[], Array]:
    """Return what computes the tensor with the pairs of one axis of its letters reordered; the leaf may have axes of size 1 besides."""
    part = step.parts[0]
    stored = source.leaves[part.leaf].spec
    for op in part.ops[: part.opening]:
        stored = op.out_spec(stored)
    pairs = (Reshape(tuple(size for _, size in part.axes)), Deinterleave(axis, width), Reshape(stored.shape))
    return with_ops(step, source, (*part.ops[: part.opening], *pairs, *part.ops[part.opening :]))


def _other_widths(step: Step, source: LeafReader) -> Iterator[Mistake]:
    """Yield the tensor with heads of another width."""
    ops = step.parts[0].ops
    declared = next(op for op in ops if isinstance(op, (Deinterleave, Interleave)))
    run = step.spec.shape[0] if declared.within is None else declared.within[2] - declared.within[1]
    for width in range(4, min(run, MAX_WIDTH) + 1, 2):
        if run % width or width in (declared.width, run):
            continue
        moved = tuple(replace(op, width=width) if op is declared else op for op in ops)
        gives = f"with the RoPE pairs of heads of {width} features"
        instead = f"with those of heads of {declared.width} features"
        yield symmetric(OTHER_WIDTH, gives, instead, with_ops(step, source, moved), f"{OTHER_WIDTH} {width}")


def _undeclared_heads(step: Step, plan: PlanView) -> Iterator[Mistake]:
    """Yield a tensor without `rope` as if its rows were heads, of a width that is the size of a letter, with pairs (0, 1)."""
    letter = step.parts[0].groups[0]
    part = step.parts[0]
    rows = dict(part.axes)[letter]
    at = [name for name, _ in part.axes].index(letter)
    for width in sorted(set(plan.sizes.values())):
        if not 2 < width < rows or width % 2 or rows % width:
            continue
        moved = _deinterleaved(step, plan.source, at, width)
        gives = f"with each {width} rows in the order of the pairs (0, {width}/2), as if the source had pairs (0, 1)"
        yield Mistake(
            DEINTERLEAVED, STILL_INTERLEAVED, gives, "in the source's order", moved, f"{DEINTERLEAVED} {width}"
        )


# ---- a map that is flattened


def flattened_mistakes(step: Step, rule: Rule, plan: PlanView) -> Iterator[Mistake]:
    """Yield the weight with a flattened map in the order of the source, where the rule names a map."""
    part, layer = step.parts[0], rule.layer(plan.target)
    if rule.flattened is None or layer is None:
        return
    order = target_order(rule, layer)
    groups = tuple(group.replace(order, rule.flattened.order) for group in part.groups)
    if groups == part.groups:
        return
    letters = [letter for letter, _ in part.axes]
    first, rest = part.ops[: part.opening], part.ops[part.opening :]
    takes = (*first, *(op for op in rest if isinstance(op, Take)))
    behind = tuple(op for op in rest if not isinstance(op, (Take, Permute, Reshape)))
    moved = (
        Reshape(tuple(size for _, size in part.axes)),
        Permute(tuple(letters.index(x) for x in "".join(groups))),
        Reshape(step.spec.shape),
    )
    gives, instead = (f"in the order {' '.join(letters)}" for letters in (rule.flattened.order, order))
    make = with_ops(step, plan.source, (*takes, *moved, *behind))
    yield Mistake(SOURCE_ORDER, NEEDLESS_ORDER, gives, instead, make, SOURCE_ORDER)


def undeclared_map(step: Step, source: LeafReader) -> Iterator[Mistake]:
    """Yield the weight as if the source had flattened a map of any number of channels, where the rule names no map."""
    width = step.spec.shape[-1]
    for channels in range(2, width // 2 + 1):
        if width % channels:
            continue

        def make(channels: int = channels) -> Array:
            right = expected(step, source)
            split = right.reshape(*right.shape[:-1], width // channels, channels)
            return np.ascontiguousarray(split.swapaxes(-1, -2)).reshape(right.shape)

        grid = f"{width // channels} x {channels}"
        gives = f"with its {width} columns as a grid of {grid}, transposed: a map with its channels first, or heads and their features exchanged"
        yield Mistake(NEEDLESS_ORDER, SOURCE_ORDER, gives, "with its columns in the source's order", make)


# ---- weight norm and spectral norm


def normalization_mistakes(step: Step, rule: Rule, plan: PlanView) -> Iterator[Mistake]:
    """Yield mistakes with a weight that the source normalises at every call."""
    layer = rule.layer(plan.target)
    if rule.normalized is None or layer is None:
        return
    if step.role == rule.normalized.role:
        yield from _norm_for_scale(step, plan)
    elif not kept(rule, layer):
        yield from _not_folded(step, plan)


def _norm_for_scale(step: Step, plan: PlanView) -> Iterator[Mistake]:
    """Yield the norm of the kernel in place of its scale, where the target keeps both."""
    stem = step.name.rstrip("0123456789g_")
    weights = (s for s in plan.steps if s.role == "weight" and s.rule == step.rule and s.name.startswith(stem))
    weight = next(weights, None)
    if weight is None or weight.spec.shape[0] != step.spec.shape[0]:
        return

    def make() -> Array:
        kernel = expected(weight, plan.source).astype(np.float64)
        norms = np.sqrt(np.sum(np.square(kernel), axis=tuple(range(1, kernel.ndim))))
        return np.asarray(norms.reshape(step.spec.shape).astype(numpy_dtype(step.spec.dtype)))

    yield symmetric(NORM_FOR_SCALE, "the norm of each row of the kernel", "the scale", make)


def _not_folded(step: Step, plan: PlanView) -> Iterator[Mistake]:
    source, ops = plan.source, step.parts[0].ops
    fold = next((op for op in ops if isinstance(op, (WeightNorm, SpectralNorm))), None)
    if fold is None:
        return
    bare = with_ops(step, source, without_norms(ops))
    yield symmetric(NOT_FOLDED, "the kernel as stored", str(fold), bare)
    if not isinstance(fold, SpectralNorm):
        return
    if fold.v is not None:
        stepped = replace(fold, v=None, steps=1)
        moved = tuple(stepped if op is fold else op for op in ops)
        yield symmetric(STEPPED, str(stepped), str(fold), with_ops(step, source, moved))
    sigma = f"{fold.u.leaf[:-1]}sigma"  # flax stores the vector as .../u, the norm as .../sigma
    if not fold.u.leaf.endswith("u") or sigma not in source.leaves:
        return
    stack = tuple(op for op in fold.u.ops if isinstance(op, Take))

    def divided() -> Array:
        kernel = apply(without_norms(ops), source.read(step.parts[0].leaf)).astype(np.float64)
        value = apply(stack, source.read(sigma)).astype(np.float64)
        return np.asarray((kernel / value).astype(numpy_dtype(step.spec.dtype)))

    yield symmetric(STORED_SIGMA, f"the kernel over {sigma}", str(fold), divided)


def likely_factor(letter: str, *, inverse: bool) -> Factor:
    """Return ``sqrt(LETTER)``, or ``1/sqrt(LETTER)``."""
    return Factor(f"1/sqrt({letter})" if inverse else f"sqrt({letter})", letter, power=0.5, is_inverse=inverse)
