"""Mistakes in the target's code with outputs alone: a map that both sides flatten, fused heads, the states of an LSTM, dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import convert
from convert.references.protocol import Reference
from convert.verify.run import check

WIDTH, HEADS, BATCH = 6, 2, 3
SAID: dict[str, str] = {}
HEAD = "title: small\ntargets:\n  torch: {loads: a module of the test}\nrules:\n"
MAP = """model: map
axes: {Y: {is: rows, equals: 4}, X: {is: columns, equals: 5}, C: {is: channels, equals: 2}}
"""
CONVOLUTION = """- {dimension_numbers: "NHWC,HWIO->NHWC", axes: PQIC, from: conv/kernel, bias: conv/bias, padding: VALID, conv: conv}
- {einsum: "...J,JK->...K", from: head/kernel, bias: head/bias, flattened: {J: YXC}, linear: head}
"""
HEADS_RULES = """- {einsum: "...D,DNH->...NH", from: "{q,k,v}/kernel", bias: "{q,k,v}/bias", linear: qkv}
- {einsum: "...NH,NHD->...D", from: o, linear: o}
"""
CELL = """- {einsum: "...D,DS->...S", from: start, linear: start}
- {cell: haiku.LSTM, from: rnn, inputs: D, hidden: H, lstm: rnn}
"""


class Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 2, (2, 3)), nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = nn.functional.relu(self.conv(x.permute(0, 3, 1, 2))).flatten(1)
        if "dropout" in SAID:
            y = nn.functional.dropout(y, 0.3)
        return self.head(y).log_softmax(0 if "batch" in SAID else 1)


class FlaxMap(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        y = flax.linen.relu(flax.linen.Conv(2, (2, 3), padding="VALID", name="conv")(x))
        return jax.nn.log_softmax(flax.linen.Dense(WIDTH, name="head")(y.reshape(len(y), -1)), 1)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        sizes, parts = ((HEADS, 3, -1), 3) if "heads first" in SAID else ((3, HEADS, -1), 2)
        q, k, v = self.qkv(x).unflatten(-1, sizes).unbind(parts if parts == 3 else 2)
        p = torch.einsum("btnh,bsnh->bnts", q, k).softmax(-1)
        return self.o(torch.einsum("bnts,bsnh->btnh", p, v).flatten(2))


def _heads(w: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    x = inputs["x"].astype(w["o"].dtype)
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[f"{name}/kernel"]) + w[f"{name}/bias"] for name in "qkv")
    p = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), -1)
    return {"y": jnp.einsum("bnts,bsnh,nhd->btd", p, v, w["o"])}


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.rnn = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        if "first state" in SAID:
            return x + self.rnn(x)[0]
        h, c = self.start(x.mean(1))[None].chunk(2, -1)
        states = (h.contiguous(), c.contiguous())
        y = self.rnn(x, states[::-1] if "states" in SAID else states)[0]
        return x + (y.flip(1) if "turned" in SAID else y)


def _cell(w: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    x = inputs["x"].astype(w["start"].dtype)
    h, c = jnp.split(x.mean(1) @ w["start"], 2, -1)
    steps = []
    for t in range(x.shape[1]):
        both = jnp.concatenate([x[:, t], h], -1) @ w["rnn/linear/w"] + w["rnn/linear/b"]
        i, g, f, o = jnp.split(both, 4, -1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        steps.append(h)
    return {"y": x + jnp.stack(steps, 1)}


def _map(w: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    params = {name: {leaf: w[f"{name}/{leaf}"] for leaf in ("kernel", "bias")} for name in ("conv", "head")}
    return {"y": FlaxMap().apply({"params": params}, inputs["x"])}


def _pair(made: type[nn.Module], side: Callable[..., dict[str, Any]], *shape: int) -> Callable[[Any], Reference]:
    def build(state: Mapping[str, torch.Tensor]) -> nn.Module:
        module = made()
        module.load_state_dict(dict(state), strict=True, assign=True)
        return module.eval()

    return lambda plan: Reference(
        inputs=lambda seed: {"x": np.random.default_rng(seed).normal(size=(BATCH, *shape)).astype(np.float32)},
        jax=side,
        build=build,
        run=lambda module, inputs: {"y": module(inputs["x"])},
        outputs=("y",),
        reduction=40,
        depth=6,
    )


map_pair, heads_pair, cell_pair = (
    _pair(Map, _map, 5, 7, 3),
    _pair(Heads, _heads, 5, WIDTH),
    _pair(Cell, _cell, 5, WIDTH),
)
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "map": {"conv/kernel": (2, 3, 3, 2), "conv/bias": (2,), "head/kernel": (40, WIDTH), "head/bias": (WIDTH,)},
    "heads": {
        **{f"{name}/kernel": (WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"},
        **{f"{name}/bias": (HEADS, WIDTH // HEADS) for name in "qkv"},
        "o": (HEADS, WIDTH // HEADS, WIDTH),
    },
    "cell": {
        "start": (WIDTH, 2 * WIDTH),
        "rnn/linear/w": (2 * WIDTH, 4 * WIDTH),
        "rnn/linear/b": (4 * WIDTH,),
    },
}
RULES = {
    "map": MAP + HEAD + CONVOLUTION,
    "heads": "model: heads\n" + HEAD + HEADS_RULES,
    "cell": "model: cell\n" + HEAD + CELL,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fault", "name", "text"),
    [
        ("map", "", "", ""),
        ("heads", "", "", ""),
        ("cell", "", "", ""),
        # Both sides flatten the map in their own order, as the rule declares: what `head` is given is not the mistake.
        ("map", "batch", "another computation", "over axis 0"),
        ("map", "dropout", "dropout in eval mode", "test_orders_and_states.py:"),
        ("heads", "heads first", "parts within heads", "of each of the 2 heads (N) the rows of all 3 leaves"),
        ("cell", "states", "states exchanged", "rnn is given (c, h)"),
        ("cell", "turned", "sequence in the reverse order", "axis 1, the sequence, of what rnn gives"),
        ("cell", "first state", "", "the target's code never uses start.weight, and the JAX model's outputs depend on"),
    ],
)
def test_the_mistake_is_named(model: str, fault: str, name: str, text: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    leaves: dict[str, Any] = {name: rng.normal(size=s).astype(np.float32) / 2 for name, s in SHAPES[model].items()}
    np.savez(tmp_path / "ckpt.npz", **leaves)
    (tmp_path / "rules.yaml").write_text(RULES[model])
    convert.convert(str(tmp_path / "rules.yaml"), tmp_path / "ckpt.npz", tmp_path / "out.safetensors")
    SAID.clear()
    SAID.update({fault: fault} if fault else {})
    report = check(
        tmp_path / "out.safetensors",
        tmp_path / "ckpt.npz",
        model=str(tmp_path / "rules.yaml"),
        reference=f"{__name__}:{model}_pair",
        levels=("model",),
    )
    diagnosis = report.levels[-1].diagnosis
    assert report.exit_code == bool(fault)
    assert (diagnosis is None) == (not fault)
    if diagnosis is not None:
        assert (diagnosis["name"], text in diagnosis["problem"]) == (name, True), diagnosis
