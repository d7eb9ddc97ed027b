"""Activations by their names in a rule: ``jax.nn``'s function and torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

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

    ours, left, _, _ = ACTIVATIONS[name]
    one: Callable[..., jax.Array] = getattr(jax.nn, ours)
    return (lambda x: one(x, **left)), torch_activation(name)


def torch_activation(name: str) -> Callable[[Any], Any]:
    """``torch.nn.functional``'s function of this name in a rule; needs no JAX."""
    import torch

    _, _, theirs, right = ACTIVATIONS[name]
    two = getattr(torch.nn.functional, theirs)
    return lambda x: two(x, **right)
