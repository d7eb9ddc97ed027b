"""Decide how each leaf is made of tensors, before a byte is read: every op is undone, or the plan is refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from convert.checkpoints.chunks import Box
from convert.checkpoints.divided import DividedSource
from convert.checkpoints.source import Source
from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.ops import Op, Pad, Slice, Take, apply, inverse, out_spec
from convert.core.similarity import ClosestNames
from convert.core.tensor_spec import TensorSpec, is_float, numpy_dtype, widens
from convert.core.value_ops import Add, AddIdentity, Cast, Multiply
from convert.core.weight_norm_ops import LossyError, RowLengths
from convert.core.yaml_nodes import Position
from convert.layers.base import Part, Step
from convert.layers.leaf_sums import IMAGINARY, NEXT, PLUS, what_is_lost
from convert.planning.adapters.names import NamedPair
from convert.planning.low_rank_source import Merge
from convert.planning.merged_leaf import Complex, Joined, MergedLeaf, Sum
from convert.planning.plan import Plan
from convert.reversing.config_json import config_conflicts
from convert.reversing.left_out import HEAD, left_out
from convert.writing.scatter import needed_box
from convert.writing.transfer import used_leaves
from convert.writing.written import Written

COMPUTING = (Cast, Add, Multiply, AddIdentity)  # change values; all others move them
SELECTING = (Take, Slice)
TWO_BIASES = (
    "torch adds bias_ih to bias_hh, and the cell has one bias: put the sum into the tensor that the cell has a leaf for, and zeros into the "
    "other (the rows of a GRU's n stay as they are); or give with --like a checkpoint whose cell has both"
)


@dataclass(frozen=True)
class MadeLeaf:
    """A leaf that is computed back.

    Attributes:
        leaf: its name.
        spec: shape and dtype.
        parts: of the tensors, in the order in which they fill it. Each is also computed forward again and compared with its tensor.
        rest: number of elements that no tensor holds; they are those of the checkpoint `like`.
        overlap: whether several parts hold the same element, which must have one value.
        rounded: whether several values of the leaf give the same tensor. That of the checkpoint `like` is taken where it is one of them.
        remedy: what to do where parts that hold the same element differ; empty: they must be equal.
    """

    leaf: str
    spec: TensorSpec
    parts: tuple[tuple[Step, Part], ...] = field(repr=False)
    rest: int = 0
    overlap: bool = False
    rounded: bool = False
    remedy: str = ""


@dataclass(frozen=True)
class KeptLeaf:
    """A leaf that the rules drop, so that no tensor holds it: it is that of the checkpoint `like`."""

    leaf: str
    spec: TensorSpec
    reason: str
    rule: Position


@dataclass(frozen=True)
class UnwrittenLeaves:
    """Leaves that the rules drop, so that without the checkpoint `like` nothing holds them. A model may have none of them."""

    pattern: str
    reason: str
    rule: Position


@dataclass(frozen=True)
class ReversePlan:
    """What a checkpoint is made of, from the tensors of a PyTorch model.

    Attributes:
        forward: the plan that converts the checkpoint to these tensors.
        written: the tensors.
        leaves: those that are computed back, in the order of the tree.
        kept: those that no tensor holds.
        constants: tensors that no leaf holds; they must have the value that the forward plan computes.
        notes: remarks for the user.
        left_out: tensor that no leaf is made of -> why.
        unwritten: leaves that only a checkpoint `like` would give.
        layout: name of the published form of the tree; empty: that of the rules; None: the tree is that of a checkpoint.
    """

    forward: Plan
    written: Written = field(repr=False)
    leaves: tuple[MadeLeaf, ...]
    kept: tuple[KeptLeaf, ...]
    constants: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    layout: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    unwritten: tuple[UnwrittenLeaves, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(made.spec.nbytes for made in self.leaves) + sum(kept.spec.nbytes for kept in self.kept)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return {
            "found": self.forward.found,
            "target": self.forward.target,
            "layout": self.layout,
            "bytes": self.nbytes,
            "leaves": [
                {
                    "leaf": made.leaf,
                    "shape": list(made.spec.shape),
                    "dtype": made.spec.dtype,
                    "from": [
                        {
                            "tensor": step.name,
                            "rows": list(part.rows) if part.rows else None,
                            "rule": step.rule.line_only,
                        }
                        for step, part in made.parts
                    ],
                    "from_like": made.rest,
                }
                for made in self.leaves
            ],
            "kept": [
                {"leaf": kept.leaf, "dtype": kept.spec.dtype, "shape": list(kept.spec.shape), "because": kept.reason}
                for kept in self.kept
            ],
            "unwritten": [{"leaves": leaves.pattern, "because": leaves.reason} for leaves in self.unwritten],
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
        }


def reverse(plan: Plan, written: Written, *, like: bool = True) -> ReversePlan:
    """Reverse a plan.

    Args:
        plan: of a checkpoint that has the leaves, shapes and dtypes that are wanted.
        written: the tensors that there are.
        like: whether that checkpoint has values.

    Raises:
        PlanError: a tensor is missing, unexpected or has another spec; an operation has no inverse; or ``config.json`` next to the
            tensors has other sizes.
    """
    tensors = written.specs
    unused = left_out(written, {step.name for step in plan.steps})
    findings = [*_irreversible(plan, like), *_compare(plan, tensors, unused)]
    findings = findings or list(config_conflicts(plan, written.config))
    if findings:
        headline = (
            f"{plan.rules.path}: this conversion cannot be reversed: {len(findings)} problem{'s' * (len(findings) > 1)}"
        )
        raise PlanError(*findings, headline=headline)
    leaves = plan.source.leaves
    made = []
    for leaf, users in used_leaves(plan).items():
        parts = [(step, part) for step, part in users if step.name in tensors]
        parts.sort(key=lambda user: bool(user[0].tied))  # a tied copy is only compared
        spec = leaves[leaf].spec
        covered = _covered([part for _, part in parts], spec)
        given = sum(_taken(part, spec) for _, part in parts)
        overlap = given > covered
        rounded = like and not overlap and any(_rounds(part.ops, spec) for _, part in parts)
        zeros = any(step.group is not None and isinstance(op, Pad) for step, part in parts for op in part.ops)
        made.append(MadeLeaf(leaf, spec, tuple(parts), spec.size - covered, overlap, rounded, TWO_BIASES if zeros else ""))  # fmt: skip
    order = {leaf: k for k, leaf in enumerate(leaves)}
    made.sort(key=lambda leaf: order[leaf.leaf])
    kept = tuple(KeptLeaf(drop.leaf, drop.spec, drop.reason, drop.rule) for drop in plan.dropped)
    constants = tuple(step for step in plan.steps if step.value is not None and step.name in tensors)
    notes = tuple(_notes(made, kept, like))
    return ReversePlan(plan, written, tuple(made), kept, constants, notes, left_out=unused)


def _irreversible(plan: Plan, like: bool) -> Iterator[Finding]:
    """Find operations without an inverse. A factor may be any number where a checkpoint has the values that the tensors may come from."""
    if plan.translated:
        yield Finding(
            "not-reversible",
            f"the tensors of {plan.target!r} are not laid out for torch",
            rule=plan.rules.path,
            fix="give a file of a PyTorch target",
        )
    if isinstance(plan.checkpoint, DividedSource):
        yield Finding(
            "not-reversible",
            "the weights of the checkpoint are integers and scales, and the tensors are their quotients; they do not tell the two apart",
            rule=plan.rules.path,
            path=next(iter(plan.checkpoint.scales)),
            fix="give a checkpoint with floating-point weights with --like, or none",
        )
    for merge in plan.merges.values():
        user = next(step for step in plan.steps if any(part.leaf == merge.name for part in step.parts))
        what, lost = what_is_lost(_sign(merge))
        yield Finding(
            "not-reversible",
            f"the tensor is {what} ({merge.name}); {lost}",
            rule=user.rule.line_only,
            path=user.name,
            fix=_of_merge(merge),
        )
    for step in plan.steps:
        for part in step.parts:
            if part.leaf in plan.merges:
                continue
            if (why := _no_inverse(part.ops, plan.source.leaves[part.leaf].spec, like)) is not None:
                fix = {_FOLDED: "", _OF_ROWS: _WITHOUT_NORM}.get(why, _OTHER_FACTOR)
                yield Finding("not-reversible", f"from {part.leaf}: {why}", rule=step.rule.line_only, path=step.name, fix=fix)  # fmt: skip


def merged_pairs(source: Source, pairs: Mapping[str, NamedPair]) -> PlanError:
    """Explain that the tensors of a model do not tell a weight from the product that was added to it."""
    pair = next(iter(pairs.values()))
    problem = "it has LoRA pairs, which the tensors have merged or not at all; they do not tell them from the weights"
    got, fix = (
        f"{pair.first} beside {pair.base}",
        "give the tensors of a conversion with --adapter base, and --adapter base again",
    )
    return PlanError(Finding("not-reversible", problem, path=str(source.display_path), expected="a tree without LoRA pairs", got=got, fix=fix))  # fmt: skip


def _sign(merge: MergedLeaf) -> str:
    """Return what stands between the leaves that a tensor is computed from."""
    return NEXT if isinstance(merge, Joined) else IMAGINARY if isinstance(merge, Complex) else PLUS


def _of_merge(merge: MergedLeaf) -> str:
    """Say what to do where a tensor is computed from several leaves."""
    if isinstance(merge, Sum | Joined | Complex):
        return "keep the leaves apart in the target"
    if isinstance(merge, Merge) and merge.base is None:
        return "keep the factors apart in the target"
    return "keep the pair, and convert the weight that it is added to alone"


_FOLDED = "the normalisation is folded into the weight, and the tensor does not hold the weight without it"
_OF_ROWS = "the scale of a weight norm is computed from the leaf, and a training changes the two tensors apart from one another"
_WITHOUT_NORM = "remove the weight norm from the module (torch.nn.utils.parametrize.remove_parametrizations), and leave `parametrization` out of the rule"
_OTHER_FACTOR = "give the checkpoint that the tensors come from with --like, or wider leaves with --dtype (float32 for bfloat16 tensors)"
SPARE_BITS = 3  # of the mantissa of a leaf, with which its tensor is the same although dividing and multiplying round


def _rounds(ops: tuple[Op, ...], spec: TensorSpec) -> bool:
    """Whether several values of a leaf may give the same value of its tensor."""
    for op in ops:
        if op.rounds:
            return True
        after = op.out_spec(spec)
        if isinstance(op, Cast) and not widens(spec.dtype, after.dtype):
            return True
        spec = after
    return False


def _no_inverse(ops: tuple[Op, ...], spec: TensorSpec, like: bool) -> str | None:
    box, rest = needed_box(ops, spec)
    try:
        inverse(rest, TensorSpec(box.shape, spec.dtype))
    except LossyError:
        return _OF_ROWS if any(isinstance(op, RowLengths) for op in ops) else _FOLDED
    narrow = _mantissa(out_spec(ops, spec).dtype) + SPARE_BITS <= _mantissa(spec.dtype)
    for op in ops:
        if isinstance(op, Multiply) and abs(math.frexp(op.value)[0]) != 0.5 and not like and not narrow:
            return f"'{op}' rounds, as its factor is no power of two: several values of the leaf give the same tensor"
    return None


def _mantissa(dtype: str) -> int:
    return int(ml_dtypes.finfo(numpy_dtype(dtype)).nmant) if is_float(dtype) else 0


def _compare(plan: Plan, tensors: Mapping[str, TensorSpec], unused: Collection[str]) -> Iterator[Finding]:
    """Compare the tensors that there are with those that the plan makes, but for the `unused` ones."""
    made = {step.name: step for step in plan.steps}
    known = ClosestNames(tensors)
    for step in plan.steps:
        if (spec := tensors.get(step.name)) is None and step.value is None and not step.tied:
            leaves = ", ".join(dict.fromkeys(part.leaf for part in step.parts))
            yield Finding(
                "tensor-missing",
                rule=step.rule.line_only,
                path=step.name,
                expected=f"{step.spec} (for {leaves})",
                got="no such tensor",
                fix=known.did_you_mean(step.name) or "give a file with all tensors of the model",
            )
        elif spec is not None and spec != step.spec:
            fix = "give a checkpoint of the same size with --like"
            if spec.shape == step.spec.shape:
                fix = f"say with --dtype {spec.dtype} that the tensors have another dtype than the leaves"
            yield Finding(
                "tensor-spec-differs",
                rule=step.rule.line_only,
                path=step.name,
                expected=str(step.spec),
                got=str(spec),
                fix=fix,
            )
    known_made = ClosestNames(made)
    for name, own in tensors.items():
        if name not in made and name not in unused:
            fix = known_made.did_you_mean(name) or "remove it from the file, or add a rule for it"
            if name == HEAD:
                fix = "the model ties its head to the table, and this one has other values: it needs rules for an untied head"
            yield Finding(
                "tensor-unexpected", f"no leaf of the checkpoint is made of this tensor ({own})", path=name, fix=fix
            )


def _taken(part: Part, spec: TensorSpec) -> int:
    """Count the elements of a leaf that a part takes."""
    return _covered([part], spec) if any(op.partial for op in part.ops) else out_spec(part.ops, spec).size


def _covered(parts: Sequence[Part], spec: TensorSpec) -> int:
    """Count the elements of a leaf that some part fills."""
    boxes: dict[Box, list[tuple[Op, ...]]] = {}
    for part in parts:
        box, rest = needed_box(part.ops, spec)
        boxes.setdefault(box, []).append(tuple(op for op in rest if not isinstance(op, COMPUTING)))
    known: dict[object, int] = {}
    total, filled = 0, list[Box]()
    for box, several in boxes.items():
        if any(box.overlap(other.origin, other.shape) is not None for other in filled) and len(boxes) < 1000:
            return _covered_one_by_one(parts, spec)
        filled.append(box)
        key = (box.shape, frozenset(several))
        if key not in known:
            moves = [ops for ops in several if not any(isinstance(op, SELECTING) or op.partial for op in ops)]
            known[key] = box.size if moves else int(np.count_nonzero(_mask(several, box.shape)))
        total += known[key]
    return total


def _covered_one_by_one(parts: Sequence[Part], spec: TensorSpec) -> int:
    """Count the elements of a leaf that some part fills, one by one."""
    mask = np.zeros(spec.shape, bool)
    for part in parts:
        box, rest = needed_box(part.ops, spec)
        moves = tuple(op for op in rest if not isinstance(op, COMPUTING))
        mask[box.within((0,) * len(spec.shape))] |= _mask([moves], box.shape)
    return int(np.count_nonzero(mask))


def _mask(several: Sequence[tuple[Op, ...]], shape: tuple[int, ...]) -> Any:
    """Mark the elements that operations take from an array."""
    spec, mask = TensorSpec(shape, "bool"), np.zeros(shape, bool)
    for ops in several:
        mask |= apply(inverse(ops, spec), np.ones(out_spec(ops, spec).shape, bool))
    return mask


def _notes(made: Sequence[MadeLeaf], kept: Sequence[KeptLeaf], like: bool) -> Iterator[str]:
    part = [leaf for leaf in made if leaf.rest]
    if part:
        yield f"{part[0].rest:,} elements of {part[0].leaf} are in no tensor and are those of --like" + (
            f" ({len(part) - 1} more leaves like it)" if len(part) > 1 else ""
        )
    if kept:
        yield f"{len(kept)} leaves are in no tensor and are those of --like: {kept[0].leaf}{', ...' if len(kept) > 1 else ''}"
    rounded = [leaf for leaf in made if any(_rounds(part.ops, leaf.spec) for _, part in leaf.parts)]
    if rounded:
        which = f"{len(rounded)} leaves ({rounded[0].leaf}{', ...' if len(rounded) > 1 else ''})"
        if like:
            yield f"several values of {which} give the same tensor: that of --like is taken where it is one of them"
        else:
            yield (
                f"several values of {which} give the same tensor: the leaf may differ in its last bits from one that was "
                "converted to these tensors; --like with that checkpoint gives its values back"
            )
