"""Parameters to which layers are applied before an input takes part, and columns that one draw of weights makes equal."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from convert.inference.derivation import Grade
from convert.inference.infer import infer
from support.inferred import WIDTH, derive, floats, grades, layer_norm, rules, sources

D = WIDTH
SQUARE = (D, D)


class Queries(torch.nn.Module):
    """Attention from learned queries, which pass a norm first, or from the parameter itself."""

    def __init__(self, norm: bool, own: bool) -> None:
        super().__init__()
        self.p, self.other = torch.nn.Parameter(torch.randn(1, D, D)), torch.nn.Parameter(torch.randn(1, D, D))
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(4))
        self.n = torch.nn.LayerNorm(D, eps=1e-6) if norm else torch.nn.Identity()
        self.own = own

    def forward(self, x: Any) -> Any:
        q = self.n(self.p.expand(len(x), -1, -1))
        if self.own:
            q = functional.scaled_dot_product_attention(self.m[3](q), q, q)
        return functional.scaled_dot_product_attention(self.m[2](q), self.m[0](x), self.m[1](x)) + self.other


@pytest.mark.parametrize(
    ("norm", "own"),
    [(True, False), (False, False), *(pytest.param(norm, True, marks=pytest.mark.slow) for norm in (True, False))],
)
def test_learned_queries_are_derived(norm, own):
    def attend(q, k, v):
        return jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(D)) @ v

    def function(w, x):
        q = jnp.broadcast_to(w["b"], (len(x), D, D))
        q = layer_norm(q, w["s"], w["t"]) if norm else q
        if own:
            q = attend(q @ w["o"] + w["ob"], q, q)
        return attend(q @ w["q"] + w["qb"], x @ w["k"] + w["kb"], x @ w["v"] + w["vb"]) + w["a"]

    shapes = dict.fromkeys("abqkv", SQUARE) | dict.fromkeys(("qb", "kb", "vb"), (D,))
    shapes |= ({"s": (D,), "t": (D,)} if norm else {}) | ({"o": SQUARE, "ob": (D,)} if own else {})
    found = derive(function, Queries(norm, own), shapes)
    made = sources(found)
    expected = {"p": "b", "other": "a", "m.0.weight": "k", "m.1.weight": "v", "m.2.weight": "q", "m.2.bias": "qb"}
    expected |= {"m.3.weight": "o", "n.weight": "s", "n.bias": "t"}
    assert {name: made[name] for name in expected if made.get(name)} == {
        name: leaf for name, leaf in expected.items() if leaf in shapes
    }
    if own:
        assert found.complete and grades(found) == {Grade.DERIVED}


class Latents(torch.nn.Module):
    """Attention from latents to the input, with a residual: they are repeated for each sample."""

    def __init__(self, repeated: bool) -> None:
        super().__init__()
        self.p, self.repeated = torch.nn.Parameter(torch.randn(5, D)), repeated
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(4))
        self.n = torch.nn.ModuleList(torch.nn.LayerNorm(D, eps=1e-6) for _ in range(2))

    def forward(self, x: Any) -> Any:
        z = self.p[None].repeat(len(x), 1, 1) if self.repeated else self.p[None].expand(len(x), -1, -1)
        q = self.m[0](self.n[0](z))
        z = z + functional.scaled_dot_product_attention(q, self.m[1](x), self.m[2](x))
        return z + self.m[3](self.n[1](z))


@pytest.mark.parametrize("repeated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_latents_without_a_batch_are_those_that_are_repeated_along_it(repeated):
    def function(w, x):
        z = w["z"]
        q = layer_norm(z, w["s"], w["t"]) @ w["q"] + w["qb"]
        seen = jax.nn.softmax(jnp.einsum("qd,bkd->bqk", q, x @ w["k"] + w["kb"]) / np.sqrt(D))
        z = z + seen @ (x @ w["v"] + w["vb"])
        return z + layer_norm(z, w["s2"], w["t2"]) @ w["m"] + w["mb"]

    shapes = {"z": (5, D), **dict.fromkeys("qkvm", SQUARE)}
    shapes |= dict.fromkeys(("qb", "kb", "vb", "mb", "s", "t", "s2", "t2"), (D,))
    found = derive(function, Latents(repeated), shapes)
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert sources(found)["p"] == "z" and sources(found)["m.0.weight"] == "q"


class Early(torch.nn.Module):
    """Attention from learned queries to what an encoder makes of the input; they are repeated before it runs, as DETR's are.

    Args:
        same: whether the keys are those of the encoder's result; planted: of the input.
    """

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.p, self.same = torch.nn.Parameter(torch.randn(D, D)), same
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(12))

    def forward(self, x: Any) -> Any:
        q, y = self.p[None].repeat(len(x), 1, 1), x
        for k in (0, 4):
            y = y + self._attend(k, y, y, y)
        return self._attend(8, q, y if self.same else x, y)

    def _attend(self, first: int, *of: Any) -> Any:
        *ways, out = self.m[first : first + 4]
        return out(functional.scaled_dot_product_attention(*(way(x) for way, x in zip(ways, of, strict=True))))


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_learned_queries_that_are_repeated_before_an_encoder_runs(same: bool) -> None:
    """Any leaf of their shape fits them there: no value tells, before the encoder is done."""

    def attend(w: Any, first: int, *of: Any) -> Any:
        q, k, v = (x @ w[f"w{first + k}"] + w[f"b{first + k}"] for k, x in enumerate(of))
        seen = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(D)) @ v
        return seen @ w[f"w{first + 3}"] + w[f"b{first + 3}"]

    def function(w: Any, x: Any) -> Any:
        for k in (0, 4):
            x = x + attend(w, k, x, x, x)
        return attend(w, 8, jnp.broadcast_to(w["z"], (len(x), D, D)), x, x)

    each = [(f"{name}{k}", SQUARE[:rank]) for k in range(12) for name, rank in (("w", 2), ("b", 1))]
    found = derive(function, Early(same), {"z": SQUARE, **dict(each)})
    assert found.complete is same and (found.proof is None) is not same
    if same:
        assert sources(found)["p"] == "z" and sources(found)["m.0.weight"] == "w0"


class Pooled(torch.nn.Module):
    """Attention from learned queries, each added to its result."""

    def __init__(self, rows: int, scale: float) -> None:
        super().__init__()
        self.p, self.scale = torch.nn.Parameter(torch.randn(1, rows, D)), scale
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Any) -> Any:
        z = self.p.expand(len(x), -1, -1)
        return z + functional.scaled_dot_product_attention(self.m[0](z), self.m[1](x), self.m[2](x), scale=self.scale)


def pooled(w: Any, x: Any) -> Any:
    """As Equinox's layers are applied: the weight stands first in each product of one vector."""

    def layer(name: str, rows: Any) -> Any:
        return jax.vmap(lambda row: w[name] @ row + w[f"{name}b"])(rows)

    def attend(sample: Any) -> Any:
        scores = layer("q", w["z"]) @ layer("k", sample).T / np.sqrt(D)
        return w["z"] + jax.nn.softmax(scores) @ layer("v", sample)

    return jax.vmap(attend)(x)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, D])  # D: sizes do not tell the queries from the weight
