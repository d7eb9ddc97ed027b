"""`fill_pytree` gives the arrays of a pytree the leaves of their names, and says which do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from convert import ConvertError, fill_pytree

jax = pytest.importorskip("jax")

LIKE = {"block_0": {"kernel": np.zeros((2, 3)), "act": np.tanh, "rate": 0.1}, "head": [np.zeros(3), np.zeros(3)]}
LEAVES = {
    "block_0/kernel": np.ones((2, 3)),
    "head/0": np.full(3, 2.0),
    "head/1": np.full(3, 3.0),
    "step": np.asarray(7),
}


def test_arrays_are_the_leaves_and_the_rest_stays() -> None:
    filled = fill_pytree(LIKE, LEAVES)
    assert filled["block_0"]["kernel"] is LEAVES["block_0/kernel"]
    assert (filled["head"][0][0], filled["head"][1][0]) == (2.0, 3.0)
    assert (filled["block_0"]["act"], filled["block_0"]["rate"]) == (np.tanh, 0.1)


def test_shapes_are_enough() -> None:
    shapes = jax.eval_shape(lambda: {"block_0": {"kernel": jax.numpy.zeros((2, 3))}})
    assert fill_pytree(shapes, LEAVES)["block_0"]["kernel"] is LEAVES["block_0/kernel"]


def test_a_prng_key_stays() -> None:
    key = jax.random.key(3)
    assert fill_pytree({"key": key, "head": LIKE["head"]}, LEAVES)["key"] is key


def test_every_array_that_does_not_fit_is_named() -> None:
    leaves = {"block_0/kernal": np.ones((2, 3)), "head/0": np.ones(4), "head/1": np.ones(3)}
    with pytest.raises(ConvertError) as caught:
        fill_pytree(LIKE, leaves)
    assert str(caught.value).splitlines() == [
        "the leaves do not fit the model: 2 problems",
        "  - block_0/kernel [leaf-missing]: expected a leaf of shape [2,3] with this path, got none; did you mean 'block_0/kernal'?",
        "  - head/0 [shape-mismatch]: expected the shape of the model's array, [3], got [4]; make the model with the sizes of the checkpoint",
    ]


@pytest.mark.parametrize(("name", "leaf"), [("w", "params/w"), ("params/w", "w")])
def test_another_root_is_named(name: str, leaf: str) -> None:
    with pytest.raises(
        ConvertError, match=f"the leaf is '{leaf}': give `--root` and the model's tree the same beginning"
    ):
        fill_pytree({name: np.zeros(2)}, {leaf: np.zeros(2)})


def test_names_that_have_nothing_in_common_are_listed() -> None:
    with pytest.raises(ConvertError, match="got none; the leaves are 'head/kernel', ..."):
        fill_pytree({"z": np.zeros(2)}, {"head/kernel": np.zeros(2)})


def test_of_many_problems_those_that_name_the_mistake_come_first() -> None:
    like = {"batch_stats": {f"n{k}": np.zeros(2) for k in range(9)}, "params": {"w": np.zeros(2)}}
    with pytest.raises(ConvertError) as caught:
        fill_pytree(like, {"w": np.zeros(2)})
    headline, first, *_, last = str(caught.value).splitlines()
    assert headline == "the leaves do not fit the model: 10 problems"
    assert "params/w: expected a leaf of shape [2]" in first and "the leaf is 'w': give `--root`" in first
    assert last == "  ... and 5 more"


@pytest.mark.slow
def test_a_recurrent_layer_of_nnx_draws_keys_within_a_trace() -> None:
    """It counts the keys that it draws, and a trace changes no variable of another one."""
    jax, nnx = pytest.importorskip("jax"), pytest.importorskip("flax.nnx")
    model = nnx.RNN(nnx.OptimizedLSTMCell(4, 4, rngs=nnx.Rngs(0)))
    leaves = {
        "/".join(map(str, path)): value.get_value() for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    run = jax.jit(lambda leaves, x: fill_pytree(model, leaves)(x))
    assert run(leaves, np.ones((2, 3, 4), np.float32)).shape == (2, 3, 4)
