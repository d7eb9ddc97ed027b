"""Writes safetensors: one file, or a directory with shards, index and whatever lies beside them.

`lay_out` decides from specs alone which file and which bytes each tensor gets. `Writer` maps the files into memory, so
that tensors are filled in any order, from any thread, each exactly in its place, and publishes all of it at once.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from convert.core import safetensors_header
from convert.core.errors import OutputError
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.writing import atomic

SUFFIX = ".safetensors"
STEM = "model"  # of the files in a directory: huggingface_hub/constants.py, SAFETENSORS_WEIGHTS_FILE_PATTERN

# What `from_pretrained` may load from a directory, variants (model.fp16.safetensors) included: none of an older output
# may stay beside a new one.
_MODEL_FILES = re.compile(
    r"(generation_)?config\.json|model(\.\w+)?(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index(\.\w+)?\.json"
)
_PAGE = mmap.ALLOCATIONGRANULARITY
# Bytes from which on a call of its own is worth it: to let go of pages, and to have them written out before the end.
_FEW, _WORTH = 1 << 15, 1 << 20


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
    """Where every tensor goes.

    Attributes:
        files: names of the safetensors files.
        placements: tensor name -> place, in the order of the bytes.
        index: name of the index file, None where there is one file only.
    """

    files: tuple[str, ...]
    placements: Mapping[str, Placement]
    index: str | None = None


def lay_out(tensors: Sequence[OutTensor], *, single: str | None = None, max_shard_bytes: int | None = None) -> Layout:
    """Decides which file and which bytes each tensor gets.

    Shards are filled in the order of `tensors`, as huggingface_hub fills them: a tensor that no longer fits starts the
    next one, a tensor above the limit gets one of its own. Within a file the order is that of safetensors' own writer,
    whatever the order of `tensors`.

    Args:
        tensors: what will be written.
        single: name of the one file, for an output that is a file. None: files of a directory, ``model.safetensors``
            or ``model-00001-of-00002.safetensors``, ...
        max_shard_bytes: limit of the tensors' bytes in one file; headers are not counted.

    Raises:
        OutputError: no tensors; a name is empty, reserved or used twice; safetensors lacks the dtype; or one file was
            asked for and the limit asks for more.
    """
    _check_names(tensors)
    total = sum(tensor.spec.nbytes for tensor in tensors)
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise OutputError(f"a shard of at most {max_shard_bytes} bytes holds nothing")
    if max_shard_bytes is None or total <= max_shard_bytes:
        return Layout(*_place([(single or STEM + SUFFIX, list(tensors))]))
    if single is not None:
        raise OutputError(
            f"{single}: {total:,} bytes do not fit into one file of at most {max_shard_bytes:,}; give a "
            "directory, which can hold several, or a larger --max-shard-size"
        )
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        return Layout(*_place([(STEM + SUFFIX, shards[0])]))
    named = [(f"{STEM}-{i:05d}-of-{len(shards):05d}{SUFFIX}", shard) for i, shard in enumerate(shards, 1)]
    return Layout(*_place(named), index=f"{STEM}{SUFFIX}.index.json")


def _check_names(tensors: Sequence[OutTensor]) -> None:
    if not tensors:
        raise OutputError("there are no tensors to write")
    seen: set[str] = set()
    for tensor in tensors:
        if not tensor.name or tensor.name == "__metadata__":
            raise OutputError(f"a tensor cannot be called {tensor.name!r}")
        if tensor.name in seen:
            raise OutputError(f"two tensors are called {tensor.name}")
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


@dataclass
class _File:
    """One mapped file of the output."""

    fd: int
    data: mmap.mmap
    tensors: list[tuple[str, TensorSpec]]
    header: int  # bytes before the data


class Writer:
    """Writes a layout. A context manager: leaving it without `commit` removes everything that was written.

    >>> with Writer(out, layout, tensors) as writer:  # doctest: +SKIP
    ...     for tensor in tensors:
    ...         writer.region(tensor.name)[...] = arrays[tensor.name]
    ...     writer.commit()
    """

    def __init__(
        self,
        out: Path,
        layout: Layout,
        tensors: Sequence[OutTensor],
        *,
        metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Only takes notes; the files are made on entering the context.

        Args:
            out: a file if it ends in ``.safetensors``, else a directory.
            layout: what `lay_out` gave for `tensors`.
            tensors: the same tensors.
            metadata: goes into every file's header; ``format`` is ``pt`` where it says no other.
            overwrite: replace what is at `out`. In a directory only files of a model are replaced or removed (weights,
                index, config.json, and what `extra_files` names); all others stay.
            extra_files: name -> content of further files of a directory, such as ``config.json``.

        Raises:
            OutputError: `out` is a file and the layout is not of one file of that name, or an extra file's name has a
                directory in it or is one of the layout's.
        """
        self._out = out
        self._layout = layout
        self._specs = {tensor.name: tensor.spec for tensor in tensors}
        self._metadata = {"format": "pt", **(metadata or {})}
        self._overwrite = overwrite
        self._extra = dict(extra_files or {})
        self._directory = out.suffix != SUFFIX
        self._stage: atomic.Stage | None = None
        self._files: dict[str, _File] = {}
        self._handed_out: set[str] = set()
        if self._specs.keys() != layout.placements.keys():
            raise ValueError("the layout is not of these tensors")
        if not self._directory and (layout.files != (out.name,) or self._extra):
            raise OutputError(
                f"{out}: a single file holds no {', '.join((*layout.files, *self._extra))}; give a directory"
            )
        for name in self._extra:
            if name in ("", ".", "..") or "/" in name or "\0" in name or name in (*layout.files, layout.index):
                raise OutputError(f"{out}: an extra file cannot be called {name!r}")

    def __enter__(self) -> Self:
        """Makes the files beside their place, with their full size reserved on the disk.

        Raises:
            OutputError: `out` exists and may not be replaced, is of the other kind, its parent is missing or not
                writable, or the disk lacks the space.
        """
        tensors: dict[str, list[tuple[str, TensorSpec]]] = {file: [] for file in self._layout.files}
        for name, place in self._layout.placements.items():
            tensors[place.file].append((name, self._specs[name]))
        headers = {file: safetensors_header.encode(inside, self._metadata) for file, inside in tensors.items()}
        data = {file: sum(spec.nbytes for _, spec in inside) for file, inside in tensors.items()}
        if self._layout.index is not None:
            self._extra[self._layout.index] = self._index(sum(data.values()))
        needed = sum(map(len, headers.values())) + sum(data.values()) + sum(map(len, self._extra.values()))
        self._stage = atomic.Stage(self._out, directory=self._directory, overwrite=self._overwrite)
        try:
            with atomic.os_errors(self._stage.out, needed):
                for file, header in headers.items():
                    self._files[file] = self._map(file, header, data[file], tensors[file])
                for name, content in self._extra.items():
                    with (self._stage.path / name).open("wb") as opened:
                        opened.write(content)
                        opened.flush()
                        os.fsync(opened.fileno())
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._discard()

    def region(self, name: str) -> np.ndarray:
        """The place of a tensor in its file, zeros until filled: writable, of its shape and dtype. May be called and
        filled from any thread. Not to be used after `commit`: it still points into the published file.

        Raises:
            KeyError: the layout has no such tensor.
        """
        place = self._layout.placements[name]
        spec = self._specs[name]
        file = self._open(place.file)
        self._handed_out.add(name)
        if spec.size == 0:
            return np.empty(spec.shape, numpy_dtype(spec.dtype))
        return np.frombuffer(file.data, numpy_dtype(spec.dtype), spec.size, file.header + place.start).reshape(
            spec.shape
        )

    def done(self, name: str) -> None:
        """Says that a tensor is filled: its pages need not stay in this process's memory, and the system may begin to write
        them out, so that `commit` waits less. Optional; filling on afterwards is slower, not wrong."""
        place = self._layout.placements[name]
        if place.stop - place.start < _FEW:
            return
        file = self._open(place.file)
        start = (file.header + place.start) // _PAGE * _PAGE
        size = min(-(-(file.header + place.stop) // _PAGE) * _PAGE, len(file.data)) - start
        if hasattr(mmap, "MADV_DONTNEED"):
            file.data.madvise(mmap.MADV_DONTNEED, start, size)
        if size >= _WORTH:
            atomic.write_back(file.fd, start, size)

    def set_metadata(self, key: str, value: str) -> None:
        """Replaces a placeholder in the metadata by a value known only now, such as a checksum.

        Raises:
            ValueError: there is no such key, or the value is not as long as the placeholder: the header cannot grow.
        """
        length = len(json.dumps(value, ensure_ascii=False).encode())
        if key not in self._metadata or length != len(json.dumps(self._metadata[key], ensure_ascii=False).encode()):
            raise ValueError(f"the metadata has no placeholder {key!r} of the length of {value!r}")
        self._metadata[key] = value

    def commit(self) -> None:
        """Syncs everything to the disk and puts it in place: see `staging.Stage.publish` for how atomic that is.

        Raises:
            OutputError: a tensor's region was never asked for, so it would be zeros; something appeared at `out`
                meanwhile; or the system refuses. Nothing is at `out` then that was not there before.
        """
        if self._stage is None:
            raise ValueError("the writer is not open")
        missing = [name for name in self._layout.placements if name not in self._handed_out]
        if missing:
            raise OutputError(f"{self._out}: {len(missing)} tensors were never filled: {', '.join(missing[:10])}")
        stage = self._stage
        with atomic.os_errors(stage.out):
            for file in self._files.values():
                header = safetensors_header.encode(file.tensors, self._metadata)
                file.data[: len(header)] = header
                file.data.flush()
                os.fsync(file.fd)
            if self._directory:
                atomic.sync_directory(stage.path)
        self._close()
        stage.publish(lambda name: name in self._extra or _MODEL_FILES.fullmatch(name) is not None)
        self._stage = None

    def _open(self, file: str) -> _File:
        if file not in self._files:
            raise ValueError(f"{self._out}: the writer is not open")
        return self._files[file]

    def _index(self, total: int) -> bytes:
        """As transformers writes it: two spaces, sorted keys, a newline at the end."""
        weight_map = {name: place.file for name, place in self._layout.placements.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()

    def _map(self, file: str, header: bytes, nbytes: int, tensors: list[tuple[str, TensorSpec]]) -> _File:
        assert self._stage is not None
        path = self._stage.path / file if self._directory else self._stage.path
        fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if self._directory else 0), 0o666)
        try:
            atomic.allocate(fd, len(header) + nbytes)
            return _File(fd, mmap.mmap(fd, len(header) + nbytes), tensors, len(header))
        except BaseException:
            os.close(fd)
            raise

    def _close(self) -> None:
        for file in self._files.values():
            with suppress(BufferError):  # regions are still held; the last of them unmaps
                file.data.close()
            os.close(file.fd)
        self._files = {}

    def _discard(self) -> None:
        self._close()
        if self._stage is not None:
            self._stage.discard()
            self._stage = None
