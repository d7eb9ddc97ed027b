"""Small models of one part each, most as plain functions of JAX: attention with norms and RoPE, positions, experts, states, fused heads.

`MODELS` has them by name. Methods of the PyTorch sides are what the fault catalogue replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from convert.references.protocol import Reference
from support.choice_models import CHOICE_MODELS
from support.memory_source import MemorySource
from support.small_model import BATCH, HEAD, HEADS, STEPS, WIDTH, Small, Weights
from support.step_models import STEP_MODELS

TOKENS, OFFSET, EXPERTS, CHOSEN = 11, 2, 4, 2
BASE, EPSILON = 10000.0, 1e-6


# ---- attention: norms of queries and keys, and RoPE, in one order or the other


def normed(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale


def _turned(x: Any) -> Any:
    angles = jnp.arange(STEPS)[:, None] / BASE ** (jnp.arange(0, HEAD, 2) / HEAD)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    one, two = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((one * cos - two * sin, two * cos + one * sin), axis=-1)


def _attention(order: str, w: Weights, inputs: Weights) -> dict[str, Any]:
    x = inputs["x"].astype(w["o"].dtype)
    q, k, v = ((x @ w[name]).reshape(*x.shape[:2], HEADS, HEAD) for name in "qkv")
    if order == "norm first":
        q, k = _turned(normed(q, w["q_norm"])), _turned(normed(k, w["k_norm"]))
    else:
        q, k = normed(_turned(q), w["q_norm"]), normed(_turned(k), w["k_norm"])
    shares = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) * HEAD**-0.5, axis=-1)
    return {"y": jnp.einsum("bnts,bsnh->btnh", shares, v).reshape(x.shape) @ w["o"]}


class Norm(nn.Module):
    def __init__(self, width: int = HEAD) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * self.weight


class Attention(nn.Module):
    """The attributes `first_q` and `first_k` are the first positions, `base` and `pairs` give the frequencies."""

    first_q = first_k = 0
    base = BASE

    def __init__(self, order: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = Norm(), Norm()
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD)) for layer in (self.q, self.k, self.v))
        if self.order == "norm first":
            q, k = self.turned(self.q_norm(q), self.first_q), self.turned(self.k_norm(k), self.first_k)
        else:
            q, k = self.q_norm(self.turned(q, self.first_q)), self.k_norm(self.turned(k, self.first_k))
        shares = (torch.einsum("btnh,bsnh->bnts", q, k) * HEAD**-0.5).softmax(-1)
        return torch.as_tensor(self.o(torch.einsum("bnts,bsnh->btnh", shares, v).flatten(2)))

    def turned(self, x: torch.Tensor, first: int) -> torch.Tensor:
        angles = torch.arange(first, first + STEPS, dtype=x.dtype)[:, None] * self.frequencies().to(x.dtype)
        sin, cos = angles.sin()[:, None], angles.cos()[:, None]
        one, two = x.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    def frequencies(self) -> torch.Tensor:
        return self.base ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)


ATTENTION_RULES = """
- {einsum: "...D,DE->...E", from: "{q,k,v}", linear: "{q,k,v}"}
- {einsum: "...E,ED->...D", from: o, linear: o}
- {from: "{q_norm,k_norm}", multiplies_by: scale, epsilon: 1e-6, axes: H, rms_norm: "{q_norm,k_norm}"}
"""
ATTENTION_SHAPES = {**dict.fromkeys("qkvo", (WIDTH, WIDTH)), "q_norm": (HEAD,), "k_norm": (HEAD,)}


# ---- positions: a table of tokens times sqrt(D), learned positions behind two unused rows, sines and cosines


def _sinusoids(steps: Any, frequencies: Any) -> Any:
    angles = steps[:, None] * frequencies
    return jnp.concatenate((jnp.sin(angles), jnp.cos(angles)), -1)


def _positions(w: Weights, inputs: Weights) -> dict[str, Any]:
    half = WIDTH // 2
    x = w["table"][inputs["tokens"]] * WIDTH**0.5
    x = x + w["places"][jnp.arange(STEPS) + OFFSET]
    x = x + _sinusoids(jnp.arange(STEPS), jnp.exp(-jnp.log(BASE) * jnp.arange(half) / half))
    return {"y": jax.nn.silu(x @ w["up"]) @ w["down"]}


class Positions(nn.Module):
    offset, first = OFFSET, 0
    divisor = WIDTH / 2

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(STEPS + 2 * OFFSET, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedded(tokens)
        x = x + self.places(torch.arange(STEPS) + self.offset)
        x = x + self.sinusoids(x)
        return torch.as_tensor(self.down(nn.functional.silu(self.up(x))))

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.table(tokens) * WIDTH**0.5)

    def sinusoids(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(self.first, self.first + STEPS, dtype=x.dtype)
        angles = steps[:, None] * torch.exp(-np.log(BASE) * torch.arange(WIDTH // 2, dtype=x.dtype) / self.divisor)
        return torch.cat((angles.sin(), angles.cos()), -1)


POSITION_RULES = """
- {from: table, axes: VD, embedding: table}
- {from: places, axes: TD, embedding: places}
- {einsum: "...D,DE->...E", from: up, linear: up}
- {einsum: "...E,EV->...V", from: down, linear: down}
"""
POSITION_SHAPES = {
    "table": (TOKENS, WIDTH),
    "places": (STEPS + 2 * OFFSET, WIDTH),
    "up": (WIDTH, WIDTH),
    "down": (WIDTH, TOKENS),
}


# ---- experts: chosen by their scores and a bias that balances them, weighted by the scores alone


def _experts(w: Weights, inputs: Weights) -> dict[str, Any]:
    x = inputs["x"].astype(w["router"].dtype)
    scores = jax.nn.sigmoid(x @ w["router"])
    _, chosen = jax.lax.top_k(scores + w["balance"], CHOSEN)
    shares = jnp.take_along_axis(scores, chosen, -1)
    shares = shares / shares.sum(-1, keepdims=True) * 1.5
    spread = (jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype) * shares[..., None]).sum(-2)
    made = jnp.einsum("btd,edf->btef", x, w["experts"])
    return {"y": jnp.einsum("bte,btef->btf", spread, jnp.tanh(made))}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.balance = nn.Parameter(torch.zeros(EXPERTS))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).sigmoid()
        chosen = self.chosen(scores)
        shares = self.shares(scores, chosen)
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            share = (shares * (chosen == k)).sum(-1, keepdim=True)
            y = y + share * torch.tanh(expert(x))
        return y

    def chosen(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores + self.balance).topk(CHOSEN, -1).indices

    def shares(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        shares = scores.gather(-1, chosen)
        return shares / shares.sum(-1, keepdim=True) * 1.5


EXPERT_RULES = """
- {einsum: "...D,DE->...E", from: router, linear: router}
- {from: balance, axes: E, parameter: balance}
- {einsum: "...D,DF->...F", from: experts, stacked: {e: 0}, linear: "experts.{e}"}
"""
EXPERT_SHAPES = {"router": (WIDTH, EXPERTS), "balance": (EXPERTS,), "experts": (EXPERTS, WIDTH, WIDTH)}


# ---- states: a recurrence whose state goes from each step to the next, and from the first half of the sequence to the second


def _states(w: Weights, inputs: Weights) -> dict[str, Any]:
    x = inputs["x"].astype(w["into"].dtype)
    state = jnp.zeros((len(x), WIDTH), x.dtype)
    keep, made = jax.nn.sigmoid(w["keep"]), []
    for t in range(x.shape[1]):
        state = jnp.tanh(x[:, t] @ w["into"] + keep * state)
        made.append(state)
    return {"y": jnp.stack(made, 1) @ w["out"]}


class States(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.keep = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = x.new_zeros(len(x), WIDTH)
        one, state = self.ran(x[:, : STEPS // 2], begin)
        two, _ = self.ran(x[:, STEPS // 2 :], self.given(state))
        return torch.as_tensor(self.out(torch.cat([one, two], 1)))

    def given(self, state: torch.Tensor) -> torch.Tensor:
        return state

    def ran(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keep, made = self.keep.sigmoid(), []
        for step in x.unbind(1):
            state = self.step(self.into(step), keep, state)
            made.append(state)
        return torch.stack(made, 1), state

    def step(self, given: torch.Tensor, keep: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(given + keep * state)


STATE_RULES = """
- {einsum: "...D,DE->...E", from: "{into,out}", linear: "{into,out}"}
- {from: keep, axes: E, parameter: keep}
"""
STATE_SHAPES = {"into": (WIDTH, WIDTH), "out": (WIDTH, WIDTH), "keep": (WIDTH,)}


# ---- fused heads, a flattened map, and an LSTM whose first states are computed


def _heads(w: Weights, inputs: Weights) -> dict[str, Any]:
    x = inputs["x"].astype(w["o"].dtype)
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[f"{name}/kernel"]) + w[f"{name}/bias"] for name in "qkv")
    shares = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), -1)
    return {"y": jnp.einsum("bnts,bsnh,nhd->btd", shares, v, w["o"])}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.parts(self.qkv(x))
        shares = torch.einsum("btnh,bsnh->bnts", q, k).softmax(-1)
        return torch.as_tensor(self.o(torch.einsum("bnts,bsnh->btnh", shares, v).flatten(2)))

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.unflatten(-1, (3, HEADS, HEAD)).unbind(2)


HEAD_RULES = """
- {einsum: "...D,DNH->...NH", from: "{q,k,v}/kernel", bias: "{q,k,v}/bias", linear: qkv}
- {einsum: "...NH,NHD->...D", from: o, linear: o}
"""
HEAD_SHAPES = {
    **{f"{name}/kernel": (WIDTH, HEADS, HEAD) for name in "qkv"},
    **{f"{name}/bias": (HEADS, HEAD) for name in "qkv"},
    "o": (HEADS, HEAD, WIDTH),
}


class FlaxMap(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        y = flax.linen.relu(flax.linen.Conv(2, (2, 3), padding="VALID", name="conv")(x))
        return jax.nn.log_softmax(flax.linen.Dense(WIDTH, name="head")(y.reshape(len(y), -1)), 1)


def _map(w: Weights, inputs: Weights) -> dict[str, Any]:
    params = {name: {leaf: w[f"{name}/{leaf}"] for leaf in ("kernel", "bias")} for name in ("conv", "head")}
    return {"y": FlaxMap().apply({"params": params}, inputs["image"])}


class Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 2, (2, 3)), nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.flat(nn.functional.relu(self.conv(x.permute(0, 3, 1, 2))))
        return self.likely(self.head(y))

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)

    def likely(self, x: torch.Tensor) -> torch.Tensor:
        return x.log_softmax(1)


MAP_AXES = """
axes: {Y: {is: rows, equals: 4}, X: {is: columns, equals: 5}, C: {is: channels, equals: 2}}"""
MAP_RULES = """
- {dimension_numbers: "NHWC,HWIO->NHWC", axes: PQIC, from: conv/kernel, bias: conv/bias, padding: VALID, conv: conv}
- {einsum: "...J,JK->...K", from: head/kernel, bias: head/bias, flattened: {J: YXC}, linear: head}
"""
MAP_SHAPES = {"conv/kernel": (2, 3, 3, 2), "conv/bias": (2,), "head/kernel": (40, WIDTH), "head/bias": (WIDTH,)}


def _cell(w: Weights, inputs: Weights) -> dict[str, Any]:
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


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.rnn = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ran(x, self.first(x))

    def first(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.contiguous() for part in self.start(x.mean(1))[None].chunk(2, -1))

    def ran(self, x: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.as_tensor(self.rnn(x, states)[0])


CELL_RULES = """
- {einsum: "...D,DS->...S", from: start, linear: start}
- {cell: haiku.LSTM, from: rnn, inputs: D, hidden: H, lstm: rnn}
"""
CELL_SHAPES = {
    "start": (WIDTH, 2 * WIDTH),
    "rnn/linear/w": (2 * WIDTH, 4 * WIDTH),
    "rnn/linear/b": (4 * WIDTH,),
}


# ---- all


MODELS: Mapping[str, Small] = {
    "norm-rope": Small(ATTENTION_RULES, ATTENTION_SHAPES, partial(_attention, "norm first"), partial(Attention, "norm first")),
    "rope-norm": Small(ATTENTION_RULES, ATTENTION_SHAPES, partial(_attention, "RoPE first"), partial(Attention, "RoPE first")),
    "positions": Small(POSITION_RULES, POSITION_SHAPES, _positions, Positions, ("tokens",)),
    "experts": Small(EXPERT_RULES, EXPERT_SHAPES, _experts, Experts),
    "states": Small(STATE_RULES, STATE_SHAPES, _states, States),
    "heads": Small(HEAD_RULES, HEAD_SHAPES, _heads, Heads),
    "map": Small(MAP_RULES, MAP_SHAPES, _map, Map, ("image",), MAP_AXES),
    "cell": Small(CELL_RULES, CELL_SHAPES, _cell, Cell),
    **STEP_MODELS,
    **CHOICE_MODELS,
}  # fmt: skip


def rules(name: str) -> str:
    model = MODELS[name]
    return f"model: {name}\ntitle: a small model{model.axes}\ntargets:\n  torch: {{loads: small_models}}\nrules:\n{model.rules}"


def source(name: str) -> MemorySource:
    """A checkpoint with random weights."""
    rng = np.random.default_rng(1)
    return MemorySource(
        {leaf: rng.normal(0.2, 0.5, shape).astype(np.float32) for leaf, shape in MODELS[name].shapes.items()}
    )


def load(name: str, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build the PyTorch side."""
    module = MODELS[name].module()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.requires_grad_(False).eval()


def draw(given: tuple[str, ...], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    if given == ("tokens",):
        return {"tokens": rng.integers(0, TOKENS, (BATCH, STEPS))}
    shape = (BATCH, 5, 7, 3) if given == ("image",) else (BATCH, STEPS, WIDTH)
    drawn = {given[0]: rng.normal(0, 1, shape).astype(np.float32)}
    if "real" in given:
        drawn["real"] = np.arange(STEPS) < np.array([STEPS, 5, 3])[:, None]
    return drawn


def reference(plan: Any) -> Reference:
    """The two sides of the model that the rules name."""
    name = plan.rules.model
    model = MODELS[name]
    return Reference(
        inputs=partial(draw, model.given),
        build=lambda state: load(name, state),
        run=lambda module, inputs: {"y": module(*(inputs[name] for name in model.given))},
        outputs=("y",),
        reduction=WIDTH,
        depth=4,
        jax=model.side,
    )