def test_learned_queries_stand_last_in_a_product_with_one_vector(rows):
    shapes = {"z": (rows, D), **dict.fromkeys("qkv", SQUARE), **dict.fromkeys(("qb", "kb", "vb"), (D,))}
    found = derive(pooled, Pooled(rows, D**-0.5), shapes)
    assert found.complete and grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}
    made = sources(found)
    assert made["p"] == "z" and made["m.0.weight"] == "q" and made["m.0.bias"] == "qb"
    (wrong,) = derive(pooled, Pooled(rows, 1 / D), shapes).differences
    assert "the target's values are 0.25 times the JAX model's" in wrong.brief


class FromLearned(torch.nn.Module):
    """An LSTM whose first state and memory are parameters, one for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.r = torch.nn.LSTM(D, D)
        self.h, self.c = torch.nn.Parameter(torch.ones(1, 1, D)), torch.nn.Parameter(torch.ones(1, 1, D))

    def forward(self, x: Any) -> Any:
        return self.r(x, (self.h.repeat(1, x.shape[1], 1), self.c.repeat(1, x.shape[1], 1)))[0]


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_cell_begins_from_a_learned_state(again: bool) -> None:
    """In JAX code of one row, which `vmap` runs, the state is a vector. Planted: each step begins from the first state."""

    def one(w: Any, x: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            h, c = (w["h"], state[1]) if again else state
            i, f, g, o = jnp.split(w["u"] @ x + w["v"] @ h + w["b"], 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return jax.lax.scan(step, (w["h"], w["c"]), x)[1]

    shapes = {"u": (4 * D, D), "v": (4 * D, D), "b": (4 * D,), "h": (D,), "c": (D,)}
    found = derive(lambda w, x: jax.vmap(lambda x: one(w, x), 1, 1)(x), FromLearned(), shapes, floats(5, 3, D))
    assert found.complete is not again
    assert again or (sources(found)["h"], sources(found)["c"]) == ("h", "c")


def test_a_unit_that_one_draw_switches_off_is_told_apart_by_the_others():
    """Of few rows several units of a ReLU are never on; other weights switch on others."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return self.m[1](self.m[0](x).relu())

    shapes = {"a": SQUARE, "b": SQUARE}
    found = derive(lambda w, x: jax.nn.relu(x @ w["a"]) @ w["b"], Model(), shapes, floats(2, D))
    assert found.complete and grades(found) == {Grade.DERIVED}


class Policy(torch.nn.Module):
    """A Gaussian policy: its deviation, and the table behind its second output, meet no state."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.m = torch.nn.Linear(D, D)
        self.d, self.t, self.floor = torch.nn.Parameter(torch.zeros(D)), torch.nn.Parameter(torch.zeros(D, 3)), floor

    def forward(self, x: Any) -> Any:
        return {"y": self.m(x), "std": self.d.clamp(self.floor, 2).exp(), "table": self.t.T}


@pytest.mark.slow
@pytest.mark.parametrize("floor", [-5.0, 0.1])
def test_outputs_of_parameters_alone(floor: float) -> None:
    def function(w: Any, given: Any) -> Any:
        std = jnp.exp(jnp.clip(w["log_std"], -5.0, 2.0))
        return {"y": given["x"] @ w["mean"] + w["bias"], "std": std, "table": w["table"]}

    module, shapes = Policy(floor).eval(), {"log_std": (D,), "mean": SQUARE, "bias": (D,), "table": (3, D)}
    found = infer(function, module, lambda module, given: module(given["x"]), floats(6, D), shapes)
    if floor > -5:
        assert Grade.DERIVED not in grades(found) and "'std' differs" in found.differences[0].problem
        return
    assert grades(found) == {Grade.DERIVED}
    assert "- from: log_std\n  parameter: d" in rules(found, module)
    assert "- from: table\n  axes: CD\n  parameter: {name: t, axes: DC}" in rules(found, module)
