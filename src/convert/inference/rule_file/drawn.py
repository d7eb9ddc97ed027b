"""Random leaves, and the tensors that a derivation makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoints.source import Leaf, Source
from convert.core.tensor_spec import TensorSpec
from convert.inference.derivation import Arithmetic, Part, Tensor
from convert.layers.leaf_sums import complex_name

Array = np.ndarray[Any, np.dtype[Any]]


class DrawnLeaves(Source):
    """A tree of random float64 leaves: two elements that are equal by chance are as good as impossible.

    Args:
        shapes: of the leaves, by name.
        root: of the leaves in the tree; their names are those below it.
        arrays: the leaves that are not to be drawn, by their names below the root.
    """

    format = "drawn"

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], root: str = "", arrays: Mapping[str, Array] | None = None
    ) -> None:
        self.path = Path("drawn")
        given = {f"{root}/{name}" if root else name: array for name, array in (arrays or {}).items()}
        shapes = {f"{root}/{name}" if root else name: shape for name, shape in shapes.items()}
        rng = np.random.default_rng(0)
        self._arrays = {
            name: _stored(given[name] if name in given else rng.normal(size=shape)) for name, shape in shapes.items()
        }
        self.leaves = {
            name: Leaf(tuple(name.split("/")), TensorSpec(shape, self._arrays[name].dtype.name))
            for name, shape in shapes.items()
        }

    def read(self, name: str) -> Array:
        return self._arrays[name]


def _stored(array: Array) -> Array:
    """Return numbers in float64; complex ones, and the parts of such, in the one dtype that a file can hold."""
    kept = array.dtype == np.float32
    return np.asarray(array, np.complex64 if np.iscomplexobj(array) else np.float32 if kept else np.float64)


def derived_array(tensor: Tensor, source: Source, root: str = "") -> Array | None:
    """Return the tensor as derived; None where it is not known, or computed from leaves with other values than those of the source."""
    if not tensor.parts or any(part.arithmetic is Arithmetic.COMPUTED and part.values is None for part in tensor.parts):
        return None
    prefix = f"{root}/" if root else ""
    leaves = {part.leaf: _read(part, source, prefix) for part in tensor.parts if part.leaf}
    return assembled(tensor.parts, tensor.shape, leaves)


def _read(part: Part, source: Source, prefix: str) -> Array:
    """Read the leaf of a part; of complex numbers, the two leaves with their parts."""
    if len(part.leaves) != 2 or part.leaf != complex_name(*part.leaves):
        return source.read(prefix + part.leaf)
    real, imaginary = (source.read(prefix + leaf) for leaf in part.leaves)
    return np.asarray(real + 1j * imaginary)


def assembled(parts: Sequence[Part], shape: tuple[int, ...], leaves: Mapping[str, Array]) -> Array:
    """Return the tensor that parts make of leaves, in float64; of complex leaves in twice that."""
    kind = np.complex128 if any(np.iscomplexobj(x) for x in leaves.values()) else np.float64
    made = np.full(shape, np.nan, kind).ravel()
    for part in parts:
        if part.arithmetic is Arithmetic.CONSTANT:
            made[part.elements] = part.factor
            continue
        if part.values is not None:
            made[part.elements] = part.values
            continue
        values = np.asarray(leaves[part.leaf], kind).ravel()[part.positions]
        plus = {Arithmetic.ONE_PLUS: 1.0, Arithmetic.MINUS_ONE: -1.0}.get(part.arithmetic, 0.0)
        made[part.elements] = (values + plus) * part.factor
    return made.reshape(shape)
