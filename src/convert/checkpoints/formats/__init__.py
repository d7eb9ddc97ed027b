"""Checkpoint formats: one module each, which recognises its files (`find`) and opens them (`open`).

To add a format, write a module with a `Format` called ``FORMAT`` and list it in `known_formats`; other packages use an entry
point instead. A reader takes the decoding of bytes from ``encodings`` and ``files``. Orbax is so large that it has a folder
of its own; `zarr_directories` reads the arrays of T5X and big_vision; `orbax_or_paxml` tells its directories from those of paxml and T5X. May import `convert.core` and the rest of
`convert.checkpoints`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

from convert.checkpoints.formats import big_vision, equinox, flax_msgpack, keras, npz, orbax_or_paxml, safetensors, t5x
from convert.checkpoints.source import Format
from convert.core.errors import CheckpointError
from convert.core.findings import Finding

GROUP = "convert.checkpoints"
"""Entry points of this group are `Format` objects of other packages."""


def known_formats() -> Iterator[Format]:
    """Yield the known formats, those of other packages last.

    Raises:
        CheckpointError: the entry point of a package is broken; the finding names it.
    """
    for module in (flax_msgpack, equinox, npz, safetensors, keras, t5x, big_vision):
        yield module.FORMAT
    yield from orbax_or_paxml.FORMATS
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist else entry.value
        name = f"the format {entry.name} of {package}"
        fix = "repair or uninstall this package"
        try:
            format = entry.load()
        except Exception as error:
            raise CheckpointError(
                Finding("reader-invalid", f"cannot be loaded: {error}", path=name, fix=fix)
            ) from error
        if not isinstance(format, Format):
            got = type(format).__name__
            raise CheckpointError(Finding("reader-invalid", path=name, expected="a convert.Format", got=got, fix=fix))
        yield format
