"""Small models of steps and distances: states of loops, biases by distance, norms of groups, codes of residuals.

Methods of the PyTorch sides are what the fault catalogue replaces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

from support.small_model import HEAD, HEADS, STEPS, WIDTH, Small, Weights

GROUPS, CODES, ROWS, NEAR, FARTHEST = 3, 6, 8, 2, 5
SLOPES = (0.5, 0.25)


def maps(*names: str) -> str:
    return "".join(f'- {{einsum: "...D,DE->...E", from: {name}, linear: {name}}}\n' for name in names)


def vectors(*names: str) -> str:
    return "".join(f"- {{from: {name}, axes: E, parameter: {name}}}\n" for name in names)


def shapes(matrices: Sequence[str], others: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    return {**dict.fromkeys(matrices, (WIDTH, WIDTH)), **dict.fromkeys(others, (WIDTH,))}


class Maps(nn.Module):
    """Linear layers without a bias, and vectors."""

    def __init__(self, layers: Sequence[str], others: Sequence[str] = ()) -> None:
        super().__init__()
        for name in layers:
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))
        for name in others:
            self.register_parameter(name, nn.Parameter(torch.zeros(WIDTH)))


# ---- a state space: the output of a step reads the new state; and a cell whose last gate reads the new cell


def _space(w: Weights, inputs: Weights) -> dict[str, Any]:
    x = inputs["x"].astype(w["out"].dtype)
    given, read, keep = x @ w["into"], x @ w["read"], jax.nn.sigmoid(w["keep"])
    state, made = jnp.zeros((len(x), WIDTH), x.dtype), []
    for k in range(STEPS):
        state = keep * state + given[:, k]
        made.append(state * read[:, k])
    return {"y": jnp.stack(made, 1) @ w["out"]}


class Space(Maps):
    def __init__(self) -> None:
        super().__init__(("into", "read", "out"), ("keep",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, read, state, made = self.into(x), self.read(x), torch.zeros_like(x[:, 0]), []
        for k in range(STEPS):
            new = self.keep.sigmoid() * state + given[:, k]
            made.append(self.given_out(state, new) * read[:, k])
            state = self.next(new, k)
        return torch.as_tensor(self.out(torch.stack(made, 1)))

    def given_out(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new

    def next(self, state: torch.Tensor, step: int) -> torch.Tensor:
        return state


def _peephole(w: Weights, inputs: Weights) -> dict[str, Any]:
    x = inputs["x"].astype(w["out"].dtype)
    cell, made = jnp.zeros((len(x), WIDTH), x.dtype), []
    for k in range(STEPS):
        share = jax.nn.sigmoid(x[:, k] @ w["forget"] + w["see"] * cell)
        cell = share * cell + jnp.tanh(x[:, k] @ w["into"])
        made.append(jax.nn.sigmoid(x[:, k] @ w["give"] + w["look"] * cell) * jnp.tanh(cell))
    return {"y": jnp.stack(made, 1) @ w["out"]}


class Peephole(Maps):
    def __init__(self) -> None:
        super().__init__(("forget", "into", "give", "out"), ("see", "look"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cell, made = torch.zeros_like(x[:, 0]), []
        for one in x.unbind(1):
            share = torch.sigmoid(self.forget(one) + self.see * cell)
            new = share * cell + torch.tanh(self.into(one))
            made.append(torch.sigmoid(self.give(one) + self.look * self.seen(cell, new)) * self.told(cell, new).tanh())
            cell = new
        return torch.as_tensor(self.out(torch.stack(made, 1)))

    def seen(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new

    def told(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new


# ---- a loop from the last step on, which keeps its state where there is no token


def _masked(w: Weights, inputs: Weights) -> dict[str, Any]:
    x = inputs["x"].astype(w["out"].dtype)
    state, made = jnp.zeros((len(x), WIDTH), x.dtype), []
    for k in reversed(range(STEPS)):
        state = jnp.where(inputs["real"][:, k, None], jnp.tanh(x[:, k] @ w["into"] + state @ w["back"]), state)
        made.insert(0, state)
    return {"y": jnp.stack(made, 1) @ w["out"]}


class Masked(Maps):
    def __init__(self) -> None:
        super().__init__(("into", "back", "out"))

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        state, made = torch.zeros_like(x[:, 0]), dict[int, torch.Tensor]()
        for k in self.order():
            new = torch.tanh(self.into(x[:, k]) + self.back(state))
            state = torch.where(self.mask(real, k)[:, None], new, state)
            made[k] = state
        return torch.as_tensor(self.out(torch.stack([made[k] for k in range(STEPS)], 1)))

    def order(self) -> Sequence[int]:
        return range(STEPS - 1, -1, -1)

    def mask(self, real: torch.Tensor, step: int) -> torch.Tensor:
        return real[:, step]


# ---- attention with a bias by distance: a slope for each head, or rows of a table, one for far distances together


def _attended(w: Weights, x: Any, bias: Any) -> Any:
    q, k, v = ((x @ w[name]).reshape(*x.shape[:2], HEADS, HEAD) for name in "qkv")
    shares = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) + bias, axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", shares, v).reshape(x.shape) @ w["o"]


def _sloping(w: Weights, inputs: Weights) -> dict[str, Any]:
    x, steps = inputs["x"].astype(w["o"].dtype), jnp.arange(STEPS)
    distances = jnp.abs(steps[:, None] - steps[None])
    return {"y": _attended(w, x, -jnp.array(SLOPES, x.dtype)[:, None, None] * distances)}


def _distant(w: Weights, inputs: Weights) -> dict[str, Any]:
    x, steps = inputs["x"].astype(w["o"].dtype), jnp.arange(STEPS)
    distances = steps[None] - steps[:, None]
    size = jnp.abs(distances)
    far = NEAR + (jnp.log(jnp.maximum(size, 1) / NEAR) / math.log(FARTHEST / NEAR) * NEAR).astype(int)
    rows = jnp.where(distances > 0, ROWS // 2, 0) + jnp.where(size < NEAR, size, jnp.minimum(far, ROWS // 2 - 1))
    return {"y": _attended(w, x, w["table"][rows].transpose(2, 0, 1))}


class Attention(Maps):
    def __init__(self, table: bool) -> None:
        super().__init__("qkvo")
        if table:
            self.table = nn.Embedding(ROWS, HEADS)

    def attended(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD)) for layer in (self.q, self.k, self.v))
        shares = (torch.einsum("btnh,bsnh->bnts", q, k) + bias).softmax(-1)
        return torch.as_tensor(self.o(torch.einsum("bnts,bsnh->btnh", shares, v).flatten(2)))


class Sloping(Attention):
    def __init__(self) -> None:
        super().__init__(table=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(STEPS)
        slopes = torch.tensor(SLOPES, dtype=x.dtype)[:, None, None]
        return self.attended(x, -slopes * self.distances(steps[:, None] - steps[None]))

    def distances(self, distances: torch.Tensor) -> torch.Tensor:
        return distances.abs()


class Distant(Attention):
    farthest = FARTHEST

    def __init__(self) -> None:
        super().__init__(table=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(STEPS)
        return self.attended(x, self.table(self.rows(steps[None] - steps[:, None])).permute(2, 0, 1))

    def rows(self, distances: torch.Tensor) -> torch.Tensor:
        size = distances.abs()
        far = NEAR + (torch.log(size.clamp(min=1).double() / NEAR) / math.log(self.farthest / NEAR) * NEAR).long()
        return (distances > 0) * (ROWS // 2) + torch.where(size < NEAR, size, far.clamp(max=ROWS // 2 - 1))


# ---- a norm of groups in each step; codes of what is left of a value; scores scaled by a function of a vector


def _grouped(w: Weights, inputs: Weights) -> dict[str, Any]:
    x = inputs["x"].astype(w["out"].dtype) @ w["into"]
    y = x.reshape(*x.shape[:2], GROUPS, -1)
    y = y - y.mean(-1, keepdims=True)
    y = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return {"y": jax.nn.silu(y.reshape(x.shape) * w["scale"]) @ w["out"]}


class Grouped(Maps):
    def __init__(self) -> None:
        super().__init__(("into", "out"), ("scale",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.out(nn.functional.silu(self.normed(self.into(x)) * self.scale)))

    def normed(self, x: torch.Tensor, groups: int = GROUPS, axes: tuple[int, ...] = (3,)) -> torch.Tensor:
        y = x.unflatten(-1, (groups, -1))
        y = y - y.mean(axes, keepdim=True)
        return (y / torch.sqrt((y * y).mean(axes, keepdim=True) + 1e-5)).flatten(2)


def _coded(w: Weights, inputs: Weights) -> dict[str, Any]:
    left = inputs["x"].astype(w["out"].dtype) @ w["into"]
    total = jnp.zeros_like(left)
    for k in range(2):
        codes = w[f"codes{k}"]
        code = codes[((left[..., None, :] - codes) ** 2).sum(-1).argmin(-1)]
        total, left = total + code, left - code
    return {"y": total @ w["out"]}


class Coded(Maps):
    def __init__(self) -> None:
        super().__init__(("into", "out"))
        self.codes = nn.ParameterList(nn.Parameter(torch.zeros(CODES, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.into(x)
        total = torch.zeros_like(left)
        for codes in self.codes:
            code = codes[((left[..., None, :] - codes) ** 2).sum(-1).argmin(-1)]
            total, left = total + code, self.rest(left, code)
        return torch.as_tensor(self.out(total))

    def rest(self, left: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        return left - code


def _scaled(w: Weights, inputs: Weights) -> dict[str, Any]:
    x = inputs["x"].astype(w["out"].dtype)
    q, k = (x @ w["q"]) * jax.nn.softplus(w["scale"]), x @ w["k"]
    return {"y": jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)), x) @ w["out"]}


class Scaled(Maps):
    def __init__(self) -> None:
        super().__init__(("q", "k", "out"), ("scale",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.q(x) * self.factor(self.scale), self.k(x)
        return torch.as_tensor(self.out(torch.einsum("btd,bsd->bts", q, k).softmax(-1) @ x))

    def factor(self, scale: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(scale)


CODE_RULE = '- {from: "codes{i}", axes: CD, parameter: "codes.{i}"}\n'
TABLE_RULE = "- {from: table, axes: RN, embedding: table}\n"
STEP_MODELS: Mapping[str, Small] = {
    "space": Small(
        maps("into", "read", "out") + vectors("keep"), shapes(("into", "read", "out"), ("keep",)), _space, Space
    ),
    "peephole": Small(
        maps("forget", "into", "give", "out") + vectors("see", "look"),
        shapes(("forget", "into", "give", "out"), ("see", "look")),
        _peephole,
        Peephole,
    ),
    "masked": Small(maps("into", "back", "out"), shapes(("into", "back", "out")), _masked, Masked, ("x", "real")),
    "sloping": Small(maps(*"qkvo"), shapes("qkvo"), _sloping, Sloping),
    "distant": Small(maps(*"qkvo") + TABLE_RULE, {**shapes("qkvo"), "table": (ROWS, HEADS)}, _distant, Distant),
    "grouped": Small(maps("into", "out") + vectors("scale"), shapes(("into", "out"), ("scale",)), _grouped, Grouped),
    "coded": Small(
        maps("into", "out") + CODE_RULE,
        {**shapes(("into", "out")), **{f"codes{k}": (CODES, WIDTH) for k in range(2)}},
        _coded,
        Coded,
    ),
    "scaled": Small(maps("q", "k", "out") + vectors("scale"), shapes(("q", "k", "out"), ("scale",)), _scaled, Scaled),
}
