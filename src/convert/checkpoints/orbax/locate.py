"""Finds the directory of the tree in a path, which may be a tree, a step with several items, or a directory of steps.

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

from convert.checkpoints.access import absolute, head, opened
from convert.checkpoints.encodings.ocdbt import MANIFEST
from convert.checkpoints.errors import (
    UNFINISHED,
    ambiguous,
    incomplete,
    missing,
    option_rejected,
    step_chosen,
    step_not_found,
    unfinished,
    unknown_format,
    unreadable,
)
from convert.checkpoints.orbax.stores import PROCESS_PREFIX
from convert.checkpoints.orbax.tree import AGGREGATE, METADATA, json_object
from convert.checkpoints.orbax.zarr_metadata import ARRAY_METADATA
from convert.core.errors import CheckpointError
from convert.core.findings import Finding

# A save writes to a directory with such a name and renames it at its end (0.12.8: _src/path/atomicity_types.py). v1's
# partial saves write to `.partial_save` (experimental/v1/_src/partial/path.py).
_UNFINISHED = re.compile(r"\.orbax-checkpoint-tmp|\.partial_save$")
_STEP = re.compile(r"(?:.+[_-])?(\d{1,18})")  # _src/path/step.py, ALLOWED_STEP_NAME_PATTERN; `step-200` is Levanter's
STEP_METADATA = "_CHECKPOINT_METADATA"
_COMMITTED = "commit_success.txt"
_WITHIN = ("checkpoints", "orbax")  # directories of steps beside other files of a run: of Orbax's examples; of TabFM
_V1 = "orbax.checkpoint"  # an empty file in the checkpoints of the v1 API
# The first bytes of a paxml file, which has the name of Orbax's aggregate file: a map of two, and one of its keys.
_PAX = (b"\x82\xafflattened_state", b"\x82\xb0str_pytree_state")
NAMES_MISSING = f"{METADATA} is missing, which names the leaves"
PARTIAL, WITHOUT_NAMES = "not finished", f"arrays without {METADATA}"  # kinds of items, for people
LISTED = 12  # items that one error names
_WAIT = "wait for the save to end, or choose another step with --step"


@dataclass(frozen=True)
class Located:
    """The item directory that holds the tree, and the notes on the chosen step and item."""

    path: Path
    notes: tuple[Finding, ...] = ()


def looks_like_orbax(path: Path) -> bool:
    """Whether `path` is, or contains, an Orbax checkpoint, even an unfinished or damaged one.

    Reads only names, and the first bytes of a file called ``checkpoint``.
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
        or (step_number(child) is not None and any(map(_is_tree, _directories(child))))
        for child in children
    ) or any(child.name in _WITHIN and looks_like_orbax(child) for child in children)


def locate(path: Path, step: int | None = None, item: str | None = None) -> Located:
    """Find the tree in `path`.

    Args:
        path: a tree, a step or a directory of steps.
        step: which step; the latest finished one if None.
        item: which item of the step; the only one that is a tree if None.

    Raises:
        CheckpointError: there is none, it is not finished, or several could be meant.
    """
    path = absolute(path)  # TensorStore takes no ".."
    if not path.exists():
        leftovers = _leftovers(path)
        if leftovers:
            raise _unfinished(path, f"there is only {leftovers[0].name}, an interrupted save or one that is running")
        raise missing(path)
    if not path.is_dir():
        raise unknown_format(path, expected="a directory of Orbax", got="a file", fix="give the directory of this file")
    _check_finished(path)
    if _is_tree(path):
        _check_step_of(path, step)
        if item is not None and path.name != item:
            raise option_rejected(path, "this is a single tree without items", f"leave out --item {item}")
        return Located(path)
    if _has_arrays(path):
        raise incomplete(NAMES_MISSING, path, fix="copy the checkpoint again, with all its files")
    if _is_step(path):
        _check_step_of(path, step)
        return _item(path, item)
    steps = _steps(path)
    unfinished_names = [child.name for child in _directories(path) if _UNFINISHED.search(child.name)]
    if steps or unfinished_names:
        trees = [child for child in _directories(path) if _is_tree(child)]
        if steps or not trees:
            chosen, note = _choose_step(path, steps, unfinished_names, step)
            tree = Located(chosen) if _is_tree(chosen) and item is None else _item(chosen, item)
            return replace(tree, notes=(note, *tree.notes))
    if _items(path):
        _check_step_of(path, step)
        return _item(path, item)
    inner = [path / name for name in _WITHIN if (path / name).is_dir() and looks_like_orbax(path / name)]
    if len(inner) > 1:
        raise ambiguous(
            path, f"{' and '.join(each.name for each in inner)} have steps", "give the directory of one of them"
        )
    if inner:
        return locate(inner[0], step, item)
    raise unknown_format(
        path,
        expected=f"{METADATA}, {MANIFEST} or a step of Orbax",
        got="none of them",
        fix="give the directory that Orbax saved to",
    )


