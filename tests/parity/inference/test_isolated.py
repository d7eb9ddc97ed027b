"""Programs that share no value behind a layer: its matrix is a product of cores in one, and the data meets core by core in the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import grades, rules

A, R, L, T = 3, 3, 2, 5
D = A * A
SHAPES = {
    "embed": (D, D),
    "left": (L, A, A, R),
    "right": (L, R, A, A),
    "out": (L, D, D),
    "scale": (L, D),
    "head": (D, D),
}


def _normed(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def _of_cores(w: Mapping[str, Any], x: Mapping[str, Any]) -> Any:
    """Tensor-train layers: the matrix is made of its two cores, and meets the data then."""
    h = w["embed"][x["ids"]]
    for k in range(L):
        matrix = jnp.einsum("aor,rbp->abop", w["left"][k], w["right"][k]).reshape(D, D)
        h = h + jax.nn.gelu(_normed(h, w["scale"][k]) @ matrix, approximate=False) @ w["out"][k]
    return {"y": h @ w["head"]}


class RMSNorm(nn.Module):
    """A norm of the module's own, which says its epsilon in its code alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class CoreByCore(nn.Module):
    """`fault`: what else it computes."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.embed = nn.Embedding(D, D)
        self.norms = nn.ModuleList(RMSNorm() for _ in range(L))
        self.first = nn.ParameterList(nn.Parameter(torch.zeros(A, R, A)) for _ in range(L))  # [in, rank, out]
        self.second = nn.ParameterList(nn.Parameter(torch.zeros(A, A, R)) for _ in range(L))  # [in, out, rank]
        self.outs = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(L))
        self.head = nn.Linear(D, D, bias=False)

    def forward(self, ids: Any) -> Any:
        h = self.embed(ids)
        for norm, first, second, out in zip(self.norms, self.first, self.second, self.outs, strict=True):
            x = norm(h).unflatten(-1, (A, A))
            x = torch.einsum("tab,aro->tbro", x, first)
            if self.fault == "relu":
                x = x.relu()
            order = "tbro,bpr->tpo" if self.fault == "order" else "tbro,bpr->top"
            if self.fault == "scale":
                x = x * 2
            x = torch.einsum(order, x, second).flatten(-2)
            h = h + out(nn.functional.gelu(x, approximate="tanh" if self.fault == "gelu" else "none"))
        return self.head(h)


def _inputs(seed: int) -> dict[str, Any]:
    return {"ids": np.random.default_rng(seed).permutation(D)[:T]}


def _derived(module: nn.Module) -> Derivation:
    return infer(_of_cores, module.eval(), lambda m, x: {"y": m(**x)}, _inputs, SHAPES)


@pytest.mark.parametrize(
    ("fault", "out"),
    [
        pytest.param("", "stacked: {l: 0}\n  linear", marks=pytest.mark.slow),
        pytest.param("order", "stacked: {l: 0}\n  flattened: {D: XC}\n  linear", marks=pytest.mark.slow),
    ],
)
def test_cores_are_found_by_the_outputs_alone(fault: str, out: str) -> None:
    """In another order of the features behind the cores, the columns of the next layer have it, too."""
    module = CoreByCore(fault)
    derivation = _derived(module)
    assert derivation.complete, (grades(derivation), derivation.differences)
    made = rules(derivation, module)
    norm = "- from: scale\n  stacked: {i: 0}\n  multiplies_by: scale\n  epsilon: 1e-6\n  axes: D\n  rms_norm: norms.{i}"
    assert norm in made, made
    assert any(f"from: out\n  {out}: outs.{{l}}" in rule for rule in made), made
    assert '- from: left\n  stacked: {j: 0}\n  axes: CFE\n  parameter: {name: "first.{j}", axes: CEF}' in made


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["relu", "gelu", "scale"])
def test_programs_that_differ_are_not_derived(fault: str) -> None:
    derivation = _derived(CoreByCore(fault))
    assert not derivation.complete and derivation.differences
    assert not {Grade.DERIVED, Grade.INTERCHANGEABLE} & grades(derivation)


def test_more_tensors_than_it_is_for_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.inference.isolated.found.MOST_TENSORS", 3)
    found = _derived(CoreByCore())
    assert not found.complete
    assert any("was not tried: it is for at most 3 tensors, and " in note for note in found.notes), found.notes
