"""The checkpoint formats: one module each, and the list of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

from convert.checkpoints.formats import equinox, flax_msgpack, keras, npz, orbax_or_paxml, safetensors, t5x
from convert.checkpoints.source import Format
from convert.core.errors import CheckpointError

GROUP = "convert.checkpoints"
"""Entry points of this group are `Format` objects, of formats that other packages read."""


def known_formats() -> Iterator[Format]:
    """The formats that are understood, those of other packages last.

    Raises:
        CheckpointError: a package's entry point is broken; the message names it.
    """
    for module in (flax_msgpack, equinox, npz, safetensors, keras, t5x):
        yield module.FORMAT
    yield from orbax_or_paxml.FORMATS
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist else entry.value
        try:
            found = entry.load()
        except Exception as error:
            raise CheckpointError(
                f"the source {entry.name} of {package} cannot be loaded: {error}; repair or uninstall it"
            ) from error
        if not isinstance(found, Format):
            raise CheckpointError(f"the source {entry.name} of {package} is no convert.Format; repair or uninstall it")
        yield found
