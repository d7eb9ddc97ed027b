"""Two models of series for ``--reference support.series_model:reference``, as plain functions of JAX and as linen modules.

`series`: a causal convolution written as a sum, tokens in front, two rounds of attention over the same keys and values, a cell with two
states. `lengths`: a recurrence in both directions over sequences of different lengths. Methods of the PyTorch sides are what the fault
catalogue replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax.traverse_util import unflatten_dict
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from convert.references.protocol import Reference
from support.memory_source import MemorySource

WIDTH, HEADS, HEAD, TAPS, ROUNDS, STEPS, BATCH, OUT = 12, 2, 6, 3, 2, 7, 3, 5
LENGTHS = (7, 4, 5)
RULES = {
    "series": """
model: series
title: a small model
targets:
  torch: {loads: series_model.Series}
rules:
- {dimension_numbers: "NWC,WO->NWC", axes: PD, from: taps, conv: taps, padding: [[2, 0]]}
- {from: first, axes: D, parameter: first}
- {from: second, axes: D, parameter: second}
- {einsum: "...D,DE->...E", from: "q{i}", linear: "q.{i}"}
- {einsum: "...D,DS->...S", from: kv, linear: kv}
- {einsum: "...E,ED->...D", from: "o{i}", linear: "o.{i}"}
- {einsum: "...D,DG->...G", from: "{keep,into,give}", linear: "{keep,into,give}"}
- {einsum: "...D,DO->...O", from: out, linear: out}
""",
    "lengths": """
model: lengths
title: a small model
targets:
  torch: {loads: series_model.Lengths}
