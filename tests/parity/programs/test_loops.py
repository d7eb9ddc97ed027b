"""A loop is recorded by the primitives of its first iterations, as if its Python code had run for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.numerics import loops
from convert.programs.program import Program
from convert.programs.record_jax import record_jax

LAYERS = 6
RNG = np.random.default_rng(0)
WEIGHTS = {"kernel": RNG.normal(size=(LAYERS, 4, 4)), "scale": RNG.normal(size=(LAYERS, 4))}
INPUTS = {"x": RNG.normal(size=(3, 4))}
calls: list[int] = []


def layer(x: Any, weights: Any) -> Any:
    calls.append(1)
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weights["scale"]
    masked = jnp.where(normed > -1, normed, jnp.nan_to_num(jnp.nan))
    return x + jnp.tanh(masked @ weights["kernel"]), x.sum()


def plain(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    x, sums = jax.lax.scan(layer, inputs["x"], weights)
    return {"x": x, "sums": sums}


def from_behind(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"x": jax.lax.scan(layer, inputs["x"], weights, reverse=True)[0]}


def nested(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    step = lambda x, factor: (jax.lax.scan(layer, factor * x, weights)[0], None)  # noqa: E731
    return {"x": jax.lax.scan(step, inputs["x"], jnp.arange(1.0, 5.0))[0]}


def branches(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    def chosen(state: Any, of: Any) -> Any:  # the fifth iteration takes another branch than those before it
        x, k = state
        x = jax.lax.cond(k < 4, lambda: x, lambda: -x)
        return (layer(x, of)[0], k + 1), None

    return {"x": jax.lax.scan(chosen, (inputs["x"], jnp.asarray(0)), weights)[0][0]}


def exchanged(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    def turned(state: Any, of: Any) -> Any:  # both begin as one array
        one, two = state
        return (two, layer(one, of)[0]), one + 2 * two

    return {"x": jax.lax.scan(turned, (inputs["x"], inputs["x"]), weights)[1]}


def rows(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"x": jax.vmap(lambda row: jax.lax.scan(layer, row, weights)[0])(inputs["x"])}


def recorded(function: Any) -> tuple[Program, int]:
    calls.clear()
    program = record_jax(function, WEIGHTS, INPUTS, twice=False)
    return program, len(calls)


def described(program: Program) -> list[Any]:
    number = {value: k for k, value in enumerate([*program.parameters.values(), *program.inputs.values()])}
    found = []
    for operation in program.operations:
        operands = [number.get(value, value.array.tobytes()) for value in operation.operands]
        number |= {value: len(number) + k for k, value in enumerate(operation.results)}
        results = [(x.array.tobytes(), x.leaves, [part.tolist() for part in x.elements]) for x in operation.results]
        found.append((operation.name, operation.where, operation.module, operands, results))
    return found


@pytest.mark.parametrize("function", [plain, from_behind, nested, branches, exchanged, rows])
def test_the_record_is_that_of_all_iterations(function: Any) -> None:
    got, fewer = recorded(function)
    with mock.patch.object(loops, "repeating", lambda scan, lifter: scan):
        expected, every = recorded(function)
    assert described(got) == described(expected)
    assert {name: x.array.tobytes() for name, x in got.outputs.items()} == {
        name: x.array.tobytes() for name, x in expected.outputs.items()
    }
    assert got.path_taken == expected.path_taken
    assert (fewer < every) == (function not in (branches, rows))


def test_a_constant_that_changes_from_iteration_to_iteration_is_not_repeated() -> None:
    def counted(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        seen: list[int] = []

        def body(x: Any, of: Any) -> Any:
            seen.append(1)
            return layer(x + np.float64(len(seen)), of)

        return {"x": jax.lax.scan(body, inputs["x"], weights)[0], "calls": jnp.asarray(len(seen))}

    program, _ = recorded(counted)
    assert program.outputs["calls"].array == LAYERS
