"""Moves the leaves of a plan, piece by piece, to where they go: one pass over the source, in parallel, in bounded memory."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
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
from convert.core.ops import apply
from convert.core.tensor_spec import TensorSpec
from convert.core.weight_norm_ops import operand_leaves, with_operands
from convert.layers.base import Part, Step
from convert.planning.plan import Plan
from convert.writing.scatter import Gathered, nowhere, place

Array = np.ndarray[Any, np.dtype[Any]]
Work = list[tuple[Step, Part]]
TOGETHER = 4 << 20  # bytes of small chunks that a thread deals with before it asks for more
TINY = (
    1 << 14
)  # bytes of leaves that threads deal with in turn: in competition for the interpreter, two are slower than one


class Deal(Protocol):
    """What is done with each piece. Called from several threads, never with the same elements."""

    def region(self, step: Step) -> Array | None:
        """The memory of a tensor; None where nothing is to be done about it."""

    def piece(self, step: Step, part: Part, region: Array, values: Callable[[], Array]) -> None:
        """Deals with some elements.

        Args:
            region: their place, a part of the tensor's memory, with axes in any order.
            values: what the plan makes of the leaf for it, of the same shape; raises OverflowError where a value does not
                fit the dtype of the tensor.
        """

    def whole(self, step: Step) -> None:
        """All pieces of a tensor were dealt with."""


def used_leaves(plan: Plan) -> dict[str, Work]:
    """The leaves that a plan reads, each with all its shares of output tensors."""
    used: dict[str, Work] = {}
    sidecar: list[str] = []
    for step in plan.steps:
        for part in step.parts:
            used.setdefault(part.leaf, []).append((step, part))
            sidecar.extend(operand_leaves(part.ops))
    for leaf in sidecar:  # read beside others; their values count for the digest
        used.setdefault(leaf, [])
    return used


def default_jobs() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def move(plan: Plan, deal: Deal, *, jobs: int, meter: Meter | None = None) -> Generator[tuple[str, str], None, None]:
    """Reads every leaf of a plan once and has its pieces dealt with; gives each leaf's name and `digest_leaf`.

    Memory: `jobs` times a piece and what a thread needs to decode it; and what is held whole, as far as a `Budget` allows, or one
    thing that exceeds it: chunks that can only be read at once, and the parts of leaves whose operations need them whole.

    Raises:
        CheckpointError: a leaf cannot be read, or the checkpoint was written anew meanwhile. And what `deal` raises.
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
            deal.whole(step)

    # That threads wait for each other's memory cannot come to a standstill. A thread takes the memory that a leaf is gathered in
    # before that of a chunk that is read at once, and who has the latter waits for nothing (see `Budget`). A leaf that is gathered
    # is in no batch with others, so that who has his turn with tiny ones does not wait for memory; and the chunks of a leaf are submitted in a row: when one thread waits to open the next leaf, the
    # chunks of those that were opened are with threads that do not wait, or next in the queue of one that does not.
    gathered, turn = Budget(), Lock()
    leaves = [_Leaf(plan.source, name, work, deal, filled, meter, gathered) for name, work in used.items()]
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="convert")
    waiting = _batches(leaves)
    running: set[Future[list[_Leaf]]] = set()
    try:
        while True:
            running.update(
                pool.submit(_deal_with, batch, meter, turn) for batch in islice(waiting, 2 * jobs - len(running))
            )
            if not running:
                break
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                for leaf in future.result():
                    yield leaf.name, leaf.digest()
        _require_unchanged(plan.checkpoint)
    except CheckpointError as error:
        _require_unchanged(plan.checkpoint, error)
        raise
    finally:  # an error, or a consumer that stopped: nothing may write into a file that is about to vanish
        gathered.stop()  # the chunks after which there would be room are not dealt with any more
        pool.shutdown(wait=True, cancel_futures=True)


def _require_unchanged(source: Source, error: CheckpointError | None = None) -> None:
    if (file := source.changed()) is not None:
        what = "written anew" if file.exists() else "removed"
        raise CheckpointError(
            f"{file}: it was {what} while the checkpoint was read, so that what was read is of no use; try again when nothing "
            "else writes there"
        ) from error


