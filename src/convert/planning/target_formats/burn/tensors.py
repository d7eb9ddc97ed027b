"""Translate the tensors of torch's layers to those of Burn's modules.

Gates of recurrent layers are split, Linears are transposed to (in, out), norms take Burn's parameter names. The plan for torch's
layers comes first, because their kinds derive layouts and arithmetic; Burn stores the same numbers elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from convert.core.findings import Finding
from convert.core.ops import Op, Pad, Permute, Slice, out_spec
from convert.core.tensor_spec import TensorSpec
from convert.core.value_ops import Add, AddIdentity, Cast, Multiply
from convert.layers import KINDS, Linear, Recurrent
from convert.layers.base import LayerLeaves, Part, PartLayout, Step
from convert.layers.casts import losses
from convert.layers.norm.group_batch import COUNTER
from convert.layers.norm.layer_rms import Norm
from convert.planning.compile.axes import group_shown
from convert.planning.target_formats.base import TranslatedTensor, Translation
from convert.planning.target_formats.burn.modules import DTYPES, GATES, NORM_PARAMETERS, TRANSFORMS

TRANSPOSE = Permute((1, 0))


@dataclass(frozen=True)
class _Translated:
    """What a torch tensor becomes.

    Attributes:
        steps: Burn's tensors, in the order of the torch tensor's rows.
        transposed: whether each is transposed.
    """

    steps: tuple[Step, ...]
    transposed: bool = False


def translate(steps: Iterable[Step], spec_of: Callable[[str], TensorSpec], target: str) -> Translation:
    """Translate torch's tensors to Burn's, in the same order.

    Args:
        steps: of a plan for torch's layers, parts joined.
        spec_of: spec of a leaf.
        target: the name of the target.
    """
    steps = list(steps)
    modules = _RecurrentModules(steps, target)
    made: list[Step] = []
    tensors: list[TranslatedTensor] = []
    findings = [*modules.findings]
    for step in steps:
        if (finding := _unsupported(step)) is not None:
            findings.append(finding)
            continue
        found = _translated(step, spec_of, target, modules)
        made += found.steps
        tensors.append(TranslatedTensor(step, tuple(one.name for one in found.steps), found.transposed))
    made += _missing(made, steps, target)
    return Translation(tuple(made), tuple(tensors), tuple(findings))


def _unsupported(step: Step) -> Finding | None:
    def no_layer(problem: str, fix: str) -> Finding:
        path = f"{step.name} ({step.spec})"
        return Finding("burn-has-no-layer", problem, rule=step.rule.line_only, path=path, fix=fix)

    if step.spec.dtype not in DTYPES:
        return no_layer(
            f"burn-store does not read {step.spec.dtype}; it reads {', '.join(DTYPES)}",
            "write another dtype with --dtype or `dtype:`",
        )
    if not issubclass(KINDS[step.kind_name], Norm) or not step.parts:
        return None
    rule = step.parts[0].rule
    lead = rule is None or step.role == rule.lead  # the other parameters have its shape, and one finding is enough
    if lead and len(step.spec.shape) != 1:
        parameter = {"weight": "scale"}.get(step.role, step.role)
        return no_layer(
            f"Burn's norms normalize the last axis only, and this {parameter} has {len(step.spec.shape)} axes",
            "keep it as a `parameter:` of your own module",
        )
    return None


def _kind(step: Step) -> object:
    rule = step.parts[0].rule if step.parts else None
    return rule.kind if rule is not None else None


def _translated(
    step: Step, spec_of: Callable[[str], TensorSpec], target: str, modules: _RecurrentModules
) -> _Translated:
    if step.group is not None:
        return _gates(step, step.group, spec_of, modules.path(step.group))
    if step.role == COUNTER and not step.parts:  # Burn's BatchNorm does not count batches
        return _Translated(())
    kind = _kind(step)
    if (
        step.tied and step.kind_name == "linear"
    ):  # Burn's Linear stores (in, out), so it needs a transposed copy of the table
        return _Translated((_transposed(step),), transposed=True)
    if not step.tied and isinstance(kind, Linear) and step.role == "weight" and not _computes_own_einsum(step, target):
        return _Translated((_transposed(step),), transposed=True)
    if not step.tied and issubclass(KINDS[step.kind_name], Norm) and step.role in NORM_PARAMETERS:
        module = step.name.rpartition(".")[0]
        return _Translated((replace(step, name=f"{module}.{NORM_PARAMETERS[step.role]}"),))
    return _Translated((step,))


def _computes_own_einsum(step: Step, target: str) -> bool:
    """Whether the target computes an einsum of its own with this weight: then it is laid out as that says."""
    rule = step.parts[0].rule
    layer = rule.layer(target) if rule is not None else None
    return layer is not None and layer.computes is not None


def _missing(made: list[Step], steps: Iterable[Step], target: str) -> Iterator[Step]:
    """Zero biases: Burn's MultiHeadAttention always has biases, also when the source has none.

    Without them burn-store would not load the file.

    attention/mha.rs has had a choice since 0.22. Those of norm/batch.rs and norm/group.rs, which have none, are in the plan.
    """
    names = {step.name for step in made}
    for step in steps:
        name = f"{step.name.rpartition('.')[0]}.bias"
        if step.role == "weight" and _in_attention(step, target) and name not in names:
            remark = "zeros: the source adds no bias, and Burn's module has one"
            spec = TensorSpec(step.spec.shape[:1], step.spec.dtype)
            yield Step(name, spec, (), step.kind_name, step.rule, remark, "", 0.0, "bias")


def _in_attention(step: Step, target: str) -> bool:
    rule = step.parts[0].rule if step.parts else None
    layer = rule.layer(target) if rule is not None else None
    return layer is not None and layer.packed_in is not None


# ---- transposing


def _transposed(step: Step) -> Step:
    """The same matrix, (in, out); what were rows of its parts are columns."""
    spec = TensorSpec(step.spec.shape[::-1], step.spec.dtype)
    return replace(step, spec=spec, parts=tuple(_transposed_part(part) for part in step.parts))


def _transposed_part(part: Part) -> Part:
    groups = part.groups[::-1]
    before, after = (" ".join([*part.split_axes, *map(group_shown, of)]) for of in (part.groups, groups))
    known = part.layout.written == before
    remarks = [part.layout.remark] if known else [part.layout.remark, "transposed"]
    layout = part.layout._replace(
        written=after if known else part.layout.written, remark=", ".join(filter(None, remarks))
    )
    return replace(part, ops=transposed_ops(part.ops), groups=groups, layout=layout, axis=-1 if part.rows else 0)


def transposed_ops(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The operations with a transposition of the matrix behind them; two that follow each other are none.

    >>> transposed_ops((Permute((1, 0)), Slice(0, 2, 4)))
    (Slice(axis=1, start=2, stop=4),)
    """
    for k in range(len(ops) - 1, -1, -1):
        if ops[k] == TRANSPOSE:
            behind = (replace(op, axis=1 - op.axis) if isinstance(op, Slice) else op for op in ops[k + 1 :])
            return (*ops[:k], *behind)
        if not isinstance(ops[k], Cast | Add | Multiply | Slice):
            break
    return (*ops, TRANSPOSE)


