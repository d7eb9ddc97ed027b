"""Reads the checkpoints of paxml's ``CheckpointType.FLAX``, in which TimesFM 1.0 and 2.0 were published.

On disk: ``checkpoints/checkpoint_1100000/state/checkpoint``, one msgpack file of ``{'flattened_state': [leaf, ...],
'str_pytree_state': 'PyTreeDef(...)'}`` (paxml/checkpoints.py, FlaxCheckpointHandler). The leaves have no names: those
come from the printed tree. Next to ``state``, ``metadata/metadata`` is JSON with the shapes of ``mdl_vars`` (since paxml's
checkpoint version 1.1); the names are compared with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from convert.checkpoints.access import Boundary, absolute, head, opened, read_json
from convert.checkpoints.encodings import pytreedef
from convert.checkpoints.encodings.flax_arrays import PackedArray, packed_array
from convert.checkpoints.encodings.msgpack_tokens import ElementError, Walker
from convert.checkpoints.encodings.pytreedef import Slot
from convert.checkpoints.errors import (
    COPY_AGAIN,
    UNFINISHED,
    ambiguous,
    corrupt,
    incomplete,
    list_numbers,
    located,
    missing,
    name_clash,
    note,
    option_rejected,
    pickle_refused,
    step_chosen,
    step_not_found,
    unfinished,
    unknown_format,
    unreadable,
)
from convert.checkpoints.files import FileSource, StoredArray
from convert.checkpoints.formats.flax_msgpack import map_file
from convert.checkpoints.source import Absent, Leaf, Source, name_leaves
from convert.core.errors import CheckpointError
from convert.core.findings import Finding

# paxml/train_states.py. The printed tree names the class only. `extra_state` is missing in early versions.
TRAIN_STATE = {"TrainState": ("step", "mdl_vars", "opt_states", "extra_state")}

_STEP = re.compile(r"(?:checkpoint_)?(\d{1,18})")  # paxml/checkpoint_paths.py, CHECKPOINT_PATTERN_RE
# The same file, TMP_CHECKPOINT_PATTERN_RE, and the suffix of Orbax, which paxml uses for the directories below.
_UNFINISHED = re.compile(r"tmp_\d+\.checkpoint_\d+|.*\.orbax-checkpoint-tmp.*")
_LEAVES, _TREE = "flattened_state", "str_pytree_state"
# A map of two pairs, then a string of 15 or 16 characters.
_HEADS = (b"\x82\xaf" + _LEAVES.encode(), b"\x82\xb0" + _TREE.encode())
_METADATA_LIMIT = 64 << 20  # bytes; 200 per leaf are usual


def looks_like_pax(path: Path) -> bool:
    """Whether `open_pax` is the reader for `path`: a file or directory, finished or not. Reads at most a few bytes."""
    try:
        file, _ = _locate(path, None)
        start = head(file, 18)
    except CheckpointError as error:
        return error.code == UNFINISHED
    except OSError:
        return False
    if len(start) < 2:  # truncated: decide by the names of the directories
        return file.name == "checkpoint" and file.parent.name == "state"
    return any(start[: len(full)] == full[: len(start)] for full in _HEADS)


def open_pax(path: Path, *, step: int | None = None, boundary: Boundary | None = None) -> Source:
    """Open a paxml checkpoint without reading its arrays.

    Args:
        path: the msgpack file, or a directory above it up to the one that holds ``checkpoints/``.
        step: which of several ``checkpoint_N``; the latest if None.
        boundary: where files may lie; in `path` if None.

    Raises:
        CheckpointError: missing, unfinished, no such step, truncated, corrupt, not paxml's msgpack, or the tree and the
            metadata contradict each other. The finding names the file and the leaf.
    """
    try:
        file, notes = _locate(path, step)
    except OSError as error:
        raise unreadable(path, error) from None
    return PaxSource(file, boundary or Boundary(path), notes)


class PaxSource(FileSource):
    """An open paxml checkpoint."""

    def __init__(self, file: Path, boundary: Boundary, notes: tuple[Finding, ...] = ()) -> None:
        boundary.check(file)
        with closing(map_file(file)) as data:
            leaves, arrays, absent, checks = _read(file, Walker(data), boundary)
        super().__init__(file, "paxml FLAX (msgpack)", leaves, arrays, absent, (*notes, *checks))


def _read(
    file: Path, walker: Walker, boundary: Boundary
) -> tuple[Mapping[str, Leaf], Mapping[str, StoredArray], tuple[Absent, ...], tuple[Finding, ...]]:
    """Read the leaves of a file, the place of each, the nodes without an array, and notes."""
    try:
        spans, text = _parts(walker)
        slots = pytreedef.slots(pytreedef.parse(text), TRAIN_STATE)
    except ElementError as error:
        raise located(error, file, _probable_name(file, error.index, boundary)) from None
    except CheckpointError as error:
        raise located(error, file) from None
    stars = sum(slot.why is None for slot in slots)
    if stars != len(spans):
        problem = "the PyTreeDef does not fit the leaves"
        raise corrupt(problem, file, expected=f"{len(spans)} leaves ('*')", got=str(stars))
    leaves: list[Leaf] = []
    absent: list[Absent] = []
    arrays: list[StoredArray] = []
    remaining = iter(spans)
    for slot in slots:
        if slot.why is not None:
            absent.append(Absent(slot.keys, slot.why))
            continue
        try:
            node = packed_array(walker, next(remaining)[0])
        except CheckpointError as error:
            raise located(error, file, "/".join(slot.keys)) from None
        if isinstance(node, PackedArray):
            leaves.append(Leaf(slot.keys, node.spec))
            arrays.append(StoredArray(file, node.ranges, node.spec, value=node.value))
        else:
            absent.append(Absent(slot.keys, node))
    named = name_leaves(leaves)
    if len(named) != len(leaves):
        names = Counter("/".join(leaf.keys) for leaf in leaves)
        raise name_clash(file, next(name for name, n in names.items() if n > 1))
    return named, dict(zip(named, arrays, strict=True)), tuple(absent), _cross_check(file, leaves, slots, boundary)


def _parts(walker: Walker) -> tuple[list[tuple[int, int]], str]:
    """Return the extents of the leaves, and the text of the tree."""
    if walker.data[:1] == b"\x80" and walker.size > 1:  # the first opcode of a pickle; in msgpack an empty map
        raise pickle_refused()
    head = walker.token(0)
    if head.kind != "map":
        got = f"the bytes {walker.data[:8].hex(' ')}"
        raise unknown_format("", expected="a msgpack map of paxml", got=got, fix=COPY_AGAIN)
    spans: list[tuple[int, int]] | None = None
    text: str | None = None
    at = head.stop
    keys = []
    for _ in range(head.children):
        token = walker.token(at)
        key = walker.text(token) if token.kind in ("str", "bin") else f"({token.kind})"
        keys.append(key[:40])
        if key == _LEAVES:
            spans = walker.sequence(token.stop)
            at = spans[-1][1] if spans and walker.token(token.stop).kind == "array" else walker.skip(token.stop)
        elif key == _TREE:
            value = walker.token(token.stop)
            text = walker.text(value)
            at = value.stop
        else:
            at = walker.skip(token.stop)
    if spans is None or text is None:
        expected, got = f"the keys {_LEAVES} and {_TREE} of paxml", f"the keys {', '.join(keys)}"
        raise unknown_format("", expected=expected, got=got, fix=COPY_AGAIN)
    if at != walker.size:
        raise corrupt(f"{walker.size - at} bytes after the end of the msgpack, at byte {at}")
    return spans, text


def _locate(path: Path, step: int | None) -> tuple[Path, tuple[Finding, ...]]:
    """Return the msgpack file that `path` and `step` select, and the note on the chosen step."""
    path = absolute(path)
    if not path.exists():
        raise missing(path)
    if path.is_file():
        file, notes = path, _step_in_path(path, step)
    elif found := _in_step(path):
        file, notes = found, _step_in_path(found, step)
    else:
        directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        file, notes = _choose_step(directory, step)
    for parent in (file.parent, file.parent.parent):
        if _UNFINISHED.fullmatch(parent.name):
            raise _unfinished(parent)
    return file, notes


def _step_in_path(file: Path, step: int | None) -> tuple[Finding, ...]:
    """Return the note on the step in the file's path.

    Raises:
        CheckpointError: `step` is another one.
    """
    for parent in (file, file.parent, file.parent.parent):
        if (match := _STEP.fullmatch(parent.name)) and parent.name.startswith("checkpoint_"):
            if step is not None and step != int(match[1]):
                problem = f"this is step {int(match[1])}, not {step}"
                raise option_rejected(file, problem, "give the directory of all steps")
            return (step_chosen(int(match[1])),)
    if step is not None:
        problem = f"this is not known to be step {step}"
        raise option_rejected(file, problem, f"give the directory that holds checkpoint_{step}")
    return ()


def _in_step(directory: Path) -> Path | None:
    """Return the msgpack file of ``checkpoint_N`` or ``checkpoint_N/state``."""
    candidates = (directory / "checkpoint", directory / "state" / "checkpoint")
    return next((file for file in candidates if file.is_file()), None)


def _choose_step(directory: Path, step: int | None) -> tuple[Path, tuple[Finding, ...]]:
    steps: dict[int, Path] = {}
    skipped: list[Path] = []
    for child in sorted(directory.iterdir()):
        if _UNFINISHED.fullmatch(child.name):
            skipped.append(child)
        elif match := _STEP.fullmatch(child.name):
            number = int(match[1])
            if number in steps:
                problem = f"{steps[number].name} and {child.name} are both step {number}"
                raise ambiguous(directory, problem, "give the directory of one of them")
            steps[number] = child
    if not steps:
        if skipped:
            raise _unfinished(skipped[0])
        raise unknown_format(
            directory,
            expected="state/checkpoint or checkpoint_N/ of paxml",
            got="neither",
            fix="give the directory that paxml saved to",
        )
    if step is not None and step not in steps:
        raise step_not_found(directory, step, steps)
    number = max(steps) if step is None else step
    chosen = steps[number]
    file = chosen if chosen.is_file() else _in_step(chosen)
    if file is None:
        partial = next((child for child in sorted(chosen.iterdir()) if _UNFINISHED.fullmatch(child.name)), None)
        if partial is not None:
            raise _unfinished(partial)
        raise incomplete("state/checkpoint is missing", chosen, fix=f"use another step: {list_numbers(steps)}")
    return file, (step_chosen(number, steps, [child.name for child in skipped]),)


def _unfinished(directory: Path) -> CheckpointError:
    problem = "unfinished: its save was interrupted before the directory was renamed"
    return unfinished(directory, problem, "use another step, or save it again")


def _probable_name(file: Path, index: int, boundary: Boundary) -> str | None:
    """Return the name of the leaf that is element `index` of a truncated file, which has lost the tree at its end.

    ``metadata/metadata`` has the same variables. The file holds the step first, then the variables in the order in which
    JAX flattens dicts, that of sorted keys. None where there is no metadata, or it lists fewer leaves.
    """
    try:
        path = file.parent.parent / "metadata" / "metadata"
        groups = read_json(boundary.around(file.parent.parent).open(path), path, _METADATA_LIMIT)[
            "train_state_metadata"
        ]
        names = sorted(keys for keys, _ in _entries(groups["mdl_vars"], ("mdl_vars",)))
    except (CheckpointError, KeyError, TypeError):
        return None
    paths = [("step",), *names]
    return "/".join(paths[index]) if index < len(paths) else None


def _cross_check(file: Path, leaves: list[Leaf], slots: list[Slot], boundary: Boundary) -> tuple[Finding, ...]:
    """Compare names and shapes with ``metadata/metadata``, where it exists.

    Raises:
        CheckpointError: they contradict each other, or a link leads out of the checkpoint.
    """
    path = file.parent.parent / "metadata" / "metadata"
    if file.parent.name != "state" or not path.is_file():
        return ()
    boundary.around(file.parent.parent).check(path)
    try:
        document = read_json(opened(path), path, _METADATA_LIMIT)
    except CheckpointError as error:
        why = error.findings[0].problem
        return (note(f"metadata/metadata was not compared with names and shapes: {why}"),)
    groups = document.get("train_state_metadata") if isinstance(document, dict) else None
    if not isinstance(groups, dict):
        return (note("metadata/metadata lists no shapes, so none were compared with it"),)
    notes: list[Finding] = []
    compared = 0
    for group, tree in groups.items():
        entries = dict(_entries(tree, (group,)))
        if not all(slot.named for slot in slots if slot.keys[:1] == (group,)):
            notes.append(
                note(f"{group} was not compared with metadata/metadata: the tree does not name all of its fields")
            )
            continue
        compared += _compare(file, {leaf.keys: leaf for leaf in leaves if leaf.keys[:1] == (group,)}, entries, notes)
    return (*notes, note(f"names and shapes of {compared} leaves agree with metadata/metadata"))


def _entries(tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield (path, entry) of every array in the tree of the metadata."""
    pending: list[tuple[Any, tuple[str, ...]]] = [(tree, keys)]
    while pending:
        node, keys = pending.pop()
        if isinstance(node, dict) and node.get("_array_metadata_tag"):
            yield keys, node
        elif isinstance(node, dict):
            pending += [(child, (*keys, key)) for key, child in node.items()]
        elif isinstance(node, list):
            pending += [(child, (*keys, str(i))) for i, child in enumerate(node)]


