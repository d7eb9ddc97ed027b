"""Moves the leaves of a plan, piece by piece, to where they go: one pass over the source, in parallel, in bounded memory."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from threading import Lock
from typing import Any, Protocol

import numpy as np

from convert.digests import ChunkDigest, join
from convert.errors import CheckpointError, ConvertError
from convert.folds import operand_leaves
from convert.ops import apply
from convert.placing import Gathered, place
from convert.plan import Plan
from convert.sources.base import Source
from convert.sources.chunks import Meter
from convert.spec import TensorSpec
from convert.steps import Part, Step

Array = np.ndarray[Any, np.dtype[Any]]
Work = list[tuple[Step, Part]]
TOGETHER = 4 << 20  # bytes of small chunks that a thread deals with before it asks for more


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
    for step in plan.steps:
        for part in step.parts:
            used.setdefault(part.leaf, []).append((step, part))
    for step in plan.steps:
        for part in step.parts:
            for leaf in operand_leaves(part.ops):  # read beside it; its values count for the digest
                used.setdefault(leaf, [])
    return used


def default_jobs() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def move(plan: Plan, deal: Deal, *, jobs: int, meter: Meter | None = None) -> Generator[tuple[str, str], None, None]:
    """Reads every leaf of a plan once and has its pieces dealt with; gives each leaf's name and `digest_leaf`.

    Memory: `jobs` times a piece and what a thread needs to decode it (sources that cannot read pieces: a leaf), and the
    parts of leaves whose operations need them whole.

    Raises:
        CheckpointError: a leaf cannot be read, or the checkpoint was written anew meanwhile. And what `deal` raises.
    """
    used = used_leaves(plan)
    unfilled = Counter({step.name: len(step.parts) for step in plan.steps if step.parts})
    lock = Lock()

    def filled(step: Step) -> None:
        with lock:
            unfilled[step.name] -= 1
            last = not unfilled[step.name]
        if last:
            deal.whole(step)

    leaves = [_Leaf(plan.source, name, work, deal, filled, meter) for name, work in used.items()]
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="convert")
    waiting = _batches(leaves)
    running: set[Future[list[_Leaf]]] = set()
    try:
        while True:
            running.update(pool.submit(_deal_with, batch) for batch in islice(waiting, 2 * jobs - len(running)))
            if not running:
                break
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                for leaf in future.result():
                    yield leaf.name, leaf.digest()
        _require_unchanged(plan.source)
    except CheckpointError as error:
        _require_unchanged(plan.source, error)
        raise
    finally:  # an error, or a consumer that stopped: nothing may write into a file that is about to vanish
        pool.shutdown(wait=True, cancel_futures=True)


def _require_unchanged(source: Source, error: CheckpointError | None = None) -> None:
    if (file := source.on_disk.changed()) is not None:
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
        meter: Meter | None,
    ) -> None:
        self.name = name
        self.spec = source.leaves[name].spec
        self._source, self._work, self._deal, self._filled, self._meter = source, work, deal, filled, meter
        self.chunks = source.chunks(name)
        self._digests: list[bytes] = [b""] * len(self.chunks)
        self._left = len(self.chunks)
        self._shares: list[_Share] | None = None
        self._lock = Lock()

    def digest(self) -> str:
        """`digest_leaf`, once all chunks were dealt with."""
        return join(self.name, self.spec, self._digests)

    def deal_with(self, k: int) -> bool:
        """Deals with one chunk; whether it was the last."""
        shares, chunk = self._open(), self.chunks[k]
        digest, size = ChunkDigest(), 0
        for origin, values in self._source.pieces(self.name, chunk, self._meter):
            if values.dtype.name != self.spec.dtype:
                raise ConvertError(f"{self.name}: read as {values.dtype.name}, announced as {self.spec}")
            started = time.perf_counter()
            digest.update(values)
            if self._meter is not None:
                self._meter.add("checksum", time.perf_counter() - started)
            for share in shares:
                share.see(origin, values)
            size += values.size
        if size != chunk.size:
            raise ConvertError(f"{self.name}: {size} values were read of a part that has {chunk.size}")
        self._digests[k] = digest.digest()
        with self._lock:
            self._left -= 1
            if self._left:
                return False
            self._shares = []
        return True

    def close(self) -> None:
        """For a leaf without elements, of which there is nothing to read."""
        self._open()

    def _open(self) -> list[_Share]:
        with self._lock:
            if self._shares is None:
                self._shares = [
                    _Share(step, part, self.spec, region, self._deal, self._filled)
                    for step, part in self._work
                    if (region := self._deal.region(step)) is not None
                ]
            return self._shares


class _Share:
    """A leaf's part of a tensor, on its way."""

    def __init__(
        self, step: Step, part: Part, spec: TensorSpec, region: Array, deal: Deal, filled: Callable[[Step], None]
    ) -> None:
        self._step, self._part, self._deal, self._filled = step, part, deal, filled
        self._rows = part.share(region)
        found = place(part.ops, spec, self._rows)
        self._gathered = Gathered(part.ops, spec) if found is None else None
        self._place = found or self._gathered.place  # type: ignore[union-attr]
        self._box = self._place.box
        self._left = self._box.size
        self._lock = Lock()
        if not self._left:
            filled(step)

    def see(self, origin: tuple[int, ...], values: Array) -> None:
        """Deals with what it needs of a piece."""
        common = self._box.overlap(origin, values.shape)
        if common is None:
            return
        here, given = self._place.view[common.within(self._box.origin)], values[common.within(origin)]
        if self._gathered is not None:
            here[...] = given
        else:
            self._deal.piece(self._step, self._part, here, lambda: apply(self._place.ops, given))
        with self._lock:
            self._left -= common.size
            last = not self._left
        if last:
            if self._gathered is not None:
                self._deal.piece(self._step, self._part, self._rows, self._gathered.made)
                self._gathered = None
            self._filled(self._step)


def _batches(leaves: Iterable[_Leaf]) -> Iterator[list[tuple[_Leaf, int]]]:
    """All chunks, those of large leaves first, so that no thread is left with one at the end; small ones together."""
    batch: list[tuple[_Leaf, int]] = []
    nbytes = 0
    for leaf in sorted(leaves, key=lambda leaf: -leaf.spec.nbytes / max(1, len(leaf.chunks))):
        each = leaf.spec.nbytes // max(1, len(leaf.chunks))
        for k in range(max(1, len(leaf.chunks))):
            batch.append((leaf, k))
            nbytes += each
            if nbytes >= TOGETHER or len(batch) == 64:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _deal_with(batch: list[tuple[_Leaf, int]]) -> list[_Leaf]:
    """Deals with chunks; the leaves that are done with it."""
    done = []
    for leaf, k in batch:
        if not leaf.chunks:
            leaf.close()
            done.append(leaf)
        elif leaf.deal_with(k):
            done.append(leaf)
    return done
