"""Stream the leaves of a plan: one pass over the checkpoint, piece by piece, in parallel, in bounded memory."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any, Protocol

import numpy as np

from convert.checkpoints.chunks import Meter, tiles
from convert.checkpoints.digest import ChunkDigest, join
from convert.checkpoints.memory_budget import Budget
from convert.checkpoints.source import Source
from convert.core.errors import CheckpointError, ConvertError
from convert.core.findings import Finding
from convert.core.ops import apply
from convert.core.tensor_spec import TensorSpec
from convert.core.weight_norm_ops import operand_leaves, with_operands
from convert.layers.base import Part, Step
from convert.planning.plan import Plan
from convert.writing.scatter import BufferedLeaf, destination_view, empty_view

Array = np.ndarray[Any, np.dtype[Any]]
Work = list[tuple[Step, Part]]
BATCH = 4 << 20  # bytes of small chunks that a thread takes at once
# Leaves of at most so many bytes are processed by one thread at a time: two threads that compete for the GIL are slower.
TINY = 1 << 14


class ChunkSink(Protocol):
    """Receives each piece. Called from several threads, never twice with the same elements."""

    def region(self, step: Step) -> Array | None:
        """Return the memory of a tensor; None to skip the tensor."""

    def piece(self, step: Step, part: Part, region: Array, values: Callable[[], Array]) -> None:
        """Receive some elements of a tensor.

        Args:
            region: their destination, a part of the tensor's memory, with its axes in any order.
            values: computes the elements, of the shape of `region`; raises OverflowError where a value does not fit the
                dtype of the tensor.
        """

    def complete(self, step: Step) -> None:
        """Called once for each tensor, after its last piece."""


def used_leaves(plan: Plan) -> dict[str, Work]:
    """Map each leaf that a plan reads to the parts of tensors that it contributes to."""
    used: dict[str, Work] = {}
    operands: list[str] = []
    for step in plan.steps:
        for part in step.parts:
            used.setdefault(part.leaf, []).append((step, part))
            operands.extend(operand_leaves(part.ops))
    for leaf in operands:  # read together with others; their values count for the digest
        used.setdefault(leaf, [])
    return used


def default_jobs() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stream_leaves(
    plan: Plan, sink: ChunkSink, *, jobs: int, meter: Meter | None = None, skip: Collection[str] = ()
) -> Generator[tuple[str, str], None, None]:
    """Read every leaf of a plan once and pass its pieces to `sink`; yield each leaf's name and `digest_leaf`.

    Args and errors are those of `stream_chunks`. `skip`: leaves that are not read.
    """
    source = plan.source
    chunks = {leaf: range(len(source.chunks(leaf))) for leaf in used_leaves(plan) if leaf not in skip}
    streamed = stream_chunks(plan, sink, chunks, jobs=jobs, meter=meter)
    try:
        for name, digests in streamed:
            yield name, join(name, source.leaves[name].spec, [digests[k] for k in chunks[name]])
    finally:
        streamed.close()


def stream_chunks(
    plan: Plan, sink: ChunkSink, chunks: Mapping[str, Sequence[int]], *, jobs: int, meter: Meter | None = None
) -> Generator[tuple[str, dict[int, bytes]], None, None]:
    """Read some chunks of leaves once and pass their pieces to `sink`; yield each leaf's name and its chunks' `ChunkDigest`.

    Memory: for each of `jobs` threads a piece and what decodes it. In addition, as far as a `Budget` allows, or one
    object that exceeds it: chunks that can only be read in one, and leaves whose operations need all elements.

    Args:
        chunks: leaf -> numbers of its chunks (`Source.chunks`). Of a tensor that needs others, `ChunkSink.complete` is not called.

    Raises:
        CheckpointError: a leaf cannot be read, or the checkpoint was rewritten meanwhile. And what `sink` raises.
    """
    meter = meter or Meter()
    used = used_leaves(plan)
    unfilled = Counter({step.name: len(step.parts) for step in plan.steps if step.parts})
    lock = Lock()

    def filled(step: Step) -> None:
        with lock:
            unfilled[step.name] -= 1
            last = not unfilled[step.name]
        if last:
            sink.complete(step)

    # Threads that wait for memory cannot deadlock:
    # - A thread takes the memory of a buffered leaf before that of a chunk. A thread that has the latter never waits.
    # - A buffered leaf shares no batch with other leaves, so a thread that holds `turn` never waits for memory.
    # - The chunks of a leaf are submitted in a row. While one thread waits to open the next leaf, the chunks of opened
    #   leaves are with threads that do not wait, or next in the queue of such a thread.
    buffers, turn = Budget(), Lock()
    leaves = [
        _Leaf(plan.source, name, used[name], chunks[name], sink, filled, meter, buffers)
        for name in used
        if name in chunks
    ]
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="convert")
    waiting = _batches(leaves)
    running: set[Future[list[_Leaf]]] = set()
    try:
        while True:
            running.update(
                pool.submit(_process, batch, meter, turn) for batch in islice(waiting, 2 * jobs - len(running))
            )
            if not running:
                break
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                for leaf in future.result():
                    yield leaf.name, leaf.digests
        require_unchanged(plan.checkpoint)
    except CheckpointError as error:
        require_unchanged(plan.checkpoint, error)
        raise
    finally:  # after an error, or when the consumer stops: no thread may write into a file that is about to be removed
        buffers.stop()  # the chunks that would free memory are cancelled
        pool.shutdown(wait=True, cancel_futures=True)


def require_unchanged(source: Source, error: CheckpointError | None = None) -> None:
    """Check that the checkpoint is the one that was opened.

    Raises:
        CheckpointError: a file was rewritten or removed.
    """
    if (file := source.changed()) is not None:
        change = "rewritten" if file.exists() else "removed"
        raise CheckpointError(
            Finding(
                "checkpoint-changed",
                f"was {change} while the checkpoint was read",
                path=str(file),
                fix="run again when no other program writes the checkpoint",
            )
        ) from error


class _Leaf:
    """A leaf, and which of its chunks were processed.

    Attributes:
        numbers: of the chunks to process, and one even where the leaf has none.
        digests: number -> digest, of those that were processed.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        work: Work,
        numbers: Sequence[int],
        sink: ChunkSink,
        filled: Callable[[Step], None],
        meter: Meter,
        buffers: Budget,
    ) -> None:
        self.name = name
        self.spec = source.leaves[name].spec
        self._source, self._work, self._sink, self._filled, self._meter = source, work, sink, filled, meter
        self.chunks = source.chunks(name)
        self.numbers = numbers or (0,)
        self.digests: dict[int, bytes] = {}
        self._left = len(self.numbers)
        self._shares: list[_Share] | None = None
        self._buffers = buffers
        self._lock = Lock()

    @property
    def tiny(self) -> bool:
        """Whether the interpreter, not the data, takes most of the time."""
        return self.spec.nbytes <= TINY

    @property
    def large(self) -> bool:
        """Whether buffering it may have to wait, so that no other leaf may wait for it in turn."""
        return self.spec.nbytes > BATCH

    def process(self, k: int) -> bool:
        """Process one chunk and return whether it was the last. A leaf without elements has nothing to read."""
        shares = self._open()
        if not self.chunks:
            return True
        chunk = self.chunks[k]
        digest, size = ChunkDigest(), 0
        pieces = self._source.pieces(self.name, chunk, self._meter)
        try:
            for origin, values in pieces:
                if values.dtype.name != self.spec.dtype:
                    raise ConvertError(
                        Finding("reader-contract", path=self.name, expected=str(self.spec), got=values.dtype.name)
                    )
                started = time.perf_counter()
                digest.update(values)
                self._meter.add("checksum", time.perf_counter() - started)
                for share in shares:
                    share.take(origin, values)
                size += values.size
        finally:  # the traceback of an error would keep its buffers alive
            if isinstance(pieces, Generator):
                pieces.close()
        if size != chunk.size:
            raise ConvertError(
                Finding("reader-contract", path=self.name, expected=f"{chunk.size} elements of a chunk", got=str(size))
            )
        with self._lock:
            self.digests[k] = digest.digest()
            self._left -= 1
            if self._left:
                return False
            self._shares = []
        return True

    def _open(self) -> list[_Share]:
        with self._lock:
            if self._shares is None:
                operands: dict[str, Array] = {}
                for leaf in dict.fromkeys(leaf for _, part in self._work for leaf in operand_leaves(part.ops)):
                    operands[leaf] = self._source.read(leaf)  # once, for all layers of a stack
                shares = [
                    _Share(step, part, self.spec, region, self._sink, self._filled, operands)
                    for step, part in self._work
                    if (region := self._sink.region(step)) is not None
                ]
                nbytes = sum(share.nbytes for share in shares)
                if nbytes and self.large:  # the buffers are allocated, but no page of them is used yet
                    started = time.perf_counter()
                    give_back = self._buffers.acquire(nbytes, self)
                    self._meter.add("wait", time.perf_counter() - started)
                    for share in shares:
                        share.give_back = give_back
                self._shares = shares
            return self._shares


