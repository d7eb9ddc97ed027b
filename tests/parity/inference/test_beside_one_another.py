"""A segment may hold whole models: what is computed first and used last, as the contexts of a temporal fusion transformer (Lim et al. 2021), is told apart behind all that lies between."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, grades, layer_norm, sources

pytestmark = pytest.mark.slow

D, V, STEPS = WIDTH, 4, 3
NUMBERS = floats(3, 1 + 2 * STEPS, V)  # static ones, of the past, of the future


def gated_leaves(name: str, inputs: int = D, outputs: int = D, context: bool = False) -> dict[str, tuple[int, ...]]:
    made: dict[str, tuple[int, ...]] = {
        "hidden": (inputs, D),
        "hidden_bias": (D,),
        "second": (D, D),
        "second_bias": (D,),
    }
    made |= dict.fromkeys(("value", "gate"), (D, outputs)) | dict.fromkeys(
        ("value_bias", "gate_bias", "s", "o"), (outputs,)
    )
    made |= {"skip": (inputs, outputs), "skip_bias": (outputs,)} if inputs != outputs else {}
    made |= {"context": (D, D)} if context else {}
    return {f"{name}/{key}": shape for key, shape in made.items()}


def selection_leaves(name: str, context: bool) -> dict[str, tuple[int, ...]]:
    made = gated_leaves(f"{name}/weights", V * D, V, context)
    for k in range(V):
        made |= {f"{name}/embed_{k}": (1, D), f"{name}/embed_bias_{k}": (D,)} | gated_leaves(f"{name}/variable_{k}")
    return made


def gated(w: Any, name: str, x: Any, context: Any = None) -> Any:
    own = {key.removeprefix(f"{name}/"): leaf for key, leaf in w.items() if key.startswith(f"{name}/")}
    hidden = x @ own["hidden"] + own["hidden_bias"]
    hidden = hidden if context is None else hidden + context @ own["context"]
    h = jax.nn.elu(hidden) @ own["second"] + own["second_bias"]
    skip = x @ own["skip"] + own["skip_bias"] if "skip" in own else x
    opened = jax.nn.sigmoid(h @ own["gate"] + own["gate_bias"]) * (h @ own["value"] + own["value_bias"])
    return layer_norm(skip + opened, own["s"], own["o"])


def selected(w: Any, name: str, x: Any, context: Any = None) -> Any:
    each = [x[..., k : k + 1] @ w[f"{name}/embed_{k}"] + w[f"{name}/embed_bias_{k}"] for k in range(V)]
    weights = jax.nn.softmax(gated(w, f"{name}/weights", jnp.concatenate(each, -1), context))
    values = jnp.stack([gated(w, f"{name}/variable_{k}", e) for k, e in enumerate(each)], -2)
    return jnp.einsum("...v,...vd->...d", weights, values)


def function(w: Any, x: Any) -> Any:
    static = selected(w, "static", x[:, 0])
    context = gated(w, "for_selection", static)[:, None]
    past = selected(w, "past", x[:, 1 : 1 + STEPS], context)
    future = selected(w, "future", x[:, 1 + STEPS :], context)
    cell, hidden = gated(w, "for_cell", static), gated(w, "for_hidden", static)
    for k in range(STEPS):
        i, f, g, o = jnp.split(past[:, k] @ w["x"] + hidden @ w["h"] + w["b"], 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return gated(w, "enriched", hidden[:, None] + future, gated(w, "for_enrichment", static)[:, None])


class Gated(nn.Module):
    def __init__(self, inputs: int = D, outputs: int = D, context: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2, self.glu = nn.Linear(inputs, D), nn.Linear(D, D), nn.Linear(D, 2 * outputs)
        self.resample = nn.Linear(inputs, outputs) if inputs != outputs else nn.Identity()
        self.context = nn.Linear(D, D, bias=False) if context else None
        self.norm = nn.LayerNorm(outputs, eps=1e-6)

    def forward(self, x: Any, context: Any = None) -> Any:
        skip, h = self.resample(x), self.fc1(x)
        h = h if self.context is None else h + self.context(context)
        return self.norm(functional.glu(self.glu(self.fc2(functional.elu(h))), -1) + skip)


class Selected(nn.Module):
    def __init__(self, context: bool) -> None:
        super().__init__()
        self.prescalers = nn.ModuleList(nn.Linear(1, D) for _ in range(V))
        self.variables = nn.ModuleList(Gated() for _ in range(V))
        self.flattened = Gated(V * D, V, context)

    def forward(self, x: Any, context: Any = None) -> Any:
        each = [layer(x[..., k : k + 1]) for k, layer in enumerate(self.prescalers)]
        values = torch.stack([layer(e) for layer, e in zip(self.variables, each, strict=True)], -1)
        weights = functional.softmax(self.flattened(torch.cat(each, -1), context), -1)
        return (values * weights.unsqueeze(-2)).sum(-1)


class Fusion(nn.Module):
    def __init__(self, exchanged: bool) -> None:
        super().__init__()
        self.exchanged = exchanged
        self.static, self.past, self.known = Selected(False), Selected(True), Selected(True)
        self.selection, self.hidden, self.cell, self.enrichment = (Gated() for _ in range(4))
        self.lstm, self.enrich = nn.LSTM(D, D, batch_first=True), Gated(context=True)

    def forward(self, x: Any) -> Any:
        static = self.static(x[:, 0])
        context = self.selection(static)[:, None].expand(-1, STEPS, -1)
        past, known = self.past(x[:, 1 : 1 + STEPS], context), self.known(x[:, 1 + STEPS :], context)
        states = [self.hidden(static)[None], self.cell(static)[None]]
        _, (hidden, _) = self.lstm(past, states[::-1] if self.exchanged else states)
        enrichment = self.enrichment(static)[:, None].expand(-1, STEPS, -1)
        return self.enrich(hidden.transpose(0, 1) + known, enrichment)


SHAPES = {
    **selection_leaves("static", False),
    **selection_leaves("past", True),
    **selection_leaves("future", True),
    **{key: x for k in ("selection", "cell", "hidden", "enrichment") for key, x in gated_leaves(f"for_{k}").items()},
    **gated_leaves("enriched", context=True),
    "x": (D, 4 * D),
    "h": (D, 4 * D),
    "b": (4 * D,),
}


@pytest.mark.parametrize("exchanged", [False, True])
def test_contexts_of_one_value_are_told_apart_behind_the_layers_between(exchanged: bool) -> None:
    found = derive(function, Fusion(exchanged), SHAPES, NUMBERS)
    assert found.complete and grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}
    names = ("cell", "hidden") if exchanged else ("hidden", "cell")
    assert sources(found)["hidden.fc1.weight"] == f"for_{names[0]}/hidden"
    assert sources(found)["cell.fc1.weight"] == f"for_{names[1]}/hidden"
