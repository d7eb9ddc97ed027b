"""Writes the leaves as an ``.npz`` file, as `np.savez` does, with names joined by ``/``, as big_vision's."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from convert.checkpoints.chunks import full_box
from convert.checkpoints.source import Source
from convert.core.tensor_spec import numpy_dtype


def write_npz(source: Source, out: Path, *, done: Callable[[str], None]) -> None:
    """Write all leaves, each in pieces. Dtypes that NumPy lacks are stored as bytes of their size (``|V2``), as NumPy does."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, leaf in source.leaves.items():
            dtype = numpy_dtype(leaf.spec.dtype)
            descr = dtype.str if dtype.isbuiltin == 1 else f"|V{dtype.itemsize}"
            entry = zipfile.ZipInfo(
                f"{'/'.join(leaf.keys)}.npy"
            )  # its time is 1980: the same leaves give the same bytes
            with archive.open(entry, "w", force_zip64=True) as file:
                header = {"descr": descr, "fortran_order": False, "shape": leaf.spec.shape}
                np.lib.format.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call]
                for _, piece in source.pieces(name, full_box(leaf.spec.shape)):
                    file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            done(name)
