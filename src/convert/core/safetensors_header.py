"""Write the header of a safetensors file, and read it without trusting the file.

Format (safetensors 0.8, README.md and safetensors/src/tensor.rs): eight bytes with the header's length, little-endian;
the header, JSON padded with spaces to a multiple of eight; the tensors' bytes, without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard

from convert.core.errors import CheckpointError, OutputError
from convert.core.findings import Finding
from convert.core.system.regular_file import open_regular, size_of
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec

MAX_HEADER = 100_000_000  # bytes; readers reject longer ones (MAX_HEADER_SIZE)

# The enum Dtype in its order of declaration; safetensors' own writer sorts by it, descending. Item sizes never decrease
# along it, so every tensor starts at a multiple of its item size.
# fmt: off
_DTYPE_ORDER = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)
# fmt: on
_NAMES = {tag: name for name, tag in SAFETENSORS_TAGS.items() if tag is not None}


class TensorEntry(NamedTuple):
    """A tensor in a file: its spec, and the offsets of its first and last+1 byte from the start of the file."""

    spec: TensorSpec
    start: int
    stop: int


def tag(name: str, spec: TensorSpec) -> str:
    """Return the dtype as safetensors spells it.

    Raises:
        OutputError: the format has no such dtype; the finding's path is the tensor's name.
    """
    found = SAFETENSORS_TAGS.get(spec.dtype)
    if found is None:
        expected = f"one of {', '.join(_NAMES.values())}"
        problem = "the dtype cannot be stored in a safetensors file"
        raise OutputError(
            Finding("dtype-not-storable", problem, path=name, expected=expected, got=spec.dtype, fix="cast the tensor")
        )
    return found


def file_order(tensors: Iterable[tuple[str, TensorSpec]]) -> list[tuple[str, TensorSpec]]:
    """Sort tensors as safetensors' own writer does: larger dtypes first, then by name.

    Raises:
        OutputError: the format has no such dtype.
    """
    return sorted(tensors, key=lambda tensor: (-_DTYPE_ORDER.index(tag(*tensor)), tensor[0]))


def encode(tensors: Iterable[tuple[str, TensorSpec]], metadata: Mapping[str, str]) -> bytes:
    """Return the length and header of a file that holds `tensors` in this order without gaps.

    The metadata's keys are sorted, as safetensors' own writer stores them in the random order of a hash map.

    Raises:
        OutputError: a name or the metadata is not Unicode text, or the header is longer than readers accept.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, spec in tensors:
        header[name] = {"dtype": tag(name, spec), "shape": spec.shape, "data_offsets": (at, at + spec.nbytes)}
        at += spec.nbytes
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        problem = f"the name of a tensor or the metadata is not Unicode text: {error}"
        raise OutputError(Finding("header-not-writable", problem)) from None
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        expected, got = f"a safetensors header of at most {MAX_HEADER} bytes", f"{len(text)} bytes"
        raise OutputError(
            Finding("header-not-writable", expected=expected, got=got, fix="write several files (--max-shard-size)")
        )
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    """Read the metadata and the tensors of a safetensors file, in the order of their bytes. Reads only the header.

    Raises:
        CheckpointError: the file is not in this format, is truncated, or has offsets that overlap, leave gaps, or do not
            fit the shape and dtype.
    """
    try:
        with open_regular(path) as file:
            size = size_of(file)
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) == 8 and (length > MAX_HEADER or (length > size - 8 and file.read(1) not in (b"", b"{"))):
                raise CheckpointError(
                    Finding(
                        "safetensors-damaged",
                        path=str(path),
                        expected="a safetensors file",
                        got="another format, or a damaged file",
                        fix="give the .safetensors file",
                    )
                )
            if len(prefix) < 8 or length > size - 8:
                _fail(path, f"the header would take {length} bytes, the file has {size}")
            text = file.read(length)
    except OSError as error:
        problem, fix = f"cannot be read: {error.strerror or error}", getattr(error, "fix", "")  # of a store
        raise CheckpointError(Finding("file-not-readable", problem, path=str(path), fix=fix)) from None
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _fail(path, f"its header is not JSON: {error}")
    if not isinstance(header, dict):
        _fail(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _fail(path, "its __metadata__ is not a map of strings")
    begin = 8 + length
    entries = {name: _entry(path, name, value, begin) for name, value in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: item[1][1:]))
    at = begin
    for name, entry in entries.items():
        if entry.start != at:
            _fail(path, f"tensor {name} starts at byte {entry.start}, but the one before it stops at {at}")
        at = entry.stop
    if at != size:
        _fail(path, f"its tensors stop at byte {at}, but it has {size}")
    return metadata, entries


def _entry(path: Path, name: str, value: Any, begin: int) -> TensorEntry:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype = fields.get("dtype")
    shape = fields.get("shape")
    offsets = fields.get("data_offsets")
    if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        _fail(path, f"tensor {name} is not described by dtype, shape and data_offsets")
    if dtype not in _NAMES:
        _fail(path, f"tensor {name} has the unknown dtype {dtype}; known are {', '.join(_NAMES)}")
    spec = TensorSpec(tuple(shape), _NAMES[dtype])
    if offsets[1] - offsets[0] != spec.nbytes:
        _fail(path, f"tensor {name}, {spec}, takes {spec.nbytes} bytes, but its offsets are {offsets}")
    return TensorEntry(spec, begin + offsets[0], begin + offsets[1])


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _fail(path: Path, what: str) -> NoReturn:
    problem = f"not a complete safetensors file: {what}"
    fix = "write or copy it again"
    raise CheckpointError(Finding("safetensors-damaged", problem, path=str(path), fix=fix))
