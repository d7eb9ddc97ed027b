"""Networks whose parameters are a stack in the JAX model, and modules with names of their own in the PyTorch model: ``{s:det,lat}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats, layer_norm, linen, rules

D, H = 3, 6
OF_EACH = {"mlp/0/w": (D, H), "mlp/0/b": (H,)}
OF_EACH |= {f"mlp/{k}/{name}": shape for k in (1, 2) for name, shape in (("w", (H, H)), ("b", (H,)))}
OF_EACH |= {f"{name}/{x}": shape for name in ("value", "gate") for x, shape in (("w", (H, H)), ("b", (H,)))}
OF_EACH |= {f"norm_{k}/{x}": (H,) for k in (1, 2) for x in ("gain", "shift")}
SHAPES = {name: (2, *shape) for name, shape in OF_EACH.items()}
NAMES = ("det", "lat")


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(H, 2 * H)

    def forward(self, x: Any) -> Any:
        return functional.glu(self.fc(x), dim=-1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = ((nn.Linear(n, H), nn.ReLU()) for n in (D, H, H))
        self.embed = nn.Sequential(*(one for layer in layers for one in layer))
        self.gate = Gate()
        self.norms = nn.ModuleList(nn.LayerNorm(H, eps=1e-6) for _ in range(2))

    def forward(self, x: Any) -> Any:
        first, last = self.norms
        y = first(self.embed(x))
        return last(y + self.gate(y))


class Named(nn.Module):
    """Both encoders, in this order; `fault`: one gate for both."""

    def __init__(self, *order: str, fault: bool = False) -> None:
        super().__init__()
        self.order = order
        for name in NAMES:
            setattr(self, name, nn.ModuleDict({"encoder": Encoder()}))
        if fault:
            self.lat["encoder"].gate = self.det["encoder"].gate

    def forward(self, x: Any) -> Any:
        return torch.stack([getattr(self, name)["encoder"](x) for name in self.order])


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(Encoder() for _ in NAMES)

    def forward(self, x: Any) -> Any:
        return torch.stack([encoder(x) for encoder in self.encoders])


def _encoder(w: Mapping[str, Any], x: Any) -> Any:
    for k in range(3):
        x = jax.nn.relu(x @ w[f"mlp/{k}/w"] + w[f"mlp/{k}/b"])
    x = layer_norm(x, w["norm_1/gain"], w["norm_1/shift"])
    gated = (x @ w["value/w"] + w["value/b"]) * jax.nn.sigmoid(x @ w["gate/w"] + w["gate/b"])
    return layer_norm(x + gated, w["norm_2/gain"], w["norm_2/shift"])


def encoders(w: Mapping[str, Any], x: Any) -> Any:
    return jax.vmap(_encoder, in_axes=(0, None))(dict(w), x)


def _in_line(rule: str) -> str:
    return rule.removeprefix("- ").replace("\n  ", ", ")


@pytest.mark.slow
@pytest.mark.parametrize(("order", "i"), [(NAMES, "i"), (NAMES[::-1], "j")])
def test_the_elements_of_a_stack_have_the_names_of_modules(order: tuple[str, ...], i: str) -> None:
    module, names = Named(*order), ",".join(order)
    assert [_in_line(rule) for rule in rules(derive(encoders, module, SHAPES, floats(9, 4, D)), module)] == [
        f'einsum: ...D,CDE->...CE, from: mlp/0/w, bias: mlp/0/b, linear: "{{{names}}}.encoder.embed.0"',
        "einsum: ...E,EF->...F, from: mlp/{1,2}/w, bias: mlp/{1,2}/b, stacked: {k: 0}, "
        f'linear: "{{k:{names}}}.encoder.embed.{{2,4}}"',
        'einsum: ...E,EF->...F, from: "{value,gate}/w", bias: "{value,gate}/b", stacked: {k: 0}, '
        f'linear: "{{k:{names}}}.encoder.gate.fc"',
        f'from: "norm_{{{i}+1}}/gain", bias: "norm_{{{i}+1}}/shift", stacked: {{k: 0}}, multiplies_by: scale, '
        f'epsilon: 1e-6, axes: E, layer_norm: "{{k:{names}}}.encoder.norms.{{{i}}}"',
    ]


def test_a_list_of_modules_has_an_index() -> None:
    module = Listed()
    written = rules(derive(encoders, module, SHAPES, floats(9, 4, D)), module)
    assert all("stacked: {i: 0}" in rule and "encoders.{i}." in rule for rule in written), written


def test_names_in_another_order_make_other_tensors() -> None:
    module = Named(*NAMES)
    found = derive(encoders, module, SHAPES, floats(9, 4, D))
    written = write_rules(found, model_of_module(module, "Model")).text
    exchanged = written.replace("{k:det,lat}.encoder.gate", "{k:lat,det}.encoder.gate")
    assert exchanged != written and compare_rules(written, found) == []
    wrong = {f"{name}.encoder.gate.fc.{tensor}" for name in NAMES for tensor in ("weight", "bias")}
    assert {one.tensor for one in compare_rules(exchanged, found)} == wrong


@pytest.mark.slow
def test_one_gate_for_both_is_not_derived() -> None:
    found = derive(encoders, Named(*NAMES, fault=True), SHAPES, floats(9, 4, D))
    assert not found.complete and found.differences


class Places(nn.Module):
    """The norms of two networks, which are in a list each, in the one below another name."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(H, eps=1e-6) for _ in range(2))
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(H, eps=1e-6)}) for _ in range(2))

    def forward(self, x: Any) -> Any:
        y = x
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x, y = norm(x).tanh(), block["norm"](y).tanh()
        return torch.stack([x, y])


