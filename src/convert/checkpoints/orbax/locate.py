"""Finds the tree in what the user named: a tree, a step with several items, or a directory of steps.

On disk (Orbax 0.5 to 0.12)::

    run/                        steps: `200`, `00000200`, `checkpoint_200`; CheckpointManager
        200/                    a step: _CHECKPOINT_METADATA (since 0.5.11), commit_success.txt; or the tree itself
            default/            an item that is a tree: _METADATA, manifest.ocdbt, ...
            metrics/metrics     an item that is JSON
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convert.checkpoints.encodings.ocdbt import MANIFEST
from convert.checkpoints.orbax.arrays import ARRAY_METADATA, PROCESS_PREFIX
from convert.checkpoints.orbax.tree import AGGREGATE, METADATA, read_json
from convert.core.errors import CheckpointError

# A save writes into a directory of such a name and renames it when it is done (0.12.8: _src/path/atomicity_types.py);
# `.partial_save` is that of v1's partial saves (experimental/v1/_src/partial/path.py).
_UNFINISHED = re.compile(r"\.orbax-checkpoint-tmp|\.partial_save$")
_STEP = re.compile(r"(?:.+[_-])?(\d{1,18})")  # _src/path/step.py, ALLOWED_STEP_NAME_PATTERN; `step-200` is Levanter's
_STEP_METADATA = "_CHECKPOINT_METADATA"
_COMMITTED = "commit_success.txt"
_V1 = "orbax.checkpoint"  # an empty file in the checkpoints of the v1 API
# How a paxml file begins, which has the name of Orbax's aggregate file: a map of two, and one of its two keys.
_PAX = (b"\x82\xafflattened_state", b"\x82\xb0str_pytree_state")
_WAIT = "Wait for the save to end"


class _UnfinishedError(CheckpointError):
    """A save is going on, or was interrupted."""


@dataclass(frozen=True)
class Located:
    """The item directory that holds the tree, and how it was chosen, for people."""

    path: Path
    notes: tuple[str, ...] = ()


def looks_like_orbax(path: Path) -> bool:
    """Whether `path` is, or contains, an Orbax checkpoint, finished or not, whole or not.

    Looks at names, and at the first bytes of a file called ``checkpoint``.
    """
    if not path.is_dir():
        return bool(_leftovers(path))
    try:
        return _looks_like_orbax(path)
    except CheckpointError:  # a directory that cannot be listed
        return False


def _looks_like_orbax(path: Path) -> bool:
    if _UNFINISHED.search(path.name) or _is_tree(path) or _is_step(path):
        return True
    children = _directories(path)
    return any(
        _UNFINISHED.search(child.name)
        or _is_tree(child)
        or _is_step(child)
        or (_number(child) is not None and any(map(_is_tree, _directories(child))))
        for child in children
    ) or any(child.name == "checkpoints" and looks_like_orbax(child) for child in children)


def locate(path: Path, step: int | None = None, item: str | None = None) -> Located:
    """The tree in `path`.

    Args:
        path: a tree, a step or a directory of steps.
        step: which step; the latest finished one if None.
        item: which item of the step; the only one that is a tree if None.

    Raises:
        CheckpointError: there is none, it is not finished, or a choice is left open.
    """
    path = path.resolve() if ".." in path.parts else path.absolute()  # TensorStore takes no ".."
    if not path.exists():
        leftovers = _leftovers(path)
        if leftovers:
            raise _unfinished(path, f"there is only {leftovers[0].name}, which a save has left or is writing now")
        raise CheckpointError(f'"{path}" does not exist')
    if not path.is_dir():
        raise CheckpointError(f'"{path}" is a file; an Orbax checkpoint is a directory: give the one that it lies in')
    _check_finished(path)
    if _is_tree(path):
        _check_step_of(path, step)
        if item is not None and path.name != item:
            raise CheckpointError(f'"{path}" is a single tree, without items; leave out --item {item}')
        return Located(path)
    if _has_arrays(path):
        raise CheckpointError(
            f'"{path}": {METADATA} is missing, so the tree is not known; copy the checkpoint again, with all its files'
        )
    if _is_step(path):
        _check_step_of(path, step)
        return _item(path, item)
    steps = _steps(path)
    unfinished = [child.name for child in _directories(path) if _UNFINISHED.search(child.name)]
    if steps or unfinished:
        trees = [child for child in _directories(path) if _is_tree(child)]
        if steps or not trees:
            chosen, note = _choose_step(path, steps, unfinished, step)
            below = Located(chosen) if _is_tree(chosen) and item is None else _item(chosen, item)
            return replace(below, notes=(note, *below.notes))
    if _items(path):
        _check_step_of(path, step)
        return _item(path, item)
    inner = path / "checkpoints"
    if inner.is_dir() and looks_like_orbax(inner):
        return locate(inner, step, item)
    raise CheckpointError(
        f'"{path}" is not an Orbax checkpoint, and holds none: there is no {METADATA}, no {MANIFEST} and no step in it'
    )


def _check_finished(path: Path) -> None:
    """Raises where `path` says that its save has not ended.

    - The name: `AtomicRenameTemporaryPath` renames at the end. All versions, all file systems but GCS.
    - `commit_timestamp_nsecs` in `_CHECKPOINT_METADATA`: set at the end, since 0.5.11.
    - `commit_success.txt` is written last of all. Before 0.12.3 only `CommitFileTemporaryPath` did, which is the
      default on GCS (0.5.0: utils.py, is_checkpoint_finalized; 0.12.2: _src/path/atomicity.py); since 0.12.3 all do
      (CHANGELOG). A checkpoint does not tell its version, and most finished ones of local disks have no such file, so
      that it is missing says nothing about a single directory. Among the steps of one run it does: see `_error`.
    """
    for place in dict.fromkeys((path, path.resolve())):
        for part in (place, place.parent):
            if _UNFINISHED.search(part.name):
                raise _unfinished(path, f"{part.name} is the name of a save that is going on or was interrupted")
    parents = [path] if (path / _STEP_METADATA).is_file() else [path, path.parent]
    for directory in parents:
        metadata = _step_metadata(directory)
        if directory != path and path.name not in _handlers(metadata):
            continue
        if metadata is not None and "commit_timestamp_nsecs" in metadata and not metadata["commit_timestamp_nsecs"]:
            raise _unfinished(path, f"{_STEP_METADATA} has no commit time, so the save is going on or was interrupted")


def _unfinished(path: Path, why: str) -> _UnfinishedError:
    return _UnfinishedError(f'"{path}" is not finished: {why}. {_WAIT}, or choose another step with --step')


def _leftovers(path: Path) -> list[Path]:
    """The temporary directories of saves to `path`."""
    if not path.parent.is_dir():
        return []
    return sorted(other for other in path.parent.glob(f"{_escape(path.name)}.*") if _UNFINISHED.search(other.name))


def _escape(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _check_step_of(path: Path, step: int | None) -> None:
    if step is not None and step not in (_number(path), _number(path.parent)):
        raise CheckpointError(f'"{path}" is a single checkpoint, without steps; leave out --step {step}')


def _number(path: Path) -> int | None:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and not _UNFINISHED.search(path.name) else None


def _directories(path: Path) -> list[Path]:
    try:
        return sorted(child for child in path.iterdir() if child.is_dir())
    except OSError as error:
        raise CheckpointError(f'"{path}" cannot be read: {error.strerror or error}') from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # in a directory that others may not enter
        return False


def _is_tree(path: Path) -> bool:
    """Whether `path` holds arrays and the names of them, or what is left of that."""
    if _is_file(path / METADATA) or _is_file(path / MANIFEST):
        return True
    return _is_aggregate(path / AGGREGATE) or any(path.glob(f"{PROCESS_PREFIX}*"))


def _has_arrays(path: Path) -> bool:
    """Whether arrays lie in `path`, one directory each."""
    return any(_is_file(child / name) for child in (path, *_directories(path)) for name in ARRAY_METADATA)


def _is_aggregate(file: Path) -> bool:
    """Whether `file` may be Orbax's msgpack, damage included: TensorFlow and paxml have files of that name, too."""
    if not _is_file(file):
        return False
    try:
        with file.open("rb") as opened:
            head = opened.read(20)
    except OSError:
        return True  # it is reported by the one who reads it
    text = head[:1].isascii() and head[:1].isalnum()  # TensorFlow's; a zip; an msgpack file starts with a map
    pickle = head[:1] == b"\x80" and len(head) > 1  # an empty map takes one byte
    return not (text or pickle or head.startswith(_PAX))


