"""Reads the checkpoints of paxml's ``CheckpointType.FLAX``, in which TimesFM 1.0 and 2.0 were published.

On disk: ``checkpoints/checkpoint_1100000/state/checkpoint``, one msgpack file of ``{'flattened_state': [leaf, ...],
'str_pytree_state': 'PyTreeDef(...)'}`` (paxml/checkpoints.py, FlaxCheckpointHandler). The leaves have no names: those
come from the printed tree. Beside ``state`` lies ``metadata/metadata``, JSON with the shapes of ``mdl_vars`` (since
paxml's checkpoint version 1.1), against which the names are checked.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convert.checkpoints.encodings import msgpack_tokens, pytreedef
from convert.checkpoints.encodings.pytreedef import Slot
from convert.checkpoints.files import FileSource, Place
from convert.checkpoints.source import Absent, Leaf, Source, name_leaves
from convert.core.errors import CheckpointError

# paxml/train_states.py. The printed tree names the class only. `extra_state` is missing in early versions.
TRAIN_STATE = {"TrainState": ("step", "mdl_vars", "opt_states", "extra_state")}

_STEP = re.compile(r"(?:checkpoint_)?(\d{1,18})")  # paxml/checkpoint_paths.py, CHECKPOINT_PATTERN_RE
# The same file, TMP_CHECKPOINT_PATTERN_RE, and the suffix of Orbax, to which paxml leaves the rest.
_UNFINISHED = re.compile(r"tmp_\d+\.checkpoint_\d+|.*\.orbax-checkpoint-tmp.*")
_LEAVES, _TREE = "flattened_state", "str_pytree_state"
# A map of two pairs, then a string of 15 or 16 characters.
_HEADS = (b"\x82\xaf" + _LEAVES.encode(), b"\x82\xb0" + _TREE.encode())
_METADATA_LIMIT = 64 << 20  # bytes; 200 per leaf are usual


class _UnfinishedError(CheckpointError):
    """Only a temporary directory is there."""


def looks_like_pax(path: Path) -> bool:
    """Whether `open_pax` is the reader for `path`: a file or directory, finished or not. Reads at most a few bytes."""
    try:
        file, _ = _locate(path, None)
        with file.open("rb") as opened:
            head = opened.read(18)
    except _UnfinishedError:
        return True
    except (CheckpointError, OSError):
        return False
    if len(head) < 2:  # cut short: the names of the directories must do
        return file.name == "checkpoint" and file.parent.name == "state"
    return any(head[: len(full)] == full[: len(head)] for full in _HEADS)


def open_pax(path: Path, *, step: int | None = None) -> Source:
    """Opens a paxml checkpoint without reading its arrays.

    Args:
        path: the msgpack file, or a directory above it up to the one that holds ``checkpoints/``.
        step: which of several ``checkpoint_N``; the latest if None.

    Raises:
        CheckpointError: nothing there, unfinished, no such step, truncated, corrupt, not paxml's msgpack, or its tree
            and its metadata contradict each other. The message names the file, the leaf and the next step.
    """
    try:
        file, notes = _locate(path, step)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    return PaxSource(file, notes)


class PaxSource(FileSource):
    """An open paxml checkpoint."""

    def __init__(self, file: Path, notes: tuple[str, ...] = ()) -> None:
        with _map(file) as data:
            leaves, places, absent, said = _read(file, data)
        super().__init__(file, "paxml FLAX (msgpack)", leaves, places, absent, (*notes, *said))


def _read(
    file: Path, data: mmap.mmap
) -> tuple[Mapping[str, Leaf], Mapping[str, Place], tuple[Absent, ...], tuple[str, ...]]:
    """The leaves of a file, where each lies, what holds no array, and notes."""
    walker = msgpack_tokens.Walker(data)
    with _in(file):
        try:
            spans, text = _parts(walker)
        except msgpack_tokens.ElementError as error:
            raise CheckpointError(f"{_probable_name(file, error.index)}{error}") from None
        slots = pytreedef.slots(pytreedef.parse(text), TRAIN_STATE)
        stars = sum(slot.why is None for slot in slots)
        if stars != len(spans):
            raise CheckpointError(f"{len(spans)} leaves, but {stars} places for them ('*') in the PyTreeDef")
    leaves: list[Leaf] = []
    absent: list[Absent] = []
    packed: list[msgpack_tokens.Packed] = []
    remaining = iter(spans)
    for slot in slots:
        if slot.why is not None:
            absent.append(Absent(slot.keys, slot.why))
            continue
        with _in(file, "/".join(slot.keys)):
            found = walker.leaf(next(remaining)[0])
        if isinstance(found, str):
            absent.append(Absent(slot.keys, found))
        else:
            leaves.append(Leaf(slot.keys, found.spec))
            packed.append(found)
    named = name_leaves(leaves)
    if len(named) != len(leaves):
        raise CheckpointError(f"{file}: {len(leaves) - len(named)} leaves share a name with another one")
    places = {
        name: Place(file, found.pieces, found.spec, value=found.value)
        for name, found in zip(named, packed, strict=True)
    }
    return named, places, tuple(absent), _cross_check(file, leaves, slots)


@contextmanager
def _in(file: Path, leaf: str | None = None) -> Iterator[None]:
    """Puts the file, the leaf and the next step around the walker's and the parser's errors."""
    where = f"{file}: leaf {leaf}" if leaf is not None else str(file)
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}; copy the checkpoint again from where it was published") from None


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_size == 0:
                raise CheckpointError(f"{file}: the file is empty; copy the checkpoint again")
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None


def _parts(walker: msgpack_tokens.Walker) -> tuple[list[tuple[int, int]], str]:
    """The extents of the leaves, and the text of the tree."""
    if walker.data[:1] == b"\x80" and walker.size > 1:  # a pickle's first opcode; in msgpack an empty map
        raise CheckpointError("this is a pickle, not paxml's msgpack; loading one runs its code, so it is refused")
    head = walker.token(0)
    if head.kind != "map":
        raise CheckpointError(f"not paxml's msgpack: the file starts with the bytes {walker.data[:8].hex(' ')}")
    spans: list[tuple[int, int]] | None = None
    text: str | None = None
    at = head.stop
    keys = []
    for _ in range(head.children):
        token = walker.token(at)
        key = walker.text(token) if token.kind in ("str", "bin") else f"({token.kind})"
        keys.append(key[:40])
        if key == _LEAVES:
            try:
                spans = walker.sequence(token.stop)
            except msgpack_tokens.ElementError as error:
                raise msgpack_tokens.ElementError(f"{_LEAVES}: {error}", error.index) from None
            except CheckpointError as error:
                raise CheckpointError(f"{_LEAVES}: {error}") from None
            at = spans[-1][1] if spans and walker.token(token.stop).kind == "array" else walker.skip(token.stop)
        elif key == _TREE:
            value = walker.token(token.stop)
            text = walker.text(value)
            at = value.stop
        else:
            at = walker.skip(token.stop)
    if spans is None or text is None:
        raise CheckpointError(f"not paxml's msgpack: it has the keys {', '.join(keys)}, not {_LEAVES} and {_TREE}")
    if at != walker.size:
        raise CheckpointError(f"{walker.size - at} bytes after the end of the msgpack, at byte {at}")
    return spans, text


def _locate(path: Path, step: int | None) -> tuple[Path, tuple[str, ...]]:
    """The msgpack file that `path` and `step` mean, and what was chosen on the way."""
    path = Path(os.path.abspath(path))  # noqa: PTH100  Path.resolve would follow the links of a Hugging Face snapshot
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if path.is_file():
        file, notes = path, _chosen(path, step)
    elif found := _in_step(path):
        file, notes = found, _chosen(found, step)
    else:
        directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        file, notes = _among_steps(directory, step)
    for parent in (file.parent, file.parent.parent):
        if _UNFINISHED.fullmatch(parent.name):
            raise _UnfinishedError(_unfinished(parent))
    return file, notes


def _chosen(file: Path, step: int | None) -> tuple[str, ...]:
    """The step in the file's own path, which `step` must not contradict."""
    for parent in (file, file.parent, file.parent.parent):
        if (match := _STEP.fullmatch(parent.name)) and parent.name.startswith("checkpoint_"):
            if step is not None and step != int(match[1]):
                raise CheckpointError(
                    f"{file}: this is step {int(match[1])}, not {step}; give the directory of all steps"
                )
            return (f"step {int(match[1])}",)
    if step is not None:
        raise CheckpointError(
            f"{file}: not known to be of step {step}; give the directory that holds checkpoint_{step}"
        )
    return ()