def _norms(w: Mapping[str, Any], x: Any) -> Any:
    for k in range(2):
        x = jnp.tanh(layer_norm(x, w[f"{k}/gain"], w[f"{k}/shift"]))
    return x


def test_norms_that_no_pattern_names_are_parts() -> None:
    module, shapes = Places(), {f"{k}/{name}": (2, H) for k in range(2) for name in ("gain", "shift")}
    found = derive(lambda w, x: jax.vmap(_norms, (0, None))(dict(w), x), module, shapes, floats(9, 4, H))
    assert [_in_line(rule) for rule in rules(found, module)] == [
        f'from: "{{i}}/{leaf}", axes: (1 + 1)D, part: {part} of 2, parameter: {{name: "{name}.{tensor}", axes: D}}'
        for part, name in ((1, "norms.{i}"), (2, "blocks.{i}.norm"))
        for leaf, tensor in (("gain", "weight"), ("shift", "bias"))
    ]
    written = write_rules(found, model_of_module(module, "Model")).text
    exchanged = re.sub(r"(norms\.|blocks\.)(\{i\}|\{i\}\.norm)\.weight", _other, written)
    assert exchanged != written
    wrong = {f"{name}.weight" for k in range(2) for name in (f"norms.{k}", f"blocks.{k}.norm")}
    assert {one.tensor for one in compare_rules(exchanged, found)} == wrong


