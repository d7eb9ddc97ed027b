"""One layer or parameter that stands in several places of a module: its tensors have several names in the state_dict."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.rule_file.joining.copies import TAKEN
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import WIDTH, derive, floats, rules, tokens

D = WIDTH


class Layer(torch.nn.Module):
    def __init__(self, shift: torch.nn.Parameter) -> None:
        super().__init__()
        self.up, self.shift = torch.nn.Linear(D, D), shift

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.up(x)) * self.shift


class Model(torch.nn.Module):
    """Two layers, of which one is applied twice, and a parameter of the model that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(D))
        one, other = Layer(self.shift), Layer(self.shift)
        self.layers = torch.nn.ModuleList([one, other, one])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def model(w: Any, x: Any) -> Any:
    for k in (0, 1, 0):
        x = x + jnp.tanh(x @ w[f"k{k}"] + w[f"c{k}"]) * w["s"]
    return x


def test_the_names_of_what_several_places_share_are_written() -> None:
    module = Model()
    found = derive(model, module, {"k0": (D, D), "k1": (D, D), "c0": (D,), "c1": (D,), "s": (D,)})
    assert found.complete, (found.differences, found.proof)
    written = write_rules(found, model_of_module(module, "Model"))
    assert written.open == {}
    assert 'loads: "Model", shared: {layers.0: [layers.2], shift: [layers.0.shift, layers.1.shift]}' in written.text


class Basis(nn.Module):
    """Tables that the module keeps as parameters, with a layer in front, as the trend of N-BEATS."""

    def __init__(self, changed: float = 0.0) -> None:
        super().__init__()
        tables = torch.tensor(TREND + changed, dtype=torch.float32)
        self.theta = nn.Linear(WIDTH, len(TREND), bias=False)
        self.past, self.future = (nn.Parameter(tables.clone(), requires_grad=False) for _ in range(2))

    def forward(self, x: Any) -> tuple[Any, Any]:
        theta = self.theta(x).relu()
        return theta @ self.past, theta @ self.future