def _in_step(directory: Path) -> Path | None:
    """The msgpack file of ``checkpoint_N`` or ``checkpoint_N/state``."""
    candidates = (directory / "checkpoint", directory / "state" / "checkpoint")
    return next((file for file in candidates if file.is_file()), None)


def _among_steps(directory: Path, step: int | None) -> tuple[Path, tuple[str, ...]]:
    steps: dict[int, Path] = {}
    unfinished: list[Path] = []
    for child in sorted(directory.iterdir()):
        if _UNFINISHED.fullmatch(child.name):
            unfinished.append(child)
        elif match := _STEP.fullmatch(child.name):
            number = int(match[1])
            if number in steps:
                raise CheckpointError(
                    f"{directory}: {steps[number].name} and {child.name} are both step {number}; give one"
                )
            steps[number] = child
    if not steps:
        if unfinished:
            raise _UnfinishedError(_unfinished(unfinished[0]))
        raise CheckpointError(f"{directory}: no paxml checkpoint here: neither state/checkpoint nor checkpoint_N/")
    known = ", ".join(map(str, sorted(steps)))
    if step is not None and step not in steps:
        raise CheckpointError(f"{directory}: there is no step {step}; there are {known}")
    number = max(steps) if step is None else step
    chosen = steps[number]
    file = chosen if chosen.is_file() else _in_step(chosen)
    if file is None:
        partial = next((child for child in sorted(chosen.iterdir()) if _UNFINISHED.fullmatch(child.name)), None)
        if partial is not None:
            raise _UnfinishedError(_unfinished(partial))
        raise CheckpointError(f"{chosen}: no state/checkpoint in it; other steps here: {known}")
    return file, (f"step {number} of {known}", *(f"unfinished, passed over: {child.name}" for child in unfinished))


