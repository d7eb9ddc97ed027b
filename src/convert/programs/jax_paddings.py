"""Tell which convolutions and poolings of a JAX model pad by a rule, such as ``SAME``: their numbers follow from the sizes of the inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

PADDED_BY = "padded_by"  # setting of an operation that pads by a rule: its name, in capitals
# Function of `jax.lax` -> the position of its argument `padding`.
CONVOLUTION = "conv_general_dilated"
FUNCTIONS = {CONVOLUTION: 3, "conv": 3, "reduce_window": 5}
Around = Callable[[str, Callable[[], Any]], Any]


@contextmanager
def around_paddings(around: Around) -> Iterator[None]:
    """Intercept the calls of `FUNCTIONS` that pad by a rule, while the context lasts.

    Args:
        around: is called in place of the function with the rule, in capitals, and what runs the function; returns what that gives.
    """
    import jax

    own = {name: getattr(jax.lax, name) for name in FUNCTIONS}
    wrapped = {name: _wrapped(function, FUNCTIONS[name], around) for name, function in own.items()}
    with ExitStack() as stack:
        for name, function in wrapped.items():
            stack.enter_context(mock.patch.object(jax.lax, name, function))
        if nnx := sys.modules.get("flax.nnx"):  # its modules keep the function that they were made with
            instead = _instead_of(CONVOLUTION, own[CONVOLUTION], wrapped[CONVOLUTION])
            stack.enter_context(mock.patch.object(nnx.Conv, CONVOLUTION, instead, create=True))
        yield


def _wrapped(function: Any, position: int, around: Around) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        padding = args[position] if len(args) > position else kwargs.get("padding")
        if not isinstance(padding, str):
            return function(*args, **kwargs)
        return around(padding.upper(), lambda: function(*args, **kwargs))

    return call


def _instead_of(name: str, function: Any, wrapped: Any) -> property:
    """Return the attribute of a module that is a function, or what wraps it."""

    def given(module: Any) -> Any:
        own = vars(module)[name]
        return wrapped if own is function else own

    return property(given, lambda module, value: vars(module).update({name: value}))
