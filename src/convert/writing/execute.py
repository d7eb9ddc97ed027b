"""Execute a plan: read every leaf once and write its parts directly to their place in the output."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoints.chunks import Meter
from convert.checkpoints.digest import combine
from convert.checkpoints.source import Source
from convert.core.errors import OptionError, OutputError, PlanError
from convert.core.findings import Finding
from convert.core.system import signals
from convert.core.tensor_spec import numpy_dtype
from convert.layers.base import Part, Step
from convert.layers.target import Numbers, Sinusoids
from convert.planning.plan import Plan
from convert.planning.tokenizer.files import GENERATION, merged_generation
from convert.stores import StorePath, located
from convert.writing.conversion_identity import identity
from convert.writing.destination.permitted import real
from convert.writing.file_layout import Layout, OutTensor, lay_out
from convert.writing.model_card import CARD, render_card
from convert.writing.provenance import header_metadata, tool_version
from convert.writing.transfer import Work, default_jobs, stream_leaves, used_leaves
from convert.writing.writer import Writer

Array = np.ndarray[Any, np.dtype[Any]]
MIN_JOURNAL = 256 << 20  # bytes of an output that any run can continue; a smaller one is converted again in a second


@dataclass(frozen=True)
class Event:
    """A leaf has been read, transformed and written.

    Attributes:
        leaf: its name; empty for the first event, before anything is read.
        done: bytes of the leaves that are complete.
        total: bytes of all leaves that the plan reads.
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
        source_digest: checksum of the leaves that were used (see `convert.checkpoints.digest`).
        spent: seconds by activity. On the main thread: ``prepare`` (layout, headers, files) and ``sync`` (to the disk, and
            the final rename). Summed over all threads: ``read``, ``decode`` (part of ``read`` where the two are one),
            ``checksum``, ``transform``, ``write`` (into the mapped output), ``steps`` (the interpreter between these) and
            ``wait`` (for memory, a turn, or work).
        restored: number of tensors that an earlier run had written (`resume`).
    """

    out: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    seconds: float
    source_digest: str
    spent: Mapping[str, float]
    restored: int = 0


def plan_layout(plan: Plan, out: Path, max_shard_bytes: int | None) -> tuple[list[OutTensor], Layout]:
    """Return the tensors, and the files and bytes that each gets.

    Raises:
        OutputError: `out` is a single file and would exceed `max_shard_bytes`.
    """
    tensors = [OutTensor(step.name, step.spec) for step in plan.steps]
    single = out.name if out.suffix == ".safetensors" else None
    stem = plan.rules.targets[plan.target].files
    return tensors, lay_out(tensors, single=single, stem=stem, max_shard_bytes=max_shard_bytes)


def prepare(plan: Plan, out: Path, max_shard_bytes: int | None) -> tuple[list[OutTensor], Layout, dict[str, bytes]]:
    """Check everything that can be refused before a byte is read or written; ``--dry-run`` stops here.

    Returns:
        The tensors, their layout, and the further files of the output by name.

    Raises:
        OutputError: the output lies in the checkpoint, its name is that of another format, a single file would exceed `max_shard_bytes`, or the target loads
            only single files.
        OptionError: files are to be copied beside a single file, or contradict those of the output.
        PlanError: ``config.json`` needs a fact that is not known.
    """
    out = located(out)
    if plan.tokenizer is not None and out.suffix == ".safetensors":
        problem, fix = (
            "--tokenizer copies files beside the weights, and OUT is one file",
            "give the name of a directory",
        )
        raise OptionError(Finding("usage", problem, path=str(out), fix=fix))
    refuse_overlap(out, plan.source)
    _refuse_name(out)
    tensors, layout = plan_layout(plan, out, max_shard_bytes)
    if plan.format.one_file and len(layout.files) > 1:
        raise OutputError(
            Finding(
                "output-too-large",
                plan.format.one_file,
                path=str(out),
                expected="1 file",
                got=f"{len(layout.files)} files",
                fix="write a .safetensors file, or give a larger --max-shard-size",
            )
        )
    return tensors, layout, {} if out.suffix == ".safetensors" else _extra_files(plan)


def execute(
    plan: Plan,
    out: str | Path,
    *,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
    jobs: int | None = None,
    resume: bool = False,
) -> Iterator[Event | Result]:
    """Execute a plan; yield an `Event` after each leaf and a `Result` at the end.

    The output is complete when the `Result` is yielded; after an error it is unchanged. Memory: see `stream_leaves`.

    Args:
        out: a name ending in ``.safetensors`` for one file, anything else for a directory (with a model card, and
            ``config.json`` and ``generation_config.json`` when the target has them).
        overwrite: whether an existing output may be replaced.
        max_shard_bytes: for a directory, the most bytes in one file.
        jobs: threads; None is the number of processors.
        resume: whether to continue an unfinished run with what it had not written, and to leave this one for the next when it is
            interrupted. What is there is compared with its digests first.

    Raises:
        OutputError: the output exists, lies in the checkpoint, or cannot be written; or the unfinished run is of another
            checkpoint, other rules, options or another version (``resume-mismatch``).
        CheckpointError: a leaf cannot be read.
        PlanError: a value does not fit the dtype asked for, or ``config.json`` needs a fact that is not known.
    """
    started = time.monotonic()
    out = located(out)
    tensors, layout, extra = prepare(plan, out, max_shard_bytes)
    used = used_leaves(plan)
    total = sum(plan.source.leaves[leaf].spec.nbytes for leaf in used)
    digests: dict[str, str] = {}
    meter = Meter()
    metadata = header_metadata(plan)
    keeps_journal = resume or (plan.nbytes >= MIN_JOURNAL and not isinstance(out, StorePath))
    with Writer(
        out,
        layout,
        tensors,
        metadata=metadata,
        overwrite=overwrite,
        extra_files=extra,
        with_digests=True,
        identity=identity(plan, layout, metadata) if keeps_journal else None,
        resume=resume,
    ) as writer:
        for step in plan.steps:
            if step.value is not None and step.name not in writer.restored:
                # One number fills a tensor of any size without a second one in memory.
                writer.region(step.name)[...] = step.value if isinstance(step.value, float) else computed(step)
                writer.done(step.name)
        meter.add("prepare", time.monotonic() - started)
        skip = {leaf for leaf, work in used.items() if leaf in writer.leaves and _restored(work, writer.restored)}
        digests |= {leaf: writer.leaves[leaf] for leaf in skip}
        done, jobs = sum(plan.source.leaves[leaf].spec.nbytes for leaf in skip), jobs or default_jobs()
        yield Event("", done, total)
        streaming, before = time.perf_counter(), sum(meter.seconds.values())
        for leaf, digest in stream_leaves(plan, Write(writer, meter), jobs=jobs, meter=meter, skip=skip):
            digests[leaf] = digest
            writer.leaf_done(leaf, digest)
            done += plan.source.leaves[leaf].spec.nbytes
            signals.check()
            yield Event(leaf, done, total)
        streaming, busy = time.perf_counter() - streaming, sum(meter.seconds.values()) - before
        meter.add("wait", max(0.0, jobs * streaming - busy))
        syncing = time.perf_counter()
        source_digest = combine(digests)
        writer.set_metadata("source_digest", source_digest)
        writer.commit()
        meter.add("sync", time.perf_counter() - syncing)
    files = (*layout.files, *((layout.index,) if layout.index else ()), *extra)
    yield Result(
        out,
        files,
        len(tensors),
        plan.nbytes,
        time.monotonic() - started,
        source_digest,
        meter.seconds,
        len(writer.restored),
    )


def _restored(work: Work, tensors: Collection[str]) -> bool:
    """Whether an earlier run completed every tensor that a leaf contributes to."""
    return all(step.name in tensors for step, _ in work)


class Write:
    """Write every piece into the mapped output."""

    def __init__(self, writer: Writer, meter: Meter) -> None:
        self._writer, self._meter = writer, meter

    def region(self, step: Step) -> Array | None:
        return None if step.name in self._writer.restored else self._writer.region(step.name)

    def piece(self, step: Step, part: Part, region: Array, values: Callable[[], Array]) -> None:
        started = time.perf_counter()
        try:
            computed = values()
        except OverflowError as error:
            raise overflowed(step, part, error) from None
        between = time.perf_counter()
        region[...] = computed
        self._meter.add("transform", between - started)
        self._meter.add("write", time.perf_counter() - between)

    def complete(self, step: Step) -> None:
        started = time.perf_counter()
        self._writer.done(step.name)
        self._meter.add("checksum", time.perf_counter() - started)


def overflowed(step: Step, part: Part, error: OverflowError, other: str = "choose another --dtype") -> PlanError:
    """Return the error for values of a leaf that the dtype of their tensor cannot hold.

    Args:
        other: what else the user can do.
    """
    return PlanError(
        Finding(
            "value-overflow",
            f"from {part.leaf}: {error}",
            rule=step.rule.line_only,
            path=step.name,
            fix=f"keep a wider dtype with `dtype: float32` in its rule, or {other}",
        )
    )


def computed(step: Step) -> np.ndarray[Any, Any]:
    """Compute the tensor of a step that reads no leaf."""
    assert step.value is not None
    if isinstance(step.value, float):
        return np.full(step.spec.shape, step.value, numpy_dtype(step.spec.dtype))
    if isinstance(step.value, range):
        return np.asarray(step.value, numpy_dtype(step.spec.dtype)).reshape(step.spec.shape)
    if isinstance(step.value, Numbers):
        return _numbers(step.value, step.spec.shape).astype(numpy_dtype(step.spec.dtype))
    if isinstance(step.value, Sinusoids):
        return _sinusoids(step.value, step.spec.shape).astype(numpy_dtype(step.spec.dtype))
    low, increment = step.value
    return np.array(
        [low * math.exp(-k * increment) for k in range(step.spec.shape[0])], dtype=numpy_dtype(step.spec.dtype)
    )


def _sinusoids(of: Sinusoids, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    rows, width = shape[-2:]
    if not of.side:
        return _line(of, rows, width).reshape(shape)
    line = _line(of, of.side, width // 2)
    both = [np.tile(line, (of.side, 1)), np.repeat(line, of.side, 0)]  # of its column, of its row
    zeros = np.zeros((rows - of.side**2, width))
    return np.asarray(np.concatenate([zeros, np.concatenate(both, 1)]).reshape(shape))


def _line(of: Sinusoids, rows: int, width: int) -> np.ndarray[Any, np.dtype[Any]]:
    scales = [of.first * math.exp(-k * of.step) for k in range(width // 2)]
    angles = [[row * scale for scale in scales] for row in range(rows)]
    both = [[[f(angle) for angle in line] for line in angles] for f in (math.sin, math.cos)]
    return np.asarray(np.concatenate(both, 1) if not of.interleaved else np.stack(both, -1).reshape(rows, width))


def _numbers(of: Numbers, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    if of.triangle is None:
        return np.broadcast_to(np.asarray(of.rows), shape)
    below, on, above = of.triangle
    sign = np.sign(np.arange(shape[-1]) - np.arange(shape[-2])[:, None])
    return np.broadcast_to(np.select([sign < 0, sign == 0], [below, on], above), shape)


def _extra_files(plan: Plan) -> dict[str, bytes]:
    """Return the further files of an output directory, by name."""
    given, config, own = plan.tokenizer, plan.config, plan.generation_config
    generation = merged_generation(own, given, config or {}, plan.sidecar.config) if given else own
    files = {"config.json": config, GENERATION: generation}
    written = {
        name: (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
        for name, content in files.items()
        if content is not None
    }
    return {**written, **(given.files if given else {}), CARD: render_card(plan, tool_version()).encode()}


# A directory may have any other name, such as gemma-3.1b.
_OTHER_FORMATS = re.compile(
    r"\.(bin|ckpt|gguf|h5|hdf5|keras|msgpack|np[yz]|onnx|pickle|pkl|pth?|safetensors?)", re.IGNORECASE
)


def _refuse_name(out: Path) -> None:
    """Refuse the name of a file of another format, as a directory of this name is hardly meant.

    Raises:
        OutputError: the name ends so, and there is no such directory.
    """
    if out.suffix == ".safetensors" or not _OTHER_FORMATS.fullmatch(out.suffix) or out.is_dir():
        return
    raise OutputError(
        Finding(
            "output-name-invalid",
            path=str(out),
            expected="a name that ends in .safetensors, or the name of a directory",
            got=f"a name that ends in {out.suffix}",
            fix=f"write {out.with_suffix('.safetensors')}, or a name without an extension for a directory",
        )
    )


def refuse_overlap(out: Path, source: Source) -> None:
    """Refuse to write into the checkpoint, or to replace a directory that contains it.

    Raises:
        OutputError: one of the two paths contains the other.
    """
    here = real(out)
    places = [(part.display_path, real(part.path)) for part in source.parts]
    for given, there in [(name, one) for name, at in places for one in (at, real(name), _outermost(at))]:
        if here == there:
            problem, fix = f"the output is the checkpoint {given} itself", "choose another path"
        elif there in here.parents and there.is_dir():
            problem = f"the output lies inside the checkpoint {given}"
            fix = "choose a path outside of it"
        elif here in there.parents:
            problem = f"the checkpoint {given} lies inside the output directory"
            fix = "choose a directory that does not contain it"
        else:
            continue
        raise OutputError(Finding("output-within-input", problem, path=str(out), fix=fix))


def _outermost(path: Path) -> Path:
    """Return the directory of the step that contains a leaf's file: ``checkpoint_N`` of paxml, or a save of Orbax."""
    outermost = path
    for parent in (path, *list(path.parents)[:3]):
        if re.fullmatch(r"checkpoint_[0-9]+", parent.name) or (parent / "_CHECKPOINT_METADATA").is_file():
            outermost = parent
    return outermost
