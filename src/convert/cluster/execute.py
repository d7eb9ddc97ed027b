"""The driver: it keeps the output, lets the tasks fill its files, and publishes it when all of them have."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from convert.checkpoints.digest import combine, join
from convert.cluster.tasks import Done, Request, Task, cut
from convert.core.errors import CheckpointError, ConvertError
from convert.core.findings import Finding
from convert.core.system import signals
from convert.planning.options import ConversionOptions
from convert.planning.plan import Plan
from convert.rules.library import is_path
from convert.stores import located
from convert.writing.conversion_identity import identity
from convert.writing.execute import Event, Result, prepare
from convert.writing.provenance import header_metadata
from convert.writing.transfer import require_unchanged
from convert.writing.writer import Writer

Runner = Callable[[Request, Sequence[Task]], Iterator[Done]]


def execute_tasks(
    plan: Plan,
    model: str,
    checkpoint: str | Path,
    options: ConversionOptions,
    out: str | Path,
    run: Runner,
    *,
    threads: int,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
    resume: bool = False,
) -> Iterator[Event | Result]:
    """Execute a plan as tasks, one for each file; yield an `Event` after each and a `Result` at the end, as `execute` does.

    The bytes are those of `execute`. The output's directory and the checkpoint must be on file systems that all machines see under the
    same paths, or in stores: each machine finds the credentials itself, and a request has none.

    Args:
        model, checkpoint, options: what `plan` was made of.
        run: runs the tasks, in any order, and yields what each has done.
        threads: of a task.

    Raises:
        ConvertError: as `execute`; and ``cluster-failed`` where a machine cannot do its part.
    """
    started = time.monotonic()
    out = located(out)
    tensors, layout, extra = prepare(plan, out, max_shard_bytes)
    metadata = header_metadata(plan)
    of = identity(plan, layout, metadata)
    tasks = cut(plan, layout)
    grids = {leaf: len(plan.source.chunks(leaf)) for task in tasks for leaf in task.chunks}
    found: dict[str, dict[int, bytes]] = defaultdict(dict)
    total, done = sum(task.nbytes for task in tasks), 0
    with Writer(
        out, layout, tensors, metadata=metadata, overwrite=overwrite, extra_files=extra, with_digests=True, identity=of, resume=resume
    ) as writer:  # fmt: skip
        leaves = dict(writer.leaves)
        files = defaultdict(set)
        for name, place in layout.placements.items():
            files[place.file].add(name)
        waiting = {
            task.file: task
            for task in tasks
            if not (files[task.file] <= writer.restored and task.chunks.keys() <= leaves.keys())
        }
        done = total - sum(task.nbytes for task in waiting.values())
        request = Request(
            str(Path(model).absolute()) if is_path(model) else model, located(checkpoint).absolute(), _absolute(options), out.absolute(),
            max_shard_bytes, writer.place, of, writer.headers, threads,
        )  # fmt: skip
        yield Event("", done, total)
        for part in run(request, tuple(waiting.values())) if waiting else ():
            if part.findings:
                raise ConvertError(*part.findings)
            writer.take(part.file, part.tensors, part.notes)
            for leaf, chunks in part.chunks.items():
                _join(leaf, found[leaf], chunks)
                if leaf not in leaves and len(found[leaf]) == grids[leaf]:
                    ordered = [found[leaf][k] for k in range(grids[leaf])]
                    leaves[leaf] = join(leaf, plan.source.leaves[leaf].spec, ordered)
                    writer.leaf_done(leaf, leaves[leaf])
            done += waiting[part.file].nbytes
            signals.check()
            yield Event(part.file, done, total)
        require_unchanged(plan.checkpoint)
        source_digest = combine(leaves)
        writer.set_metadata("source_digest", source_digest)
        writer.commit()
    names = (*layout.files, *((layout.index,) if layout.index else ()), *extra)
    yield Result(
        out, names, len(tensors), plan.nbytes, time.monotonic() - started, source_digest, {}, len(writer.restored)
    )


def _absolute(options: ConversionOptions) -> ConversionOptions:
    """Return the options of a task: with absolute paths, as it runs in another directory; it writes tensors alone."""
    lora, skeleton, rules = (
        path and str(located(path).absolute()) for path in (options.lora, options.skeleton, options.rules_dir)
    )
    return replace(options, lora=lora, skeleton=skeleton, rules_dir=rules, tokenizer=None)


def _join(leaf: str, known: dict[int, bytes], chunks: Mapping[int, bytes]) -> None:
    """Add digests of chunks.

    Raises:
        CheckpointError: two tasks have read other values.
    """
    for number, digest in chunks.items():
        if known.setdefault(number, digest) != digest:
            problem = "two machines have read other values"
            raise CheckpointError(
                Finding("checkpoint-changed", problem, path=leaf, fix="check the disks, and convert again")
            )
