"""Mistakes with convolutions, maps that are flattened, statistics of norms, and weights that are normalised at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from convert.checkpoints.source import Source
from convert.core.ops import Cast, Flip, Op, Permute, Reshape, Take, apply
from convert.core.tensor_spec import numpy_dtype
from convert.core.weight_norm_ops import SpectralNorm, Standardize, WeightNorm
from convert.layers import Convolution, ConvTranspose, Linear, Rule
from convert.layers.base import Step
from convert.layers.hypothesis import Hypothesis
from convert.layers.weight_normalization import kept
from convert.layers.weight_transforms import target_order
from convert.planning.plan import Plan
from convert.verify.mistakes.hypothesis import expected, maker

Array = np.ndarray[Any, np.dtype[Any]]
FLIPPED, CHANNELS, SPATIAL, AS_STORED = (
    "kernel flipped",
    "input and output channels exchanged",
    "spatial axes exchanged",
    "axes as stored",
)
APART = "results of one channel not beside each other"  # of a depthwise convolution
OTHER_WAY = "transpose_kernel the other way round"
FLATTEN, NEEDLESS = "flattened in the source's order", "flattened in another order needlessly"
STATISTICS, SCALE_BIAS = "mean and variance exchanged", "scale and bias exchanged"
DEVIATION = "standard deviation for the variance"
NOT_STANDARDIZED, NEEDLESSLY = "standardisation left out", "standardised needlessly"
EPSILON_SIDE = "epsilon on the other side of the root"
NOT_FOLDED, STORED_SIGMA = "normalisation of the weight left out", "divided by the stored sigma"
STEPPED = "a step of the power iteration too many"
NORM_FOR_SCALE = "the norm of the kernel for its scale"
EXCHANGED = {
    "running_mean": ("running_var", STATISTICS),
    "running_var": ("running_mean", STATISTICS),
    "weight": ("bias", SCALE_BIAS),
    "bias": ("weight", SCALE_BIAS),
}


def conv_hypotheses(step: Step, plan: Plan) -> Iterator[Hypothesis]:
    """By the kind of layer; nothing for others."""
    rule, source = step.parts[0].rule, plan.source
    layer = rule.layer(plan.target) if rule is not None else None
    if rule is None or layer is None or len(step.parts) != 1:
        return
    if isinstance(rule.kind, (Convolution, ConvTranspose)) and step.role == "weight":
        yield _turned(step, rule.kind.spatial_axes(layer), source)
        if isinstance(rule.kind, ConvTranspose):
            yield from _other_way(step, rule.kind, source)
    if isinstance(rule.kind, Convolution) and step.role == "weight":
        yield from _standardized(step, rule.kind, rule.kind.output_axis(layer), source)
    if rule.normalized is not None:
        yield from _normalized(step, rule, plan, kept(rule, layer))
    if rule.flattened is not None:
        yield from _source_order(step, rule, target_order(rule, layer), source)
    elif isinstance(rule.kind, Linear) and step.role == "weight" and len(step.parts[0].groups[-1]) == 1:
        yield from _undeclared(step, source)
    if step.word in ("batch_norm", "group_norm"):
        yield from _statistics(step, plan)


def layout_name(step: Step, groups: tuple[str, ...]) -> str:
    """What another order of a kernel's axes is called; empty for layers that are no convolutions."""
    part = step.parts[0]
    kind = part.rule.kind if part.rule is not None else None
    if not isinstance(kind, (Convolution, ConvTranspose)):
        return ""
    spatial = set(map(kind.letter, kind.numbers.spatial))
    if any(right != other and sorted(right) == sorted(other) for right, other in zip(part.groups, groups, strict=True)):
        return APART
    moved = {right for right, other in zip(part.groups, groups, strict=True) if right != other}
    if moved <= spatial:
        return SPATIAL
    if not moved & spatial:
        return CHANNELS
    return AS_STORED if "".join(groups) == "".join(x for x, _ in part.axes) else ""


