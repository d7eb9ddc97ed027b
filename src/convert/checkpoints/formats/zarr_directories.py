"""Reads arrays that lie in zarr directories of one folder: those of T5X and of big_vision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from convert.checkpoints.access import Boundary, absolute
from convert.checkpoints.chunks import Box, Grid, Meter, Piece
from convert.checkpoints.errors import COPY_AGAIN, incomplete, located, unreadable
from convert.core.errors import CheckpointError
from convert.core.tensor_spec import TensorSpec


class ZarrDirectories:
    """The zarr directories in a folder."""

    def __init__(self, folder: Path, names: set[str], boundary: Boundary) -> None:
        self._store = None
        self._arrays: dict[str, object] = {}
        if names:
            # This imports TensorStore, which a checkpoint in one file does not need.
            from convert.checkpoints.encodings.ocdbt import TENSORSTORE_ERRORS
            from convert.checkpoints.orbax.stores import open_store, reason
            from convert.checkpoints.orbax.zarr_metadata import read_metadata

            real = absolute(folder)
            try:
                self._store = open_store(real, use_ocdbt=False, boundary=boundary)
                self._arrays = dict(read_metadata(self._store, sorted(names), use_zarr3=False))
            except TENSORSTORE_ERRORS as error:
                raise unreadable(folder, ValueError(reason(error, real)), fix=COPY_AGAIN) from None

    def spec(self, file: Path, keys: tuple[str, ...], name: str) -> TensorSpec:
        """Return the shape and dtype of the array of a leaf."""
        from convert.checkpoints.orbax.zarr_metadata import Array

        array = self._arrays.get(name)
        if isinstance(array, Array):
            return array.spec
        if isinstance(array, CheckpointError):
            raise located(array, file, "/".join(keys))
        raise incomplete(f"{name}/.zarray is missing", file, "/".join(keys))

    def grid(self, name: str) -> Grid:
        """Return the chunks of an array."""
        return self._arrays[name].grid  # type: ignore[attr-defined,no-any-return]

    def pieces(self, file: Path, leaf: str, name: str, chunk: Box, meter: Meter | None) -> Iterator[Piece]:
        """Yield a chunk in pieces, as `Source.pieces`."""
        from convert.checkpoints.encodings.ocdbt import TENSORSTORE_ERRORS
        from convert.checkpoints.orbax.arrays import pieces
        from convert.checkpoints.orbax.stores import reason
        from convert.checkpoints.orbax.zarr_metadata import Array

        array = self._arrays[name]
        assert self._store is not None and isinstance(array, Array)
        try:
            yield from pieces(self._store, array, False, chunk, meter)
        except TENSORSTORE_ERRORS as error:
            problem = f"{array.spec}: {reason(error, file.parent)}"
            raise unreadable(file, ValueError(problem), leaf, COPY_AGAIN) from None
