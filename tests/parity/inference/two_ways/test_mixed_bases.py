"""Relational graph convolutions: the matrices of the relations are mixed of bases first, or what the bases give is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import UNPROVEN, grades, sources

NODES, EDGES, RELATIONS, BASES, D, E = 5, 14, 4, 3, 6, 7
SHAPES = {"v": (BASES, D, E), "c": (RELATIONS, BASES), "s": (D, E), "o": (E, D)}


def _source(form: str) -> Callable[[Any, Any], Any]:
    def function(w: Any, x: Any) -> Any:
        h, start, end, kind = (x[name] for name in ("h", "start", "end", "kind"))
        matrices = jnp.tensordot(w["c"], w["v"], axes=1)
        sent = {
            "every": lambda: jnp.einsum("nd,rde->rne", h, matrices)[kind, start],
            "chosen": lambda: jnp.einsum("nd,nde->ne", h[start], matrices[kind]),
            "bases": lambda: jnp.einsum("nb,nbe->ne", w["c"][kind], jnp.einsum("nd,bde->nbe", h[start], w["v"])),
        }[form]()
        place = end * RELATIONS + kind
        count = jax.ops.segment_sum(jnp.ones(place.shape, h.dtype), place, NODES * RELATIONS)
        got = jax.ops.segment_sum(sent / count[place][:, None], end, NODES)
        return jnp.tanh(got + h @ w["s"]) @ w["o"]

    return function


class Relations(nn.Module):
    """`form` of what an edge sends; `fault`: what differs."""

    def __init__(self, form: str, fault: str = "") -> None:
        super().__init__()
        self.v, self.c = nn.Parameter(torch.zeros(BASES, D, E)), nn.Parameter(torch.zeros(RELATIONS, BASES))
        self.s, self.o = nn.Linear(D, E, bias=False), nn.Linear(E, D, bias=False)
        self.form, self.fault = form, fault

    def forward(self, h: Any, start: Any, end: Any, kind: Any) -> Any:
        chosen = kind.roll(1) if self.fault == "another edge's relation" else kind
        numbers = self.c.softmax(-1) if self.fault == "other numbers" else self.c
        from_ = end if self.fault == "another node" else start
        if self.form == "every":
            sent = torch.einsum("nd,rde->rne", h, torch.einsum("rb,bde->rde", numbers, self.v))[chosen, from_]
        else:
            of_bases = torch.einsum("nd,bde->nbe", h[from_], self.v)
            if self.form == "product":
                sent = torch.bmm(numbers[chosen].unsqueeze(1), of_bases).squeeze(1)
            else:
                sent = (of_bases * numbers[chosen].unsqueeze(-1)).sum(1)
        count = h.new_zeros(NODES, RELATIONS).index_add_(0, end, nn.functional.one_hot(kind, RELATIONS).to(h.dtype))
        weight = 1 / (count.sum(1)[end] if self.fault == "another count" else count[end, kind])
        got = h.new_zeros(NODES, E).index_add_(0, end, sent * weight.unsqueeze(-1))
        return self.o(torch.tanh(got + self.s(h)))


def _inputs(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    ends = {name: random.integers(0, NODES, EDGES) for name in ("start", "end")}
    return {"h": random.normal(size=(NODES, D)), **ends, "kind": random.integers(0, RELATIONS, EDGES)}


def _derive(source: str, module: nn.Module) -> Derivation:
    return infer(lambda w, x: {"y": _source(source)(w, x)}, module.eval(), lambda m, x: {"y": m(**x)}, _inputs, SHAPES)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("every", "product"),
        ("bases", "every"),
        pytest.param("chosen", "sum", marks=pytest.mark.slow),
        pytest.param("bases", "sum", marks=pytest.mark.slow),
    ],
)
def test_bases_mixed_before_or_behind(source: str, target: str) -> None:
    found = _derive(source, Relations(target))
    assert found.complete, found.differences
    assert grades(found) == {Grade.DERIVED}
    assert {tensor: sources(found.tensor(tensor)) for tensor in ("v", "c")} == {"v": "v", "c": "c"}


FAULTS = ["another node", "another edge's relation", "other numbers", "another count"]


@pytest.mark.parametrize(
    ("source", "target", "fault"),
    [
        ("every", "product", FAULTS[0]),
        *(pytest.param("every", "product", fault, marks=pytest.mark.slow) for fault in FAULTS[1:]),
        *(pytest.param("bases", "every", fault, marks=pytest.mark.slow) for fault in FAULTS),
    ],
)
def test_other_edges_are_a_difference(source: str, target: str, fault: str) -> None:
    found = _derive(source, Relations(target, fault))
    assert not found.complete and found.proof is None and grades(found) <= UNPROVEN
