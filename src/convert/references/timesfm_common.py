"""What the references of all TimesFM versions share: the series that they are run on, how a module is loaded and fed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]

PATCHES = (
    16  # of the context; padding, a constant stretch and a jump fit in, and attention has something to choose from
)
CONSTANT = 2.5  # exact in every precision, so that the standard deviation of a constant stretch is exactly 0


def series(seed: int, patch: int, constant: slice, patches: int = PATCHES) -> tuple[Array, Array]:
    """Four series, float32, and which points are padding.

    They are waves on random walks. The first jumps to a hundred times its range; the second has three whole patches of
    padding in front, the third one patch and a part of the next; the fourth is constant for a while. Padding is not zero,
    so that a model which looks at it is found out.

    Args:
        patch: points in a patch.
        constant: the patches of the constant stretch.
        patches: how many there are.
    """
    rng = np.random.default_rng(seed)
    points = patches * patch
    periods = rng.uniform(2, 8, (4, 1))
    values = 3 * np.sin(np.arange(points) / periods) + np.cumsum(rng.normal(0, 0.2, (4, points)), axis=1)
    values[0, 9 * patch + 5 :] *= 100
    values[3, constant.start * patch : constant.stop * patch] = CONSTANT
    padding = np.zeros((4, points), bool)
    padding[1, : 3 * patch] = True
    padding[2, : patch + max(1, patch // 4)] = True
    values[padding] = rng.normal(0, 50, int(padding.sum()))
    return values.astype(np.float32), padding


def counted(padding: Array, patch: int) -> Array:
    """True for patches that are not padding throughout: [batch, patch].

    A patch of padding alone attends to nothing. JAX's softmax over masked logits is uniform then; PyTorch's is another
    constant or NaN, depending on the kernel. Nothing that counts looks at it.
    """
    return np.asarray(~np.asarray(padding, bool).reshape(len(padding), -1, patch).all(-1))


def on(device: torch.device, value: Any) -> torch.Tensor:
    """An input, array or tensor of any dtype and on any device, as a tensor on this one."""
    import torch

    return (value if isinstance(value, torch.Tensor) else torch.as_tensor(np.array(value))).to(device)


def load(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The module in eval mode with these weights and in their dtype; buffers that are not saved keep theirs.

    Raises:
        RuntimeError: PyTorch's, the weights are not those of this module.
    """
    module.load_state_dict(dict(weights), strict=True, assign=True)
    return module.requires_grad_(False).eval()


@contextmanager
def ready(module: torch.nn.Module) -> Iterator[tuple[torch.device, torch.dtype]]:
    """Where and in what dtype the module wants its inputs.

    Within this context, what upstream's code makes without naming a dtype (statistics, caches) has the weights' dtype:
    upstream has no other way to run in bfloat16 or float64.
    """
    import torch

    weight = next(module.parameters())
    before = torch.get_default_dtype()
    torch.set_default_dtype(weight.dtype)
    try:
        with torch.no_grad():
            yield weight.device, weight.dtype
    finally:
        torch.set_default_dtype(before)
