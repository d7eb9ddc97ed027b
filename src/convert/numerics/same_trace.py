"""Whether a JAX function traces to the same program each time: then two runs give the same, without being carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Rules of these for derivatives are functions, made anew by each trace; they change no value.
_WITH_RULES = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"}


def traces_alike(function: Callable[..., Any], *args: Any) -> bool:
    """Whether two traces of a function are one program; of one with effects, such as a callback, nothing is known.

    What ``jax.jit`` has traced before is not traced again, here as in any run.

    Args:
        args: pytrees of arrays.
    """
    # JAX keeps the trace of a function that it knows: each is a new one.
    one, other = (jax.make_jaxpr(lambda *xs: function(*xs))(*args) for _ in range(2))
    return not one.effects and same(one, other)


def same(one: Any, other: Any) -> bool:
    """Whether two values within a program are the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one == other or (one != one and other != other)  # two NaN are the same
    if isinstance(one, core.ClosedJaxpr):  # since JAX 0.12 the same class as Jaxpr
        return same(list(one.consts), list(other.consts)) and _same_body(one.jaxpr, other.jaxpr)
    if isinstance(one, core.Jaxpr):
        return _same_body(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if hasattr(one, "shape") and hasattr(one, "dtype"):
        # NaN and random keys are not: the runs are compared then.
        return bool(one.dtype == other.dtype) and np.array_equal(one, other)
    try:
        return bool(one == other)
    except (TypeError, ValueError):  # what cannot be compared is not known to be the same
        return False


def _same_body(one: core.Jaxpr, other: core.Jaxpr) -> bool:
    if (len(one.constvars), len(one.invars)) != (len(other.constvars), len(other.invars)):
        return False
    given = zip((*one.constvars, *one.invars), (*other.constvars, *other.invars), strict=True)
    number = {var: k for k, pair in enumerate(given) for var in pair}  # of each variable, in both

    def operand(var: Any) -> Any:
        return (var.aval, var.val) if isinstance(var, core.Literal) else (var.aval, number[var])

    if len(one.eqns) != len(other.eqns):
        return False
    for a, b in zip(one.eqns, other.eqns, strict=True):
        if a.primitive is not b.primitive or "callback" in a.primitive.name or len(a.outvars) != len(b.outvars):
            return False
        if not same([*map(operand, a.invars)], [*map(operand, b.invars)]) or not same(_params(a), _params(b)):
            return False
        number |= {
            var: len(number) + k for k, pair in enumerate(zip(a.outvars, b.outvars, strict=True)) for var in pair
        }
    return same([*map(operand, one.outvars)], [*map(operand, other.outvars)])


def _params(equation: Any) -> dict[str, Any]:
    if equation.primitive.name not in _WITH_RULES:
        return dict(equation.params)
    return {name: value for name, value in equation.params.items() if not callable(value)}
