"""A network of relative positions (SwinV2): one program runs it for each pair of positions, the other for each distance, and looks rows up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from convert.inference.forms.rows_early import rows_early, takes_rows_late
from convert.programs.record_torch import record_torch
from convert.programs.rerun import rerun
from support.inferred import WIDTH, derive, floats, grades

HEADS, SIDE = 4, 4
PLACES = SIDE * SIDE
SHAPES = {
    "qkv": (3, WIDTH, HEADS, WIDTH // HEADS),
    "scale": (HEADS,),
    "first": (2, WIDTH),
    "bias": (WIDTH,),
    "second": (WIDTH, HEADS),
    "out": (HEADS, WIDTH // HEADS, WIDTH),
    "shift": (WIDTH,),
}
GIVEN = floats(2, PLACES, WIDTH)


def _logarithms(distances: Any) -> Any:
    return np.sign(distances) * np.log2(np.abs(distances) * 8 / (SIDE - 1) + 1) / np.log2(8)


AT = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij"), -1).reshape(-1, 2)
DISTANCES = _logarithms(AT[:, None] - AT)


def source(w: Any, x: Any) -> Any:
    q, k, v = jnp.einsum("bnc,tchd->tbhnd", x, w["qkv"])
    scores = (
        jnp.einsum("bhnd,bhmd->bhnm", q / jnp.linalg.norm(q, axis=-1, keepdims=True), k) * w["scale"][:, None, None]
    )
    network = jax.nn.relu(DISTANCES @ w["first"] + w["bias"]) @ w["second"]
    scores = scores + 16 * jax.nn.sigmoid(network).transpose(2, 0, 1)
    return jnp.einsum("bhnm,bhmd,hdc->bnc", jax.nn.softmax(scores), v, w["out"]) + w["shift"]


class Attention(nn.Module):
    """Runs the network once for each distance; ``activation`` is its own, and `dtype` that of the distances."""

    def __init__(self, activation: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, WIDTH), activation, nn.Linear(WIDTH, HEADS, bias=False))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(HEADS, 1, 1))
        steps = np.arange(1 - SIDE, SIDE)
        table = _logarithms(np.stack(np.meshgrid(steps, steps, indexing="ij"), -1))
        self.register_buffer("table", torch.tensor(table, dtype=dtype), persistent=False)
        at = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij")).reshape(2, -1)
        rows, columns = at[:, :, None] - at[:, None] + SIDE - 1
        self.register_buffer("index", torch.tensor(rows * (2 * SIDE - 1) + columns).flatten(), persistent=False)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).view(-1, PLACES, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = nn.functional.normalize(q, dim=-1) @ k.mT * self.scale
        network = self.network(self.table.to(x.dtype)).view(-1, HEADS)[self.index]
        scores = scores + 16 * network.view(PLACES, PLACES, HEADS).permute(2, 0, 1).sigmoid()
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_for_each_distance_and_for_each_pair_of_positions(dtype: torch.dtype) -> None:
    """JAX rounds the distances to float32; a module with wider ones was called different."""
    made = derive(source, Attention(nn.ReLU(), dtype), SHAPES, GIVEN)
    assert made.complete and grades(made) == {Grade.DERIVED}
    assert any("rounded to float32" in note for note in made.notes)


@pytest.mark.slow
def test_another_activation_is_no_equal_network() -> None:
    assert not derive(source, Attention(nn.GELU()), SHAPES, GIVEN).complete


def test_the_rows_are_looked_up_in_front_of_the_network() -> None:
    given = {"x": GIVEN(0)["x"]}
    module = Attention(nn.ReLU()).double()
    table = module.table.numpy().copy()  # an input: data, as the search makes the constants that parameters meet
    record = record_torch(module, _with_table, {**given, "table": table})
    assert takes_rows_late(record)
    made = rows_early(record, keep=True)
    of_pairs = {x.results[0].array.shape for x in made.operations if x.name in ("mm", "relu")}
    assert of_pairs >= {(PLACES**2, WIDTH), (PLACES**2, HEADS)}
    state = {name: value.array for name, value in record.parameters.items()}
    again = rerun(made, state, {**given, "table": table})
    np.testing.assert_allclose(again.outputs["y"].array, record.outputs["y"].array, atol=1e-12)


def _with_table(module: Attention, given: Any) -> dict[str, Any]:
    module.table = given["table"]
    return {"y": module(given["x"])}
