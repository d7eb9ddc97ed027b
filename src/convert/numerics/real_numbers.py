"""Complex numbers as pairs of real ones: what compares values compares both parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]


def as_real(array: Array) -> Array:
    """Return an array with the two parts of complex numbers along a further last axis; another one as it is."""
    if array.dtype.kind != "c":
        return array
    return np.stack([array.real, array.imag], axis=-1)


def as_complex(array: Array) -> Array:
    """Return complex numbers whose two parts lie along the last axis of an array."""
    made: Array = np.ascontiguousarray(array, np.float64).view(np.complex128)[..., 0]
    return made


def in_float64(value: Any) -> Array:
    """Return numbers in float64, complex ones by their parts."""
    return np.asarray(as_real(np.asarray(value)), np.float64)


def tensor_in_float64(value: torch.Tensor) -> Array:
    """Return the numbers of a tensor in float64, complex ones by their parts."""
    value = value.detach().cpu()
    return in_float64(value.resolve_conj().numpy()) if value.is_complex() else np.asarray(value.double().numpy())
