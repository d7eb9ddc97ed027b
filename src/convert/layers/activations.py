"""Activations by their names in a rule: ``jax.nn``'s function and torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax

Array = np.ndarray[Any, np.dtype[np.float64]]

QUICK, SLOPE = "quick_gelu", 1.702  # no function of jax.nn or torch.nn.functional
# name in a rule: function of jax.nn and its arguments, function of torch.nn.functional and its arguments
ACTIVATIONS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "relu": ("relu", {}, "relu", {}),
    "silu": ("silu", {}, "silu", {}),
    "gelu_tanh": ("gelu", {"approximate": True}, "gelu", {"approximate": "tanh"}),
    "gelu_erf": ("gelu", {"approximate": False}, "gelu", {"approximate": "none"}),
    "tanh": ("tanh", {}, "tanh", {}),
    "sigmoid": ("sigmoid", {}, "sigmoid", {}),
    "softplus": ("softplus", {}, "softplus", {}),
    "elu": ("elu", {}, "elu", {}),
}


def activation_pair(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """``jax.nn``'s and ``torch.nn.functional``'s function of this name in a rule."""
    import jax

    if name == QUICK:
        return (lambda x: x * jax.nn.sigmoid(SLOPE * x)), torch_activation(name)
    ours, left, _, _ = ACTIVATIONS[name]
    one: Callable[..., jax.Array] = getattr(jax.nn, ours)
    return (lambda x: one(x, **left)), torch_activation(name)


def torch_activation(name: str) -> Callable[[Any], Any]:
    """``torch.nn.functional``'s function of this name in a rule; needs no JAX."""
    import torch

    if name == QUICK:
        return lambda x: x * torch.sigmoid(SLOPE * x)
    _, _, theirs, right = ACTIVATIONS[name]
    two = getattr(torch.nn.functional, theirs)
    return lambda x: two(x, **right)


def _erf(x: Array) -> Array:
    return np.asarray([math.erf(value) for value in x.ravel()]).reshape(x.shape)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


NUMPY_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "relu6": lambda x: np.clip(x, 0, 6),
    "silu": lambda x: x * _sigmoid(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    QUICK: lambda x: x * _sigmoid(SLOPE * x),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "softplus": lambda x: np.logaddexp(x, 0),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
}
"""The same functions, and further ones that target configs name, in NumPy."""
