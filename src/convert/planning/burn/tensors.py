"""The tensors of Burn's modules, from those of torch's: gates apart, Linears (in, out), norms by Burn's names.

A plan is made for torch's layers first, whose layouts and arithmetic the rules' kinds derive; Burn's differ in where the same
numbers lie. Which Burn tensors hold a torch tensor is kept (`Held`), so that a file can be looked at either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from convert.checkpoints.source import Source
from convert.core.ops import Add, AddIdentity, Cast, Multiply, Op, Pad, Permute, Slice, out_spec
from convert.core.tensor_spec import TensorSpec
from convert.layers import KINDS, Linear, Recurrent
from convert.layers.base import LayerLeaves, Part, Step
from convert.layers.casts import losses
from convert.layers.norm.group_batch import COUNTER
from convert.layers.norm.layer_rms import Norm
from convert.planning.burn.modules import DTYPES, GATES, TRANSFORMS, Conventions
from convert.planning.compile.axes import group_shown
from convert.planning.plan import Held

TURN = Permute((1, 0))


@dataclass(frozen=True)
class _Made:
    """What a torch tensor becomes.

    Attributes:
        steps: Burn's tensors, in the order of the torch tensor's rows; others that Burn's module has besides, after them.
        held: how many of them hold the torch tensor.
        turned: whether each is transposed.
    """

    steps: tuple[Step, ...]
    held: int = 1
    turned: bool = False


def burn_steps(
    steps: Iterable[Step], source: Source, target: str, conventions: Conventions
) -> tuple[list[Step], tuple[Held, ...], list[str]]:
    """Burn's tensors, in the order of torch's.

    Args:
        steps: of a plan for torch's layers, parts joined.
        source: the checkpoint.
        target: the name of the target.
        conventions: of the file.

    Returns:
        Burn's steps; for each torch tensor what holds it; and what Burn cannot hold.
    """
    steps = list(steps)
    modules = _Cells(steps, target)
    made: list[Step] = []
    held: list[Held] = []
    findings = [*modules.findings]
    for step in steps:
        if said := _unfit(step):
            findings.append(f"{step.rule.line_only}: {step.name}: {step.spec}: {said}")
            continue
        found = _translated(step, source, target, conventions, modules)
        made += found.steps
        held.append(Held(step, tuple(one.name for one in found.steps[: found.held]), found.turned))
    made += _missing(made, steps, target)
    return made, tuple(held), findings


def _unfit(step: Step) -> str:
    if step.spec.dtype not in DTYPES:
        return f"burn-store reads no {step.spec.dtype} (it reads {', '.join(DTYPES)}); write another with --dtype or `dtype:`"
    if not issubclass(KINDS[step.word], Norm) or not step.parts:
        return ""
    rule = step.parts[0].rule
    lead = rule is None or step.role == rule.lead  # the others have its shape, and it is said once
    if lead and len(step.spec.shape) != 1:
        called = {"weight": "scale"}.get(step.role, step.role)
        return (
            f"Burn's norms have one axis, the last one of what they normalise, and this {called} has "
            f"{len(step.spec.shape)}; keep it as a `parameter:` of your own module"
        )
    return ""


def _kind(step: Step) -> object:
    rule = step.parts[0].rule if step.parts else None
    return rule.kind if rule is not None else None


def _translated(step: Step, source: Source, target: str, conventions: Conventions, modules: _Cells) -> _Made:
    if step.group is not None:
        return _gates(step, step.group, source, conventions, modules.path(step.group))
    if step.role == COUNTER and not step.parts:  # Burn's BatchNorm counts nothing
        return _Made((), 0)
    kind = _kind(step)
    if step.tied:  # Burn's Linear has its weight (in, out), and so a copy of the table, turned
        turned = step.word == "linear" and conventions.transposed
        return _Made((_turned(step) if turned else step,), turned=turned)
    if isinstance(kind, Linear) and step.role == "weight" and conventions.transposed and not _own(step, target):
        return _Made((_turned(step),), turned=True)
    if issubclass(KINDS[step.word], Norm) and step.role in conventions.norms:
        module = step.name.rpartition(".")[0]
        return _Made((replace(step, name=f"{module}.{conventions.norms[step.role]}"),))
    return _Made((step,))


def _own(step: Step, target: str) -> bool:
    """Whether the target computes an einsum of its own with this weight: then it is laid out as that says."""
    rule = step.parts[0].rule
    layer = rule.layer(target) if rule is not None else None
    return layer is not None and layer.computes is not None


def _missing(made: list[Step], steps: Iterable[Step], target: str) -> Iterator[Step]:
    """Biases that Burn's MultiHeadAttention has whatever the source does: zeros. Without them burn-store would not load the file.

    attention/mha.rs has had a choice since 0.22. Those of norm/batch.rs and norm/group.rs, which have none, are in the plan.
    """
    names = {step.name for step in made}
    for step in steps:
        name = f"{step.name.rpartition('.')[0]}.bias"
        if step.role == "weight" and _in_attention(step, target) and name not in names:
            said = "zeros: the source adds no bias, and Burn's module has one"
            spec = TensorSpec(step.spec.shape[:1], step.spec.dtype)
            yield Step(name, spec, (), step.word, step.rule, said, "", 0.0, "bias")


def _in_attention(step: Step, target: str) -> bool:
    rule = step.parts[0].rule if step.parts else None
    layer = rule.layer(target) if rule is not None else None
    return layer is not None and layer.packed_in is not None


# ---- transposing


def _turned(step: Step) -> Step:
    """The same matrix, (in, out); what were rows of its parts are columns."""
    spec = TensorSpec(step.spec.shape[::-1], step.spec.dtype)
    return replace(step, spec=spec, parts=tuple(_turned_part(part) for part in step.parts))


def _turned_part(part: Part) -> Part:
    groups = part.groups[::-1]
    head, arrow, tail = part.layout.partition(" -> ")
    before, after = (" ".join([*part.apart, *map(group_shown, of)]) for of in (part.groups, groups))
    layout = (
        f"{head}{arrow}{after}{tail.removeprefix(before)}" if tail.startswith(before) else f"{part.layout}, transposed"
    )
    return replace(part, ops=turned_ops(part.ops), groups=groups, layout=layout, axis=-1 if part.rows else 0)


def turned_ops(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The operations with a transposition of the matrix behind them; two that follow each other are none.

    >>> turned_ops((Permute((1, 0)), Slice(0, 2, 4)))
    (Slice(axis=1, start=2, stop=4),)
    """
    for k in range(len(ops) - 1, -1, -1):
        if ops[k] == TURN:
            behind = (replace(op, axis=1 - op.axis) if isinstance(op, Slice) else op for op in ops[k + 1 :])
            return (*ops[:k], *behind)
        if not isinstance(ops[k], Cast | Add | Multiply | Slice):
            break
    return (*ops, TURN)


