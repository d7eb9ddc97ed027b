"""Views between NumPy and torch; they share memory, also for dtypes that torch does not read from NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of this name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def spec_of(tensor: torch.Tensor) -> TensorSpec | None:
    """Return shape and dtype of a tensor; None if NumPy has no such dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(tuple(tensor.shape), name) if name in SAFETENSORS_TAGS else None


def as_tensor(x: Array) -> torch.Tensor:
    """Return a writable array in C order as a tensor that shares its memory."""
    if x.dtype.isbuiltin == 1:
        return torch.from_numpy(x)
    bits = torch.from_numpy(x.view(f"i{x.itemsize}"))  # torch reads no bfloat16 from NumPy
    return bits.view(torch_dtype(x.dtype.name))


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor of the CPU as an array that shares its memory."""
    dtype = numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    found = tensor.detach()
    return np.asarray(found.numpy() if dtype.isbuiltin == 1 else found.view(_BITS[dtype.itemsize]).numpy().view(dtype))
