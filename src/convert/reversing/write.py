"""Write the checkpoint of a reverse plan: it appears complete or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from convert.core.errors import OutputError
from convert.core.findings import Finding
from convert.core.system import signals
from convert.reversing.formats.flax_msgpack import write_msgpack
from convert.reversing.formats.npz import write_npz
from convert.reversing.formats.orbax import OWN, step_files, write_orbax
from convert.reversing.plan import ReversePlan
from convert.reversing.source import ReversedSource
from convert.writing.destination.atomic import AtomicOutput, write_text
from convert.writing.destination.permitted import os_errors, real, refuse_existing
from convert.writing.execute import Event, refuse_overlap
from convert.writing.transfer import default_jobs, require_unchanged

FORMATS = {"orbax": "", "msgpack": ".msgpack", "npz": ".npz"}  # and the ending of the file; orbax writes a directory


@dataclass(frozen=True)
class CheckpointResult:
    """What was written.

    Attributes:
        out: the file or directory.
        format: ``orbax``, ``msgpack`` or ``npz``.
        leaves, nbytes: number and bytes of the leaves.
        seconds: from the first read to the rename.
    """

    out: Path
    format: str
    leaves: int
    nbytes: int
    seconds: float


def refuse(plan: ReversePlan, out: Path, to: str, overwrite: bool) -> None:
    """Check everything about the output that can be refused before a byte is read.

    Raises:
        OutputError: its name is that of another format, it exists, or it lies in the checkpoint or among the tensors.
    """
    if to not in FORMATS:
        known = ", ".join(FORMATS)
        raise OutputError(Finding("usage", "unknown format of a checkpoint", expected=f"one of {known}", got=repr(to)))
    ending = FORMATS[to]
    if out.suffix != ending and (ending or out.suffix in (".safetensors", *FORMATS.values())):
        raise OutputError(
            Finding(
                "output-name-invalid",
                path=str(out),
                expected=f"a name that ends in {ending}" if ending else f"the name of a directory, for --to {to}",
                got=f"a name that ends in {out.suffix}" if out.suffix else "a name without an extension",
                fix=f"write {out.with_suffix(ending)}",
            )
        )
    refuse_overlap(out, plan.forward.checkpoint)
    here, tensors = real(out), real(plan.written.path)
    if here == tensors or here in tensors.parents or (tensors in here.parents and tensors.is_dir()):
        problem = f"the output and the tensors {plan.written.path} are or contain each other"
        raise OutputError(Finding("output-within-input", problem, path=str(out), fix="choose another path"))
    refuse_existing(out, overwrite, directory=not ending, or_one_file=False)


def write_checkpoint(
    plan: ReversePlan,
    out: str | Path,
    to: str,
    *,
    overwrite: bool = False,
    jobs: int | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> CheckpointResult:
    """Write the leaves of a plan; after an error, `out` is unchanged.

    Args:
        to: a key of `FORMATS`.
        jobs: threads (``orbax``); None is the number of processors.
        on_event: called after each leaf.
        overwrite: whether `out` may be replaced; a directory keeps entries that are not of an Orbax checkpoint.

    Raises:
        OutputError: as `refuse`, or it cannot be written.
        PlanError: a value cannot be computed back.
        CheckpointError: a leaf of the checkpoint that gives the tree cannot be read.
    """
    started, out = time.monotonic(), Path(out)
    refuse(plan, out, to, overwrite)
    source, progress = ReversedSource(plan), 0
    source.check_constants()

    def done(leaf: str) -> None:
        nonlocal progress
        progress += source.leaves[leaf].spec.nbytes
        signals.check()
        if on_event is not None:
            on_event(Event(leaf, progress, source.nbytes))

    output = AtomicOutput(out, directory=not FORMATS[to], overwrite=overwrite)
    try:
        with os_errors(output.out, source.nbytes):
            if to == "orbax":
                write_orbax(source, output.path, jobs=jobs or default_jobs(), done=done)
            else:
                (write_npz if to == "npz" else write_msgpack)(source, output.path, done=done)
            require_unchanged(plan.forward.checkpoint)
            _sync(output.path)
        signals.check()
        output.publish(lambda name: OWN.fullmatch(name) is not None)
        for file, text in step_files(out).items() if to == "orbax" else ():
            write_text(file, text)
    finally:
        output.discard()
    return CheckpointResult(out, to, len(source.leaves), source.nbytes, time.monotonic() - started)


def _sync(path: Path) -> None:
    """Sync a file, or all files and directories below a directory, to the disk."""
    for each in (*path.rglob("*"), path):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
