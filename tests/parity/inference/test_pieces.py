"""Layers whose results the module takes apart in another order than the JAX model, behind a product of two of them, as PaiNN's filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch import nn

from convert.inference.derivation import Derivation, Grade, Tensor
from convert.inference.draws import Draws
from convert.inference.infer import infer
from convert.inference.isolated.found import Allowance, found_by_outputs
from convert.inference.isolated.pieces import Pieces
from convert.inference.meetings.sites import meetings
from convert.inference.models import Models, Runs
from convert.inference.recorded import recorded
from support.inferred import grades, rules

F, ROWS, EDGES = 4, 5, 9
LAYERS = ("first", "second")
SHAPES = {"filter": (3, 3 * F), "shift": (3 * F,), "context": (F, 3 * F), "bias": (3 * F,)}


def _messages(w: Mapping[str, Any], x: Mapping[str, Any]) -> Any:
    h = x["h"]
    for layer in (layer for layer in LAYERS if f"{layer}/filter" in w):
        both = (x["edges"] @ w[f"{layer}/filter"] + w[f"{layer}/shift"]) * (
            jax.nn.silu(h) @ w[f"{layer}/context"] + w[f"{layer}/bias"]
        )[x["ends"]]
        gate, shift, turn = jnp.split(both, 3, -1)
        made = h[x["ends"]] * gate + jnp.tanh(shift) + x["edges"][:, :1] * turn
        h = h + jax.ops.segment_sum(made, x["starts"], ROWS) / 4
    return {"y": h @ w["head"]}


class Messages(nn.Module):
    """Its parts are a shift, a turn and a gate; one layer makes the filters of all. `fault`: what else it computes."""

    def __init__(self, layers: int, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.filters = nn.Linear(3, layers * 3 * F)
        self.contexts = nn.ModuleList(nn.Linear(F, 3 * F) for _ in range(layers))
        self.head = nn.Linear(F, F, bias=False)

    def forward(self, h: Any, edges: Any, starts: Any, ends: Any) -> Any:
        for number, (filters, context) in enumerate(
            zip(self.filters(edges).split(3 * F, -1), self.contexts, strict=True)
        ):
            made = filters * context(nn.functional.silu(h))[ends]
            shift, turn, gate = made.chunk(3, -1)
            if self.fault == "twice" and number == len(self.contexts) - 1:
                turn = gate
            if self.fault == "reversed":
                gate = gate.flip(0)
            bent = shift.atan() if self.fault == "bent" else shift.tanh()
            made = h[ends] * gate + bent + edges[:, :1] * turn
            h = h.index_add(0, starts, made / 4)
        return self.head(h)


def _inputs(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "h": rng.normal(size=(ROWS, F)),
        "edges": rng.normal(size=(EDGES, 3)),
        "starts": rng.permutation(np.arange(EDGES) % ROWS),
        "ends": rng.permutation(np.arange(EDGES) % ROWS),
    }


def _run(module: nn.Module, x: Mapping[str, Any]) -> dict[str, Any]:
    return {"y": module(**x)}


def _shapes(layers: int) -> dict[str, tuple[int, ...]]:
    names = {f"{layer}/{name}": shape for layer in LAYERS[:layers] for name, shape in SHAPES.items()}
    return names | {"head": (F, F)}


def _derived(module: Messages) -> Derivation:
    return infer(_messages, module.eval(), _run, _inputs, _shapes(len(module.contexts)))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_parts_in_another_order_behind_a_product_of_two_layers_are_found(layers: int) -> None:
    module = Messages(layers)
    derivation = _derived(module)
    assert derivation.complete, (grades(derivation), derivation.differences, derivation.notes)
    made = "\n".join(rules(derivation, module))
    assert "concatenated: {C: E + F}\n  linear: {module: filters, concatenated: {C: F + E}}" in made, made


def test_a_layer_for_all_is_taken_apart_once_for_each_and_again_in_each() -> None:
    """24 rows: 12 for each layer, and 4 for each part of them; those of another length are none."""
    target = recorded(Messages(2), _run, _inputs(0))
    meeting = next(one for one in meetings(target) if "filters.weight" in one.weight.leaves)
    of_rows = {(start, stop) for length, start, stop in Pieces(target).of(meeting) if length == 24}
    assert of_rows == {(0, 12), (12, 24), *((k, k + 4) for k in range(0, 24, 4))}


@pytest.mark.parametrize("runs", [2, 15, 400])
def test_where_no_runs_are_left_the_note_says_so(runs: int) -> None:
    models = Models(
        Runs(_messages, Draws(_shapes(1))), Messages(1).eval(), _run, _inputs, lambda _: {}, Allowance(runs)
    )
    both = models.record(0)
    open_ones = [Tensor(name, value.array.shape, Grade.OPEN) for name, value in both.as_run.parameters.items()]
    as_run = models.runs.as_run(0, _inputs(0))
    found = found_by_outputs(open_ones, both.source, as_run, both.as_run, models.allowance)
    if runs == 400:
        assert found.tensors is not None and not found.note and models.allowance.left == runs
        return
    assert found.tensors is None and models.allowance.left == 0
    assert "whether the programs are equal is not decided" in found.note and "of 5 tensors" in found.note
    again = found_by_outputs(open_ones, both.source, as_run, both.as_run, models.allowance)
    assert again.tensors is None and again.note == found.note, "other weights get no more runs"


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("fault", ["twice", "reversed", "bent"])
def test_another_use_of_the_parts_is_not_derived(fault: str, layers: int) -> None:
    derivation = _derived(Messages(layers, fault))
    assert not derivation.complete and derivation.differences
    assert not {Grade.DERIVED, Grade.INTERCHANGEABLE} & grades(derivation)
