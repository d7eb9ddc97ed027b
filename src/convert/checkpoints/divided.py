"""A view of a checkpoint whose quantised weights are divided by their scales: those of gemma's `peft.quantize`.

The leaves ``_IntEinsum_0/kernel`` (int4 or int8) and ``_IntEinsum_0/scale`` become one leaf with the name of the first: kernel / scale in
float32, which is what gemma's `IntWrapper` multiplies with (gemma 4.0.1 gm/nn/_quantization.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from convert.checkpoints.chunks import Box, Grid, Meter, Piece
from convert.checkpoints.source import Leaf, Source
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec, is_float

MODULE, KERNEL, SCALE = "_IntEinsum_", "kernel", "scale"


def divided(stored: Source) -> Source:
    """Return the view of a checkpoint; the checkpoint itself if it has no quantised weights.

    Raises:
        CheckpointError: a weight has no scales, or scales of another shape.
    """
    kernels = [name for name, leaf in stored.leaves.items() if _of_quantize(leaf) and not is_float(leaf.spec.dtype)]
    return DividedSource(stored, {name: _scale_of(stored, name) for name in kernels}) if kernels else stored


def _of_quantize(leaf: Leaf) -> bool:
    *_, module, last = ("", *"/".join(leaf.keys).split("/"))
    return module.startswith(MODULE) and last == KERNEL


def _scale_of(stored: Source, kernel: str) -> str:
    name, spec = f"{kernel.removesuffix(KERNEL)}{SCALE}", stored.leaves[kernel].spec
    scale = stored.leaves[name].spec if name in stored.leaves else None
    sizes = scale.shape if scale is not None and is_float(scale.dtype) else ()
    if len(sizes) != len(spec.shape) or any(m not in (1, n) for m, n in zip(sizes, spec.shape, strict=True)):
        problem = "the weight is quantised, and without its scales the integers mean nothing"
        finding = Finding(
            "scales-missing",
            problem,
            path=kernel,
            expected=f"scales in {name}: floating-point, each axis that of {spec} or 1",
            got="no such leaf" if scale is None else str(scale),
            fix="save the state again with the scales, or convert the weights before they were quantised",
        )
        raise CheckpointError(finding)
    return name


def _values(kernel: np.ndarray, scale: np.ndarray, origin: tuple[int, ...]) -> np.ndarray:
    """Divide a part of a kernel by its part of the scales."""
    within = [slice(0, 1) if m == 1 else slice(at, at + n) for m, at, n in zip(scale.shape, origin, kernel.shape, strict=True)]  # fmt: skip
    part: np.ndarray = kernel.astype(np.float32) / scale[tuple(within)].astype(np.float32)
    return part


class DividedSource(Source):
    """The view; a divided leaf stands where its kernel stood.

    Attributes:
        scales: name of a divided leaf -> name of its scales in the checkpoint.
    """

    def __init__(self, stored: Source, scales: dict[str, str]) -> None:
        self._inner, self.scales = stored, scales
        self.path, self.format, self.absent = stored.path, stored.format, stored.absent
        self.given_path, self.boundary, self.watched = stored.given_path, stored.boundary, stored.watched
        self.names_from = stored.names_from
        self.leaves = {
            name: Leaf(leaf.keys, TensorSpec(leaf.spec.shape, "float32")) if name in scales else leaf
            for name, leaf in stored.leaves.items()
            if name not in scales.values()
        }
        first = next(iter(scales))
        text = f"{len(scales)} weights of {stored.leaves[first].spec.dtype} are divided by their scales, in float32: {first} / {scales[first]}, ..."
        self.notes = (*stored.notes, Finding("weights-divided", text))

    def read(self, name: str) -> np.ndarray:
        if name not in self.scales:
            return self._inner.read(name)
        kernel, scale = self.read_stored(name)
        return _values(kernel, scale, (0,) * kernel.ndim)

    def read_stored(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the integers and the scales of a divided leaf."""
        return self._inner.read(name), self._inner.read(self.scales[name])

    def chunks(self, name: str) -> Grid:
        return self._inner.chunks(name)

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        if name not in self.scales:
            yield from self._inner.pieces(name, chunk, meter)
            return
        scale = self._inner.read(self.scales[name])
        for origin, kernel in self._inner.pieces(name, chunk, meter):
            yield origin, _values(kernel, scale, origin)