def _check_finished(path: Path) -> None:
    """Reject a directory whose save has not ended. The signs are:

    - The name: `AtomicRenameTemporaryPath` renames at the end. All versions, all file systems except GCS.
    - `commit_timestamp_nsecs` in `_CHECKPOINT_METADATA`: set at the end, since 0.5.11.
    - `commit_success.txt`: written at the end. Before 0.12.3 only `CommitFileTemporaryPath` wrote it, the default on GCS
      (0.5.0: utils.py, is_checkpoint_finalized; 0.12.2: _src/path/atomicity.py); since 0.12.3 all saves do (CHANGELOG).
      A checkpoint does not store its version, and most finished checkpoints on local disks have no such file. So a
      missing file means nothing for a single directory, but it does among the steps of one run: see `_error`.
    """
    for place in dict.fromkeys((path, path.resolve())):
        for part in (place, place.parent):
            if _UNFINISHED.search(part.name):
                raise _unfinished(path, f"{part.name} is the name of a save that is running or was interrupted")
    parents = [path] if (path / STEP_METADATA).is_file() else [path, path.parent]
    for directory in parents:
        metadata = _step_metadata(directory)
        if directory != path and path.name not in _handlers(metadata):
            continue
        if metadata is not None and "commit_timestamp_nsecs" in metadata and not metadata["commit_timestamp_nsecs"]:
            raise _unfinished(path, f"{STEP_METADATA} has no commit time: the save is running or was interrupted")


def _unfinished(path: Path, why: str) -> CheckpointError:
    return unfinished(path, f"not finished: {why}", _WAIT)


def _leftovers(path: Path) -> list[Path]:
    """Return the temporary directories of saves to `path`."""
    if not path.parent.is_dir():
        return []
    return sorted(other for other in path.parent.glob(f"{_escape(path.name)}.*") if _UNFINISHED.search(other.name))