def _compare(
    file: Path,
    leaves: dict[tuple[str, ...], Leaf],
    entries: dict[tuple[str, ...], dict[str, Any]],
    notes: list[Finding],
) -> int:
    """Compare the leaves with the metadata; return their number. Another dtype is only noted: paxml stores the declared one."""

    def contradiction(keys: tuple[str, ...], problem: str, expected: object, got: object) -> CheckpointError:
        fix = "one of the two files is damaged or from another checkpoint: copy both again"
        leaf = "/".join(keys)
        return corrupt(problem, file, leaf, expected=f"{expected} as in metadata/metadata", got=str(got), fix=fix)

    for keys, leaf in leaves.items():
        entry = entries.get(keys)
        if entry is None:
            raise contradiction(keys, "the leaf is only in the checkpoint", "no such leaf", leaf.spec)
        shape = entry.get("unpadded_shape")
        if isinstance(shape, list) and tuple(shape) != leaf.spec.shape:
            raise contradiction(keys, "the shapes differ", shape, list(leaf.spec.shape))
        if entry.get("dtype") not in (None, leaf.spec.dtype):
            notes.append(note(f"{'/'.join(keys)} is {leaf.spec.dtype}; metadata/metadata says {entry['dtype']}"))
    for keys, entry in entries.items():
        if keys not in leaves and not entry.get("is_optax_masked_node"):
            shape = entry.get("unpadded_shape")
            raise contradiction(keys, "the leaf is missing in the checkpoint", f"the shape {shape}", "no such leaf")
    return len(leaves)