class _Share:
    """The part of a tensor that a leaf contributes.

    Attributes:
        nbytes: bytes of the buffer; 0 where pieces go directly to their destination.
        give_back: called with bytes of the buffer that are free again.
    """

    def __init__(
        self,
        step: Step,
        part: Part,
        spec: TensorSpec,
        region: Array,
        sink: ChunkSink,
        filled: Callable[[Step], None],
        operands: Mapping[str, Array],
    ) -> None:
        self._step, self._part, self._sink, self._filled = step, part, sink, filled
        self._spec, self._rows = spec, part.share(region)
        direct = destination_view(part.ops, spec, self._rows)
        self._buffer = BufferedLeaf(with_operands(part.ops, operands), spec) if direct is None else None
        self._view = direct or self._buffer.view  # type: ignore[union-attr]
        self._left = self._view.size
        self._lock = Lock()
        self.nbytes = self._view.region.nbytes if self._buffer is not None else 0
        self.give_back: Callable[[int], None] | None = None
        if not self._left:
            filled(step)

    def take(self, origin: tuple[int, ...], values: Array) -> None:
        """Take what it needs from a piece."""
        last = False
        for region, given in self._view.parts(origin, values):
            if self._buffer is not None:
                region[...] = apply(self._view.ops, given)
            else:
                self._sink.piece(self._step, self._part, region, partial(apply, self._view.ops, given))
            with self._lock:
                self._left -= given.size
                last = not self._left
        if last:
            del region, given  # they would keep the buffer alive
            self._finish()

    def _finish(self) -> None:
        if self._buffer is not None:
            for tile in tiles(self._rows.shape, self._view.region.itemsize):
                cut = tile.within((0,) * self._rows.ndim)
                self._sink.piece(self._step, self._part, self._rows[cut], partial(self._buffer.result, cut))
            self._buffer = None
            self._view = empty_view(self._spec)
            if self.give_back is not None:
                self.give_back(self.nbytes)
        self._filled(self._step)


_Batch = list[tuple[_Leaf, int]]


def _batches(leaves: Iterable[_Leaf]) -> Iterator[_Batch]:
    """Yield all chunks in batches: large leaves first, so that the threads end together; small chunks share a batch."""
    batch: _Batch = []
    nbytes = 0
    for leaf in sorted(leaves, key=lambda leaf: -leaf.spec.nbytes / max(1, len(leaf.chunks))):
        each = leaf.spec.nbytes // max(1, len(leaf.chunks))
        if batch and (leaf.large or batch[-1][0].large):
            yield batch
            batch, nbytes = [], 0
        for k in leaf.numbers:
            batch.append((leaf, k))
            nbytes += each
            if nbytes >= BATCH or len(batch) == 64:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _process(batch: _Batch, meter: Meter, turn: Lock) -> list[_Leaf]:
    """Process chunks and return the leaves that are complete with them."""
    with meter.rest("wait"), turn if batch[0][0].tiny else nullcontext(), meter.rest("steps"):
        return [leaf for leaf, k in batch if leaf.process(k)]
