"""Reads ``.eqx`` files of ``equinox.tree_serialise_leaves``: one NumPy array after the other, without names.

A line of JSON may stand before the arrays; Equinox's documentation stores the hyperparameters there. The names come from a
skeleton (`convert skeleton`) or from the rules. bfloat16 is stored as ``V2``, float8 and int4 as ``V1``; the skeleton tells
which. Python's numbers are records, too (equinox/_serialisation.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from convert.checkpoints.access import head, opened
from convert.checkpoints.encodings.npy_header import MAGIC, Header, read_header
from convert.checkpoints.errors import corrupt, located, name_clash, note, truncated
from convert.checkpoints.files import FileSource, StoredArray, files_in
from convert.checkpoints.formats.skeleton import SkeletonRecord, read_skeleton, records_from_names
from convert.checkpoints.source import Format, Leaf, Options, Source, name_leaves
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.system.regular_file import open_regular, size_of
from convert.core.tensor_spec import TensorSpec, numpy_dtype

_MOST_LINE = 16 << 20  # bytes of hyperparameters
_MOST_RECORDS = 1_000_000
_SHOWN = 8
_MAKE_SKELETON = (
    "run `convert skeleton module:factory > skeleton.json` where the model's code and JAX are (factory returns what was "
    "saved: the model, or (model, state)) and pass --skeleton skeleton.json; or list the names under `leaf_names:` in the "
    "rule file"
)
_SAME_CODE = "make the skeleton with the same code and hyperparameters as the checkpoint"


def _open(path: Path, options: Options) -> Source:
    headers, hyperparameters = _read_headers(path)
    records, origin = _names(path, headers, options)
    leaves: list[Leaf] = []
    arrays: list[StoredArray] = []
    for number, ((header, start), record) in enumerate(zip(headers, records, strict=True)):
        spec = _spec(path, number, header, record, origin)
        leaves.append(Leaf(record.keys, spec))
        arrays.append(StoredArray(path, ((start, spec.nbytes),), spec, header.fortran, header.swapped))
    named = name_leaves(leaves)
    if len(named) != len(leaves):
        names = Counter("/".join(record.keys) for record in records)
        raise name_clash(origin, next(name for name, n in names.items() if n > 1))
    notes = [note(f"names from {origin}")]
    if hyperparameters is not None:
        text = json.dumps(hyperparameters, ensure_ascii=False)
        notes.append(note(f"hyperparameters in the first line: {text if len(text) <= 300 else text[:297] + '...'}"))
    source = FileSource(path, "Equinox", named, dict(zip(named, arrays, strict=True)), notes=tuple(notes))
    source.names_from = origin
    return source


def _read_headers(path: Path) -> tuple[list[tuple[Header, int]], Any]:
    """Read the header and the start of every record, and the hyperparameters."""
    with opened(path) as file:
        size = size_of(file)
        line = _hyperparameters(path, file) if file.read(1) == b"{" else None
        at = file.tell() if line is not None else 0
        headers: list[tuple[Header, int]] = []
        while at < size:
            if len(headers) == _MOST_RECORDS:
                raise corrupt("the file has too many records", path, expected=f"at most {_MOST_RECORDS} records")
            file.seek(at)
            try:
                header = read_header(file)
            except CheckpointError as error:
                raise located(error, f"{path}: record {len(headers)}, at byte {at}") from None
            start = file.tell()
            at = start + header.spec.nbytes
            if at > size:
                raise truncated(
                    f"the file ends in record {len(headers)} ({header.spec})",
                    path,
                    expected=f"{at} bytes",
                    got=f"{size} bytes",
                )
            headers.append((header, start))
    return headers, line


def _hyperparameters(path: Path, file: IO[bytes]) -> Any:
    file.seek(0)
    line = file.readline(_MOST_LINE)
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise corrupt(f"the first line starts like JSON, but is not valid JSON: {error}", path) from None


def _names(path: Path, headers: Sequence[tuple[Header, int]], options: Options) -> tuple[Sequence[SkeletonRecord], str]:
    """Return the name of each record in the file, and the origin of the names."""
    shown = ", ".join(f"{k} {header.spec}" for k, (header, _) in enumerate(headers[:_SHOWN]))
    more = f", ... and {len(headers) - _SHOWN} more" if len(headers) > _SHOWN else ""
    got = f"{len(headers)} records ({shown}{more})"
    if options.skeleton is not None:
        records = read_skeleton(options.skeleton)
        if len(records) != len(headers):
            problem = "the number of records differs (numbers that are fields of the model are records, too)"
            expected = f"{len(records)} records of {options.skeleton}"
            raise CheckpointError(Finding("skeleton-mismatch", problem, "", str(path), expected, got, _SAME_CODE))
        return records, str(options.skeleton)
    fitting = {records for records in records_from_names(options.leaf_names) if len(records) == len(headers)}
    if len(fitting) == 1:
        return fitting.pop(), "the rules"
    problem, expected = "an Equinox file has no names for its records", ""
    if options.leaf_names and not fitting:
        counts = " or ".join(str(n) for n in sorted({len(names) for names in options.leaf_names}))
        expected = f"{counts} records as in the rules"
    elif options.leaf_names:
        problem = f"{len(fitting)} rule files name this number of records differently"
        expected = "the names of one rule file"
    raise CheckpointError(Finding("leaf-names-unknown", problem, "", str(path), expected, got, _MAKE_SKELETON))


def _spec(path: Path, number: int, header: Header, record: SkeletonRecord, origin: str) -> TensorSpec:
    """Return the spec of a record, compared with the skeleton's."""
    name, spec, named_spec = "/".join(record.keys), header.spec, record.spec
    if named_spec is None:
        if header.nameless:
            problem = "its elements are single bytes of a dtype that only a skeleton can tell"
            finding = Finding("leaf-names-unknown", problem, fix=_MAKE_SKELETON)
            raise located(CheckpointError(finding), path, name)
        return spec
    if header.nameless and numpy_dtype(named_spec.dtype).itemsize == 1:
        spec = TensorSpec(spec.shape, named_spec.dtype)
    if spec != named_spec:
        problem, expected = f"record {number} differs from {origin}", f"{named_spec} for {name}"
        got = str(header.spec)
        raise CheckpointError(Finding("skeleton-mismatch", problem, "", str(path), expected, got, _SAME_CODE))
    return spec


def is_equinox(path: Path) -> bool:
    """Whether the file is a sequence of NumPy arrays, maybe after a line of JSON. A ``.npy`` file is a sequence of one."""
    start = head(path)
    if start.startswith(MAGIC):
        return True
    if not start.startswith(b"{"):
        return False
    try:
        with open_regular(path) as file:
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
