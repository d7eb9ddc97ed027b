"""What must be the same for an unfinished conversion to be continued: version, rules, options, layout, and the checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from convert.core.system.regular_file import ObjectPath
from convert.planning.plan import Plan
from convert.writing.file_layout import Layout


def identity(plan: Plan, layout: Layout, metadata: Mapping[str, str]) -> dict[str, str]:
    """Return what must be the same for a conversion to be continued.

    Args:
        metadata: of the header, before the source was read.
    """
    placed = [(name, place.file, place.start, place.stop) for name, place in layout.placements.items()]
    return {
        **metadata,
        "source": source_stamp(plan.source.path, *(part.path for part in plan.checkpoint.parts)),
        "layout": _hash(placed),
        "plan": _hash(
            [{**tensor, "rule": ""} for tensor in plan.to_dict()["tensors"]]
        ),  # the path of the rules may be another
    }


def source_stamp(*paths: Path) -> str:
    """Return a hash of the names, sizes and times of all files of a checkpoint."""
    return _hash([(str(path.name), *map(list, _stats(path))) for path in dict.fromkeys(paths)])


def newest_change(*paths: Path) -> int:
    """Return when a file of a checkpoint was last changed, replaced or renamed, in nanoseconds."""
    return max((max(times) for path in paths for _, _, *times in _stats(path)), default=0)


def _stats(path: Path) -> list[tuple[str, int, int, int]]:
    """Return name, size, and times of content and inode, of a file or of everything in a directory."""
    if isinstance(path, ObjectPath):
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        stats = [(file, file.lstat()) for file in files]
        return [(f"{file} {stat.st_ino}", stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file, stat in stats]
    below = (
        [Path(folder) / name for folder, _, names in os.walk(path) for name in (".", *names)] if path.is_dir() else []
    )
    found = []
    for file in sorted([path, *below]):
        try:
            stat = file.stat()
        except OSError:
            continue
        found.append((os.path.relpath(file, path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return found


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
