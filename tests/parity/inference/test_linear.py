"""`infer` derives linear layers, norms and embeddings, whatever the layout: every size is equal and no name says anything."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from convert.inference.derivation import Arithmetic, Grade, Role
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import HEADS, WIDTH, derive, floats, grades, layer_norm, rms_norm, rules, sources, tokens

D, N, H = WIDTH, HEADS, WIDTH // HEADS
SQUARE = (D, D)


class Crossed(torch.nn.Module):
    """Three layers of the same shape; the first that runs is `m.2`."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=bias) for _ in range(3))

    def forward(self, x: Any) -> Any:
        a, b, c = self.m
        return b(torch.tanh(a(torch.sin(c(x)))))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:The .grad attribute of a Tensor")
def test_a_module_of_torchscript_is_derived_like_any_other() -> None:
    module = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh(), torch.nn.Linear(D, D)))
    shapes = {"a": SQUARE, "ba": (D,), "k": SQUARE, "bk": (D,)}
    found = derive(lambda w, x: jnp.tanh(x @ w["k"].T + w["bk"]) @ w["a"] + w["ba"], module, shapes)
    assert [rule.rpartition("linear: ")[2] for rule in rules(found, module)] == ['"0"', '"2"']


def test_layers_of_one_shape_are_told_apart_by_what_they_meet():
    def function(w, x):
        return (jnp.tanh((jnp.sin(x @ w["z"] + w["bz"])) @ w["k"].T + w["bk"])) @ w["a"] + w["ba"]

    found = derive(function, Crossed(), {"a": SQUARE, "ba": (D,), "k": SQUARE, "bk": (D,), "z": SQUARE, "bz": (D,)})
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert sources(found) == {
        "m.2.weight": "z", "m.2.bias": "bz", "m.0.weight": "k", "m.0.bias": "bk", "m.1.weight": "a", "m.1.bias": "ba",
    }  # fmt: skip
    (transposed,), (stored,) = found.tensor("m.2.weight").parts, found.tensor("m.0.weight").parts
    assert np.array_equal(transposed.positions.reshape(D, D), np.arange(D * D).reshape(D, D).T)
    assert np.array_equal(stored.positions, np.arange(D * D))
    assert transposed.contracted == (0,) and stored.contracted == (1,)
    assert transposed.evidence.role is Role.PRODUCT and transposed.evidence.shared == "input x"


def test_a_bias_that_the_source_lacks_is_zeros():
    module = Crossed()
    found = derive(
        lambda w, x: jnp.tanh(jnp.sin(x @ w["a"]) @ w["b"]) @ w["c"], module, {"a": SQUARE, "b": SQUARE, "c": SQUARE}
    )
    assert [sources(found)[f"m.{k}.bias"] for k in range(3)] == [0.0, 0.0, 0.0]
    written = rules(found, module)
    assert len(written) == 2 and all('parameters: "weight and bias"}' in rule for rule in written)


class Attention(torch.nn.Module):
    """Queries, keys and values from one matrix; fewer heads of keys than of queries."""

    def __init__(self, keys: int = N) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(D, (N + 2 * keys) * H), torch.nn.Linear(N * H, D)
        self.keys = keys

    def forward(self, x: Any) -> Any:
        q, k, v = self.a(x).unflatten(-1, (-1, H)).transpose(-2, -3).split([N, self.keys, self.keys], -3)
        y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.b(y.transpose(-2, -3).flatten(-2))


