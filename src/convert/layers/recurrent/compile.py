"""The tensors of a recurrent layer: which leaf holds which gate, in what order, and what is computed on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from convert.core.findings import Finding
from convert.core.ops import Op, Pad, Permute, Slice, Take, out_spec
from convert.core.tensor_spec import TensorSpec
from convert.core.value_ops import Add, AddIdentity, Multiply
from convert.layers.base import CompileContext, LayerLeaves, Matched, Part, PartLayout, Rule, Step
from convert.layers.casts import computing, losses, target_dtype
from convert.layers.leaves import MisfitError, dtype_mismatch, leaf_groups, not_convertible, shape_mismatch
from convert.layers.recurrent.equations import TENSORS, Cell, Held, tensor_at
from convert.layers.target import TargetLayer
from convert.layers.transforms.concatenated import reordered, shown_orders, source_places


def compile_cell(context: CompileContext, cell: Cell, matched: Matched, layer: TargetLayer) -> Iterator[Step]:
    """Make the four tensors of each layer and direction that the rule has leaves for.

    Raises:
        MisfitError: the target cannot compute the cell, or the leaves contradict the rule; the message is a finding.
    """
    rule = matched.rule
    if cell.module and not context.custom_cells:
        raise MisfitError(cell.refusal(rule.at.line_only))
    needed = set(cell.leaves) - cell.may_lack
    for group in leaf_groups(matched, layer, context.spec, needed):
        path = layer.path.fill(group.where, group.choices)
        yield from _layer(context, rule, cell, layer, path, group.leaves)


@dataclass(frozen=True)
class _Share:
    """Gates that follow each other both in a leaf and in the target, with the same arithmetic."""

    role: str
    first: int  # of the leaf's gates
    letters: str
    compute: tuple[Op, ...]


def _layer(
    context: CompileContext,
    rule: Rule,
    cell: Cell,
    layer: TargetLayer,
    path: str,
    leaves: Mapping[str, tuple[str, tuple[Take, ...]]],
) -> Iterator[Step]:
    found = {role: name for role, (name, _) in leaves.items()}
    specs = {role: out_spec(takes, context.spec(name)) for role, (name, takes) in leaves.items()}
    widths = _widths(rule, cell, found, specs)
    module, _, suffix = path.rpartition(".")
    hidden = widths["H"]
    moves, places = _order_of_inputs(context, rule, layer, cell, widths, found)
    group = LayerLeaves(rule, module, leaves, suffix, widths, places)
    biased = layer.computes is not False
    notes = (
        (f"{module} must be a {cell.module}, not a torch.nn.GRU: only that computes {cell.name}",)
        if cell.module
        else ()
    )
    dtype = ""
    for tensor, part in TENSORS.items():
        name = tensor_at(path, tensor)
        if part in "bc" and not biased:
            if held := next((role for role in found if part in cell.leaves[role].parts), None):
                raise MisfitError(
                    Finding(
                        "leaf-would-be-lost",
                        "the target has `bias: false`, and this leaf is a bias",
                        rule=rule.at.line_only,
                        path=found[held],
                        fix="leave `bias: false` out",
                    )
                )
            continue
        step = _tensor(context, rule, cell, group, tensor, part, name, layer, moves if part == "W" else ())
        if step is None:
            spec = TensorSpec((len(cell.order) * hidden,), dtype)
            if any(cell.offsets.values()) and part == "b" and not _has_bias(cell, found):
                raise MisfitError(
                    Finding(
                        "layer-not-representable",
                        f"{cell.name} adds {cell.offsets} to its gates and has no bias leaf that could hold it",
                        rule=rule.at.line_only,
                        path=name,
                    )
                )
            step = Step(
                name,
                spec,
                (),
                rule.kind_name,
                rule.at,
                "zeros: the source has no such bias",
                "",
                0.0,
                tensor,
                group=group,
            )
        dtype = dtype or step.spec.dtype
        if step.spec.dtype != dtype and part in "WU":
            raise dtype_mismatch(rule, name, (dtype, step.spec.dtype), "the weights of a layer have one dtype")
        yield replace(step, notes=notes)
        notes = ()


def _order_of_inputs(
    context: CompileContext,
    rule: Rule,
    layer: TargetLayer,
    cell: Cell,
    widths: Mapping[str, int],
    found: Mapping[str, str],
) -> tuple[tuple[Op, ...], tuple[int, ...]]:
    """Return what gives the columns of the input the target's order, and which input of the source each of the target's is.

    Raises:
        MisfitError: the sizes of the parts are unknown, or not those of the input.
    """
    (axis,) = [*rule.concatenated] or [""]
    if not axis or "I" not in widths:
        return (), ()
    try:
        moves = reordered(rule, layer, f".{axis}", (0, widths["I"]), context.sizes)
        places = source_places(rule, layer, axis, widths["I"], context.sizes)
    except ValueError as error:
        role = cell.holder("W", cell.gates[cell.order[0]])
        code = "size-unknown" if "nothing gives" in str(error) else "shape-mismatch"
        raise MisfitError(Finding(code, str(error), rule=rule.at.line_only, path=found[role or next(iter(found))])) from None  # fmt: skip
    return moves, () if places is None else tuple(places.tolist())


def _has_bias(cell: Cell, found: Mapping[str, str]) -> bool:
    return any(set(cell.leaves[role].parts) & {"b", "c"} for role in found)


def _widths(rule: Rule, cell: Cell, found: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Return the cell's widths `I` and `H`, in which all leaves must agree."""
    known: dict[str, tuple[int, str]] = {}
    for role, spec in specs.items():
        try:
            cell.leaves[role].check(spec.shape)
        except ValueError as error:
            raise shape_mismatch(
                rule,
                found[role],
                problem=str(error),
                expected=cell.leaves[role].text,
                got=str(spec),
                fix="correct `leaves` or the path",
            ) from None
        for axis, size in cell.leaves[role].sizes(spec.shape):
            first, other = known.setdefault(axis, (size, role))
            if first != size or size < 1:
                word = "state" if axis == "H" else "input"
                raise shape_mismatch(
                    rule,
                    found[role],
                    expected=f"{word} width {first}, as {found[other]}: {specs[other]} has ({cell.leaves[other].text})",
                    got=f"{spec} with {word} width {size} ({cell.leaves[role].text})",
                    fix="correct what `leaves` says of one of the two, or its path",
                )
    return {axis: size for axis, (size, _) in known.items()}


