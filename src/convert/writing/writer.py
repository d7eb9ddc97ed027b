"""Write safetensors: one file, or a directory with shards, an index and further files.

`Writer` maps the files of a `Layout` into memory: tensors are filled in any order and from any thread. All files appear at once.
"""

from __future__ import annotations

import json
import mmap
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from convert.core import safetensors_header
from convert.core.errors import ConvertError, OutputError
from convert.core.findings import Finding
from convert.core.system import signals
from convert.core.system.regular_file import close
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.planning.tokenizer.files import of_tokenizer
from convert.stores import StorePath, located
from convert.writing import digests
from convert.writing.complete import check_complete
from convert.writing.destination import permitted, store
from convert.writing.destination.journal import Journal
from convert.writing.destination.local import LocalOutput, LocalPart
from convert.writing.destination.store import StoreOutput, StorePart
from convert.writing.file_layout import SUFFIX, Layout, OutTensor, Placement

Place = Path | Mapping[str, str]  # the temporary; in a store, the ids of the uploads by file
# What `from_pretrained` of transformers, diffusers and PEFT may load from a directory, variants (model.fp16.safetensors) included:
# files of an older output must not stay in a new one. An adapter that stays would be added once more.
_MODEL_FILES = re.compile(
    r"(generation_|adapter_)?config\.json|(model|diffusion_pytorch_model|adapter_model)"
    r"((\.\w+)?(-\d{5}-of-\d{5})?\.safetensors|\.safetensors\.index(\.\w+)?\.json)"
)


def of_model(name: str) -> bool:
    """Whether a file of this name in a directory is of a model, and so does not stay when another model takes its place."""
    return _MODEL_FILES.fullmatch(name) is not None


@dataclass
class _File:
    """One mapped file of the output."""

    fd: int
    data: mmap.mmap
    tensors: list[tuple[str, TensorSpec]]
    header: int  # bytes before the data


def open_output(
    out: Path, directory: bool, overwrite: bool, keep: bool = False, files: Collection[str] = ()
) -> LocalOutput | StoreOutput:
    """Return where an output is written: on this machine or, for a URL, in a store.

    Args:
        keep: as for `AtomicOutput`; in a store, whether to remove what a killed run left.
        files: names of all files of a directory.

    Raises:
        OutputError: it may not be written.
    """
    if not isinstance(there := located(out), StorePath):
        return LocalOutput(out, directory=directory, overwrite=overwrite, keep=keep)
    return StoreOutput(there, directory=directory, overwrite=overwrite, keep=keep, files=files)