def _attention(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[c]) + w[f"b{c}"] for c in "qkv")
    return _attended(q, *(jnp.repeat(a, N // a.shape[2], 2) for a in (k, v)), w)


def _attended(q: Any, k: Any, v: Any, w: Any) -> Any:
    p = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H))
    return jnp.einsum("btnh,nhd->btd", jnp.einsum("bnts,bsnh->btnh", p, v), w["o"]) + w["bo"]


def _shapes(keys: int) -> dict[str, tuple[int, ...]]:
    heads = {"q": N, "k": keys, "v": keys}
    shapes: dict[str, tuple[int, ...]] = {c: (D, n, H) for c, n in heads.items()}
    return shapes | {f"b{c}": (n, H) for c, n in heads.items()} | {"o": (N, H, D), "bo": (D,)}


@pytest.mark.parametrize("keys", [N, 2, 1], ids=["as many keys", "two keys", "one key"])
def test_rows_of_a_fused_matrix(keys):
    found = derive(_attention, Attention(keys), _shapes(keys))
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert sources(found)["a.weight"] == ("q", "k", "v") and sources(found)["a.bias"] == ("bq", "bk", "bv")
    assert found.tensor("b.weight").parts[0].contracted == (0, 1)


def test_rows_of_a_fused_matrix_head_by_head():
    class HeadByHead(Attention):
        def forward(self, x: Any) -> Any:
            q, k, v = self.a(x).unflatten(-1, (N, 3, H)).permute(3, 0, 2, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v)
            return self.b(y.transpose(-2, -3).flatten(-2))

    module = HeadByHead()
    found = derive(_attention, module, _shapes(N))
    assert grades(found) == {Grade.DERIVED}
    assert rules(found, module)[0] == (
        '- einsum: ...D,DNH->...NH\n  from: "{q,k,v}"\n  bias: "{bq,bk,bv}"\n  linear: {module: a, axes: "(N (1 + 1 + 1) H)D"}'
    )


def _without_heads(w: Any, x: Any) -> Any:
    return _attention(
        {key: leaf.reshape(-1, N, H) if leaf.ndim > 1 else leaf for key, leaf in w.items()} | _heads(w), x
    )


def _heads(w: Any) -> dict[str, Any]:
    return {f"b{c}": w[f"b{c}"].reshape(N, H) for c in "qkv"} | {"o": w["o"].reshape(N, H, D)}


@pytest.mark.parametrize("heads", [True, False], ids=["leaves have heads", "leaves have none"])
@pytest.mark.parametrize("taps", [0, 1, 2], ids=["a matrix", "a kernel of one tap", "a kernel of one pixel"])
def test_a_kernel_of_one_tap_has_its_rows_head_by_head(heads: bool, taps: int) -> None:
    class OfOneTap(Attention):
        def __init__(self) -> None:
            super().__init__()
            if taps:
                self.a = (torch.nn.Conv1d, torch.nn.Conv2d)[taps - 1](D, 3 * N * H, 1)

        def forward(self, x: Any) -> Any:
            rows = self.a(x.mT[..., *[None] * (taps - 1)]).flatten(2).mT if taps else self.a(x)
            q, k, v = rows.unflatten(-1, (N, 3, H)).permute(3, 0, 2, 1, 4)
            return self.b(functional.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))

    flat: dict[str, tuple[int, ...]] = dict.fromkeys("qkvo", SQUARE) | dict.fromkeys(("bq", "bk", "bv", "bo"), (D,))
    module = OfOneTap()
    found = derive(_attention if heads else _without_heads, module, _shapes(N) if heads else flat)
    assert grades(found) == {Grade.DERIVED}
    stored, made = ("DNH", "NH") if heads else ("D(N H)", "(N H)")
    of = f"...D,{stored}->...{made}"
    of = of if heads else f'"{of}"'
    axes = f'"(N (1 + 1 + 1) H)D{"." * taps}"'
    assert rules(found, module)[0] == (
        f'- einsum: {of}\n  from: "{{q,k,v}}"\n  bias: "{{bq,bk,bv}}"\n  linear: {{module: a, axes: {axes}}}'
    )


def test_a_bias_has_the_axes_of_the_result_and_the_rows_another_order():
    """The source's kernel is heads, then queries, keys and values; the target's rows are the other way round."""

    def split(w: Any, x: Any) -> Any:
        parts = jnp.moveaxis(jnp.einsum("btd,dnch->btnch", x, w["qkv"]) + w["b"], -2, 0)
        return _attended(*parts, w)

    module = Attention()
    found = derive(split, module, {"qkv": (D, N, 3, H), "b": (N, 3, H), "o": (N, H, D), "bo": (D,)})
    assert rules(found, module)[0] == (
        '- einsum: ...D,DNCH->...NCH\n  from: qkv\n  bias: b\n  linear: {module: a, axes: "(C N H)D"}'
    )