def _tensor(
    context: CompileContext,
    rule: Rule,
    cell: Cell,
    group: LayerLeaves,
    tensor: str,
    part: str,
    name: str,
    layer: TargetLayer,
    moves: tuple[Op, ...],
) -> Step | None:
    """One tensor; None when the source has nothing for it.

    Args:
        moves: that give its columns the target's order.
    """
    rows: list[tuple[int, _Share]] = []
    for row, gate in enumerate(cell.order):
        letter = cell.gates[gate]
        role = cell.holder(part, letter)
        if role is None or role not in group.leaves:
            continue
        place = cell.leaves[role].gates.index(letter)
        compute = _arithmetic(cell, group, gate, part)
        if rows:
            first, last = rows[-1]
            if (last.role, last.compute) == (role, compute) and first + len(last.letters) == row and last.first + len(last.letters) == place:  # fmt: skip
                rows[-1] = (first, _Share(role, last.first, last.letters + letter, compute))
                continue
        rows.append((row, _Share(role, place, letter, compute)))
    if not rows:
        return None
    parts: list[Part] = []
    dtypes: list[str] = []
    sources: list[str] = []
    shape: tuple[int, ...] = ()
    hidden, count = group.sizes["H"], len(cell.order)
    for k, (row, share) in enumerate(rows):
        start = row if k else 0  # gates without a leaf are zeros, if another gate has one
        stop = count if k == len(rows) - 1 else rows[k + 1][0]
        pad = (Pad(0, (row - start) * hidden, (stop - row - len(share.letters)) * hidden),)
        leaf, takes = group.leaves[share.role]
        spec = context.spec(leaf)
        try:
            held = cell.leaves[share.role]
            ops = (*takes, *_take_out(held, part, share, group, out_spec(takes, spec)), *moves)
            dtype = target_dtype(rule, spec, context.dtype)
            ops = (*ops, *computing(share.compute, spec, dtype), *(pad if pad[0].before or pad[0].after else ()))
            made = out_spec(ops, spec)
        except ValueError as error:
            raise not_convertible(rule, leaf, spec, name, error) from None
        shape = made.shape[1:]
        side = {"W": " I", "U": " H"}.get(part, "")
        packed = f"({' '.join(share.letters)})" if len(share.letters) > 1 else share.letters
        order = shown_orders(rule, layer, "".join(rule.concatenated)) if moves else []
        remark = ", ".join([*order, *(["zeros for the others"] if pad[0].before or pad[0].after else [])])
        layout = PartLayout(held.text, f"{packed}{side}", remark)
        names, sizes = ("G", *side.split()), (len(share.letters) * hidden, *shape)
        stored = () if pad[0].before or pad[0].after else tuple(zip(names, sizes, strict=True))
        at = ", ".join(f"{take.index}" for take in takes if isinstance(take, Take))
        filled = None if len(rows) == 1 else (start * hidden, stop * hidden)
        parts.append(Part(leaf, ops, filled, layout, at, (), names, stored, rule=rule))
        dtypes.append(made.dtype)
        sources.append(spec.dtype)
    if len(set(dtypes)) > 1:
        raise dtype_mismatch(rule, name, sorted(set(dtypes)), "the leaves become rows of one tensor")
    words = [f"{', '.join(share.letters)}: {op}" for _, share in rows for op in share.compute]
    spec = TensorSpec((count * hidden, *shape), dtypes[0])
    lost = losses(sources, dtypes[0], any(share.compute for _, share in rows))
    return Step(name, spec, tuple(parts), rule.kind_name, rule.at, "; ".join(words), lost, role=tensor, group=group)


