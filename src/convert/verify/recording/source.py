"""A checkpoint that is known only from a recording: most leaves are computed back from the written weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from convert.checkpoints.chunks import Grid
from convert.checkpoints.source import Source
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.ops import (
    Deinterleave,
    Flip,
    Interleave,
    Op,
    Pad,
    Permute,
    Place,
    Reorder,
    Reshape,
    Slice,
    Take,
    apply,
    inverse,
)
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.core.value_ops import Add, Cast, Multiply
from convert.core.weight_norm_ops import LossyError
from convert.layers.base import Part, Step
from convert.planning.low_rank_source import HoldsMerged
from convert.planning.merged_leaf import MergedLeaf
from convert.planning.plan import Plan
from convert.verify.recording.file import Recording
from convert.writing.transfer import used_leaves
from convert.writing.written import Written

Array = np.ndarray[Any, np.dtype[Any]]
Users = Mapping[str, list[tuple[Step, Part]]]  # leaf -> the steps that read it, each with the part that does
_VIEWS = (Take, Slice, Permute, Flip)  # return views of the array, which can be written through
_MOVES = (*_VIEWS, Reshape, Pad, Place, Deinterleave, Interleave, Reorder, Cast)  # compute nothing


class RecordedSource(Source, HoldsMerged):
    """The checkpoint of a recording. A leaf is recorded, or computed back from the written weights.

    Before there is a plan only the recorded leaves can be read; `with_written_leaves` adds the others.
    """

    def __init__(self, recording: Recording, written: Written, users: Users | None = None) -> None:
        self.recording, self.path = recording, recording.path
        self.format = f"{recording.manifest.source_format}, known from a recording"
        self.leaves = recording.manifest.leaves
        self.stored, self.digests = recording.stored, recording.manifest.digests
        self._written, self._users = written, users or {}
        self._last: tuple[str, Array] | None = None  # the layers of a stack read the same leaf one after another

    def for_plan(self, plan: Plan) -> RecordedSource:
        """Return the source that also computes back the leaves from which the plan makes tensors."""
        return RecordedSource(self.recording, self._written, used_leaves(plan))

    def read(self, name: str) -> Array:
        """Return a recorded leaf, or the leaf from which the plan makes the written tensors; zeros where none was written."""
        if name in self.stored:
            return self.stored[name]
        if name not in self._users:
            raise CheckpointError(self._not_recorded(name, "no written tensor is made of it"))
        last = self._last
        if last is not None and last[0] == name:
            return last[1]
        spec = self.recording.manifest.spec(name)
        leaf = np.zeros(spec.shape, numpy_dtype(spec.dtype))
        for step, part in self._users[name]:
            if self._holds(step) and not step.tied:
                view, ops = _writable_view(leaf, part.ops)
                rows = part.share(self._written.read(step.name))
                try:
                    back = inverse(ops, TensorSpec(view.shape, spec.dtype))
                except LossyError as error:
                    problem = f"it cannot be computed back from {step.name}: {error}"
                    raise CheckpointError(self._not_recorded(name, problem)) from None
                view[...] = _apply_inverse(back, rows)
        leaf.setflags(write=False)
        self._last = name, leaf
        return leaf

    def _not_recorded(self, leaf: str, problem: str) -> Finding:
        return Finding(
            "leaf-not-recorded",
            f"leaf {leaf} is not in the recording, and {problem}",
            path=str(self.path),
            fix="record again with a larger --max-size, or give the checkpoint with --from",
        )

    def read_merged(self, merge: MergedLeaf) -> Array:
        """Return the written tensor: it is the result of the merge, whose leaves are unknown."""
        return self.read(merge.name)

    def chunks(self, name: str) -> Grid:
        return self.recording.manifest.grid(name) or super().chunks(name)

    def is_exact(self, name: str) -> bool:
        """Whether `read` returns the leaf bit for bit, if the written weights are right."""
        if name in self.stored:
            return True
        manifest = self.recording.manifest
        covered = np.zeros(manifest.spec(name).shape, bool)
        for step, part in self._users[name]:
            if step.tied:
                continue
            if not self._holds(step) or computes(step, name in manifest.merged) or step.loses:
                return False
            view, ops = _writable_view(covered, part.ops)
            rows = part.share(np.ones(step.spec.shape, bool))
            moves = tuple(op for op in ops if not isinstance(op, (Cast, Add, Multiply)))
            view[...] |= apply(inverse(moves, TensorSpec(view.shape, "bool")), rows)
        return bool(covered.all())

    def _holds(self, step: Step) -> bool:
        """Whether the tensor is in the file as the plan makes it."""
        return self._written.specs.get(step.name) == step.spec


def with_written_leaves(plan: Plan) -> Plan:
    """Let a recorded checkpoint compute back the leaves that the plan reads; other plans are unchanged."""
    if not isinstance(plan.checkpoint, RecordedSource):
        return plan
    return replace(plan, checkpoint=plan.checkpoint.for_plan(plan))


def computes(step: Step, merged: bool) -> bool:
    """Whether a tensor's values are computed from its leaf's values, and not only moved.

    Args:
        merged: whether the leaf is merged from others. That is arithmetic of the step, too, but not of its operations.
    """
    if not step.arithmetic:
        return False
    return not merged or any(not isinstance(op, _MOVES) for part in step.parts for op in part.ops)


def _writable_view(leaf: Array, ops: tuple[Op, ...]) -> tuple[Array, tuple[Op, ...]]:
    """Return the part of a leaf that the first operations select, as a view, and the remaining operations."""
    for k, op in enumerate(ops):
        if not isinstance(op, _VIEWS):
            return leaf, ops[k:]
        leaf = op.apply(leaf)
    return leaf, ()


def _apply_inverse(ops: tuple[Op, ...], rows: Array) -> Array:
    """Apply inverse operations; casts do not check their range."""
    for op in ops:
        with np.errstate(over="ignore", invalid="ignore"):
            rows = rows.astype(numpy_dtype(op.dtype)) if isinstance(op, Cast) else op.apply(rows)
    return rows
