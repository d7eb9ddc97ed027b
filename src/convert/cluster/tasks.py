"""Cut a plan into tasks, one for each file of the output, and run one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convert.api import plan_conversion
from convert.checkpoints.chunks import Grid, Meter
from convert.checkpoints.memory_budget import DEFAULT_LIMIT
from convert.core.errors import ConvertError, OutputError
from convert.core.findings import Finding
from convert.core.ops import Op
from convert.core.weight_norm_ops import operand_leaves
from convert.layers.base import Step
from convert.planning.options import ConversionOptions
from convert.planning.plan import Plan
from convert.writing.conversion_identity import identity
from convert.writing.execute import Write, computed, plan_layout
from convert.writing.file_layout import Layout, OutTensor
from convert.writing.provenance import header_metadata
from convert.writing.scatter import ELEMENTWISE, MOVING, needed_box
from convert.writing.transfer import stream_chunks, used_leaves
from convert.writing.writer import Place, Writer

Array = np.ndarray[Any, np.dtype[Any]]
# Bytes of a task in which no single object exceeds the limit of a budget: `checkpoints.memory_budget`.
BASE_MEMORY = 400 << 20


@dataclass(frozen=True)
class Request:
    """What all tasks of a conversion share: enough to make the same plan in another process.

    Attributes:
        model, checkpoint, options: of `plan_conversion`; paths are absolute.
        out: the output.
        max_shard_bytes: the largest size of one of its files.
        place: the file or directory that the driver has created for it; in a store, the uploads that it has begun.
        identity: of the driver's plan (`conversion_identity`). A process whose plan is another one refuses the task.
        headers: file -> bytes of its header.
        threads: of a task.
    """

    model: str
    checkpoint: Path
    options: ConversionOptions
    out: Path
    max_shard_bytes: int | None
    place: Place
    identity: Mapping[str, str]
    headers: Mapping[str, int]
    threads: int


@dataclass(frozen=True)
class Task:
    """One file of the output.

    Attributes:
        file: its name.
        chunks: leaf -> numbers of the chunks to read.
        nbytes: bytes of its tensors.
        read: bytes of the chunks.
        memory: bytes that it may need.
    """

    file: str
    chunks: Mapping[str, Sequence[int]]
    nbytes: int
    read: int
    memory: int


@dataclass(frozen=True)
class Done:
    """What a task wrote and read.

    Attributes:
        file: of the task.
        tensors: name -> digest of its bytes.
        chunks: leaf -> number of a chunk -> digest.
        notes: what else the driver's writer must know (`Writer.take`).
        findings: why it failed; empty otherwise. An exception of this package keeps more than a process can send.
    """

    file: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    chunks: Mapping[str, Mapping[int, bytes]] = field(default_factory=dict)
    notes: tuple[Sequence[Any], ...] = ()
    findings: tuple[Finding, ...] = ()


def cut(plan: Plan, layout: Layout) -> list[Task]:
    """Return a task for each file, in their order. Every chunk of every leaf that the plan uses is read by one of them, at least."""
    steps: dict[str, list[Step]] = {file: [] for file in layout.files}
    for step in plan.steps:
        steps[layout.placements[step.name].file].append(step)
    used = used_leaves(plan)
    grids = {leaf: plan.source.chunks(leaf) for leaf in used}
    needed: dict[str, dict[str, set[int]]] = {file: {} for file in layout.files}
    left = {leaf: set(range(len(grid))) for leaf, grid in grids.items()}
    for file, inside in steps.items():
        for part in (part for step in inside for part in step.parts):
            numbers = _overlapping(plan, part.leaf, part.ops, grids[part.leaf])
            needed[file].setdefault(part.leaf, set()).update(numbers)
            left[part.leaf] -= numbers
    for leaf, rest in left.items():  # no tensor needs them, but their values count for the digest of the source
        if rest or not len(grids[leaf]):
            file = next((file for file in layout.files if leaf in needed[file]), layout.files[0])
            needed[file].setdefault(leaf, set()).update(rest)
    return [_task(plan, file, steps[file], needed[file], grids) for file in layout.files]


def _overlapping(plan: Plan, leaf: str, ops: Sequence[Op], grid: Grid) -> set[int]:
    """Return the numbers of the chunks that hold what the operations select."""
    box, _ = needed_box(tuple(ops), plan.source.leaves[leaf].spec)
    if not box.size or not len(grid):
        return set()
    if not grid.counts:
        return {0}
    ranges = (range(a // c, (a + n - 1) // c + 1) for a, n, c in zip(box.origin, box.shape, grid.chunk, strict=True))
    return {int(np.ravel_multi_index(at, grid.counts)) for at in itertools.product(*ranges)}


def _task(
    plan: Plan, file: str, steps: Sequence[Step], needed: Mapping[str, set[int]], grids: Mapping[str, Grid]
) -> Task:
    read = largest = 0
    for leaf, numbers in needed.items():
        itemsize = plan.source.leaves[leaf].spec.nbytes // max(1, plan.source.leaves[leaf].spec.size)
        sizes = [grids[leaf][k].size * itemsize for k in numbers]
        read, largest = read + sum(sizes), max(largest, *sizes, 0)
    buffered = max((step.spec.nbytes for step in steps if _buffers(step)), default=0)
    memory = BASE_MEMORY + sum(max(0, nbytes - DEFAULT_LIMIT) for nbytes in (largest, buffered))
    chunks = {leaf: tuple(sorted(numbers)) for leaf, numbers in needed.items()}
    return Task(file, chunks, sum(step.spec.nbytes for step in steps), read, memory)


def _buffers(step: Step) -> bool:
    """Whether an operation may need all elements of a leaf at once."""
    ops = tuple(op for part in step.parts for op in part.ops)
    return bool(operand_leaves(ops)) or not all(isinstance(op, (*ELEMENTWISE, *MOVING)) for op in ops)


_prepared: dict[str, tuple[Plan, list[OutTensor], Layout]] = {}  # the last plan of this process, by its identity


def run_task(request: Request, task: Task) -> Done:
    """Write one file of the output. A task that runs again writes the same bytes to the same place."""
    try:
        plan, tensors, layout = _prepare(request)
        writer = Writer(request.out, layout, tensors, with_digests=True)
        with writer.part(request.place, task.file, request.headers[task.file]) as (digests, notes):
            sink = _OneFile(writer, layout, task.file)
            for step in plan.steps:
                if step.value is not None and sink.holds(step):
                    writer.region(step.name)[...] = computed(step)
                    writer.done(step.name)
            chunks = dict(stream_chunks(plan, sink, task.chunks, jobs=request.threads))
    except ConvertError as error:
        return Done(task.file, findings=error.findings)
    return Done(task.file, dict(digests), chunks, tuple(notes))


def _prepare(request: Request) -> tuple[Plan, list[OutTensor], Layout]:
    """Make the plan of the driver again, once for each process.

    Raises:
        OutputError: it is another plan: this machine has another version, other rules or another checkpoint.
    """
    key = repr(sorted(request.identity.items()))
    if key not in _prepared:
        plan = plan_conversion(request.model, request.checkpoint, request.options)
        tensors, layout = plan_layout(plan, request.out, request.max_shard_bytes)
        here = identity(plan, layout, header_metadata(plan))
        if differing := sorted(
            name for name in {*here, *request.identity} if here.get(name) != request.identity.get(name)
        ):
            problem = f"a machine of the cluster makes another plan: it differs in {', '.join(differing)}"
            fix = "install the same version on all machines, and let them see the same files under the same paths"
            raise OutputError(Finding("cluster-failed", problem, path=str(request.checkpoint), fix=fix))
        _prepared.clear()
        _prepared[key] = plan, tensors, layout
    return _prepared[key]


class _OneFile(Write):
    """Write only the tensors of one file."""

    def __init__(self, writer: Writer, layout: Layout, file: str) -> None:
        super().__init__(writer, Meter())
        self._layout, self._file = layout, file

    def holds(self, step: Step) -> bool:
        """Whether the file holds the tensor."""
        return self._layout.placements[step.name].file == self._file

    def region(self, step: Step) -> Array | None:
        return super().region(step) if self.holds(step) else None
