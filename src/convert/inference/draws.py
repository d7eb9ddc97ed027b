"""Random weights for the source, and the rows of its inputs that are compared."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.references.user_reference import require_masks

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = Mapping[str, tuple[int, ...]]
SMALLEST = 1 / 16


def draw(
    shapes: Shapes,
    seed: int,
    positive: Collection[str] = (),
    size_of_all: float = 1.0,
    complex_leaves: Collection[str] = (),
) -> dict[str, Array]:
    """Return an array for each leaf; of matrices the elements are small, so that values keep their size through many layers."""
    drawn = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        size = int(np.prod(shape))
        spread, middle = (1.3 * max(size, 1) ** -0.25, 0.0) if len(shape) > 1 else (0.6, 0.4)
        values = size_of_all * rng.normal(middle, spread, shape)
        if name in complex_leaves:
            drawn[name] = values + 1j * size_of_all * rng.normal(middle, spread, shape)
            continue
        drawn[name] = np.abs(values) + 0.2 if name in positive else values
    return drawn


class Draws:
    """Draws on which a function is defined: which leaves must be positive is found where a root of one is not a number.

    Attributes:
        shapes: of the leaves.
        complex_leaves: names of those that are complex.
        positive: names of the leaves that must be.
        size: what the weights are multiplied by: less than 1 where the outputs were infinite, as those of exponentials of sums.
    """

    def __init__(self, shapes: Shapes, complex_leaves: Collection[str] = (), size: float = 1.0) -> None:
        self.shapes = shapes
        self.complex_leaves = complex_leaves
        self.positive: set[str] = set()
        self.size = size

    def run(self, seed: int, function: Callable[[Mapping[str, Array]], Any]) -> Any:
        """Return what the function makes of weights that it is defined on.

        Raises:
            ConvertError: the function refused them all, or for another reason.
        """
        while True:
            try:
                return function(draw(self.shapes, seed, self.positive, self.size, self.complex_leaves))
            except ConvertError as error:
                told = [f.data for f in error.findings if f.code == "output-not-a-number"]
                leaves = {name for data in told for name in data["leaves"] if name in self.shapes}
                alone = {name for data in told for name in data["alone"]}  # a variance of each layer is a matrix, too
                more = {name for name in leaves if name in alone or _is_vector(self.shapes[name])}
                more -= self.positive | set(self.complex_leaves)
                not_numbers = all(f.code == "output-not-a-number" for f in error.findings)
                if not more and not (not_numbers and self.smaller()):
                    raise
                self.positive |= more

    def smaller(self) -> bool:
        """Draw smaller weights from now on; False if they are as small as they may be."""
        self.size /= 2
        return self.size >= SMALLEST


def _is_vector(shape: tuple[int, ...]) -> bool:
    """Whether only the last axis has several elements. Haiku keeps a variance as [1, 1, D]."""
    return all(size == 1 for size in shape[:-1])


def whole_rows(
    inputs: Mapping[str, Array], masks: Callable[[Mapping[str, Array]], Mapping[str, Array]]
) -> dict[str, Array]:
    """Return the rows of a batch whose outputs all count; all rows if there are none, or if the outputs have not the same rows.

    Where an output does not count, such as that of a padded position, the programs may differ, and so may values before it.

    Args:
        masks: inputs -> name of an output -> true where it counts.
    """
    counts = [mask for _, mask in require_masks(masks(inputs), {}) if mask.dtype == bool and mask.ndim]
    if len({len(mask) for mask in counts} - {1}) > 1:
        return dict(inputs)
    keep = np.array(True)
    for mask in counts:
        keep = keep & mask.reshape(len(mask), -1).all(1)
    if keep.ndim == 0 or keep.all() or not keep.any():
        return dict(inputs)
    return {name: x[keep] if np.ndim(x) and len(x) == len(keep) else x for name, x in inputs.items()}
