"""Decide whether an output that exists is what a conversion would write: `--resume` then keeps it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoints.digest import combine
from convert.core.errors import OutputError
from convert.core.safetensors_header import read_header
from convert.core.system.regular_file import ObjectPath
from convert.outputs.integrity import verify_output
from convert.planning.plan import Plan
from convert.stores import StorePath, located
from convert.writing.conversion_identity import newest_change
from convert.writing.destination.journal import refuse_other
from convert.writing.destination.permitted import os_errors
from convert.writing.destination.store import remove_unfinished
from convert.writing.execute import Result, plan_layout
from convert.writing.file_layout import INDICES, SINGLE_FILES
from convert.writing.model_card import CARD
from convert.writing.provenance import header_metadata
from convert.writing.transfer import default_jobs, stream_leaves
from convert.writing.written import Written, open_written

_SKEW = 15 * 60 * 10**9  # nanoseconds by which the clock of a store may differ; S3 refuses requests that differ by more
_WHAT, _FIX = "the output", "replace it with --overwrite, or give another name"


def completed(plan: Plan, out: Path, max_shard_bytes: int | None) -> Result | None:
    """Return the result of the earlier conversion; None where there is no output yet.

    Compares the version, the rules, the options and the layout, then every byte with its digest. If a file of the checkpoint has changed
    since, its leaves are read and compared with the digest in the header.

    Raises:
        OutputError: it is of another conversion (``resume-mismatch``), or damaged.
        CheckpointError: it is no output of a conversion.
    """
    out = located(out)
    if not is_there(out):
        return None
    started = time.monotonic()
    written = require_same(plan, out, max_shard_bytes)
    integrity = verify_output(out, [CARD])
    if not integrity.intact:
        raise OutputError(*integrity.findings, headline=f"{out} is damaged; {_FIX}")
    digest, files = written.metadata["source_digest"], {file for file, _ in written.tensors.values()}
    written_at = min(file.stat().st_mtime_ns for file in files)
    skew = _SKEW if isinstance(out, ObjectPath) else 0
    if newest_change(plan.source.path, *(part.path for part in plan.checkpoint.parts)) >= written_at - skew:
        found = combine(dict(stream_leaves(plan, _NoSink(), jobs=default_jobs())))
        if found != digest:
            raise refuse_other(out, ["source"], _WHAT, _FIX)
    tensors, seconds = len(plan.steps), time.monotonic() - started
    names = tuple(sorted(file.name for file in files))
    if isinstance(out, StorePath):  # its run was killed between its last object and the end of its journal
        with os_errors(out):
            remove_unfinished(out)
    return Result(out, names, tensors, plan.nbytes, seconds, digest, {}, restored=tensors)


def is_there(out: Path) -> bool:
    """Whether there is an output: in a store its last object, without which a run into a directory was killed before its end."""
    if isinstance(out, ObjectPath):
        return out.is_file() or any((out / name).is_file() for name in (*SINGLE_FILES, *INDICES))
    return os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir()))


def require_same(plan: Plan, out: Path, max_shard_bytes: int | None) -> Written:
    """Compare what the headers of an output state with a plan. Reads only the headers.

    Raises:
        OutputError: they are of another conversion.
        CheckpointError: it is no output of a conversion.
    """
    written = open_written(out)
    expected = header_metadata(plan)
    metadata = [read_header(file)[0] for file in {file for file, _ in written.tensors.values()}]
    differing = {
        key for key in expected for said in metadata if key != "source_digest" and said.get(key) != expected[key]
    }
    layout = plan_layout(plan, out, max_shard_bytes)[1]
    placed = {name: (place.file, place.stop - place.start) for name, place in layout.placements.items()}
    if placed != {name: (file.name, entry.stop - entry.start) for name, (file, entry) in written.tensors.items()}:
        differing.add("layout")
    if differing:
        raise refuse_other(out, sorted(differing), _WHAT, _FIX)
    return written


class _NoSink:
    """Takes no values: the leaves are only read."""

    def region(self, step: Any) -> np.ndarray[Any, Any] | None:
        return None

    def piece(self, step: Any, part: Any, region: Any, values: Any) -> None:
        raise AssertionError("nothing was asked for")

    def complete(self, step: Any) -> None:
        pass
