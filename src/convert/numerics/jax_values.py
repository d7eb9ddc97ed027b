"""Values and dtypes of JAX for a lifted run (`lift_jax`): which are narrower than float64, and what stands for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:  # what `jax.device_put` ends in; it takes a tenth of the time, and a run has thousands of small arrays
    from jax._src.interpreters import pxla

    _put: Any = pxla.batched_device_put
except (ImportError, AttributeError):
    _put = None

FLOAT = np.dtype(np.float64)
# Elements. XLA computes a larger array faster, with the time to compile it, and NumPy copies one that it turns.
_SMALL = 2**18
_OF_GELU = math.sqrt(2 / math.pi)


def narrow(dtype: Any) -> bool:
    """Whether a dtype is floating, real or complex, and narrower than float64."""
    if not isinstance(dtype, np.dtype):
        if not (isinstance(dtype, type) and issubclass(dtype, np.generic)) and not hasattr(dtype, "dtype"):
            return False  # random keys have special dtypes
        try:
            dtype = np.dtype(dtype)
        except TypeError:
            return False
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return bool(dtype.itemsize < 16)
    return bool(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 8)


def wide(dtype: Any) -> Any:
    """Return the dtype that stands for a narrower one."""
    return np.dtype("complex128" if jnp.issubdtype(dtype, jnp.complexfloating) else "float64")


def up(x: Any) -> Any:
    """Return an array in float64 or complex128 if it is narrower; anything else as it is."""
    return jnp.asarray(x).astype(wide(x.dtype)) if hasattr(x, "dtype") and narrow(x.dtype) else x


def small(operands: Sequence[Any]) -> bool:
    """Whether operands are arrays with few elements; a traced one is none."""
    return all(not isinstance(x, jax.core.Tracer) and np.size(x) <= _SMALL for x in operands)


@cache
def _device() -> tuple[Any, Any]:
    device = jax.local_devices()[0]
    return device, jax.sharding.SingleDeviceSharding(device)


def as_jax(x: np.ndarray[Any, Any]) -> Any:
    """Return an array of JAX with these elements."""
    if _put is None:
        return jax.device_put(x)
    device, sharding = _device()
    try:
        return _put(jax.core.ShapedArray(x.shape, x.dtype), sharding, [x], [device])
    except TypeError:  # another JAX has other arguments
        return jax.device_put(x)


def usual(x: Any) -> Any:
    """Return the shape and dtype that an array has without float64: as code that requires its dtypes expects."""
    return jax.ShapeDtypeStruct(x.shape, jnp.float32 if x.dtype == jnp.float64 else x.dtype)


def digits(x: Any) -> float:
    """Return what most likely stands in the source code: the constant of GELU, or the shortest decimal that rounds to this scalar."""
    if x.dtype == np.float32 and np.float32(_OF_GELU) == x:
        return _OF_GELU
    for precision in range(1, 18):
        typed = float(f"{float(x):.{precision}g}")
        if np.asarray(typed).astype(x.dtype) == x:
            return typed
    return float(x)  # NaN