def _unfinished(directory: Path) -> str:
    return f"{directory}: unfinished: its writer was stopped before it renamed it; use another step, or save it again"


def _probable_name(file: Path, index: int) -> str:
    """``leaf mdl_vars/...: `` for element `index` of a file whose end, where the tree stands, is lost.

    ``metadata/metadata`` has the same variables; the file holds the step first, then the variables in the order in which
    JAX flattens dicts, that of sorted keys. Empty when there is no metadata, or when the element lies beyond.
    """
    try:
        groups = json.loads((file.parent.parent / "metadata" / "metadata").read_bytes())["train_state_metadata"]
        names = sorted(keys for keys, _ in _stated(groups["mdl_vars"], ("mdl_vars",)))
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return ""
    named = [("step",), *names]
    return f"leaf {'/'.join(named[index])}: " if index < len(named) else ""


def _cross_check(file: Path, leaves: list[Leaf], slots: list[Slot]) -> tuple[str, ...]:
    """Compares names and shapes with ``metadata/metadata``, where there is one that says them.

    Raises:
        CheckpointError: they contradict each other.
    """
    path = file.parent.parent / "metadata" / "metadata"
    try:
        if file.parent.name != "state" or not path.is_file():
            return ()
        if path.stat().st_size > _METADATA_LIMIT:
            return (f"metadata/metadata is larger than {_METADATA_LIMIT} bytes and was not read",)
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return (f"metadata/metadata cannot be read, so names and shapes were not checked against it: {error}",)
    groups = document.get("train_state_metadata") if isinstance(document, dict) else None
    if not isinstance(groups, dict):
        return ("metadata/metadata lists no shapes, so none were checked against it",)
    notes: list[str] = []
    checked = 0
    for group, tree in groups.items():
        stated = dict(_stated(tree, (group,)))
        if not all(slot.named for slot in slots if slot.keys[:1] == (group,)):
            notes.append(f"{group} was not checked against metadata/metadata: the tree does not name all its fields")
            continue
        checked += _compare(file, {leaf.keys: leaf for leaf in leaves if leaf.keys[:1] == (group,)}, stated, notes)
    return (*notes, f"names and shapes of {checked} leaves agree with metadata/metadata")


def _stated(tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """(path, entry) of every array in the metadata's tree."""
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
    file: Path, leaves: dict[tuple[str, ...], Leaf], stated: dict[tuple[str, ...], dict[str, Any]], notes: list[str]
) -> int:
    """How many leaves were found in both. A dtype that differs is noted: paxml saves it as the model declared it."""
    hint = "one of the two files is damaged or from another checkpoint: copy both again"
    for keys, leaf in leaves.items():
        name = "/".join(keys)
        entry = stated.get(keys)
        if entry is None:
            raise CheckpointError(f"{file}: leaf {name} {leaf.spec} is not in metadata/metadata; {hint}")
        shape = entry.get("unpadded_shape")
        if isinstance(shape, list) and tuple(shape) != leaf.spec.shape:
            raise CheckpointError(
                f"{file}: leaf {name} has the shape {list(leaf.spec.shape)}, metadata/metadata says {shape}; {hint}"
            )
        if entry.get("dtype") not in (None, leaf.spec.dtype):
            notes.append(f"{name} is {leaf.spec.dtype}, metadata/metadata says {entry['dtype']}")
    for keys, entry in stated.items():
        if keys not in leaves and not entry.get("is_optax_masked_node"):
            raise CheckpointError(
                f"{file}: leaf {'/'.join(keys)} {entry.get('unpadded_shape')} is in metadata/metadata only; {hint}"
            )
    return len(leaves)
