"""A derivation never says more than it knows: symmetric models are interchangeable, models that differ are never derived."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import HEADS, UNPROVEN, WIDTH, derive, floats, grades, layer_norm, sources

D, N, H = WIDTH, HEADS, WIDTH // HEADS
SQUARE = (D, D)


class Two(torch.nn.Module):
    """Two branches."""

    def __init__(self, right: Any = torch.tanh) -> None:
        super().__init__()
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(3))
        self.right = right

    def forward(self, x: Any) -> Any:
        return self.m[2](torch.tanh(self.m[0](x)) + self.right(self.m[1](x)))


@pytest.mark.parametrize("symmetric", [True, False])
def test_two_branches_are_interchangeable_exactly_where_they_are_alike(symmetric):
    def function(w, x):
        return (jnp.tanh(x @ w["b"]) + (jnp.tanh if symmetric else jnp.sin)(x @ w["a"])) @ w["c"]

    module = Two(torch.tanh if symmetric else torch.sin)
    found = derive(function, module, dict.fromkeys("abc", SQUARE))
    assert found.complete
    assert found.tensor("m.2.weight").grade is Grade.DERIVED
    for name, other in (("m.0.weight", "a"), ("m.1.weight", "b")):
        tensor = found.tensor(name)
        assert tensor.grade is (Grade.INTERCHANGEABLE if symmetric else Grade.DERIVED)
        assert [parts[0].leaf for parts in tensor.alternatives.values()] == ([other] if symmetric else [])
    if not symmetric:
        assert sources(found) == {"m.0.weight": "b", "m.1.weight": "a", "m.2.weight": "c"}


@pytest.mark.parametrize("merges", [True, False])
def test_the_order_of_two_axes_is_open_only_if_nothing_tells_them_apart(merges):
    """A layer makes two axes; if the next sums over both, either order of the rows does."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(D, D), torch.nn.Linear(D, D)

        def forward(self, x: Any) -> Any:
            y = self.a(x)
            return self.b(torch.tanh(y if merges else y.unflatten(-1, (N, H)).softmax(-1).flatten(-2)))

    def function(w, x):
        y = jnp.einsum("btd,dnh->btnh", x, w["a"]) + w["s"]
        return jnp.einsum("btnh,nhd->btd", jnp.tanh(y if merges else jax.nn.softmax(y)), w["b"]) + w["t"]

    shapes = {"a": (D, N, H), "s": (N, H), "b": (N, H, D), "t": (D,)}
    found = derive(function, Model(), shapes)
    expected = Grade.INTERCHANGEABLE if merges else Grade.DERIVED
    assert found.complete
    assert [found.tensor(name).grade for name in ("a.weight", "a.bias", "b.weight")] == [expected] * 3
    assert found.tensor("b.bias").grade is Grade.DERIVED
    assert np.array_equal(np.sort(found.tensor("a.weight").parts[0].positions), np.arange(D * D))


class Block(torch.nn.Module):
    """A transformer's layer, with faults."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(6))
        self.n = torch.nn.ModuleList(torch.nn.LayerNorm(D, eps=1e-5 if fault == "epsilon" else 1e-6) for _ in range(2))
        self.fault = fault

    def forward(self, x: Any) -> Any:
        fault = self.fault
        y = self.n[0](x)
        q, k, v = (self.m[i](y).unflatten(-1, (N, H)).transpose(1, 2) for i in range(3))
        if fault == "values from queries":
            v = q
        scale = {"no scale": 1.0, "width": D**-0.5}.get(fault, H**-0.5)
        causal = fault != "mask"
        if fault == "heads mixed":
            k = k.flip(1)
        z = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)
        x = (0 if fault == "residual" else x) + self.m[3](z.flatten(-2))
        y = x if fault == "norm" else self.n[1](x)
        y = functional.gelu(self.m[4](y), approximate="none" if fault == "gelu" else "tanh")
        return x + self.m[5](y)


def _block(w: Any, x: Any) -> Any:
    y = layer_norm(x, w["s"], w["t"])
    q, k, v = (jnp.einsum("btd,dnh->btnh", y, w[c]) + w[f"{c}b"] for c in "qkv")
    logits = jnp.where(np.tri(x.shape[1], dtype=bool), jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H), -1e30)
    z = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)
    x = x + jnp.einsum("btnh,nhd->btd", z, w["o"]) + w["ob"]
    y = jax.nn.gelu(layer_norm(x, w["u"], w["z"]) @ w["i"] + w["ib"], approximate=True)
    return x + y @ w["j"] + w["jb"]


SHAPES: dict[str, tuple[int, ...]] = (
    dict.fromkeys("qkv", (D, N, H)) | {f"{c}b": (N, H) for c in "qkv"} | {"o": (N, H, D), "ob": (D,), "i": SQUARE}
    | {"ib": (D,), "j": SQUARE, "jb": (D,)} | dict.fromkeys("stuz", (D,))
)  # fmt: skip


def test_a_layer_without_a_fault_is_derived():
    found = derive(_block, Block(), SHAPES)
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert [sources(found)[f"m.{k}.weight"] for k in range(6)] == ["q", "k", "v", "o", "i", "j"]


SLOW = ("values from queries", "no scale", "width", "mask")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["epsilon", "gelu", "residual", "norm", *SLOW])
def test_a_layer_with_a_fault_is_never_derived(fault):
    found = derive(_block, Block(fault), SHAPES)
    assert not found.complete and found.proof is None
    assert grades(found) <= UNPROVEN
    assert found.differences and found.differences[0].site.where.startswith("test_grades.py:")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"), [("gelu", ["gelu_erf", "gelu_tanh"]), ("epsilon", ["1e-05", "1e-06"])], ids=["gelu", "epsilon"]
)
def test_a_difference_says_what_each_side_computes(fault, says):
    (difference,) = derive(_block, Block(fault), SHAPES).differences
    assert all(word in difference.problem for word in says)
    assert difference.error is not None and 1e-9 < difference.error < 1e-2


@pytest.mark.slow
def test_heads_in_another_order_are_not_said_to_be_the_same():
    """The target pairs each head of queries with another head of keys; no order of whole axes makes up for it."""
    found = derive(_block, Block("heads mixed"), SHAPES)
    assert not found.complete and Grade.DERIVED not in grades(found)


@pytest.mark.slow
def test_a_leaf_behind_a_difference_is_asked_for_and_never_dropped():
    def function(w, x):
        return jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"])

    layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Sigmoid(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
    found = derive(function, torch.nn.Sequential(*layers), {**dict.fromkeys("ab", (WIDTH, WIDTH)), "unused": (3,)})
    assert not found.complete and found.dropped == ("unused",)


def test_units_that_are_zero_for_every_row_are_told_apart_by_fresh_draws():
    """Behind the ReLU some of the units are zero for all four rows: they are tied in the first draw."""
    layers = (torch.nn.Linear(D, D), torch.nn.ReLU(), torch.nn.Linear(D, D))
    shapes = {"a": SQUARE, "b": SQUARE, "x": (D,), "y": (D,)}
    found = derive(
        lambda w, x: jax.nn.relu(x @ w["a"] + w["x"]) @ w["b"] + w["y"],
        torch.nn.Sequential(*layers),
        shapes,
        floats(3, D),
    )
    assert found.complete and grades(found) == {Grade.DERIVED}
