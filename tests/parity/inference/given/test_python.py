"""`convert.infer` from Python takes shapes and outputs as the frameworks give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convert import ConvertError, infer

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

TREE = {"a": {"kernel": jax.ShapeDtypeStruct((4, 3), "float32"), "bias": jax.ShapeDtypeStruct((3,), "float32")}}
FLAT = {"a/kernel": (4, 3), "a/bias": (3,)}


def _inputs(seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(5, 4)).astype(np.float32)}


def _array(parameters: Any, given: Any) -> Any:
    return given["x"] @ parameters["a/kernel"] + parameters["a/bias"]


# A model of Equinox has its activations among its leaves.
@pytest.mark.parametrize("shapes", [TREE, FLAT, {**TREE, "activation": jax.nn.relu}])
def test_shapes_and_one_output(shapes: Any) -> None:
    found = infer(_array, torch.nn.Linear(4, 3), lambda module, given: module(given["x"]), _inputs, shapes)
    assert found.complete and [part.leaf for tensor in found.tensors for part in tensor.parts] == ["a/kernel", "a/bias"]


def test_several_outputs() -> None:
    found = infer(
        lambda p, given: (_array(p, given), {"h": given["x"] * 2}),
        torch.nn.Linear(4, 3),
        lambda module, given: (module(given["x"]), {"h": given["x"] + given["x"]}),
        _inputs,
        TREE,
    )
    assert found.complete


def test_a_size_below_zero_is_an_error() -> None:
    """It was blamed on the function."""
    with pytest.raises(ConvertError, match="shapes: expected sizes of 0 or more for 'a/kernel', got \\[4, -1\\]"):
        infer(_array, torch.nn.Linear(4, 3), lambda module, given: module(given["x"]), _inputs, {"a/kernel": (4, -1)})


@pytest.mark.parametrize(
    ("shapes", "got"), [({"a/kernel": "4x3"}, "got str"), ({"a/kernel": (4, 3), "b": 7}, "got int")]
)
def test_other_shapes_are_an_error(shapes: Any, got: str) -> None:
    with pytest.raises(ConvertError, match=f"shapes: expected a tree of arrays, as jax.eval_shape returns it, {got}"):
        infer(_array, torch.nn.Linear(4, 3), lambda module, given: module(given["x"]), _inputs, shapes)
