"""Streams a plan: every leaf is read once, its parts go straight to their place in the output. Draws nothing."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import xxhash

from convert.card import CARD, render_card
from convert.errors import ConvertError, OutputError, PlanError
from convert.folds import operand_leaves
from convert.ops import apply
from convert.plan import Plan
from convert.sources.base import Source
from convert.spec import numpy_dtype
from convert.steps import Part, Step
from convert.writer import Layout, OutTensor, Writer, lay_out

DIGEST_LENGTH = len("xxh3_128:") + 32


@dataclass(frozen=True)
class Event:
    """A leaf has been read, transformed and written.

    Attributes:
        leaf: its name; empty for the first event, when nothing has been read yet.
        done: bytes of leaves dealt with so far, of `total`.
    """

    leaf: str
    done: int
    total: int


@dataclass(frozen=True)
class Result:
    """What a conversion wrote.

    Attributes:
        out: the file or directory.
        files: names of the files, relative to `out` when it is a directory.
        tensors, nbytes: number and bytes of the tensors.
        seconds: from the first read to the last rename.
        source_digest: checksum of the leaves that were used (see `digest_leaf`).
    """

    out: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    seconds: float
    source_digest: str


def tool_version() -> str:
    """``ckpt-convert 0.1.0``, as it goes into the provenance."""
    try:
        return f"ckpt-convert {version('ckpt-convert')}"
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "ckpt-convert unknown"


def metadata(plan: Plan) -> dict[str, str]:
    """What goes into the safetensors header beside ``format: pt``: provenance and the facts that are no weights.

    No timestamps and no paths of this machine, so that the same conversion gives the same bytes.
    """
    return {
        "format": "pt",
        "converter": tool_version(),
        "model": plan.rules.model,
        "version": plan.version or "",
        "target": plan.target,
        "rules_sha256": plan.rules.sha256,
        "source_format": plan.source.format,
        "source_digest": "0" * DIGEST_LENGTH,
        "dtype": plan.dtype or "",
        "settings": json.dumps(plan.settings, sort_keys=True),
        "choices": json.dumps(plan.choices, sort_keys=True),
        "sizes": json.dumps(plan.sizes, sort_keys=True),
        "facts": json.dumps(plan.facts, sort_keys=True),
        "layers": json.dumps(plan.layers, sort_keys=True),
    }


def plan_layout(plan: Plan, out: Path, max_shard_bytes: int | None) -> tuple[list[OutTensor], Layout]:
    """The files that `out` will consist of, and where each tensor lies in them.

    Raises:
        OutputError: a single file was asked for and it would exceed `max_shard_bytes`.
    """
    tensors = [OutTensor(step.name, step.spec) for step in plan.steps]
    single = out.name if out.suffix == ".safetensors" else None
    return tensors, lay_out(tensors, single=single, max_shard_bytes=max_shard_bytes)


def default_jobs() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def execute(
    plan: Plan,
    out: str | Path,
    *,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
    jobs: int | None = None,
) -> Iterator[Event | Result]:
    """Runs a plan; yields an `Event` after each leaf and a `Result` at the end.

    The output appears whole when the `Result` has been yielded, or not at all. Memory: the leaves being dealt with,
    `jobs` of them at a time, and what one transformation of them needs.

    Args:
        out: a name ending in ``.safetensors`` for one file, anything else for a directory (with a model card, and
            ``config.json`` and ``generation_config.json`` when the target has them).
        overwrite: whether an existing output may be replaced.
        max_shard_bytes: for a directory, the most bytes in one file.
        jobs: leaves dealt with at a time; None is the number of processors.

    Raises:
        OutputError: the output exists, lies in the checkpoint, or cannot be written.
        CheckpointError: a leaf cannot be read.
        PlanError: a value does not fit the dtype asked for, or ``config.json`` needs a fact that is not known.
    """
    started = time.monotonic()
    out = Path(out)
    refuse_overlap(out, plan.source)
    tensors, layout = plan_layout(plan, out, max_shard_bytes)
    extra = {} if out.suffix == ".safetensors" else _extra_files(plan)
    used = used_leaves(plan)
    total = sum(plan.source.leaves[leaf].spec.nbytes for leaf in used)
    digests: dict[str, str] = {}
    with Writer(out, layout, tensors, metadata=metadata(plan), overwrite=overwrite, extra_files=extra) as writer:
        for step in plan.steps:
            if step.value is not None:
                writer.region(step.name)[...] = computed(step)
        yield Event("", 0, total)
        done = 0
        for leaf, digest in _stream(used, _Transfer(plan, used, writer), jobs or default_jobs()):
            digests[leaf] = digest
            done += plan.source.leaves[leaf].spec.nbytes
            yield Event(leaf, done, total)
        source_digest = combine(digests)
        writer.set_metadata("source_digest", source_digest)
        writer.commit()
    files = (*layout.files, *((layout.index,) if layout.index else ()), *extra)
    yield Result(out, files, len(tensors), plan.nbytes, time.monotonic() - started, source_digest)


Work = list[tuple[Step, Part]]


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


Leaves = Iterator[tuple[str, Work, np.ndarray[Any, Any]]]
AHEAD = 2  # times the bytes of the largest leaf: what is read while the caller deals with a leaf


@contextmanager
def read_used(plan: Plan, first: Callable[[str, Work, np.ndarray[Any, Any]], None] | None = None) -> Iterator[Leaves]:
    """The leaves that a plan reads, with their shares. Reading starts at once, and goes on while the caller deals with them.

    Memory: three times the largest leaf.

    Args:
        first: sees each leaf before the caller does, one after the other, in the thread that reads.
    """
    used = used_leaves(plan)
    sizes = {leaf: plan.source.leaves[leaf].spec.nbytes for leaf in used}
    budget = AHEAD * max(sizes.values(), default=0)
    pool = ThreadPoolExecutor(1, thread_name_prefix="convert-read")
    waiting = deque(used)
    started: deque[tuple[str, Future[np.ndarray[Any, Any]]]] = deque()

    def read(leaf: str) -> np.ndarray[Any, Any]:
        array = plan.source.read(leaf)
        if first is not None:
            first(leaf, used[leaf], array)
        return array

    def read_ahead() -> None:
        while waiting and sum(sizes[leaf] for leaf, _ in started) + sizes[waiting[0]] <= budget:
            started.append((leaf := waiting.popleft(), pool.submit(read, leaf)))

    def leaves() -> Leaves:
        while started:
            leaf, future = started.popleft()
            array = future.result()
            del future  # it holds the array as long as it lives
            read_ahead()
            yield leaf, used[leaf], array

    read_ahead()

    try:
        yield leaves()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Transfer:
    """Moves leaves to their places; called from several threads, each with another leaf."""

    def __init__(self, plan: Plan, used: Mapping[str, Work], writer: Writer) -> None:
        self._source, self._used, self._writer = plan.source, used, writer
        self._open_parts = {step.name: len(step.parts) for step in plan.steps}
        self._lock = Lock()

    def __call__(self, leaf: str) -> tuple[str, str]:
        """Reads a leaf, fills its parts of the output; gives its name and checksum."""
        array = self._source.read(leaf)
        spec = self._source.leaves[leaf].spec
        if array.shape != spec.shape or array.dtype.name != spec.dtype:  # a reader's promise, on which the plan relies
            raise ConvertError(f"{leaf}: read as {array.dtype.name}{list(array.shape)}, announced as {spec}")
        for step, part in self._used[leaf]:
            region = self._writer.region(step.name)
            try:
                part.share(region)[...] = apply(part.ops, array)
            except OverflowError as error:
                raise PlanError(
                    f"{step.rule.line_only}: {step.name} from {leaf}: {error}; keep a wider dtype for it with "
                    "`dtype: float32` in its rule, or choose another --dtype"
                ) from None
            with self._lock:
                self._open_parts[step.name] -= 1
                filled = not self._open_parts[step.name]
            if filled:
                self._writer.done(step.name)
        return leaf, digest_leaf(leaf, array)


def _stream(leaves: Iterable[str], transfer: _Transfer, jobs: int) -> Iterator[tuple[str, str]]:
    """Deals with each leaf in a pool; no more than `jobs` leaves are in memory."""
    waiting = iter(leaves)
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="convert")
    running: set[Future[tuple[str, str]]] = set()
    try:
        while True:
            running.update(pool.submit(transfer, leaf) for leaf in islice(waiting, jobs - len(running)))
            if not running:
                return
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                yield future.result()
    finally:  # an error, or a consumer that stopped: nothing may write into a file that is about to vanish
        pool.shutdown(wait=True, cancel_futures=True)


def digest_leaf(name: str, array: np.ndarray[Any, Any]) -> str:
    """Checksum of a leaf: XXH3-128 of its name, dtype, shape and bytes in C order (little endian)."""
    digest = xxhash.xxh3_128()
    digest.update(f"{name}\0{array.dtype.name}\0{array.shape}\0".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def combine(digests: Mapping[str, str]) -> str:
    """Checksum of a set of leaves, whatever the order in which they were read: ``xxh3_128:`` and 32 hex digits."""
    digest = xxhash.xxh3_128()
    for name in sorted(digests):
        digest.update(f"{name}\0{digests[name]}\n".encode())
    return f"xxh3_128:{digest.hexdigest()}"


def computed(step: Step) -> np.ndarray[Any, Any]:
    """The tensor of a step that no leaf goes into."""
    assert step.value is not None
    if isinstance(step.value, float):
        return np.full(step.spec.shape, step.value, numpy_dtype(step.spec.dtype))
    low, increment = step.value
    return np.array([low * math.exp(-k * increment) for k in range(step.spec.shape[0])], dtype=np.float32)


def _extra_files(plan: Plan) -> dict[str, bytes]:
    """What lies beside the weights in a directory, by name."""
    files = {"config.json": plan.config, "generation_config.json": plan.generation_config}
    written = {
        name: (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
        for name, content in files.items()
        if content is not None
    }
    return {**written, CARD: render_card(plan, tool_version()).encode()}


def refuse_overlap(out: Path, source: Source) -> None:
    """Writing into the checkpoint, or replacing a directory that holds it, would damage the source."""
    here = out.resolve()
    for there in (source.path.resolve(), source.called.resolve(), _outermost(source.path.resolve())):
        if here == there or (there in here.parents and there.is_dir()) or here in there.parents:
            raise OutputError(
                f"{out} and the checkpoint {source.called} lie within each other; choose another place for the output"
            )


def _outermost(path: Path) -> Path:
    """The directory of the step that a leaf's file lies in: ``checkpoint_N`` of paxml, or a save of Orbax."""
    found = path
    for parent in (path, *list(path.parents)[:3]):
        if re.fullmatch(r"checkpoint_[0-9]+", parent.name) or (parent / "_CHECKPOINT_METADATA").is_file():
            found = parent
    return found
