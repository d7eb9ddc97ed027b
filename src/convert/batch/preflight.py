"""Find what can be refused before a byte is read: of all jobs, as one error."""

from __future__ import annotations

import glob
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from convert.api import plan_conversion
from convert.batch.jobs import Job, command, refuse
from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.user_code import REFERENCE_OPTION, find_factory
from convert.outputs.completed import is_there, require_same
from convert.planning.plan import Plan
from convert.rules import library
from convert.stores import StorePath
from convert.verify.config.judge import require_names
from convert.writing.destination.permitted import real, refuse_existing, require_text_file
from convert.writing.destination.store import require_writable
from convert.writing.execute import prepare
from convert.writing.shard_size import shard_bytes
from convert.writing.written import open_written


@dataclass(frozen=True)
class Planned:
    """A job that can start.

    Attributes:
        job: the job.
        nbytes: bytes that its output still needs.
    """

    job: Job
    nbytes: int


def preflight(
    jobs: Sequence[Job],
    mine: Sequence[Job],
    *,
    overwrite: bool,
    resume: bool = False,
    create: bool = True,
    reports: Sequence[Path] = (),
) -> list[Planned]:
    """Plan all jobs of this machine. Reads no arrays and writes no output.

    Args:
        jobs: the whole batch, in which no output may occur twice.
        mine: those that this machine runs.
        overwrite: whether existing outputs may be replaced.
        resume: whether outputs of the same conversion are kept, and unfinished ones continued.
        create: whether the directories of the outputs are created.
        reports: what the batch writes at its end.

    Raises:
        ConvertError: with a finding for each problem of each job.
    """
    findings = [*_clashes(jobs), *_replacing(reports, jobs)]
    planned = []
    for job in mine:
        try:
            planned.append(_plan(job, overwrite, resume))
        except ConvertError as error:
            findings.append(_of_job(job, error))
    findings += _too_small_disks(planned)
    if findings:
        raise refuse(findings, len(jobs))
    local = {real(path).parent for job in mine for path in job.written if not isinstance(path, StorePath)}
    for parent in local if create else ():
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConvertError(
                Finding("output-not-writable", f"cannot be created: {error.strerror}", path=str(parent))
            ) from None
    return planned


def _of_job(job: Job, error: ConvertError) -> Finding:
    """Return the first finding of an error at the job's line; the rest is what the command prints."""
    first, more = error.findings[0], len(error.findings) - 1
    rest = f"{more} more: {command(['plan', job.model, str(job.checkpoint)])}" if more else ""
    problem = first.problem if first.path == str(job.checkpoint) else f"{job.checkpoint}: {first.problem}".rstrip(": ")
    rule, fix = ", ".join(filter(None, (job.at, first.rule))), "; ".join(filter(None, (first.fix, rest)))
    return replace(first, rule=rule, problem=problem, fix=fix)


def _plan(job: Job, overwrite: bool, resume: bool) -> Planned:
    like = job.values.get("like")
    options = replace(job.options(), like=open_written(like).specs) if like else job.options()
    plan = plan_conversion(job.model, job.checkpoint, options)
    limit = shard_bytes(job.values.get("max_shard_size"), job.out)
    _, layout, extra = prepare(plan, job.out, limit)
    require_names(job.values.get("trust", ()), plan)
    if "reference" in job.values:
        find_factory(job.values["reference"], REFERENCE_OPTION)
    if job.statement is not None:
        if real(job.statement).parent.is_dir():
            require_text_file(job.statement)
        _require_writable_parent(job.statement)
    nbytes, there = plan.nbytes, False
    if isinstance(job.out, StorePath):
        there = resume and _is_there(plan, job.out, limit, overwrite)
        if not there:
            files = (*layout.files, *extra, *([layout.index] if layout.index else []))
            require_writable(job.out, overwrite, files if resume else ())
        return Planned(job, 0 if there else nbytes)
    if real(job.out).parent.is_dir():
        there = resume and _is_there(plan, job.out, limit, overwrite)
        if not there:
            refuse_existing(job.out, overwrite)
        nbytes = 0 if there else max(0, nbytes - _allocated(job.out)) if resume else nbytes
    _require_writable_parent(job.out)
    return Planned(job, nbytes)


