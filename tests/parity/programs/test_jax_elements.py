"""The elements of a value that is computed from parameters are followed through every layout operation and product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from convert.programs.program import Program
from convert.programs.record_jax import record_jax

RNG = np.random.default_rng(0)
W = {"z": RNG.normal(size=(2, 3, 4)), "a": RNG.normal(size=(4, 6)), "v": RNG.normal(size=4)}
X = {"x": RNG.normal(size=(3, 4))}


def recorded(make: Callable[[Any], Any]) -> Program:
    """Record a function of the parameters."""
    return record_jax(lambda w, i: {"y": make(w)}, W, X)


def flat(program: Program) -> np.ndarray:
    """The elements of the parameters, in the order of their numbers, and the constant zero at -1."""
    return np.concatenate([*(value.array.ravel() for value in program.parameters.values()), [0.0]])


def padded(w: Any) -> Any:
    return jnp.pad(w["a"], ((1, 0), (0, 2)))[:, ::-1]


def stacked(w: Any) -> Any:
    _, rows = lax.scan(lambda carry, x: (carry, x.T), 0, w["z"])
    return rows


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda w: jnp.swapaxes(w["z"], 0, 2).reshape(2, 2, 6),
    "joined": lambda w: jnp.concatenate([w["a"], w["z"].reshape(4, 6)], axis=1),
    "split": lambda w: jnp.split(w["a"], 3, axis=1)[1],
    "unequally split": lambda w: jnp.split(w["a"], [1, 4], axis=1)[1],
    "sliced": lambda w: w["z"][:, 1:, ::2],
    "reversed": lambda w: w["z"][::-1],
    "dynamically sliced": lambda w: lax.dynamic_slice(w["a"], (jnp.int32(1), jnp.int32(2)), (2, 3)),
    "dynamically indexed": lambda w: lax.dynamic_index_in_dim(w["z"], jnp.int32(1), keepdims=False),
    "looked up": lambda w: jnp.take(w["a"], jnp.array([[3, 0], [1, 1]]), axis=0),
    "looked up with what is missing": lambda w: jnp.nan_to_num(jnp.take(w["v"], jnp.array([1, 9]), mode="fill")),
    "padded": padded,
    "repeated": lambda w: jnp.repeat(w["a"], 2, axis=1),
    "tiled": lambda w: jnp.tile(w["a"][:, None], (1, 2, 1)),
    "rolled": lambda w: jnp.roll(w["a"], 2, axis=1),
    "masked": lambda w: jnp.where(jnp.arange(6) < 4, w["a"], 0.0),
    "updated": lambda w: jnp.zeros((5, 6)).at[1:].set(w["a"]),
    "updated in place": lambda w: lax.dynamic_update_slice(w["a"], w["z"].reshape(4, 6)[:2, :2], (1, 1)),
    "cast": lambda w: w["a"].astype(jnp.bfloat16).astype(jnp.float32).T,
    "a view through vmap": lambda w: jax.vmap(lambda z: z.T, in_axes=2, out_axes=1)(w["z"]),
    "under jit": lambda w: jax.jit(lambda a: a.reshape(2, 2, 6)[::-1])(w["a"]),
    "rows of a scan": stacked,
    "with an axis of one": lambda w: jnp.squeeze(w["v"][None], 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_operations_move_the_numbers_as_they_move_the_values(name: str) -> None:
    program = recorded(LAYOUTS[name])
    made = program.outputs["y"]
    (numbers,) = made.elements
    assert numbers.shape == made.array.shape
    np.testing.assert_array_equal(flat(program)[numbers], made.array)


def test_parameters_number_their_own_elements_in_their_order() -> None:
    program = recorded(lambda w: w["v"])
    assert program.first_element == {"z": 0, "a": 24, "v": 48}
    assert program.outputs["y"].elements[0].tolist() == [48, 49, 50, 51]


def test_a_product_of_parameters_has_one_array_for_each_factor() -> None:
    program = recorded(lambda w: (1 + w["v"][:, None]) * jnp.exp(w["a"]))
    first, second = program.outputs["y"].elements
    np.testing.assert_array_equal(first, np.broadcast_to(48 + np.arange(4)[:, None], (4, 6)))
    np.testing.assert_array_equal(second, 24 + np.arange(24).reshape(4, 6))
    assert program.outputs["y"].leaves == {"a", "v"}


def test_a_factor_that_mixes_elements_has_no_array() -> None:
    """Weight normalization: the norm is a sum over elements; what it divides keeps its own."""
    (numbers,) = recorded(lambda w: w["a"] / jnp.linalg.norm(w["a"], axis=0)).outputs["y"].elements
    np.testing.assert_array_equal(numbers, 24 + np.arange(24).reshape(4, 6))
    assert recorded(lambda w: w["a"].sum(0)).outputs["y"].elements == ()
    assert recorded(lambda w: w["v"] @ w["a"]).outputs["y"].elements == ()


def test_joined_with_a_mixture_nothing_is_known() -> None:
    assert recorded(lambda w: jnp.concatenate([w["a"], w["v"][None] @ w["a"]])).outputs["y"].elements == ()


def test_a_choice_by_a_parameter_depends_on_it_too() -> None:
    program = recorded(lambda w: jnp.where(w["v"] > 0, w["a"][:, 0], 1.0))
    assert sorted(part.min() for part in program.outputs["y"].elements) == [24, 48]


def test_a_value_with_an_input_in_it_has_no_elements() -> None:
    program = record_jax(lambda w, i: {"y": i["x"] * w["v"]}, W, X)
    assert program.outputs["y"].elements == ()