# ---- recurrent layers


class _RecurrentModules:
    """What the recurrent layers of a plan are called in Burn: ``rnn``, ``rnn.0``, ``rnn.forward``, ``rnn.0.reverse``.

    Burn's Gru, Lstm and Rnn are one layer in one direction; BiGru, BiLstm and BiRnn have the fields ``forward`` and ``reverse``;
    a stack is a Vec of them, whose elements are called by their index (burn-core module/param/primitive.rs).
    """

    def __init__(self, steps: Iterable[Step], target: str) -> None:
        self._seen: dict[str, dict[tuple[str, bool], LayerLeaves]] = {}
        self._counted: set[str] = set()
        for step in steps:
            if step.group is not None:
                self._seen.setdefault(step.group.module, {})[_place(step.group)] = step.group
                layer = step.group.rule.layer(target)
                if layer is not None and ".l{" in layer.path.text:
                    self._counted.add(step.group.module)

    @property
    def findings(self) -> Iterator[Finding]:
        """Directions without the other one."""
        for module, places in self._seen.items():
            backward = any(reverse for _, reverse in places)
            for (layer, reverse), leaves in places.items():
                if backward and (layer, not reverse) not in places:
                    has, lacks = ("backward", "forward") if reverse else ("forward", "backward")
                    yield Finding(
                        "burn-has-no-layer",
                        f"layer {layer} has the direction {has} and not {lacks}; Burn's bidirectional layers have both",
                        rule=leaves.rule.at.line_only,
                        path=module,
                        fix=f"add a rule for the {lacks} direction, or write a module of your own",
                    )

    def path(self, cell: LayerLeaves) -> str:
        places = self._seen[cell.module]
        layer, reverse = _place(cell)
        counted = cell.module in self._counted or len({number for number, _ in places}) > 1
        both = any(back for _, back in places)
        return ".".join(
            [cell.module, *([layer] if counted else []), *(["reverse" if reverse else "forward"] if both else [])]
        )