class Repeated(nn.Module):
    def __init__(self, changed: float = 0.0) -> None:
        super().__init__()
        block = Basis(changed)
        self.blocks, self.head = nn.ModuleList([block, block]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        made = 0
        for block in self.blocks:
            past, future = block(x)
            x, made = x - past, made + future
        return self.head(torch.tanh(made))


def _repeated(w: Any, x: Any) -> Any:
    made = 0
    for _ in range(2):
        theta = jax.nn.relu(x @ w["theta"])
        x, made = x - theta @ TREND, made + theta @ TREND
    return jnp.tanh(made) @ w["w"] + w["b"]


TREND = (np.arange(WIDTH) / WIDTH) ** np.arange(4)[:, None]
REPEATED = {"theta": (WIDTH, len(TREND)), "w": (WIDTH, WIDTH), "b": (WIDTH,)}


def test_tables_of_a_block_that_stands_twice_are_written_once() -> None:
    module = Repeated()
    found = derive(_repeated, module, REPEATED, floats(20, WIDTH))
    assert found.complete, found.differences
    written = [rule for rule in rules(found, module) if "constant:" in rule]
    assert [rule.rpartition("constant: ")[2] for rule in written] == ["blocks.0.past", "blocks.0.future"]


@pytest.mark.slow
def test_other_tables_of_a_block_that_stands_twice() -> None:
    """The planted fault: the module's tables are higher by a hundredth."""
    found = derive(_repeated, Repeated(0.01), REPEATED, floats(20, WIDTH))
    assert not found.complete and found.proof is None


class Tied(nn.Module):
    """An autoencoder of three layers, with matrices of its own on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(*WIDTHS[i : i + 2]) for i in range(3))
        self.back = nn.ModuleList(nn.Linear(WIDTHS[i + 1], WIDTHS[i]) for i in range(3))

    def forward(self, x: Any) -> Any:
        for layer in (*self.up, *reversed(self.back)):
            x = torch.tanh(layer(x))
        return x


def _tied(w: Any, x: Any) -> Any:
    for i in range(3):
        x = jnp.tanh(x @ w[f"k{i}"] + w[f"b{i}"])
    for i in (2, 1, 0):
        x = jnp.tanh(x @ w[f"k{i}"].T + w[f"c{i}"])
    return x


WIDTHS = (5, 6, 7, 4)
TIED = {f"k{i}": WIDTHS[i : i + 2] for i in range(3)}
TIED |= {f"{n}{i}": WIDTHS[i + own : i + own + 1] for i in range(3) for n, own in (("b", 1), ("c", 0))}


def test_a_leaf_that_is_a_matrix_and_its_transpose() -> None:
    module = Tied()
    found = derive(_tied, module, TIED, floats(3, 7, WIDTHS[0]))
    written = rules(found, module)
    for i, (ours, theirs) in enumerate((("CD", "DC"), ("DE", "ED"), ("EF", "FE"))):
        of_weights = f"[{{name: up.{i}.weight, axes: {theirs}}}, {{name: back.{i}.weight, axes: {ours}}}]"
        assert f"- from: k{i}\n  axes: {ours}\n  parameter: {of_weights}" in written
        assert f"- from: c{i}\n  parameter: back.{i}.bias" in written
    text = write_rules(found, model_of_module(module, "Model")).text
    planted = text.replace("{name: up.1.weight, axes: ED}", "{name: up.1.weight, axes: DE}")
    assert [wrong.tensor for wrong in compare_rules(planted, found)] == ["up.1.weight"]


def test_a_table_that_is_also_a_matrix() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.l = nn.Embedding(12, 5), nn.Linear(5, 5)
            self.h = nn.Parameter(torch.zeros(5, 12))

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.l(self.e(x))) @ self.h

    module = Model()
    shapes = {"e": (12, 5), "l": (5, 5), "b": (5,)}
    found = derive(lambda w, x: jnp.tanh(w["e"][x] @ w["l"] + w["b"]) @ w["e"].T, module, shapes, tokens(12, 3, 9))
    own = "  parameter: [{name: h, axes: DC}, {name: e.weight, axes: CD}]"
    assert f"- from: e\n  axes: CD\n{own}" in rules(found, module)


def test_a_leaf_that_one_layer_has_whole_and_others_in_part_has_no_rule() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(5, of, bias=False) for of in (12, 6, 6))

        def forward(self, x: Any) -> Any:
            return torch.cat(
                [torch.tanh(self.a(x)), torch.tanh(self.b(x.flip(1))) * torch.sigmoid(self.c(x.cos()))], -1
            )

    def function(w: Any, x: Any) -> Any:
        gated = jnp.tanh(x[:, ::-1] @ w["k"][:, :6]) * jax.nn.sigmoid(jnp.cos(x) @ w["k"][:, 6:])
        return jnp.concatenate([jnp.tanh(x @ w["k"]), gated], -1)

    module = Model()
    found = derive(function, module, {"k": (5, 12)}, floats(3, 7, 5))
    assert found.complete and TAKEN in write_rules(found, model_of_module(module, "Model")).open.values()


@pytest.mark.parametrize("factor", [1, 2])
def test_a_bias_that_two_layers_have(factor: int) -> None:
    """Planted: one of them has twice the leaf, and the rule of a leaf has one factor."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(5, 6)

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.a(x)) * torch.cos(self.b(x))

    def function(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w["a"] + w["c"]) * jnp.cos(x @ w["b"] + factor * w["c"])

    module = Model()
    found = derive(function, module, {"a": (5, 6), "b": (5, 6), "c": (6,)}, floats(3, 7, 5))
    written = write_rules(found, model_of_module(module, "Model"))
    assert found.complete and compare_rules(written.decided, found, written.open) == []
    assert ("  parameter: [a.bias, b.bias]" in written.text) is (factor == 1)
    assert list(written.open.values()) == ([] if factor == 1 else [TAKEN])
