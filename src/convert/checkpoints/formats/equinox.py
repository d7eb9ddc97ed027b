"""Reads ``.eqx``: what ``equinox.tree_serialise_leaves`` writes, one NumPy array after the other, without names.

Before them there may be a line of JSON, with which Equinox's documentation stores the hyperparameters. The names come from
a skeleton (`convert skeleton`), or from the rules. bfloat16 is stored as ``V2``, float8 and int4 as ``V1``: the skeleton
says which. Python's numbers are records too (equinox/_serialisation.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from convert.checkpoints.encodings.npy_header import MAGIC, Header, read_header
from convert.checkpoints.files import COPY_AGAIN, FileSource, Place, files_in, head, opened, size_of
from convert.checkpoints.formats.skeleton import Record, match_names, read_skeleton
from convert.checkpoints.source import Format, Leaf, Options, Source, name_leaves
from convert.core.errors import CheckpointError
from convert.core.tensor_spec import TensorSpec, numpy_dtype

_MOST_LINE = 16 << 20  # bytes of hyperparameters
_MOST_RECORDS = 1_000_000
_SHOWN = 8
HOW = (
    "Where the model's code and JAX are, run `convert skeleton module:factory > skeleton.json` (factory returns what was saved: "
    "the model, or (model, state)) and give --skeleton skeleton.json; or list the names under `leaf_names:` in the rule file"
)


def _open(path: Path, options: Options) -> Source:
    found, line = _records(path)
    names, whence = _names(path, found, options)
    leaves: list[Leaf] = []
    places: list[Place] = []
    for number, ((header, start), record) in enumerate(zip(found, names, strict=True)):
        spec = _spec(path, number, header, record, whence)
        leaves.append(Leaf(record.keys, spec))
        places.append(Place(path, ((start, spec.nbytes),), spec, header.fortran, header.swapped))
    named = name_leaves(leaves)
    if len(named) != len(leaves):
        raise CheckpointError(f"{whence}: {len(leaves) - len(named)} records have the name of another one")
    notes: tuple[str, ...] = (f"names from {whence}",)
    if line is not None:
        text = json.dumps(line, ensure_ascii=False)
        notes = (*notes, f"hyperparameters in the first line: {text if len(text) <= 300 else text[:297] + '...'}")
    return FileSource(path, "Equinox", named, dict(zip(named, places, strict=True)), notes=notes)


def _records(path: Path) -> tuple[list[tuple[Header, int]], Any]:
    """Head and start of every record, and the hyperparameters."""
    with opened(path) as file:
        size = size_of(file)
        line = _hyperparameters(path, file) if file.read(1) == b"{" else None
        at = file.tell() if line is not None else 0
        found: list[tuple[Header, int]] = []
        while at < size:
            if len(found) == _MOST_RECORDS:
                raise CheckpointError(f"{path}: more than {_MOST_RECORDS} leaf_names: not a checkpoint")
            file.seek(at)
            try:
                header = read_header(file)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: record {len(found)}, at byte {at}: {error}") from None
            start = file.tell()
            at = start + header.spec.nbytes
            if at > size:
                raise CheckpointError(
                    f"{path}: record {len(found)}, {header.spec}: truncated: {at - size} bytes are missing; {COPY_AGAIN}"
                )
            found.append((header, start))
    return found, line


def _hyperparameters(path: Path, file: IO[bytes]) -> Any:
    file.seek(0)
    line = file.readline(_MOST_LINE)
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the first line is not the JSON that it seems to be: {error}; {COPY_AGAIN}"
        ) from None


def _names(path: Path, found: Sequence[tuple[Header, int]], options: Options) -> tuple[Sequence[Record], str]:
    """A record of names for each record of the file, and where they come from."""
    if options.skeleton is not None:
        records = read_skeleton(options.skeleton)
        if len(records) != len(found):
            raise CheckpointError(
                f"{path}: {len(found)} records, but {options.skeleton} has {len(records)}. Numbers that are fields of the model "
                "are records, too; make the skeleton from the same code and hyperparameters as the checkpoint"
            )
        return records, str(options.skeleton)
    fitting = {records for records in match_names(options.leaf_names) if len(records) == len(found)}
    if len(fitting) == 1:
        return fitting.pop(), "the rules"
    shown = ", ".join(f"{k} {header.spec}" for k, (header, _) in enumerate(found[:_SHOWN]))
    more = f", ... and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    if options.leaf_names:
        counts = " and ".join(str(n) for n in sorted({len(names) for names in options.leaf_names}))
        why = (
            f"the rules name {counts} records"
            if not fitting
            else "several rule files name as many records, differently; give one"
        )
        raise CheckpointError(f"{path}: an Equinox file of {len(found)} records ({shown}{more}), but {why}. {HOW}")
    raise CheckpointError(f"{path}: an Equinox file has no names for its {len(found)} records ({shown}{more}). {HOW}")


def _spec(path: Path, number: int, header: Header, record: Record, whence: str) -> TensorSpec:
    """The record's spec, checked against what the skeleton says."""
    name, spec, said = "/".join(record.keys), header.spec, record.spec
    if said is None:
        if header.nameless:
            raise CheckpointError(
                f"{path}: leaf {name}: its elements are single bytes of a dtype that only a skeleton tells. {HOW}"
            )
        return spec
    if header.nameless and numpy_dtype(said.dtype).itemsize == 1:
        spec = TensorSpec(spec.shape, said.dtype)
    if spec != said:
        raise CheckpointError(
            f"{path}: record {number} is {header.spec}, but {whence} calls it {name} and says {said}; "
            "make the skeleton from the same code and hyperparameters as the checkpoint"
        )
    return spec


def is_equinox(path: Path) -> bool:
    """Whether the file is a sequence of NumPy arrays, maybe after a line of JSON. A ``.npy`` file is one of length one."""
    start = head(path)
    if start.startswith(MAGIC):
        return True
    if not start.startswith(b"{"):
        return False
    try:
        with path.open("rb") as file:
            file.readline(_MOST_LINE)
            return file.read(len(MAGIC)) == MAGIC or (path.suffix == ".eqx" and size_of(file) > 0)
    except OSError:
        return False


def _find(path: Path) -> list[Path]:
    return files_in(path, (".eqx",), is_equinox)


FORMAT = Format(
    "Equinox",
    "an .eqx file of equinox.tree_serialise_leaves, with --skeleton or names in the rules",
    _find,
    _open,
    frozenset({"skeleton", "leaf_names"}),
)