def _is_step(path: Path) -> bool:
    return any(_is_file(path / name) for name in (_STEP_METADATA, _COMMITTED, _V1))


# --- Steps


def _steps(path: Path) -> dict[int, list[Path]]:
    """The step directories in `path` by number, in order."""
    found: dict[int, list[Path]] = {}
    for child in _directories(path):
        number = _number(child)
        if number is not None and (_is_step(child) or _is_tree(child) or any(map(_is_tree, _directories(child)))):
            found.setdefault(number, []).append(child)
    return dict(sorted(found.items()))


def _error(steps: Mapping[int, Sequence[Path]], number: int) -> CheckpointError | None:
    """Why the step cannot be read, as far as it is known from outside: not finished or damaged.

    A step with neither a commit time nor `commit_success.txt` is not finished if an earlier one has that file: it is
    on GCS (or was copied from there), where the file is the only sign; an upgrade of Orbax does not explain it, since
    no version has ceased to write the file.
    """
    directory = steps[number][0]
    try:
        _check_finished(directory)
    except CheckpointError as error:
        return error
    if (directory / _COMMITTED).exists() or _step_metadata(directory) is not None:
        return None
    if any((earlier / _COMMITTED).exists() for n, paths in steps.items() if n < number for earlier in paths):
        return _unfinished(directory, f"{_COMMITTED} is missing, which earlier steps have")
    return None