def _turned(step: Step, axes: tuple[int, ...], source: Source) -> Hypothesis:
    """A kernel turned round, as one that was written for a true convolution is, or left as it is in a transposed one."""
    flipped = any(isinstance(op, Flip) for op in step.parts[0].ops)
    words = ("the kernel with its taps in the order in which the source stores them", "the taps in reverse order")
    gives, instead = words if flipped else (words[1], words[0])
    return Hypothesis(FLIPPED, FLIPPED, gives, instead, lambda: np.flip(expected(step, source), axes).copy())


def _other_way(step: Step, kind: ConvTranspose, source: Source) -> Iterator[Hypothesis]:
    """`transpose_kernel` says whether the kernel is turned and which of its axes come in: both at once."""
    if step.spec.shape[0] != step.spec.shape[1]:
        return
    axes = tuple(range(2, len(step.spec.shape)))
    said = "the kernel " + ("not turned round" if not kind.transpose_kernel else "turned round")
    make = lambda: np.flip(expected(step, source), axes).swapaxes(0, 1).copy()  # noqa: E731
    yield Hypothesis(OTHER_WAY, OTHER_WAY, f"{said}, its channels exchanged", "what transpose_kernel says", make)


# ---- weights that are computed


def _bare(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    return tuple(op for op in ops if not isinstance(op, (Standardize, WeightNorm, SpectralNorm)))


def _with(step: Step, source: Source, ops: tuple[Op, ...]) -> Callable[[], Array]:
    return maker(step, source, (replace(step.parts[0], ops=ops),))


def _standardized(step: Step, kind: Convolution, axis: int, source: Source) -> Iterator[Hypothesis]:
    ops = step.parts[0].ops
    if kind.weight_standardization is None:
        for inside, epsilon in (
            (False, 1e-5),
            (True, 1e-5),
            (False, 1e-10),
            (True, 1e-6),
        ):  # big_vision, flax, BiT, timm
            added = (*ops, Cast("float64"), Standardize(axis, epsilon, inside), Cast(step.spec.dtype))
            said = f"the kernel standardised, {'sqrt(var + ' if inside else '(std + '}{epsilon:g})"
            yield Hypothesis(NEEDLESSLY, NOT_STANDARDIZED, said, "the kernel as stored", _with(step, source, added))
        return
    said = f"standardised by {kind.weight_standardization.text}"
    if step.spec.shape[0] == step.spec.shape[1]:  # and then moved; `hypotheses` moves first
        make = lambda: expected(step, source).swapaxes(0, 1).copy()  # noqa: E731
        yield Hypothesis(CHANNELS, CHANNELS, "standardised, then its first two axes exchanged", said, make)
    bare = _with(step, source, _bare(ops))
    yield Hypothesis(NOT_STANDARDIZED, NEEDLESSLY, "the kernel as stored", said, bare)
    turned = tuple(replace(op, inside=not op.inside) if isinstance(op, Standardize) else op for op in ops)
    other = "standardised with its epsilon on the other side of the root"
    yield Hypothesis(EPSILON_SIDE, EPSILON_SIDE, other, said, _with(step, source, turned))


def _normalized(step: Step, rule: Rule, plan: Plan, apart: bool) -> Iterator[Hypothesis]:
    source, ops = plan.source, step.parts[0].ops
    assert rule.normalized is not None
    if step.role == rule.normalized.role:
        sidecar = (s for s in plan.steps if s.role == "weight" and s.rule == step.rule)
        stem = step.name.rstrip("0123456789g_")
        weight = next((s for s in sidecar if s.name.startswith(stem)), None)
        if weight is not None and weight.spec.shape[0] == step.spec.shape[0]:

            def make() -> Array:
                rows = _norms(expected(weight, source)).reshape(step.spec.shape)
                return np.asarray(rows.astype(numpy_dtype(step.spec.dtype)))

            yield Hypothesis(NORM_FOR_SCALE, NORM_FOR_SCALE, "the norm of each row of the kernel", "the scale", make)
        return
    if apart:
        return
    fold = next((op for op in ops if isinstance(op, (WeightNorm, SpectralNorm))), None)
    if fold is None:
        return
    said = str(fold)
    yield Hypothesis(NOT_FOLDED, NOT_FOLDED, "the kernel as stored", said, _with(step, source, _bare(ops)))
    if isinstance(fold, SpectralNorm) and fold.v is not None:
        stepped = replace(fold, v=None, steps=1)
        moved = tuple(stepped if op is fold else op for op in ops)
        yield Hypothesis(STEPPED, STEPPED, f"{stepped}", said, _with(step, source, moved))
    if isinstance(fold, SpectralNorm) and fold.u.leaf.endswith("u"):
        sigma = fold.u.leaf[:-1] + "sigma"
        if sigma in source.leaves:

            def divided() -> Array:
                wide = apply(_bare(ops), source.read(step.parts[0].leaf)).astype(np.float64)
                taken = tuple(op for op in fold.u.ops if isinstance(op, Take))
                value = apply(taken, source.read(sigma)).astype(np.float64)
                return np.asarray((wide / value).astype(numpy_dtype(step.spec.dtype)))

            yield Hypothesis(STORED_SIGMA, STORED_SIGMA, f"the kernel over {sigma}", said, divided)


def _norms(x: Array) -> Array:
    return np.asarray(np.sqrt(np.sum(np.square(x.astype(np.float64)), axis=tuple(range(1, x.ndim)))))


# ---- a map that is flattened


def _source_order(step: Step, rule: Rule, order: str, source: Source) -> Iterator[Hypothesis]:
    part = step.parts[0]
    assert rule.flattened is not None
    left = tuple(group.replace(order, rule.flattened.order) for group in part.groups)
    if left == part.groups:
        return
    letters = [letter for letter, _ in part.axes]
    front = tuple(op for op in part.ops if isinstance(op, Take))
    behind = tuple(op for op in part.ops if not isinstance(op, (Take, Permute, Reshape)))
    moved = (
        Reshape(tuple(size for _, size in part.axes)),
        Permute(tuple(letters.index(x) for x in "".join(left))),
        Reshape(step.spec.shape),
    )
    gives, instead = (f"in the order {' '.join(words)}" for words in (rule.flattened.order, order))
    make = _with(step, source, (*front, *moved, *behind))
    yield Hypothesis(FLATTEN, NEEDLESS, gives, instead, make, FLATTEN)


def _undeclared(step: Step, source: Source) -> Iterator[Hypothesis]:
    """The rule says nothing of a map; the source may have flattened one of any number of channels."""
    width = step.spec.shape[-1]
    for channels in range(2, width // 2 + 1):
        if width % channels:
            continue

        def make(channels: int = channels) -> Array:
            known = expected(step, source)
            apart = known.reshape(*known.shape[:-1], width // channels, channels)
            return np.ascontiguousarray(apart.swapaxes(-1, -2)).reshape(known.shape)

        gives = f"with its {width} columns as a map of {channels} channels, channels first"
        yield Hypothesis(NEEDLESS, FLATTEN, gives, "with its columns in the source's order", make)


# ---- norms


def _statistics(step: Step, plan: Plan) -> Iterator[Hypothesis]:
    other_role, name = EXCHANGED.get(step.role, ("", ""))
    module = step.name.rpartition(".")[0]
    others = (s for s in plan.steps if s.role == other_role and s.name.rpartition(".")[0] == module and s.parts)
    other = next(others, None)
    if other is not None and other.spec.shape == step.spec.shape:
        bare = tuple(op for op in other.parts[0].ops if not isinstance(op, Cast))
        make = lambda: apply((*bare, Cast(step.spec.dtype)), plan.source.read(other.parts[0].leaf))  # noqa: E731
        yield Hypothesis(name, name, f"what belongs to {other.name}", f"what belongs to {step.name}", make, name)
    if step.role == "running_var":

        def root() -> Array:
            wide = np.abs(expected(step, plan.source).astype(np.float64))
            return np.asarray(np.sqrt(wide).astype(numpy_dtype(step.spec.dtype)))

        yield Hypothesis(DEVIATION, DEVIATION, "the square root of the variance", "the variance", root)