def _open_part(out: Path, place: Place, directory: bool) -> LocalPart | StorePart:
    if isinstance(out, StorePath):
        assert isinstance(place, Mapping)
        return StorePart(out, place, directory)
    assert isinstance(place, Path)
    return LocalPart(out, place, directory)


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Check that `out` may be written, without writing anything.

    Raises:
        OutputError: as `open_output`.
    """
    there = located(out)
    if isinstance(there, StorePath):
        store.refuse_existing(there, overwrite, out.suffix != SUFFIX)
    else:
        permitted.refuse_existing(there, overwrite)


class Writer:
    """Write a layout. A context manager: leaving it without `commit` removes everything that was written.

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
        with_digests: bool = False,
        identity: Mapping[str, str] | None = None,
        resume: bool = False,
    ) -> None:
        """Store the arguments; entering the context creates the files.

        Args:
            out: a file if it ends in ``.safetensors``, else a directory.
            layout: the result of `lay_out` for `tensors`.
            tensors: the same tensors.
            metadata: metadata of every file's header; ``format`` defaults to ``pt``.
            overwrite: whether to replace `out`. In a directory only files of a model are replaced or removed (weights,
                index, config.json, those in `extra_files`, and with a tokenizer the files of another one); all others stay.
            extra_files: name -> content of further files of a directory, such as ``config.json``.
            with_digests: whether each header gets the digests of `convert.writing.digests`.
            identity: what must be the same for another run to continue this one; None keeps no journal.
            resume: whether to continue an unfinished run of the same identity, and to leave this one when it is interrupted.

        Attributes:
            leaves: name -> digest of the leaves that an earlier run read to their end.
            restored: names of the tensors that it completed, and whose bytes still have their digests.

        Raises:
            OutputError: `out` is a file and the layout has other files, or an extra file's name is a path or is used by
                the layout.
        """
        self._out = out
        self._layout = layout
        self._specs = {tensor.name: tensor.spec for tensor in tensors}
        self._metadata = {"format": "pt", **(metadata or {})}
        self._overwrite = overwrite
        self._extra = dict(extra_files or {})
        self._directory = out.suffix != SUFFIX
        self._output: LocalOutput | StoreOutput | None = None
        self._reserving = threading.Lock()
        self._files: dict[str, _File] = {}
        self._requested: set[str] = set()
        self._with_digests = with_digests
        self._digests: dict[str, str] = {}  # of the tensors that are complete
        self._identity, self._resume = identity, resume
        self._journal: Journal | None = None
        self.leaves: Mapping[str, str] = {}
        self.restored: frozenset[str] = frozenset()
        if self._specs.keys() != layout.placements.keys():
            raise ValueError("the layout is not of these tensors")
        if not self._directory and (layout.files != (out.name,) or self._extra):
            raise OutputError(
                Finding(
                    "output-kind",
                    path=str(out),
                    expected="one file",
                    got=", ".join((*layout.files, *self._extra)),
                    fix="give a directory",
                )
            )
        for name in self._extra:
            if name in ("", ".", "..") or "/" in name or "\0" in name or name in (*layout.files, layout.index):
                raise OutputError(
                    Finding(
                        "output-kind", f"{name!r} is not a valid name of an extra file", path=str(out), fix="rename it"
                    )
                )

    def __enter__(self) -> Self:
        """Create the temporary files, with their full size reserved on the disk.

        Raises:
            OutputError: as `AtomicOutput`, or the disk lacks the space.
        """
        tensors: dict[str, list[tuple[str, TensorSpec]]] = {file: [] for file in self._layout.files}
        for name, place in self._layout.placements.items():
            tensors[place.file].append((name, self._specs[name]))
        data = {file: sum(spec.nbytes for _, spec in inside) for file, inside in tensors.items()}
        if self._layout.index is not None:
            self._extra[self._layout.index] = self._index(sum(data.values()))
        headers = {file: self._header(inside) for file, inside in tensors.items()}
        needed = sum(map(len, headers.values())) + sum(data.values()) + sum(map(len, self._extra.values()))
        output = self._output = open_output(
            self._out, self._directory, self._overwrite, self._resume, {*headers, *self._extra}
        )
        try:
            if self._identity is not None:
                with permitted.os_errors(output.out):
                    self._journal = output.start_journal(self._identity, self._out)
            with permitted.os_errors(output.out, needed, output.folder):
                for file, header in headers.items():
                    self._files[file] = self._map(file, header, data[file], tensors[file])
                output.add(self._extra)
                self._restore()
        except BaseException:
            self._discard()
            raise
        return self

    @property
    def headers(self) -> dict[str, int]:
        """File -> bytes of its header. The writer must be open."""
        return {name: file.header for name, file in self._files.items()}

    @property
    def place(self) -> Place:
        """Where other processes fill files (`part`)."""
        assert self._output is not None
        return self._output.place

    def take(self, file: str, digests: Mapping[str, str], notes: Sequence[Sequence[Any]]) -> None:
        """Take over tensors of a file that another process has filled: name -> the digest that it computed, and what else it said (`part`).

        Raises:
            OutputError: the file is not complete, or a tensor has other values than in the run that is continued.
        """
        assert self._output is not None
        with permitted.os_errors(self._output.out):
            self._output.take(file, notes)
        self._requested |= digests.keys()
        self._digests |= digests
        for name, digest in digests.items() if self._journal is not None else ():
            self._journal.tensor(name, digest)  # type: ignore[union-attr]

    @contextmanager
    def part(self, place: Place, file: str, header: int) -> Iterator[tuple[dict[str, str], list[list[Any]]]]:
        """Fill one file of an output that the writer of another process keeps (`region`, `done`), and sync or send it.

        Args:
            place: of the other writer.
            header: bytes of the file's header (`headers`).

        Yields:
            What `take` takes at the end of the block: the digests of the tensors that are `done`, by name, and notes.

        Raises:
            OutputError: the file is not there, has another size, or cannot be written.
        """
        inside = [(name, self._specs[name]) for name, at in self._layout.placements.items() if at.file == file]
        with permitted.os_errors(self._out):
            output = self._output = _open_part(located(self._out), place, self._directory)
            self._files = {file: self._map(file, bytes(header), sum(spec.nbytes for _, spec in inside), inside)}
        try:
            yield self._digests, output.notes
            with permitted.os_errors(self._out):
                output.finish(file, self._files[file].fd, self._files[file].data)
        finally:
            self._discard()

    def _restore(self) -> None:
        """Take over the tensors of an earlier run whose bytes are those that it recorded."""
        if self._journal is None:
            return
        self.leaves = self._journal.leaves
        for name, digest in self._journal.tensors.items():
            if name in self._specs and self._kept(name, digest):
                self._digests[name] = digest
                self._release(name)
        self.restored = frozenset(self._digests)
        self._requested |= self.restored

    def _kept(self, name: str, digest: str) -> bool:
        assert self._output is not None
        place = self._layout.placements[name]
        file = self._open(place.file)
        return self._output.kept(place.file, file.data, file.header + place.start, file.header + place.stop, digest)

    def leaf_done(self, leaf: str, digest: str) -> None:
        """Record for `resume` that a leaf was read to its end; call it after `done` of its tensors."""
        if self._journal is not None:
            self._journal.leaf(leaf, digest)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._discard()
        except OutputError as left:
            if not isinstance(error, ConvertError):
                raise
            headline = "The output was not written, and not all that was sent could be removed:"
            raise OutputError(*error.findings, *left.findings, headline=headline) from error

    def region(self, name: str) -> np.ndarray:
        """Return the memory of a tensor in its mapped file: writable, of its shape and dtype, zeros until filled.

        Any thread may call this and fill it. Do not use it after `commit`: it still points into the published file.

        Raises:
            KeyError: the layout has no such tensor.
        """
        place = self._layout.placements[name]
        spec = self._specs[name]
        file = self._open(place.file)
        if name not in self._requested:
            with self._reserving:
                if name not in self._requested:
                    self._reserve(file, place)
                self._requested.add(name)
        if spec.size == 0:
            return np.empty(spec.shape, numpy_dtype(spec.dtype))
        return np.frombuffer(file.data, numpy_dtype(spec.dtype), spec.size, file.header + place.start).reshape(
            spec.shape
        )

    def _reserve(self, file: _File, place: Placement) -> None:
        assert self._output is not None
        if place.stop > place.start:
            with permitted.os_errors(self._output.out, place.stop - place.start, self._output.folder):
                self._output.reserve(file.fd, file.header + place.start, place.stop - place.start)

    def done(self, name: str) -> None:
        """Compute the digest of a filled tensor, release its pages and start to write them out, so that `commit` waits less.

        Optional: `commit` computes the digests that are missing. Do not fill more of the tensor afterwards.
        """
        if self._with_digests:  # while its pages are in memory
            self._digests[name] = self._digest(name)
            if self._journal is not None:
                self._journal.tensor(name, self._digests[name])
        self._release(name)

    def _release(self, name: str) -> None:
        assert self._output is not None
        place = self._layout.placements[name]
        file = self._open(place.file)
        if place.stop > place.start:
            with permitted.os_errors(self._output.out):
                self._output.filled(place.file, file.fd, file.data, file.header + place.start, file.header + place.stop)

    def set_metadata(self, key: str, value: str) -> None:
        """Replace a placeholder in the metadata by a value that is known only at the end, such as a checksum.

        Raises:
            ValueError: there is no such key, or the value has another length: the header cannot grow.
        """
        length = len(json.dumps(value, ensure_ascii=False).encode())
        if key not in self._metadata or length != len(json.dumps(self._metadata[key], ensure_ascii=False).encode()):
            raise ValueError(f"the metadata has no placeholder {key!r} of the length of {value!r}")
        self._metadata[key] = value

    def commit(self) -> None:
        """Check that the output is complete (`check_complete`), sync it to the disk, and publish it (`AtomicOutput.publish`).

        Raises:
            OutputError: a tensor was never requested (`region`); another program created `out` meanwhile; or the system refused.
                `out` is then unchanged.
        """
        if self._output is None:
            raise ValueError("the writer is not open")
        check_complete(self._out, self._layout.placements, self._requested)
        output = self._output
        with permitted.os_errors(output.out):
            for name, file in self._files.items():
                header = self._header(file.tensors, complete=True)
                file.data[: len(header)] = header
                output.finish(name, file.fd, file.data)
        self._close()
        signals.check()
        other_tokenizer = any(map(of_tokenizer, self._extra))
        output.publish(lambda name: name in self._extra or of_model(name) or (other_tokenizer and of_tokenizer(name)))
        self._output = None
        self._discard()

    def _open(self, file: str) -> _File:
        if file not in self._files:
            raise ValueError(f"{self._out}: the writer is not open")
        return self._files[file]

    def _header(self, tensors: Sequence[tuple[str, TensorSpec]], *, complete: bool = False) -> bytes:
        if not self._with_digests:
            return safetensors_header.encode(tensors, self._metadata)
        files = {name: digests.digest(content) for name, content in self._extra.items()}
        names = [name for name, _ in tensors]
        if not complete:
            return safetensors_header.encode(tensors, {**self._metadata, **digests.placeholders(names, files)})
        found = {name: self._digests.get(name) or self._digest(name) for name in names}
        return digests.seal(
            safetensors_header.encode(tensors, {**self._metadata, **digests.file_metadata(found, files)})
        )

    def _digest(self, name: str) -> str:
        place = self._layout.placements[name]
        file = self._open(place.file)
        with memoryview(file.data) as data, data[file.header + place.start : file.header + place.stop] as values:
            return digests.digest(values)

    def _index(self, total: int) -> bytes:
        """Encode the index as transformers does: two spaces, sorted keys, a newline at the end."""
        weight_map = {name: place.file for name, place in self._layout.placements.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()

    def _map(self, file: str, header: bytes, nbytes: int, tensors: list[tuple[str, TensorSpec]]) -> _File:
        assert self._output is not None
        fd = self._output.create(file, len(header) + nbytes, len(header))
        try:
            return _File(fd, mmap.mmap(fd, len(header) + nbytes), tensors, len(header))
        except BaseException:
            close(fd)
            raise

    def _close(self) -> None:
        for file in self._files.values():
            with suppress(BufferError):  # arrays still point into the map; the last of them unmaps it
                file.data.close()
            close(file.fd)
        self._files = {}

    def _discard(self) -> None:
        self._close()
        journal, self._journal = self._journal, None
        if self._output is not None:  # without a journal, it is of another conversion
            self._output.discard(keep=self._resume and (journal is None or not journal.empty))
            self._output = None
        if journal is not None:
            journal.close()
