"""The tensors of a control path: which leaf holds which coefficient, where its time axis is, what is multiplied by what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from convert.core.findings import Finding
from convert.core.ops import Op, Take, out_spec
from convert.core.tensor_spec import TensorSpec, is_float
from convert.layers.base import CompileContext, LayerLeaves, Matched, Part, PartLayout, Step
from convert.layers.casts import computing, losses, target_dtype
from convert.layers.control_path.declaration import TIMES, PathDeclaration
from convert.layers.leaves import MisfitError, dtype_mismatch, leaf_groups, not_convertible, shape_mismatch
from convert.layers.target import TargetLayer


def compile_paths(
    context: CompileContext, kind: PathDeclaration, matched: Matched, layer: TargetLayer
) -> Iterator[Step]:
    """Make the tensors of every path that the rule has leaves for.

    Raises:
        MisfitError: the leaves contradict each other or the rule; the message is a finding.
    """
    rule = matched.rule
    needed = set(kind.DEFAULT) - kind.may_lack
    for found in leaf_groups(matched, layer, context.spec, needed, kind.shared):
        group = LayerLeaves(rule, layer.path.fill(found.where, found.choices), found.leaves)
        yield from _path(context, kind, layer, group, found.where, found.choices)


def _path(
    context: CompileContext,
    kind: PathDeclaration,
    layer: TargetLayer,
    group: LayerLeaves,
    where: Mapping[str, int],
    choices: tuple[int, ...],
) -> Iterator[Step]:
    rule, target = group.rule, layer.computes
    parts = {role: _part(context, kind, group, role) for role in group.leaves}
    _fit(kind, group, {role: out_spec(takes, context.spec(name)) for role, (name, takes) in group.leaves.items()})  # fmt: skip
    for name, roles in kind.tensors(group.module, target.buffers).items():
        role = roles[0] if len(roles) == 1 else "coeffs"
        yield _step(context, kind, group, name, role, {of: parts[of] for of in roles})
    name = f"{group.module}._t" if target.buffers else target.times.fill(where, choices) if target.times else ""
    if TIMES in parts and name:
        yield _step(context, kind, group, name, TIMES, {TIMES: parts[TIMES]})
    elif TIMES in parts:
        raise MisfitError(
            Finding(
                "leaf-would-be-lost",
                f"this leaf holds the times of the path, and without them {kind.module} takes 0, 1, 2, ...",
                rule=rule.at.line_only,
                path=group.leaves[TIMES][0],
                fix="name their tensor in the target with `times:`",
            )
        )
    elif name:
        raise MisfitError(
            Finding(
                "leaf-missing",
                f"no leaf has the times of {group.module}, for {name}",
                rule=rule.at.line_only,
                path=name,
                fix="name the leaf with `leaves: {times: ...}`",
            )
        )


def _fit(kind: PathDeclaration, group: LayerLeaves, specs: dict[str, TensorSpec]) -> None:
    """Check that all coefficients have one shape, and that the number of times fits."""
    first, *others = (role for role in specs if role != TIMES)
    rule = group.rule
    for role in others:
        if specs[role].shape != specs[first].shape:
            raise shape_mismatch(
                rule,
                group.leaves[role][0],
                problem="the coefficients of a path have the same shape",
                expected=f"the shape of {group.leaves[first][0]}: {specs[first]}",
                got=str(specs[role]),
                fix="correct one of the two paths",
            )
    if TIMES not in specs:
        return
    name, times = group.leaves[TIMES][0], specs[TIMES]
    if len(times.shape) != 1:
        raise shape_mismatch(
            rule,
            name,
            expected=f"one axis: {kind.module} has the same times for all series of a batch",
            got=str(times),
            fix="write each series as its own path with `stacked`",
        )
    letters, _ = kind.order(len(specs[first].shape))
    pieces = specs[first].shape[letters.index("T")]
    wanted = times.shape[0] - 1 if kind.PIECES else times.shape[0]
    if pieces != wanted:
        word = "intervals" if kind.PIECES else "knots"
        raise shape_mismatch(
            rule,
            group.leaves[first][0],
            expected=f"{wanted} {word} along T, for the {times.shape[0]} times of {name}",
            got=f"{pieces}: {specs[first]} as {' '.join(letters)}",
            fix="name the time axis with `data:`",
        )


def _part(context: CompileContext, kind: PathDeclaration, group: LayerLeaves, role: str) -> Part:
    """One leaf, moved to (..., time, channels), with torchcde's factor, in the dtype that is written."""
    rule = group.rule
    leaf, takes = group.leaves[role]
    spec = context.spec(leaf)
    own = out_spec(takes, spec)
    at = ", ".join(f"{take.index}" for take in takes if isinstance(take, Take))
    try:
        if not is_float(spec.dtype):
            raise ValueError("a path's coefficients and times are floats")
        if role == TIMES:  # rounding could make two knots coincide, which changes the path
            ops: tuple[Op, ...] = (*takes, *computing((), spec, target_dtype(replace(rule, dtype=None), spec, None)))
            return Part(leaf, ops, None, PartLayout("times"), at, (), (), rule=rule)
        dtype = target_dtype(rule, spec, context.dtype)
        letters, order = kind.order(len(own.shape))
        ops = (*takes, *kind.movement(own.shape), *computing(kind.arithmetic(role), spec, dtype))
        out_spec(ops, spec)
    except ValueError as error:
        raise not_convertible(rule, leaf, spec, group.module, error) from None
    groups = (*(letters[k] for k in order), *(() if "C" in letters else ("",)))
    factor = ", ".join(map(str, kind.arithmetic(role)))
    layout = PartLayout(" ".join(letters), " ".join(x or "1" for x in groups), factor)
    axes = tuple(zip(letters, own.shape, strict=True))
    return Part(leaf, ops, None, layout, at, axes, groups, axes, rule=rule)


def _step(
    context: CompileContext, kind: PathDeclaration, group: LayerLeaves, name: str, role: str, parts: dict[str, Part]
) -> Step:
    """Make the step of a tensor; several parts are concatenated along the channels."""
    rule = group.rule
    specs = [out_spec(part.ops, context.spec(part.leaf)) for part in parts.values()]
    dtypes = sorted({spec.dtype for spec in specs})
    if len(dtypes) > 1:
        raise dtype_mismatch(rule, name, dtypes, "the leaves become one tensor")
    width = specs[0].shape[-1] if specs[0].shape else 1
    placed = tuple(
        part if len(parts) == 1 else replace(part, rows=(k * width, (k + 1) * width), axis=-1)
        for k, part in enumerate(parts.values())
    )
    spec = TensorSpec((*specs[0].shape[:-1], len(parts) * width), dtypes[0])
    words = [f"{of}: {op}" for of in parts if of != TIMES for op in kind.arithmetic(of)]
    sources = [context.spec(part.leaf).dtype for part in parts.values()]
    lost = losses(sources, dtypes[0], bool(words))
    return Step(name, spec, placed, rule.kind_name, rule.at, "; ".join(words), lost, role=role, group=group)