def _choose_step(
    path: Path, steps: Mapping[int, Sequence[Path]], unfinished: Sequence[str], step: int | None
) -> tuple[Path, str]:
    errors = {number: _error(steps, number) for number in steps}
    finished = [number for number in steps if not isinstance(errors[number], _UnfinishedError)]
    half = [*(steps[number][0].name for number in steps if number not in finished), *unfinished]
    if step is None:
        if not finished:
            raise _UnfinishedError(f'"{path}" has no finished step: there is only {", ".join(half)}. {_WAIT}')
        step = finished[-1]
    if step not in steps:
        for name in unfinished:
            if _number(Path(name.partition(".")[0])) == step:
                raise _unfinished(path / name, "its name is that of a save that is going on or was interrupted")
        raise CheckpointError(
            f'"{path}" has no step {step}; it has {_listed(finished) or "no finished one"}: choose one with --step'
        )
    error = errors[step]
    if error is not None:
        raise error
    if len(steps[step]) > 1:
        names = ", ".join(child.name for child in steps[step])
        raise CheckpointError(f'"{path}" has step {step} more than once: {names}; give the directory of one of them')
    note = f"step {step} of {_listed(finished)}" + (f" (not finished: {', '.join(half)})" if half else "")
    return steps[step][0], note


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) > 12:
        return f"{', '.join(map(str, numbers[:3]))}, ... {', '.join(map(str, numbers[-3:]))} ({len(numbers)} steps)"
    return ", ".join(map(str, numbers))


# --- Items


@dataclass(frozen=True)
class _Item:
    path: Path
    kind: str  # for people
    is_tree: bool


def _items(path: Path) -> list[_Item]:
    handlers = _handlers(_step_metadata(path))
    items = []
    for child in _directories(path):
        handler = handlers.get(child.name, "")
        kind = _kind(child, handler)
        items.append(_Item(child, kind, kind == "tree"))
    return items if any(item.is_tree for item in items) or _is_step(path) else []


def _kind(path: Path, handler: str) -> str:
    """What an item is, for the list of them. Handlers are named in `_CHECKPOINT_METADATA`, since 0.10."""
    if _UNFINISHED.search(path.name):
        return "not finished"
    if handler.endswith("ArrayCheckpointHandler"):  # a `_METADATA` with a single array called `checkpoint`
        return "a single array"
    if _is_tree(path):
        return "tree"
    if _has_arrays(path):
        return f"arrays whose {METADATA} is missing"
    if _is_file(path / "metadata"):
        return "JSON"
    if any(path.glob("jax_random_key*")):
        return "a random key"
    return handler.rpartition(".")[2] or "no tree"


def _item(path: Path, name: str | None) -> Located:
    items = _items(path)
    listed = ", ".join(f"{item.path.name} ({item.kind})" for item in items) or "nothing"
    if name is not None:
        named = [item for item in items if item.path.name == name]
        if not named:
            raise CheckpointError(f'"{path}" has no item {name}; it has {listed}: choose one with --item')
        if not _is_tree(named[0].path):
            raise CheckpointError(f'"{named[0].path}" is no tree of arrays but {named[0].kind}; there is {listed}')
        return Located(named[0].path, (f"item {name}",))
    trees = [item for item in items if item.is_tree]
    if not trees:
        half = [item for item in items if item.kind == "not finished"]
        if half:
            raise _unfinished(path, f"there is {half[0].path.name} in it")
        raise CheckpointError(f'"{path}" has no item that is a tree of arrays; it has {listed}')
    if len(trees) > 1:
        raise CheckpointError(f'"{path}" has several trees: {listed}; choose one with --item NAME')
    others = [item.path.name for item in items if item is not trees[0]]
    note = f"item {trees[0].path.name}" + (f" (not {', '.join(others)})" if others else "")
    return Located(trees[0].path, (note,))


def _step_metadata(path: Path) -> dict[str, Any] | None:
    file = path / _STEP_METADATA
    return read_json(file) if file.is_file() else None


def _handlers(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Item -> the class that wrote it; empty where not told."""
    handlers = metadata.get("item_handlers") if metadata is not None else None
    return {str(name): str(handler) for name, handler in handlers.items()} if isinstance(handlers, dict) else {}