rules:
- {gru: {module: rnn, direction: "{forward,backward}"}, cell: flax.linen.GRUCell, from: "{f,b}"}
- {einsum: "...D,DE->...E", from: score/kernel, linear: score}
- {einsum: "...D,DO->...O", from: out/kernel, linear: out}
""",
}
SHAPES = {
    "taps": (TAPS, WIDTH),
    "first": (WIDTH,),
    "second": (WIDTH,),
    **{f"{name}{k}": (WIDTH, WIDTH) for name in "qo" for k in range(ROUNDS)},
    "kv": (WIDTH, 2 * WIDTH),
    **dict.fromkeys(("keep", "into", "give"), (WIDTH, WIDTH)),
    "out": (WIDTH, OUT),
}
Weights = Mapping[str, Any]


def unit(x: Any) -> Any:
    return x / ((x * x).sum(-1, keepdims=True) + 1e-6) ** 0.5


def series(w: Weights, inputs: Weights) -> dict[str, Any]:
    """The JAX model."""
    x = inputs["x"].astype(w["out"].dtype)
    padded = jnp.pad(x, ((0, 0), (TAPS - 1, 0), (0, 0)))
    x = x + jnp.tanh(sum(padded[:, k : k + STEPS] * w["taps"][k] for k in range(TAPS)))
    front = (jnp.broadcast_to(w[name], (len(x), 1, WIDTH)) for name in ("first", "second"))
    x = jnp.concatenate((*front, x), 1)
    keys, values = (part.reshape(*x.shape[:2], HEADS, HEAD) for part in jnp.split(x @ w["kv"], 2, -1))
    for k in range(ROUNDS):
        scores = 4.0 * jnp.einsum("btnh,bsnh->bnts", unit((x @ w[f"q{k}"]).reshape(keys.shape)), keys)
        x = x + jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), values).reshape(x.shape) @ w[f"o{k}"]

    def step(states: Any, x: Any) -> Any:
        state, cell = states
        cell = jax.nn.sigmoid(x @ w["keep"]) * cell + jnp.tanh(x @ w["into"] + state)
        state = jax.nn.sigmoid(x @ w["give"]) * jnp.tanh(cell)
        return (state, cell), state

    zeros = jnp.zeros((len(x), WIDTH), x.dtype)
    _, states = jax.lax.scan(step, (zeros, zeros), x.swapaxes(0, 1))
    return {"y": jax.nn.log_softmax(jax.nn.softplus(states.swapaxes(0, 1)[:, 1:] @ w["out"]), -1)}


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Conv1d(WIDTH, WIDTH, TAPS, groups=WIDTH, bias=False)
        self.first, self.second = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.q = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(ROUNDS))
        self.o = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(ROUNDS))
        self.kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.keep, self.into, self.give = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, OUT, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.taps(self.padded(x.transpose(1, 2))).transpose(1, 2).tanh()
        x = self.joined(x, *(one.expand(len(x), 1, WIDTH) for one in (self.first, self.second)))
        keys, values = self.parts(self.kv(x))
        for k in range(ROUNDS):
            scores = 4.0 * torch.einsum("btnh,bsnh->bnts", self.queries(self.q[k](x)), keys)
            x = x + self.o[k](torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), values).flatten(2))
            keys, values = self.again(x, keys, values)
        return self.given(self.states(x)[:, 1:])

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x, (TAPS - 1, 0))

    def joined(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.cat((first, second, x), 1)

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.unflatten(-1, (HEADS, HEAD)) for part in x.chunk(2, -1))

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(unit(x.unflatten(-1, (HEADS, HEAD))))

    def again(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return keys, values

    def states(self, x: torch.Tensor) -> torch.Tensor:
        state, cell, made = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
        for one in x.unbind(1):
            state, cell = self.step(one, state, cell)
            made.append(state)
        return torch.stack(made, 1)

    def step(self, x: torch.Tensor, state: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cell = self.keep(x).sigmoid() * cell + torch.tanh(self.into(x) + state)
        return self.give(x).sigmoid() * torch.tanh(cell), cell

    def given(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(self.out(x)).log_softmax(-1)


class _Lengths(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any, lengths: Any) -> Any:
        cells = [flax.linen.GRUCell(WIDTH, name=name) for name in "fb"]
        runs = (flax.linen.RNN(cells[0]), flax.linen.RNN(cells[1], reverse=True, keep_order=True))
        x = jnp.concatenate([run(x, seq_lengths=lengths) for run in runs], -1)
        seen = jnp.arange(STEPS)[None] < lengths[:, None]
        scores = flax.linen.Dense(1, use_bias=False, name="score")(jnp.tanh(x))[..., 0]
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], 1)[:, 0]
        return flax.linen.Dense(OUT, use_bias=False, name="out")(jnp.einsum("bt,btd->bd", shares, x) + last)


def lengths(w: Weights, inputs: Weights) -> dict[str, Any]:
    """The JAX model."""
    return {"y": _Lengths().apply({"params": unflatten_dict(dict(w), sep="/")}, inputs["x"], inputs["lengths"])}


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.score, self.out = nn.Linear(2 * WIDTH, 1, bias=False), nn.Linear(2 * WIDTH, OUT, bias=False)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.ran(x, lengths)
        shares = self.masked(self.score(x.tanh())[..., 0], lengths).softmax(-1)
        return torch.as_tensor(self.out((shares[..., None] * x).sum(1) + self.last(x, lengths)))

    def ran(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return torch.as_tensor(pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=STEPS)[0])

    def masked(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(STEPS)[None] >= lengths[:, None], float("-inf"))

    def last(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(len(x)), lengths - 1]


SIDES: Mapping[str, tuple[Callable[[Weights, Weights], dict[str, Any]], Callable[[], nn.Module]]] = {
    "series": (series, Series),
    "lengths": (lengths, Lengths),
}


def source(name: str) -> MemorySource:
    """A checkpoint with random weights."""
    shapes = dict(SHAPES)
    if name == "lengths":
        gates = {f"{cell}/{side}{gate}" for cell in "fb" for side in "ih" for gate in "rzn"}
        shapes = {f"{gate}/kernel": (WIDTH, WIDTH) for gate in sorted(gates)}
        shapes |= {f"{gate}/bias": (WIDTH,) for gate in sorted(gates) if gate[2:] in ("ir", "iz", "in", "hn")}
        shapes |= {"score/kernel": (2 * WIDTH, 1), "out/kernel": (2 * WIDTH, OUT)}
    rng = np.random.default_rng(1)
    return MemorySource({leaf: rng.normal(0.1, 0.4, shape).astype(np.float32) for leaf, shape in shapes.items()})


def load(name: str, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build the PyTorch side."""
    module = SIDES[name][1]()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.requires_grad_(False).eval()


def draw(name: str, seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(0, 1, (BATCH, STEPS, WIDTH)).astype(np.float32)
    return {"x": x, **({"lengths": np.array(LENGTHS, np.int32)} if name == "lengths" else {})}


def reference(plan: Any) -> Reference:
    """The two sides of the model that the rules name."""
    name = plan.rules.model
    return Reference(
        inputs=partial(draw, name),
        build=lambda state: load(name, state),
        run=lambda module, inputs: {"y": module(*inputs.values())},
        outputs=("y",),
        reduction=WIDTH,
        depth=4,
        jax=SIDES[name][0],
    )
