"""A record runs again on other weights and inputs, and gives what the function gives on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.core.errors import ConvertError
from convert.inference.infer import infer
from convert.numerics.lift_jax import lift
from convert.programs import record_jax as recording
from convert.programs.program import Program
from convert.programs.record_jax import record_jax
from convert.programs.rerun import can_rerun, rerun


def model(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves that are joined, sliced, normalised and scanned over, with a table of constants."""
    both = jnp.concatenate([weights["a"], weights["b"]], axis=1)
    kernel = both / jnp.sqrt((both**2).sum(0) + 1e-6)
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), inputs["x"], jnp.stack([kernel[:, :4], kernel[:, 4:]]))
    return {"y": x[:, inputs["k"]] + jnp.sin(jnp.arange(4.0))[inputs["k"]]}


def drawn(seed: int, rows: int = 3) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(seed)
    weights = {name: rng.normal(size=(4, 4)) for name in "ab"}
    return weights, {"x": rng.normal(size=(rows, 4)), "k": rng.permutation(4)}


def arrays(program: Program) -> list[Any]:
    return [value.array for operation in program.operations for value in (*operation.operands, *operation.results)]


def test_the_outputs_and_every_value_are_those_of_the_function() -> None:
    record = record_jax(model, *drawn(0))
    weights, inputs = drawn(1)
    made, expected = rerun(record, weights, inputs), record_jax(model, weights, inputs)
    np.testing.assert_array_equal(made.outputs["y"].array, expected.outputs["y"].array)
    np.testing.assert_allclose(
        made.outputs["y"].array, np.asarray(lift(model)(weights, inputs)["y"]), rtol=1e-12, atol=1e-12
    )
    for got, want in zip(arrays(made), arrays(expected), strict=True):
        np.testing.assert_array_equal(got, want)
    assert [value.leaves for o in made.operations for value in o.results] == [
        value.leaves for o in record.operations for value in o.results
    ]


def test_the_record_stays_as_it_was() -> None:
    record = record_jax(model, *drawn(0))
    before = [array.copy() for array in arrays(record)]
    rerun(record, *drawn(1))
    for got, want in zip(arrays(record), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_other_shapes_and_a_path_that_values_choose_take_another_record() -> None:
    assert can_rerun(record_jax(model, *drawn(0)), drawn(1)[1])
    assert not can_rerun(record_jax(model, *drawn(0)), drawn(1, rows=5)[1])

    def choosing(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": jax.lax.cond(inputs["x"].sum() > 0, lambda x: x @ weights["a"], lambda x: x, inputs["x"])}

    assert not can_rerun(record_jax(choosing, *drawn(0)), drawn(1)[1])


def test_an_output_that_is_no_number_is_named() -> None:
    def root(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": jnp.sqrt(weights["a"]) @ inputs["x"].T}

    weights, inputs = drawn(0)
    record = record_jax(root, {"a": np.abs(weights["a"])}, {"x": inputs["x"]})
    with pytest.raises(ConvertError, match="NaN"):
        rerun(record, {"a": -np.abs(weights["a"])}, {"x": inputs["x"]})


def test_infer_records_the_source_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **options: Any) -> Program:
        calls.append(args)
        return record_jax(*args, **options)

    monkeypatch.setattr(recording, "record_jax", counted)
    found = infer(
        lambda weights, given: {"y": jnp.tanh(given["x"] @ weights["w"]) @ weights["v"]},
        torch.nn.Sequential(
            torch.nn.Linear(6, 6, bias=False), torch.nn.Tanh(), torch.nn.Linear(6, 6, bias=False)
        ).eval(),
        lambda module, given: {"y": module(given["x"])},
        lambda seed: {"x": np.random.default_rng(seed).normal(size=(5, 6))},
        {"w": (6, 6), "v": (6, 6)},
    )
    assert found.complete and found.proof is not None and found.proof.draws == 3
    assert len(calls) == 1


def test_columns_that_no_weights_tell_apart_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the inputs are zeros in every draw: a second attempt could not pair them either."""
    calls = []

    def counted(*args: Any, **options: Any) -> Program:
        calls.append(args)
        return record_jax(*args, **options)

    monkeypatch.setattr(recording, "record_jax", counted)
    found = infer(
        lambda weights, given: {"y": given["x"] @ weights["w"]},
        torch.nn.Linear(16, 4, bias=False).eval(),
        lambda module, given: {"y": module(given["x"])},
        lambda seed: {"x": np.random.default_rng(seed).normal(size=(5, 16)) * (np.arange(16) < 8)},
        {"w": (16, 4)},
    )
    assert [tensor.grade for tensor in found.tensors] == ["tied"]
    assert len(calls) == 1