# ---- recurrent layers


class _Cells:
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
    def findings(self) -> Iterator[str]:
        """Directions without the other one."""
        for module, places in self._seen.items():
            backward = any(reverse for _, reverse in places)
            for (layer, reverse), cell in places.items():
                if backward and (layer, not reverse) not in places:
                    has, lacks = ("backward", "forward") if reverse else ("forward", "backward")
                    yield (
                        f"{cell.rule.at.line_only}: {module}: its layer {layer} has the direction {has} and not {lacks}, and Burn's "
                        "bidirectional layers have both"
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


def _gates(step: Step, cell: LayerLeaves, source: Source, conventions: Conventions, path: str) -> _Made:
    """One tensor of torch's as one for each gate."""
    kind = cell.rule.kind
    assert isinstance(kind, Recurrent)
    order = kind.cell.order
    inner, parameter = TRANSFORMS[step.role]
    turned = parameter == "weight" and conventions.transposed
    made = []
    for k, gate in enumerate(order):
        name = f"{path}.{GATES[kind.cell.word][gate]}.{inner}.{parameter}"
        one = _rows(step, name, k * cell.sizes["H"], (k + 1) * cell.sizes["H"], kind.cell.gates[gate], source)
        one = replace(one, role=parameter, siblings=len(order), group=None, notes=())
        made.append(_turned(one) if turned else one)
    return _Made(tuple(made), len(made), turned)


def _rows(step: Step, name: str, start: int, stop: int, letter: str, source: Source) -> Step:
    """The rows of one gate, which one leaf makes, or none."""
    spec = TensorSpec((stop - start, *step.spec.shape[1:]), step.spec.dtype)
    for part in step.parts:
        first, last = part.rows or (0, step.spec.shape[0])
        if not (first <= start and stop <= last):
            continue
        ops = _sliced(part.ops, start - first, stop - first, source.leaves[part.leaf].spec)
        if ops is None:
            break
        said, side = part.layout.partition(" -> ")[0], part.groups[1:]
        sizes = tuple(zip((letter, *side), spec.shape, strict=True))
        layout = f"{said} -> {' '.join((letter, *side))}"
        one = replace(part, ops=ops, rows=None, layout=layout, groups=(letter, *side), stored=sizes)
        computed = [op for op in ops if isinstance(op, Add | Multiply | AddIdentity)]
        lost = losses([source.leaves[part.leaf].spec.dtype], spec.dtype, bool(computed))
        return replace(step, name=name, spec=spec, parts=(one,), arithmetic=", ".join(map(str, computed)), loses=lost)
    said = "zeros: the source has no such bias"
    return Step(name, spec, (), step.word, step.rule, said, "", 0.0, step.role)


def _sliced(ops: tuple[Op, ...], start: int, stop: int, spec: TensorSpec) -> tuple[Op, ...] | None:
    """The operations that give these rows alone; None where they are padding."""
    if ops and isinstance(ops[-1], Pad):
        whole = out_spec(ops[:-1], spec).shape[0]
        start, stop, ops = start - ops[-1].before, stop - ops[-1].before, ops[:-1]
        if not 0 <= start < stop <= whole:
            return None
    whole = out_spec(ops, spec).shape[0]
    return ops if (start, stop) == (0, whole) else (*ops, Slice(0, start, stop))