def _place(cell: LayerLeaves) -> tuple[str, bool]:
    """Number of the layer, and whether it runs from the end."""
    layer, _, reverse = cell.suffix.removeprefix("l").partition("_")
    return layer, bool(reverse)


def _gates(step: Step, layer: LayerLeaves, spec_of: Callable[[str], TensorSpec], path: str) -> _Translated:
    """Split one tensor of torch into one for each gate."""
    kind = layer.rule.kind
    assert isinstance(kind, Recurrent)
    order, hidden = kind.cell.order, layer.sizes["H"]
    inner, parameter = TRANSFORMS[step.role]
    transposed = parameter == "weight"
    made = []
    for k, gate in enumerate(order):
        name = f"{path}.{GATES[kind.cell.kind_name][gate]}.{inner}.{parameter}"
        one = _rows(step, name, k * hidden, (k + 1) * hidden, kind.cell.gates[gate], spec_of)
        one = replace(one, role=parameter, siblings=len(order), group=None, notes=())
        made.append(_transposed(one) if transposed else one)
    return _Translated(tuple(made), transposed)


def _rows(step: Step, name: str, start: int, stop: int, letter: str, spec_of: Callable[[str], TensorSpec]) -> Step:
    """Return the rows of one gate, which are those of one leaf, or zeros."""
    spec = TensorSpec((stop - start, *step.spec.shape[1:]), step.spec.dtype)
    for part in step.parts:
        first, last = part.rows or (0, step.spec.shape[0])
        if not (first <= start and stop <= last):
            continue
        ops = _sliced(part.ops, start - first, stop - first, spec_of(part.leaf))
        if ops is None:
            break
        side = part.groups[1:]
        sizes = tuple(zip((letter, *side), spec.shape, strict=True))
        layout = PartLayout(part.layout.stored, " ".join((letter, *side)))
        one = replace(part, ops=ops, rows=None, layout=layout, groups=(letter, *side), stored=sizes)
        computed = [op for op in ops if isinstance(op, Add | Multiply | AddIdentity)]
        lost = losses([spec_of(part.leaf).dtype], spec.dtype, bool(computed))
        return replace(step, name=name, spec=spec, parts=(one,), arithmetic=", ".join(map(str, computed)), loses=lost)
    return Step(name, spec, (), step.kind_name, step.rule, "zeros: the source has no such bias", "", 0.0, step.role)


def _sliced(ops: tuple[Op, ...], start: int, stop: int, spec: TensorSpec) -> tuple[Op, ...] | None:
    """The operations that give these rows alone; None where they are padding."""
    if ops and isinstance(ops[-1], Pad):
        whole = out_spec(ops[:-1], spec).shape[0]
        start, stop, ops = start - ops[-1].before, stop - ops[-1].before, ops[:-1]
        if not 0 <= start < stop <= whole:
            return None
    whole = out_spec(ops, spec).shape[0]
    return ops if (start, stop) == (0, whole) else (*ops, Slice(0, start, stop))