def _other(name: re.Match[str]) -> str:
    return "norms.{i}.weight" if name[1] == "blocks." else "blocks.{i}.norm.weight"


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Four(nn.Module):
    """Four layers of one kind in two lists, in the one below another name."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.blocks = nn.ModuleList(nn.ModuleDict({"layer": make()}) for _ in range(2))

    def forward(self, x: Any) -> Any:
        each = (*self.layers, *(block["layer"] for block in self.blocks))
        return torch.stack([layer(x.mT).mT if isinstance(layer, nn.Conv1d) else layer(x) for layer in each])


def _scaled(x: Any, w: Mapping[str, Any]) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + w["a"])


def _convolved(x: Any, w: Mapping[str, Any]) -> Any:
    return jax.lax.conv_general_dilated(x, w["a"], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")) + w["b"]


@pytest.mark.parametrize(
    ("function", "make", "shapes", "said"),
    [
        (_scaled, Rms, {"a": (H,)}, 'from: "{i}/a + 1", axes: (1 + 1)D, part: 1 of 2'),
        (_convolved, lambda: nn.Conv1d(H, 4, 3), {"a": (3, H, 4), "b": (4,)}, 'from: "{i}/a", axes: (1 + 1)PDC, part: 1 of 2'),
    ],
    ids=["one plus the scale", "convolutions"],
)  # fmt: skip
def test_other_layers_that_no_pattern_names_are_parts(
    function: Any, make: Any, shapes: Mapping[str, tuple[int, ...]], said: str
) -> None:
    def each(w: Mapping[str, Any], x: Any) -> Any:
        leaves = [{name: w[f"{k}/{name}"][at] for name in shapes} for at in range(2) for k in range(2)]
        return jnp.stack([function(x, of) for of in leaves])

    module = Four(make)
    stacks = {f"{k}/{name}": (2, *shape) for k in range(2) for name, shape in shapes.items()}
    written = [_in_line(rule) for rule in rules(derive(each, module, stacks, floats(3, 7, H)), module)]
    assert written[0].startswith(f'{said}, parameter: {{name: "layers.{{i}}.weight"'), written
    assert len(written) == 2 * len(shapes)


class Attentions(nn.Module):
    """Attention layers for the same data; the wrong ones take the values from the end."""

    def __init__(self, *, wrong: bool = False) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.MultiheadAttention(H, 2, batch_first=True) for _ in range(2))
        self.wrong = wrong

    def forward(self, x: Any) -> Any:
        one, two = (attend(x, x, torch.flip(x, [1]) if self.wrong else x)[0] for attend in self.each)
        return torch.stack([one, two])


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_a_stack_of_attention_layers_has_one_rule(wrong: bool) -> None:
    """The bias of a key changes no output, so that only a value that both programs share shows it."""
    attend, sizes = linen(flax.linen.MultiHeadDotProductAttention(2), np.zeros((2, 5, H)))
    found = derive(
        lambda w, x: jax.vmap(lambda each: attend(each, x))(dict(w)),
        module := Attentions(wrong=wrong),
        {name: (2, *shape) for name, shape in sizes.items()},
        floats(3, 5, H),
    )
    assert found.complete is not wrong
    if not wrong:
        (rule,) = rules(found, module)
        assert "flax.linen.MultiHeadDotProductAttention" in rule and "attention: each.{i}" in rule


class Cells(nn.Module):
    """Two recurrent layers for the same data, or one behind the other as layers of one module."""

    def __init__(self, kind: str, *, deep: bool) -> None:
        super().__init__()
        make = {"gru": nn.GRU, "lstm": nn.LSTM}[kind]
        self.deep = deep
        if deep:
            self.rnn = make(H, H, num_layers=2, batch_first=True)
        else:
            self.det, self.lat = make(H, H, batch_first=True), make(H, H, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.rnn(x)[0] if self.deep else torch.stack([self.det(x)[0], self.lat(x)[0]])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cell"), [("gru", "GRUCell"), ("lstm", "OptimizedLSTMCell")])
@pytest.mark.parametrize("deep", [False, True])
def test_a_stack_of_recurrent_cells_has_one_rule(kind: str, cell: str, deep: bool) -> None:
    recur, sizes = linen(flax.linen.RNN(getattr(flax.linen, cell)(H)), np.zeros((2, 5, H)))
    leaves = {name: (2, *shape) for name, shape in sizes.items()}

    def function(w: Mapping[str, Any], x: Any) -> Any:
        if not deep:
            return jax.vmap(lambda each: recur(each, x))(dict(w))
        for k in range(2):
            x = recur({name: leaf[k] for name, leaf in w.items()}, x)
        return x

    module = Cells(kind, deep=deep)
    found = derive(function, module, leaves, floats(3, 5, H))
    assert found.complete
    written = write_rules(found, model_of_module(module, "Model"))
    (rule,) = rules(found, module)
    target = f"{kind}: {{module: rnn, layer: " if deep else f"{kind}: " + '"{i:det,lat}"'
    assert not written.open and "stacked: {i: 0}" in rule and target in rule
    wrong = written.text.replace("{i:det,lat}", "{i:lat,det}")
    assert compare_rules(written.text, found) == [] and (deep or compare_rules(wrong, found))