def test_a_fused_leaf_becomes_two_layers():
    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(3))

        def forward(self, x: Any) -> Any:
            return self.m[0](self.m[1](x) * torch.tanh(self.m[2](x)))

    def function(w, x):
        gate, up = jnp.einsum("btd,cdf->cbtf", x, w["w"])
        return (jnp.tanh(gate) * up) @ w["o"]

    found = derive(function, Gated(), {"w": (2, D, D), "o": SQUARE})
    assert found.complete and grades(found) == {Grade.DERIVED}
    (up,), (gate,) = found.tensor("m.1.weight").parts, found.tensor("m.2.weight").parts
    assert gate.leaf == up.leaf == "w"
    assert gate.positions.max() < D * D <= up.positions.min()


def test_a_stacked_leaf_becomes_many_layers():
    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(10))

        def forward(self, x: Any) -> Any:
            for layer in self.m:
                x = x + torch.tanh(layer(x))
            return x

    def function(w, x):
        return jax.lax.scan(lambda x, wb: (x + jnp.tanh(x @ wb[0] + wb[1]), None), x, (w["w"], w["b"]))[0]

    found = derive(function, Stack(), {"w": (10, D, D), "b": (10, D)})
    assert found.complete and grades(found) == {Grade.DERIVED}
    for k in range(10):
        (part,) = found.tensor(f"m.{k}.weight").parts
        assert part.leaf == "w" and part.contracted == (1,)
        assert np.array_equal(part.positions.reshape(D, D), k * D * D + np.arange(D * D).reshape(D, D).T)


def test_embeddings_tied_and_with_more_rows_in_the_source():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Embedding(11, D), torch.nn.Embedding(20, D)
            self.head = torch.nn.Linear(D, 11, bias=False)
            self.head.weight = self.a.weight

        def forward(self, x: Any) -> Any:
            return self.head(torch.tanh(self.a(x) + self.b(torch.arange(x.shape[1]))))

    def function(w, x):
        y = jnp.tanh(w["t"][x] + w["p"][: x.shape[1]])
        return y @ w["t"][:11].T

    found = derive(function, Model(), {"p": (20, D), "t": (13, D)}, tokens(11, 3, 7))
    assert found.complete and sources(found) == {"a.weight": "t", "b.weight": "p"}
    assert found.tensor("head.weight") is found.tensor("a.weight")
    assert found.tensor("b.weight").unseen == 13 * D
    assert np.array_equal(found.tensor("a.weight").parts[0].positions, np.arange(11 * D))


def test_tables_whose_last_rows_the_target_lacks():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Embedding(rows, D) for rows in (11, 11, 9))
            self.head = torch.nn.Linear(D, 11, bias=False)
            self.head.weight = self.a.weight

        def forward(self, x: Any) -> Any:
            return self.head(torch.tanh(self.a(x) + self.b(x) + self.c(torch.arange(x.shape[1]))))

    def function(w, x):
        return (jnp.tanh(w["t"][x] + w["u"][x] + w["p"][jnp.arange(x.shape[1])]) @ w["t"].T)[..., :11]

    module = Model()
    found = derive(function, module, {"p": (10, D), "t": (13, D), "u": (16, D)}, tokens(11, 3, 7))
    assert grades(found) == {Grade.DERIVED}, "the head reads one of the two tables again"
    assert rules(found, module) == [
        f"- from: {leaf}\n  rows: ${fact}\n  padded: [{rows}]\n  axes: {axes}\n  embedding: {to}"
        for leaf, fact, rows, axes, to in (
            ("t", "entries", 13, "VD", "{module: a, tied: head}"),
            ("u", "entries", 16, "AD", "b"),
            ("p", "entries_2", 10, "BD", "c"),
        )
    ]
    text = write_rules(found, model_of_module(module, "Model")).text
    assert "facts:\n  entries: 11\n  entries_2: 9\n" in text


