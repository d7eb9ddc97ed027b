"""Lay out safetensors files: a file and a range of bytes for each tensor, from specs alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convert.core import safetensors_header
from convert.core.errors import OutputError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec
from convert.rules.file import STEMS

SUFFIX = ".safetensors"
# The files of a directory: huggingface_hub/constants.py, SAFETENSORS_WEIGHTS_FILE_PATTERN, and diffusers/utils/constants.py.
SINGLE_FILES = tuple(stem + SUFFIX for stem in STEMS)
INDEX_SUFFIX = ".index.json"  # of the file that names the shards, behind the name that a single file would have
INDICES = tuple(name + INDEX_SUFFIX for name in SINGLE_FILES)
SHARD = re.compile(rf"({'|'.join(STEMS)})-(\d{{5}})-of-(\d{{5}})\.safetensors")


@dataclass(frozen=True)
class OutTensor:
    """A tensor that will be written."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True)
class Placement:
    """The bytes of a tensor: a file, and a range within its data, which starts after the header."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The file and bytes of every tensor.

    Attributes:
        files: names of the safetensors files.
        placements: tensor name -> placement, in the order of the bytes.
        index: name of the index file; None for a single file.
    """

    files: tuple[str, ...]
    placements: Mapping[str, Placement]
    index: str | None = None


def lay_out(
    tensors: Sequence[OutTensor], *, single: str | None = None, stem: str = STEMS[0], max_shard_bytes: int | None = None
) -> Layout:
    """Assign a file and a range of bytes to each tensor.

    Shards are filled in the order of `tensors`, as huggingface_hub fills them: a tensor that does not fit starts the
    next shard; a tensor above the limit gets its own shard. Within a file the order is that of safetensors' writer.

    Args:
        tensors: the tensors to write.
        single: name of the file, for an output that is one file. None: files of a directory, ``model.safetensors``
            or ``model-00001-of-00002.safetensors``, ...
        stem: of the files of a directory.
        max_shard_bytes: limit of the tensors' bytes in one file; headers are not counted.

    Raises:
        OutputError: there are no tensors; a name is empty, reserved or used twice; safetensors lacks the dtype; or a
            single file would exceed the limit.
    """
    _check_names(tensors)
    total = sum(tensor.spec.nbytes for tensor in tensors)
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise OutputError(
            Finding(
                "usage", expected="a shard size of at least 1 byte", got=str(max_shard_bytes), fix="give a larger one"
            )
        )
    if max_shard_bytes is None or total <= max_shard_bytes:
        return Layout(*_place([(single or stem + SUFFIX, list(tensors))]))
    if single is not None:
        raise OutputError(
            Finding(
                "output-too-large",
                path=single,
                expected=f"at most {max_shard_bytes:,} bytes in one file",
                got=f"{total:,}",
                fix="give a directory, which can hold several files, or a larger --max-shard-size",
            )
        )
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        return Layout(*_place([(stem + SUFFIX, shards[0])]))
    named = [(f"{stem}-{i:05d}-of-{len(shards):05d}{SUFFIX}", shard) for i, shard in enumerate(shards, 1)]
    return Layout(*_place(named), index=stem + SUFFIX + INDEX_SUFFIX)


def _check_names(tensors: Sequence[OutTensor]) -> None:
    if not tensors:
        raise OutputError(Finding("nothing-to-write", "the plan has no tensors", fix="add rules that take leaves"))
    seen: set[str] = set()
    for tensor in tensors:
        if not tensor.name or tensor.name == "__metadata__":
            raise OutputError(
                Finding(
                    "tensor-name", f"{tensor.name!r} is not a valid tensor name", fix="correct the target of its rule"
                )
            )
        if tensor.name in seen:
            raise OutputError(
                Finding(
                    "tensor-name", "two tensors have this name", path=tensor.name, fix="correct one of the two rules"
                )
            )
        seen.add(tensor.name)
        safetensors_header.tag(tensor.name, tensor.spec)


def _split(tensors: Sequence[OutTensor], limit: int) -> list[list[OutTensor]]:
    shards: list[list[OutTensor]] = []
    current: list[OutTensor] = []
    room = limit
    for tensor in tensors:
        nbytes = tensor.spec.nbytes
        if nbytes > limit:
            shards.append([tensor])
            continue
        if nbytes > room:
            shards.append(current)
            current, room = [], limit
        current.append(tensor)
        room -= nbytes
    return [*shards, current] if current else shards


def _place(shards: Sequence[tuple[str, Sequence[OutTensor]]]) -> tuple[tuple[str, ...], dict[str, Placement]]:
    placements = {}
    for file, shard in shards:
        at = 0
        for name, spec in safetensors_header.file_order((tensor.name, tensor.spec) for tensor in shard):
            placements[name] = Placement(file, at, at + spec.nbytes)
            at += spec.nbytes
    return tuple(file for file, _ in shards), placements
