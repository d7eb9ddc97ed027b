"""Queries, keys and values apart, below each other in one matrix, or head by head; RoPE turns neighbours, or the halves of a head."""

from __future__ import annotations

import itertools
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
from support.inferred import UNPROVEN, grades
from support.marks import slow_but

HEADS, SIZE, LAYERS, LENGTH = 4, 6, 2, 5
D = HEADS * SIZE
ANGLES = np.arange(LENGTH)[:, None] / 100 ** (np.arange(0, SIZE, 2) / SIZE)


def _split(form: str, y: Any, joined: Any) -> list[Any]:
    """Queries, keys and values of a fused result, or of three."""
    shape = (*(y if form != "apart" else y[0]).shape[:-1], HEADS, SIZE)
    if form == "apart":
        return [x.reshape(shape) for x in y]
    if form == "below":
        return [joined(y, k).reshape(shape) for k in range(3)]
    by_head = y.reshape(*y.shape[:-1], HEADS, 3, SIZE)
    return [by_head[..., k, :] for k in range(3)]


def _neighbours_turned(x: Any) -> Any:
    cos, sin = np.cos(ANGLES)[:, None], np.sin(ANGLES)[:, None]
    one, two = x[..., ::2], x[..., 1::2]
    return jnp.stack([one * cos - two * sin, one * sin + two * cos], -1).reshape(x.shape)


def _forward(form: str, rope: bool, p: Mapping[str, Any], x: Any) -> Any:
    for i in range(LAYERS):
        y = [x @ p[f"{i}/{name}"] for name in "qkv"] if form == "apart" else x @ p[f"{i}/qkv"]
        q, k, v = _split(form, y, lambda y, k: y[..., k * D : (k + 1) * D])
        q, k = (_neighbours_turned(q), _neighbours_turned(k)) if rope else (q, k)
        scores = jax.nn.softmax(jnp.einsum("bthc,bshc->bhts", q, k) / np.sqrt(SIZE), -1)
        x = x + jnp.einsum("bhts,bshc->bthc", scores, v).reshape(x.shape) @ p[f"{i}/o"]
    return x


class Attention(nn.Module):
    """`turned`: which of queries, keys and values RoPE turns."""

    def __init__(self, form: str, turned: str) -> None:
        super().__init__()
        self.form, self.turned = form, turned
        if form == "apart":
            self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        else:
            self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.o = nn.Linear(D, D, bias=False)

    def forward(self, x: Any) -> Any:
        y = [self.q(x), self.k(x), self.v(x)] if self.form == "apart" else self.qkv(x)
        q, k, v = (z.transpose(1, 2) for z in _split(self.form, y, lambda y, k: y.chunk(3, -1)[k]))
        cos, sin = (torch.as_tensor(np.concatenate([f(ANGLES)] * 2, -1)) for f in (np.cos, np.sin))

        def turn(name: str, z: Any) -> Any:
            one, two = z.chunk(2, -1)
            return z * cos + torch.cat([-two, one], -1) * sin if name in self.turned else z

        scores = (turn("q", q) @ turn("k", k).mT / SIZE**0.5).softmax(-1)
        return x + self.o((scores @ turn("v", v)).transpose(1, 2).flatten(2))


def derived(source: str, target: str, turned: str = "qk") -> Derivation:
    names = [*"qkv"] if source == "apart" else ["qkv"]
    shapes: dict[str, tuple[int, ...]] = {f"{i}/o": (D, D) for i in range(LAYERS)}
    shapes |= {f"{i}/{name}": (D, D * len(name)) for i in range(LAYERS) for name in names}
    module = nn.Sequential(*[Attention(target, turned) for _ in range(LAYERS)]).eval()

    def function(p: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"y": _forward(source, bool(turned), p, given["x"])}

    def inputs(seed: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(seed).normal(size=(2, LENGTH, D))}

    return infer(function, module, lambda net, given: {"y": net(given["x"])}, inputs, shapes)


FORMS = ("apart", "below", "by head")
PAIRS = list(itertools.permutations(FORMS, 2))


@pytest.mark.parametrize(("source", "target"), slow_but(PAIRS[-1:], PAIRS))
def test_pairs_are_reordered_in_queries_and_keys_alone(source: str, target: str) -> None:
    found = derived(source, target)
    assert found.complete and grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}, found.differences


@pytest.mark.slow
def test_parts_that_lie_head_by_head_without_rope() -> None:
    found = derived("by head", "apart", turned="")
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [("apart", "below"), ("by head", "apart")])
def test_values_that_are_turned_too_are_a_difference(source: str, target: str) -> None:
    found = derived(source, target, turned="qkv")
    assert found.differences and not found.complete and grades(found) <= UNPROVEN
