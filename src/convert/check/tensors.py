"""NumPy's arrays as torch takes them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]


def tensor(x: Array, dtype: str, device: str) -> torch.Tensor:
    """For reading alone: shares the array's memory where it can."""
    import torch

    known = x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)  # which holds the narrow ones exactly
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        made = torch.from_numpy(np.ascontiguousarray(known))
    return made.to(device=device, dtype=getattr(torch, dtype))
