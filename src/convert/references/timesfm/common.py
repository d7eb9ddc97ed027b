"""The series on which the references of all TimesFM versions run."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

PATCHES = (
    16  # of the context; padding, a constant stretch and a jump fit in, and attention has something to choose from
)
CONSTANT = 2.5  # exact in every precision, so that the standard deviation of a constant stretch is exactly 0


def series(seed: int, patch: int, constant: slice, patches: int = PATCHES) -> tuple[Array, Array]:
    """Return four series, float32, and which points are padding.

    They are waves on random walks. The first jumps to a hundred times its range. The second has up to three patches of padding at
    its start, the third one patch and a part of the next. The fourth is constant for some patches. Padding is not zero, so
    that a model which reads it gives other values.

    Args:
        patch: points in a patch.
        constant: the patches of the constant stretch.
        patches: number of patches.
    """
    rng = np.random.default_rng(seed)
    points = patches * patch
    periods = rng.uniform(2, 8, (4, 1))
    values = 3 * np.sin(np.arange(points) / periods) + np.cumsum(rng.normal(0, 0.2, (4, points)), axis=1)
    values[0, 9 * patch + 5 :] *= 100
    values[3, constant.start * patch : constant.stop * patch] = CONSTANT
    padding = np.zeros((4, points), bool)
    padding[1, : min(3, patches - 1) * patch] = True  # each series has a patch without padding
    padding[2, : min(1, patches - 1) * patch + max(1, patch // 4)] = True
    values[padding] = rng.normal(0, 50, int(padding.sum()))
    return values.astype(np.float32), padding


def counted(padding: Array, patch: int) -> Array:
    """Return true for patches that have a point without padding: [batch, patch].

    A patch that is all padding attends to nothing. JAX's softmax over masked logits is uniform then; PyTorch's is another
    constant or NaN, depending on the kernel. No other patch attends to it.
    """
    return np.asarray(~np.asarray(padding, bool).reshape(len(padding), -1, patch).all(-1))