class _Leaf:
    """A leaf on its way: which of its chunks were dealt with."""

    def __init__(
        self,
        source: Source,
        name: str,
        work: Work,
        deal: Deal,
        filled: Callable[[Step], None],
        meter: Meter,
        gathered: Budget,
    ) -> None:
        self.name = name
        self.spec = source.leaves[name].spec
        self._source, self._work, self._deal, self._filled, self._meter = source, work, deal, filled, meter
        self.chunks = source.chunks(name)
        self._digests: list[bytes] = [b""] * len(self.chunks)
        self._left = len(self.chunks)
        self._shares: list[_Share] | None = None
        self._gathered = gathered
        self._lock = Lock()

    @property
    def tiny(self) -> bool:
        """Whether dealing with it is mostly the interpreter's work."""
        return self.spec.nbytes <= TINY

    @property
    def large(self) -> bool:
        """Whether to gather it may have to wait, so that no other leaf may wait for it in turn."""
        return self.spec.nbytes > TOGETHER

    def digest(self) -> str:
        """`digest_leaf`, once all chunks were dealt with."""
        return join(self.name, self.spec, self._digests)

    def deal_with(self, k: int) -> bool:
        """Deals with one chunk; whether it was the last. Of a leaf without elements there is nothing to read."""
        shares = self._open()
        if not self.chunks:
            return True
        chunk = self.chunks[k]
        digest, size = ChunkDigest(), 0
        pieces = self._source.pieces(self.name, chunk, self._meter)
        try:
            for origin, values in pieces:
                if values.dtype.name != self.spec.dtype:
                    raise ConvertError(f"{self.name}: read as {values.dtype.name}, announced as {self.spec}")
                started = time.perf_counter()
                digest.update(values)
                self._meter.add("checksum", time.perf_counter() - started)
                for share in shares:
                    share.see(origin, values)
                size += values.size
        finally:  # an error would keep alive what it holds
            if isinstance(pieces, Generator):
                pieces.close()
        if size != chunk.size:
            raise ConvertError(f"{self.name}: {size} values were read of a part that has {chunk.size}")
        self._digests[k] = digest.digest()
        with self._lock:
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
                    _Share(step, part, self.spec, region, self._deal, self._filled, operands)
                    for step, part in self._work
                    if (region := self._deal.region(step)) is not None
                ]
                nbytes = sum(share.nbytes for share in shares)
                if nbytes and self.large:  # nothing was put into the memory yet, so it was not made use of
                    started = time.perf_counter()
                    give_back = self._gathered.take(nbytes, self)
                    self._meter.add("wait", time.perf_counter() - started)
                    for share in shares:
                        share.give_back = give_back
                self._shares = shares
            return self._shares


class _Share:
    """A leaf's part of a tensor, on its way.

    Attributes:
        nbytes: of the memory that the leaf is gathered in; 0 where its pieces go straight to their place.
        give_back: is told when that is not needed any more.
    """

    def __init__(
        self,
        step: Step,
        part: Part,
        spec: TensorSpec,
        region: Array,
        deal: Deal,
        filled: Callable[[Step], None],
        operands: Mapping[str, Array],
    ) -> None:
        self._step, self._part, self._deal, self._filled = step, part, deal, filled
        self._spec, self._rows = spec, part.share(region)
        found = place(part.ops, spec, self._rows)
        self._gathered = Gathered(with_operands(part.ops, operands), spec) if found is None else None
        self._place = found or self._gathered.place  # type: ignore[union-attr]
        self._left = self._place.view.size
        self._lock = Lock()
        self.nbytes = self._place.view.nbytes if self._gathered is not None else 0
        self.give_back: Callable[[int], None] | None = None
        if not self._left:
            filled(step)

    def see(self, origin: tuple[int, ...], values: Array) -> None:
        """Deals with what it needs of a piece."""
        last = False
        for here, given in self._place.parts(origin, values):
            if self._gathered is not None:
                here[...] = apply(self._place.ops, given)
            else:
                self._deal.piece(self._step, self._part, here, partial(apply, self._place.ops, given))
            with self._lock:
                self._left -= given.size
                last = not self._left
        if last:
            del here, given  # which would keep what was gathered
            self._finish()

    def _finish(self) -> None:
        if self._gathered is not None:
            for tile in tiles(self._rows.shape, self._place.view.itemsize):
                cut = tile.within((0,) * self._rows.ndim)
                self._deal.piece(self._step, self._part, self._rows[cut], partial(self._gathered.made, cut))
            self._gathered = None
            self._place = nowhere(self._spec)
            if self.give_back is not None:
                self.give_back(self.nbytes)
        self._filled(self._step)


_Batch = list[tuple[_Leaf, int]]


def _batches(leaves: Iterable[_Leaf]) -> Iterator[_Batch]:
    """All chunks, those of large leaves first, so that no thread is left with one at the end; small ones together."""
    batch: _Batch = []
    nbytes = 0
    for leaf in sorted(leaves, key=lambda leaf: -leaf.spec.nbytes / max(1, len(leaf.chunks))):
        each = leaf.spec.nbytes // max(1, len(leaf.chunks))
        if batch and (leaf.large or batch[-1][0].large):
            yield batch
            batch, nbytes = [], 0
        for k in range(max(1, len(leaf.chunks))):
            batch.append((leaf, k))
            nbytes += each
            if nbytes >= TOGETHER or len(batch) == 64:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _deal_with(batch: _Batch, meter: Meter, turn: Lock) -> list[_Leaf]:
    """Deals with chunks; the leaves that are done with it."""
    with meter.rest("wait"), turn if batch[0][0].tiny else nullcontext(), meter.rest("steps"):
        return [leaf for leaf, k in batch if leaf.deal_with(k)]