@pytest.mark.parametrize("plus", [0, 1], ids=["scale", "1+scale"])
@pytest.mark.parametrize("target", [0, 1], ids=["weight", "1+weight"])
def test_norms_and_what_they_multiply_by(plus, target):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = torch.nn.ModuleList(torch.nn.LayerNorm(D, eps=1e-6) for _ in range(2))
            self.w = torch.nn.Parameter(torch.randn(D))
            self.o = torch.nn.Linear(D, D, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.m[0](torch.tanh(self.m[1](x)))
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * (target + self.w)
            return self.o(y)

    def function(w, x):
        x = layer_norm(jnp.tanh(layer_norm(x, w["s"], w["t"])), w["u"], w["v"])
        return rms_norm(x, plus + w["a"]) @ w["o"]

    shapes = dict.fromkeys("astuv", (D,)) | {"o": SQUARE}
    found = derive(function, Model(), shapes)
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert sources(found) == {
        "m.1.weight": "s", "m.1.bias": "t", "m.0.weight": "u", "m.0.bias": "v", "w": "a", "o.weight": "o",
    }  # fmt: skip
    how = {0: Arithmetic.SAME, 1: Arithmetic.ONE_PLUS, -1: Arithmetic.MINUS_ONE}[plus - target]
    assert found.tensor("w").parts[0].arithmetic is how


def test_masks_of_zeros_and_ones_are_told_apart_and_constant_columns_are_tied():
    def inputs(constant):
        def make(seed):
            rng = np.random.default_rng(seed)
            x = rng.normal(size=(5, 9, D))
            x[..., D // 2 :] = 1.0 if constant else rng.random((5, 9, D // 2)) < 0.4
            return {"x": x}

        return make

    def function(w, x):
        return jnp.tanh(x @ w["a"]) @ w["b"]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return self.m[1](torch.tanh(self.m[0](x)))

    shapes = {"a": SQUARE, "b": SQUARE}
    assert grades(derive(function, Model(), shapes, inputs(False))) == {Grade.DERIVED}
    found = derive(function, Model(), shapes, inputs(True))
    assert not found.complete
    assert found.tensor("m.0.weight").grade is Grade.TIED
    assert found.tensor("m.0.weight").ties[0].columns == tuple(range(D // 2, D))
    assert found.tensor("m.1.weight").grade is Grade.DERIVED


def test_a_factor_of_a_leaf():
    found = derive(lambda w, x: jnp.tanh(x @ (w["a"] * 0.25)), torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()), {"a": SQUARE})  # fmt: skip
    assert found.complete and found.tensor("0.weight").parts[0].factor == pytest.approx(0.25)


@pytest.mark.slow
def test_inputs_of_no_columns_that_differ_by_layer_are_not_needed():
    """Ten times the same shapes: the cost grows with the number of layers, not faster."""
    tried = []
    for layers in (2, 4, 8):

        def function(w, x, layers=layers):
            for k in range(layers):
                x = x + jnp.tanh(x @ w[f"a{k}"]) @ w[f"b{k}"]
            return x

        class Model(torch.nn.Module):
            def __init__(self, layers: int = layers) -> None:
                super().__init__()
                self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(2 * layers))

            def forward(self, x: Any) -> Any:
                for a, b in zip(self.m[::2], self.m[1::2], strict=True):
                    x = x + b(torch.tanh(a(x)))
                return x

        found = derive(function, Model(), {f"{c}{k}": SQUARE for c in "ab" for k in range(layers)}, floats(2, 5, D))
        assert found.complete and grades(found) == {Grade.DERIVED}
        tried.append(found.tried)
    assert tried[2] - tried[1] <= 2 * (tried[1] - tried[0])
