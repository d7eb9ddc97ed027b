"""A second run is spared only where JAX traces the same program again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.numerics import same_trace
from convert.numerics.same_trace import traces_alike

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
CALLS = count(1)
RNG = np.random.default_rng(0)


def noise(x: Any) -> Any:
    return RNG.normal(size=x.shape).astype(x.dtype)


def scanned(x: Any) -> Any:
    """Calls, branches, loops, rules for derivatives, a constant array, a NaN, and a gradient."""
    x, _ = jax.lax.scan(lambda state, row: (jax.nn.gelu(state) + row, None), x[0], x + np.arange(3.0, dtype=np.float32))
    x = jax.lax.cond(x[0] > 0, jax.nn.softplus, lambda x: jnp.where(x > 0, x, jnp.nan), x)
    return jax.lax.while_loop(lambda x: x[0] < 0, lambda x: x + 1, x) + jax.grad(lambda x: jax.nn.silu(x).sum())(x)


@pytest.mark.parametrize("function", [scanned, jax.jit(scanned), jax.remat(scanned), lambda x: x])
def test_a_function_of_its_arguments_alone(function: Callable[[Any], Any]) -> None:
    assert traces_alike(function, X)


@pytest.mark.parametrize(
    "function",
    {
        "a number": lambda x: x * float(next(CALLS)),
        "an array": lambda x: x + RNG.normal(size=3).astype(np.float32),
        "an array within a loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, x: x + RNG.normal(size=3).astype(np.float32), x),
        "an operation": lambda x: jnp.sin(x) if next(CALLS) % 2 else jnp.cos(x),
        "one operation more": lambda x: x if next(CALLS) % 2 else x + 1,
        "an operand": lambda x: jnp.sin(x) - (x if next(CALLS) % 2 else jnp.cos(x)),
        "a setting": lambda x: x.sum(next(CALLS) % 2, keepdims=True),
        "a result": lambda x: (jnp.sin(x), jnp.cos(x))[:: 1 if next(CALLS) % 2 else -1],
        "a callback": lambda x: jax.pure_callback(noise, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    }.values(),
)  # fmt: skip
def test_a_function_that_may_differ(function: Callable[[Any], Any]) -> None:
    assert not traces_alike(function, X)


class OneClass:
    """A program of JAX 0.12, where a closed one is no class of its own, and its body is itself."""

    def __init__(self, traced: Any) -> None:
        self.consts = traced.consts
        for name in ("constvars", "invars", "outvars", "eqns"):
            setattr(self, name, getattr(traced.jaxpr, name))

    @property
    def jaxpr(self) -> OneClass:
        return self


def test_programs_of_one_class_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [OneClass(jax.make_jaxpr(lambda x, n=n: jnp.tanh(x) * n)(1.0)) for n in (2, 2, 3)]
    monkeypatch.setattr(same_trace.core, "Jaxpr", OneClass)
    monkeypatch.setattr(same_trace.core, "ClosedJaxpr", OneClass)
    assert same_trace.same(traces[0], traces[1]) and not same_trace.same(traces[0], traces[2])
