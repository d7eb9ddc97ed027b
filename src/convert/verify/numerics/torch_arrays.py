"""NumPy's arrays as torch takes them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
SHARED = ("float16", "bfloat16", "float32", "float64")  # whose memory torch can take over


def tensor(x: Array, dtype: str, device: str) -> torch.Tensor:
    """For reading alone: shares the array's memory where it can."""
    import torch

    bits = x.dtype.name == "bfloat16"  # which torch does not take from NumPy
    known = x if x.dtype.name in SHARED else x.astype(np.float32)  # which holds the narrow ones exactly
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        whole = np.ascontiguousarray(known)
        made = torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16) if bits else torch.from_numpy(whole)
    return made.to(device=device, dtype=getattr(torch, dtype))