def _arithmetic(cell: Cell, group: LayerLeaves, gate: str, part: str) -> tuple[Op, ...]:
    """Return the arithmetic of a gate: torch's update gate is 1 - z where the source's z multiplies the new state."""
    ops: list[Op] = []
    if gate == "z" and not cell.keeps:
        ops.append(Multiply(-1.0))  # sigmoid(-x) = 1 - sigmoid(x)
    if cell.residual and part == "U":
        ops.append(AddIdentity())
    offset = cell.offsets.get(cell.gates[gate], 0.0)
    first = next((p for p in "bc" if cell.holder(p, cell.gates[gate]) in group.leaves), None)
    if offset and part == first:
        ops.append(Add(offset))
    return tuple(ops)


def _take_out(held: Held, part: str, share: _Share, group: LayerLeaves, spec: TensorSpec) -> Iterator[Op]:
    """Return the operations from a leaf to the rows of gates; the columns are the input or the state."""
    axes = list(held.axes)
    if "2" in axes:
        at = axes.index("2")
        yield Take(at, held.parts.index(part))
        del axes[at]
    if "I+H" in axes:
        start, stop = (
            (0, group.sizes["I"])
            if held.parts.index(part) == 0
            else (group.sizes["I"], group.sizes["I"] + group.sizes["H"])
        )
        yield Slice(axes.index("I+H"), start, stop)
    at = next(k for k, axis in enumerate(axes) if axis == held.gates)
    if len(share.letters) < len(held.gates):
        yield Slice(at, share.first * group.sizes["H"], (share.first + len(share.letters)) * group.sizes["H"])
    if at:
        yield Permute((1, 0))