def _require_writable_parent(path: Path) -> None:
    parent = _existing_parent(path)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        problem = f"the directory {parent} is not writable" if parent.is_dir() else f"{parent} is a file"
        raise ConvertError(Finding("output-not-writable", problem, path=str(path), fix="write elsewhere"))


def _is_there(plan: Plan, out: Path, limit: int | None, overwrite: bool) -> bool:
    """Whether an earlier run wrote the output. The job itself compares the bytes with their digests.

    Raises:
        ConvertError: it is of another conversion, and may not be replaced.
    """
    if not is_there(out):
        return False
    try:
        require_same(plan, out, limit)
    except ConvertError:
        if overwrite:
            return False
        raise
    return True


def _allocated(out: Path) -> int:
    """Return the bytes on the disk that an unfinished output has already."""
    out = real(out)
    found = [path for path in out.parent.glob(f".{glob.escape(out.name)}.tmp-*") if not path.name.endswith(".journal")]
    files = [file for path in found for file in (path.iterdir() if path.is_dir() else [path])]
    return sum(file.stat().st_blocks * 512 for file in files)


def _existing_parent(out: Path) -> Path:
    return next(parent for parent in real(out).parents if os.path.lexists(parent))


def _clashes(jobs: Sequence[Job]) -> Iterator[Finding]:
    """Find what two jobs write, and what is written into an output or a checkpoint. An output in its own checkpoint is found by its plan."""
    writers: dict[Path, Job] = {}
    readers = {real(job.checkpoint): job for job in jobs}
    for job in jobs:
        for path in job.written:
            if (first := writers.get(real(path))) is None:
                writers[real(path)] = job
            else:
                problem = f"two jobs have this output: from {first.checkpoint} and from {job.checkpoint}"
                fix = "give each job its own output"
                yield Finding("batch-invalid", problem, rule=job.at, path=str(path), fix=fix)
    for job in jobs:
        for path in job.written:
            place = real(path)
            for parent in (place, *place.parents):
                if parent != place and (writer := writers.get(parent)) is not None:
                    problem = f"lies inside what a job writes from {writer.checkpoint}: {parent}"
                    yield Finding("batch-invalid", problem, rule=job.at, path=str(path), fix="give another directory")
                reader = readers.get(parent)
                if reader is not None and (reader is not job or path is not job.out):
                    problem = f"lies in the checkpoint {reader.checkpoint} of a job"
                    yield Finding("output-within-input", problem, rule=job.at, path=str(path), fix="write elsewhere")
    for place, job in readers.items():
        for parent in place.parents:
            if (writer := writers.get(parent)) is not None and writer is not job:
                problem = f"would contain the checkpoint {job.checkpoint} of a job"
                yield Finding("output-within-input", problem, rule=writer.at, path=str(parent), fix="write elsewhere")


def _replacing(reports: Sequence[Path], jobs: Sequence[Job]) -> Iterator[Finding]:
    """Find reports that would replace what the batch reads or writes, or lie in it."""
    taken = {real(path) for job in jobs for path in (job.checkpoint, *job.written)}
    taken |= {real(Path(job.model)) for job in jobs if library.is_path(job.model)}
    taken |= {real(Path(job.at.rpartition(":")[0])) for job in jobs if job.at}
    for report in reports:
        place = real(report)
        if not taken.isdisjoint((place, *place.parents)):
            problem = "the report would replace what the batch reads or writes, or lie in it"
            yield Finding("output-within-input", problem, path=str(report), fix="give another name")
        taken.add(place)


def _too_small_disks(planned: Sequence[Planned]) -> Iterator[Finding]:
    """Compare the bytes of all outputs of a file system with its free space: an output that is replaced stays until then."""
    needed: dict[int, int] = defaultdict(int)
    places: dict[int, Path] = {}
    for one in planned:
        if isinstance(one.job.out, StorePath):
            continue
        parent = _existing_parent(one.job.out)
        device = parent.stat().st_dev
        needed[device] += one.nbytes
        places.setdefault(device, parent)
    for device, nbytes in needed.items():
        free = shutil.disk_usage(places[device]).free
        if nbytes > free:
            yield Finding(
                "disk-full",
                "all outputs together do not fit",
                path=str(places[device]),
                expected=f"{nbytes:,} free bytes",
                got=f"{free:,}",
                fix="make room, or write elsewhere",
            )