def _escape(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _check_step_of(path: Path, step: int | None) -> None:
    if step is not None and step not in (step_number(path), step_number(path.parent)):
        raise option_rejected(path, "this is a single checkpoint without steps", f"leave out --step {step}")


def step_number(path: Path) -> int | None:
    """Return the step whose directory has this name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and not _UNFINISHED.search(path.name) else None


def _directories(path: Path) -> list[Path]:
    try:
        return sorted(child for child in path.iterdir() if child.is_dir())
    except OSError as error:
        raise unreadable(path, error) from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError:
        return False


def _is_tree(path: Path) -> bool:
    """Whether `path` holds arrays and their names, even if it is damaged."""
    if _is_file(path / METADATA) or _is_file(path / MANIFEST):
        return True
    return _is_aggregate(path / AGGREGATE) or any(path.glob(f"{PROCESS_PREFIX}*"))


def _has_arrays(path: Path) -> bool:
    """Whether `path` holds arrays, one directory each."""
    return any(_is_file(child / name) for child in (path, *_directories(path)) for name in ARRAY_METADATA)


def _is_aggregate(file: Path) -> bool:
    """Whether `file` may be Orbax's msgpack, even a damaged one. TensorFlow and paxml have files of that name, too."""
    if not _is_file(file):
        return False
    try:
        start = head(file, 20)
    except OSError:
        return True  # the reader reports the error
    text = start[:1].isascii() and start[:1].isalnum()  # TensorFlow's text, or a zip; msgpack starts with a map
    pickle = start[:1] == b"\x80" and len(start) > 1  # an empty map takes one byte
    return not (text or pickle or start.startswith(_PAX))


def _is_step(path: Path) -> bool:
    return any(_is_file(path / name) for name in (STEP_METADATA, _COMMITTED, _V1))


# --- Steps


def _steps(path: Path) -> dict[int, list[Path]]:
    """Return the step directories in `path` by number, in order."""
    steps: dict[int, list[Path]] = {}
    for child in _directories(path):
        number = step_number(child)
        if number is not None and (_is_step(child) or _is_tree(child) or any(map(_is_tree, _directories(child)))):
            steps.setdefault(number, []).append(child)
    return dict(sorted(steps.items()))


def _error(steps: Mapping[int, Sequence[Path]], number: int) -> CheckpointError | None:
    """Return why the step cannot be read (not finished or damaged), without opening it; None where nothing is known.

    A step with neither a commit time nor `commit_success.txt` is not finished if an earlier one has that file: it is on
    GCS (or was copied from there), where the file is the only sign. An upgrade of Orbax does not explain the
    difference, since no version has stopped writing the file.
    """
    directory = steps[number][0]
    try:
        _check_finished(directory)
    except CheckpointError as error:
        return error
    if (directory / _COMMITTED).exists() or _step_metadata(directory) is not None:
        return None
    if any((earlier / _COMMITTED).exists() for n, paths in steps.items() if n < number for earlier in paths):
        return _unfinished(directory, f"earlier steps have {_COMMITTED}, this one does not")
    return None


def _choose_step(
    path: Path, steps: Mapping[int, Sequence[Path]], unfinished_names: Sequence[str], step: int | None
) -> tuple[Path, Finding]:
    errors = {number: _error(steps, number) for number in steps}
    finished = [number for number, error in errors.items() if error is None or error.code != UNFINISHED]
    skipped = [*(steps[number][0].name for number in steps if number not in finished), *unfinished_names]
    if step is None:
        if not finished:
            raise unfinished(path, f"no step is finished: there is only {', '.join(skipped)}", _WAIT)
        step = finished[-1]
    if step not in steps:
        for name in unfinished_names:
            if step_number(Path(name.partition(".")[0])) == step:
                raise _unfinished(path / name, "its name is that of a save that is running or was interrupted")
        raise step_not_found(path, step, finished)
    error = errors[step]
    if error is not None:
        raise error
    if len(steps[step]) > 1:
        names = ", ".join(child.name for child in steps[step])
        raise ambiguous(path, f"step {step} exists more than once: {names}", "give the directory of one of them")
    return steps[step][0], step_chosen(step, finished, skipped)


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
    """Describe an item, for people. `_CHECKPOINT_METADATA` names the handlers since 0.10."""
    if _UNFINISHED.search(path.name):
        return PARTIAL
    if handler.endswith("ArrayCheckpointHandler"):  # a `_METADATA` with a single array called `checkpoint`
        return "a single array"
    if _is_tree(path):
        return "tree"
    if _has_arrays(path):
        return WITHOUT_NAMES
    if _is_file(path / "metadata"):
        return "JSON"
    if any(path.glob("jax_random_key*")):
        return "a random key"
    return handler.rpartition(".")[2] or "not a tree"


def _item(path: Path, name: str | None) -> Located:
    items = _items(path)
    shown = _shown(items)
    if name is not None:
        named = [item for item in items if item.path.name == name]
        if leftovers := _leftovers(path / name) if not named else [item.path for item in named if item.kind == PARTIAL]:
            raise _unfinished(
                path / name, f"there is only {leftovers[0].name}, an interrupted save or one that is running"
            )
        if not named:
            raise _item_not_found(path, f"there is no item {name}", shown)
        if named[0].kind == WITHOUT_NAMES:
            raise incomplete(NAMES_MISSING, named[0].path, fix="copy the checkpoint again, with all its files")
        if not _is_tree(named[0].path):
            raise _item_not_found(path, f"the item {name} is not a tree of arrays but {named[0].kind}", shown)
        return Located(named[0].path, (_item_chosen(name, []),))
    trees = [item for item in items if item.is_tree]
    if not trees:
        partial = [item for item in items if item.kind == PARTIAL]
        if partial:
            raise _unfinished(path, f"it contains {partial[0].path.name}")
        raise _item_not_found(path, "no item is a tree of arrays", shown)
    if len(trees) > 1:
        raise ambiguous(
            path,
            f"several items are trees: {shown}",
            f"choose one with --item NAME, or give its path, such as {trees[0].path}",
        )
    others = [item.path.name for item in items if item is not trees[0]]
    return Located(trees[0].path, (_item_chosen(trees[0].path.name, others),))


def _shown(items: Sequence[_Item]) -> str:
    """Return the items for people: trees first, where there are more than an error can list."""
    if len(items) > LISTED:
        items = sorted(items, key=lambda item: not item.is_tree)
    named = [f"{item.path.name} ({item.kind})" for item in items[:LISTED]]
    more = f" and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return f"{', '.join(named)}{more}" if named else "no items"


def _item_not_found(path: Path, problem: str, shown: str) -> CheckpointError:
    fix = "choose an item that is a tree with --item"
    return CheckpointError(
        Finding("item-not-found", problem, path=str(path), expected="an item that is a tree", got=shown, fix=fix)
    )


def _item_chosen(name: str, others: Sequence[str]) -> Finding:
    text = f"reads the item {name}" + (f" (not {', '.join(others)})" if others else "")
    return Finding("item-chosen", text, data={"item": name, "others": list(others)})


def _step_metadata(path: Path) -> dict[str, Any] | None:
    file = path / STEP_METADATA
    return json_object(opened(file), file) if file.is_file() else None


def _handlers(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Return item -> the class that wrote it; empty where it is unknown."""
    handlers = metadata.get("item_handlers") if metadata is not None else None
    return {str(name): str(handler) for name, handler in handlers.items()} if isinstance(handlers, dict) else {}
