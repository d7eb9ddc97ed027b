"""Mistakes of a few lines, each in a model of a few operations: what the comparison of the two records says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import conv1d, hardswish, leaky_relu, pad, relu, silu, softplus

from support.marks import slow_but
from support.small_faults import Arrays, Fault, check


def norm(x: Any) -> Any:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def distances(low: int, high: int, of: Any) -> Any:
    return (of.arange(10)[None] - of.arange(10)[:, None]).clip(low, high) + 4


def attend(q: Any, k: Any, v: Any, heads: int) -> Any:
    q, k, v = (z.reshape(3, 10, heads, 8 // heads) for z in (q, k, v))
    s = torch.einsum("btnh,bsnh->bnts", q, k) * (8 // heads) ** -0.5
    return torch.einsum("bnts,bsnh->btnh", s.softmax(-1), v).reshape(3, 10, 8)


def heads_of_four(p: Arrays, x: Any, real: Any) -> Any:
    q, k, v = (z.reshape(3, 10, 2, 4) for z in (x @ p["w"], x @ p["v"], x))
    a = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 2, -1)
    return jnp.einsum("bnts,bsnh->btnh", a, v).reshape(3, 10, 8)


def block(p: Arrays, x: Any, real: Any) -> Any:
    x = x + jnp.tanh((norm(x) * p["g"]) @ p["w"])
    return x + (norm(x) * p["h"]) @ p["v"]


def parallel(p: Arrays, x: Any, real: Any) -> Any:
    return x + torch.tanh((rms(x) * p["g"]) @ p["w"]) + (rms(x) * p["h"]) @ p["v"]


def hidden(p: Arrays, x: Any, real: Any, of: Any, fill: float, plus: float) -> Any:
    """A product whose hidden rows are another number, which no output depends on."""
    y = of.where(real[..., None], of.tanh(x @ p["w"]), fill) @ p["v"] * p["g"]
    return of.where(real[..., None], of.tanh(y + plus) if plus else of.tanh(y), 0.0)


def pooled(x: Any) -> Any:
    return [x[:, 0], x.mean(1)]


def scores(p: Arrays, x: Any, seen: Any) -> Any:
    s = jnp.einsum("btd,bsd->bts", x @ p["w"], x @ p["v"])
    return jax.nn.softmax(jnp.where(seen, s, -1e30), -1) @ x


def seen_once_more(real: torch.Tensor) -> torch.Tensor:
    """The real tokens, and one of padding."""
    return (torch.arange(10)[None] <= real.sum(1)[:, None])[:, None]


def masked(p: Arrays, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    s = torch.einsum("btd,bsd->bts", x @ p["w"], x @ p["v"])
    return torch.matmul(s.masked_fill(~seen, -1e30).softmax(-1), x)


def added(p: Arrays, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    s = torch.einsum("btd,bsd->bts", x @ p["w"], x @ p["v"])
    return torch.matmul((s + torch.zeros_like(s).masked_fill(~seen, float("-inf"))).softmax(-1), x)


def states(p: Arrays, x: Any, zeros: Any, tanh: Any) -> list[Any]:
    found = [zeros]
    for k in range(10):
        found.append(tanh(x[:, k] @ p["w"] + found[-1] @ p["v"]))
    return found[1:]


def last_state(p: Arrays, x: Any, real: Any) -> Any:
    every = jnp.stack(states(p, x, jnp.zeros((3, 8)), jnp.tanh), 1)
    return every[:, -1] + jnp.tanh(every.mean(1) @ p["w"])


def last_real_state(p: Arrays, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    every = torch.stack(states(p, x, torch.zeros(3, 8, dtype=x.dtype), torch.tanh), 1)
    return every[torch.arange(3), real.sum(1) - 1] + torch.tanh(every.mean(1) @ p["w"])


def convolved(p: Arrays, x: Any, real: Any) -> Any:
    kernel = jnp.asarray(p["conv"]).transpose(2, 1, 0)
    for _ in range(2):
        y = jax.lax.conv_general_dilated(x, kernel, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"))
        x = (x + jnp.tanh(y) @ p["w"]) * 0.5**0.5
    return x


def convolved_without_factor(p: Arrays, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        y = conv1d(pad(x.transpose(1, 2), (2, 0)), p["conv"]).transpose(1, 2)
        x = x + torch.tanh(y) @ p["w"]
    return x


def largest_of_each(p: Arrays, x: Any, real: Any) -> Any:
    """A max-pool over three positions in steps of two, as flax pads it: the numbers are negative."""
    y = jnp.tanh(x @ p["w"]) - 2
    return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 3, 1), (1, 2, 1), "SAME") @ p["v"]


def pooled_as(p: Arrays, x: torch.Tensor, padded: Callable[[torch.Tensor], torch.Tensor], padding: int = 0) -> Any:
    y = padded((torch.tanh(x @ p["w"]) - 2).transpose(1, 2))
    return torch.nn.functional.max_pool1d(y, 3, 2, padding).transpose(1, 2) @ p["v"]


def timed(p: Arrays, x: Any, real: Any) -> Any:
    one = lambda z: jnp.tanh(jnp.concatenate([z[:7], x[0, 0, :1]]) @ p["w"]) @ p["v"]  # noqa: E731
    return jax.vmap(jax.vmap(one))(x)


def timeless(p: Arrays, x: Any, real: Any) -> Any:
    return torch.tanh(torch.cat([x[..., :7], torch.zeros_like(x[..., :1])], -1) @ p["w"]) @ p["v"]


def weighted_by_shares(p: Arrays, x: Any, real: Any) -> Any:
    top, which = jax.lax.top_k(jax.nn.softmax(x @ p["w"], -1), 2)
    shares = jax.nn.one_hot(which, 8, dtype=x.dtype) * (top / top.sum(-1, keepdims=True))[..., None]
    return jnp.einsum("btxd,btx->btd", jnp.einsum("btd,xd->btxd", x, p["v"]), shares.sum(-2))


def weighted_by_scores(p: Arrays, x: Any, real: Any) -> Any:
    scores = (x @ p["w"]).softmax(-1)
    top, which = scores.topk(2, -1)
    spread = torch.zeros_like(scores).scatter(-1, which, top)
    return torch.einsum("btxd,btx->btd", torch.einsum("btd,xd->btxd", x, p["v"]), spread)


def largest(p: Arrays, x: Any, real: Any) -> Any:
    top, index = jax.lax.top_k(x @ p["w"], 2)
    return (jax.nn.one_hot(index, 8) * jax.nn.softmax(top, -1)[..., None]).sum(-2) @ p["v"]


def largest_alone(p: Arrays, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    s = x @ p["w"]
    top, index = s.topk(1, -1)
    return torch.zeros_like(s).scatter(-1, index, top.softmax(-1)) @ p["v"]


def chosen(p: Arrays, x: Any, factor: float) -> Any:
    """The two largest of biased scores, weighted with the scores."""
    score = jax.nn.sigmoid(x @ p["w"])
    index = jax.lax.top_k(score + p["h"], 2)[1]
    weight = jnp.take_along_axis(score, index, -1)
    weight = factor * weight / weight.sum(-1, keepdims=True)
    return ((jax.nn.one_hot(index, 8) * weight[..., None]).sum(-2) * (x @ p["v"])) @ p["w"]


def routed(p: Arrays, x: torch.Tensor, biased: bool = True, weighted: bool = False, factor: float = 1.0) -> Any:
    score = torch.sigmoid(x @ p["w"])
    index = (score + p["h"] if biased else score).topk(2, -1).indices
    weight = (score + p["h"] if weighted else score).gather(-1, index)
    weight = factor * weight / weight.sum(-1, keepdim=True)
    return (torch.zeros_like(score).scatter(-1, index, weight) * (x @ p["v"])) @ p["w"]


def decayed(p: Arrays, x: Any, of: Any, factor: float) -> Any:
    y, state, found = x @ p["w"], of.zeros_like(x[:, 0]), []
    for k in range(10):
        state = of.exp(-of.abs(x[:, k])) * state + (y[:, k] if factor == 1 else factor * y[:, k])
        found.append(state * p["g"])
    return of.stack(found, 1) @ p["v"]


def gated(gate: Any, x: Any, new: Any) -> Any:
    return gate * x + (1 - gate) * new


TABLE = np.sin(np.arange(12)[:, None] * np.array([1, 0.3, 0.1, 0.03, 0.7, 0.2, 0.05, 0.9]))


def layer_norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


# Each gives back what relu gives, as it is: with relu in front of it, the target's output is the JAX model's.
OF_RELU: tuple[tuple[Any, str, str], ...] = (  # the function, its name, and what the sentence says of the target
    (lambda y: leaky_relu(y, 0.1), "leaky_relu with slope 0.1 for relu", "the target computes leaky_relu"),
    (
        lambda y: torch.where(y > 0, y, 0.25 * y),
        "leaky_relu with slope 0.25 for relu",
        "the target computes leaky_relu",
    ),
    (
        lambda y: torch.prelu(y, torch.full((1,), 0.5).to(y)),
        "leaky_relu with slope 0.5 for relu",
        "the target computes leaky_relu",
    ),
    (torch.nn.functional.elu, "elu for relu", "the target computes elu"),
    (lambda y: torch.nn.functional.celu(y, 2.0), "celu with alpha 2 for relu", "the target computes celu"),
    (lambda y: y.clamp(min=-0.5), "another constant", "the target limits the values"),
    (
        lambda y: torch.nn.functional.hardtanh(y, -0.5, 50.0),
        "another computation",
        "the target runs hardtanh (-0.5 to 50)",
    ),
    (lambda y: torch.nn.functional.threshold(y, -0.5, 0.0), "another computation", "the target runs threshold"),
    (torch.abs, "the absolute value for relu", "the target takes the absolute value"),
)

FAULTS = {
    "rows that are hidden, beside a missing addition": Fault(
        lambda p, x, real: hidden(p, x, real, jnp, 5.0, 0.3),
        lambda p, x, real: hidden(p, x, real, torch, 7.0, 0.0),
        "operation missing",
        ("the JAX model adds 0.3",),
    ),
    "no soft cap at the end": Fault(
        lambda p, x, real: 8 * jnp.tanh((x @ p["w"]) / 8),
        lambda p, x, real: x @ p["w"],
        "operation missing",
        ("the JAX model computes tanh up to 8", "uses it as it is"),
    ),
    "the output's axes in another order": Fault(
        lambda p, x, real: (x @ p["w"]).reshape(3, 10, 2, 4).swapaxes(-1, -2).reshape(3, 10, 8),
        lambda p, x, real: x @ p["w"],
        "elements in another order",
        ("the elements of", "are in another order"),
    ),
    "joined in another order": Fault(
        lambda p, x, real: jnp.concatenate(pooled(jnp.tanh(x)), -1) @ jnp.concatenate([p["w"], p["v"]]),
        lambda p, x, real: torch.cat(pooled(torch.tanh(x))[::-1], -1) @ torch.cat([p["w"], p["v"]]),
        "elements in another order",
        ("with its elements in another order",),
    ),
    "an activation missing in front of a layer": Fault(
        lambda p, x, real: jax.nn.silu(x @ p["w"]) @ p["v"] + jax.nn.silu(x @ p["w"]),
        lambda p, x, real: (x @ p["w"]) @ p["v"] + silu(x @ p["w"]),
        "operation missing",
        ("computes silu", "uses it as it is"),
    ),
    "another norm's scale": Fault(
        lambda p, x, real: (norm(x) * p["g"]) @ p["w"] + (norm(x * x) * p["h"]) @ p["v"],
        lambda p, x, real: (rms(x) * p["g"]) @ p["w"] + (rms(x * x) * p["g"]) @ p["v"],
        "another parameter",
        ("the target uses g, and the JAX model h",),
    ),
    "relu for softplus": Fault(
        lambda p, x, real: jax.nn.softplus(x @ p["w"]) @ p["v"],
        lambda p, x, real: relu(x @ p["w"]) @ p["v"],
        "relu for softplus",
        ("relu for softplus",),
    ),
    "another slope": Fault(
        lambda p, x, real: jax.nn.leaky_relu(x @ p["w"], 0.1) @ p["v"],
        lambda p, x, real: leaky_relu(x @ p["w"], 0.3) @ p["v"],
        "leaky_relu with slope 0.3 for leaky_relu with slope 0.1",
        ("computes leaky_relu with slope 0.3",),
    ),
    **{
        f"relu for {says.split()[-1]}, {k}": Fault(
            lambda p, x, real: jax.nn.relu(layer_norm(x @ p["w"]) * p["g"] + p["h"]) @ p["v"],
            lambda p, x, real, function=function: (  # type: ignore[misc]
                function(torch.nn.functional.layer_norm(x @ p["w"], (8,), p["g"], p["h"])) @ p["v"]
            ),
            name,
            (says, "the JAX model limits the values to at least 0"),
        )
        for k, (function, name, says) in enumerate(OF_RELU)
    },
    "hard swish for swish": Fault(
        lambda p, x, real: jax.nn.silu(x @ p["w"]) @ p["v"],
        lambda p, x, real: hardswish(x @ p["w"]) @ p["v"],
        "hard swish for silu",
        (),
    ),
    "positions from one on": Fault(
        lambda p, x, real: jnp.tanh(x + TABLE[:10]) @ p["w"],
        lambda p, x, real: torch.tanh(x + torch.tensor(TABLE)[1:11]) @ p["w"],
        "another constant",
        ("row k of the target's table is row k + 1 of the JAX model's",),
    ),
    "distances clipped elsewhere": Fault(
        lambda p, x, real: jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ p["w"], x) + p["rel"][distances(-4, 4, jnp)], -1) @ x,
        lambda p, x, real: (torch.einsum("btd,bsd->bts", x @ p["w"], x) + p["rel"][distances(-3, 3, torch)]).softmax(-1) @ x,
        "another part",
        ("of rel, the two pick other elements",),
    ),
    "another function within one of a parameter": Fault(
        lambda p, x, real: (x * jnp.exp(-jnp.exp(p["h"]))) @ p["w"],
        lambda p, x, real: (x * torch.exp(-softplus(p["h"]))) @ p["w"],
        "softplus for exp",
        ("of h, the target applies softplus, changes the sign, applies exp", "the JAX model applies exp, changes the sign, applies exp"),
    ),
    "a value of another place": Fault(
        lambda p, x, real: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"]),
        lambda p, x, real: torch.tanh(x @ p["w"]),
        "another operand",
        ("where the JAX model has",),
    ),
    "a scale in front of an addition": Fault(
        lambda p, x, real: jnp.tanh(jnp.tanh(x @ p["w"]) * p["h"] + p["g"]) @ p["v"],
        lambda p, x, real: torch.tanh((torch.tanh(x @ p["w"]) + p["g"]) * p["h"]) @ p["v"],
        "operations in another order",
        ("multiplies by h",),
    ),
    "fewer heads": Fault(
        heads_of_four,
        lambda p, x, real: attend(x @ p["w"], x @ p["v"], x, 1),
        "heads of another width",
        ("vectors of 8 features, and the JAX model of 4",),
    ),
    "a token of padding is seen": Fault(
        lambda p, x, real: scores(p, x, real[:, None]),
        lambda p, x, real: masked(p, x, seen_once_more(real)),
        "another mask",
        ("the target shows 2 positions that the JAX model hides",),
    ),
    "a token of padding is seen, by an added mask": Fault(
        lambda p, x, real: scores(p, x, real[:, None]),
        lambda p, x, real: added(p, x, seen_once_more(real)),
        "another mask",
        ("the target shows 2 positions that the JAX model hides",),
    ),
    "another step of a recurrence": Fault(last_state, last_real_state, "another part", ("takes index 9 of axis 1",)),
    "a factor missing in front of a padded convolution": Fault(
        convolved, convolved_without_factor, "operation missing", ("multiplies by 0.7071068 = 1/sqrt(2)",)
    ),
    "a factor missing at three values": Fault(
        lambda p, x, real: jnp.cos((x[:, 0, 0] * 1000)[:, None] * np.arange(1, 9.0)) @ p["w"],
        lambda p, x, real: torch.cos(x[:, 0, 0][:, None] * torch.arange(1, 9.0, dtype=x.dtype)) @ p["w"],
        "operation missing",
        ("multiplies by 1000",),
    ),
    "largest values of a padding of zeros": Fault(
        largest_of_each,
        lambda p, x, real: pooled_as(p, x, lambda y: torch.nn.functional.pad(y, (0, 1))),
        "another padding",
        ("the target pads (0, 1) with 0, and the JAX model (0, 1) that do not count",),
    ),
    "a pooling padded on both sides": Fault(
        largest_of_each,
        lambda p, x, real: pooled_as(p, x, lambda y: y, padding=1),
        "another padding",
        ("the target pads (1, 1) that do not count, and the JAX model (0, 1) that do not count",),
    ),
    "the batch in another order": Fault(
        lambda p, x, real: jnp.tanh(x @ p["w"]) @ p["v"],
        lambda p, x, real: torch.tanh(x.flip(0) @ p["w"]) @ p["v"],
        "elements in another order",
        ("the target's indices of axis 0 in the order 2, 1, 0",),
    ),
    "divided by one less": Fault(
        lambda p, x, real: ((x @ p["w"]) ** 2).sum(1) / real.sum(1)[:, None] @ p["v"],
        lambda p, x, real: ((x @ p["w"]) ** 2).sum(1) / (real.sum(1)[:, None] - 1) @ p["v"],
        "another factor",
        ("the target's values are 1.11111, 1.14286, 1.2 times",),
    ),
    "zeros for the time that a field is given": Fault(
        timed,
        timeless,
        "another operand",
        ("the target joins a part of the input x and zeros", "the JAX model joins"),
    ),
    "scores of the chosen that do not add up": Fault(
        weighted_by_shares,
        weighted_by_scores,
        "operation missing",
        ("the JAX model computes division by the L1 norm over the last axis", "uses it as it is"),
    ),
    "the largest alone": Fault(
        largest,
        largest_alone,
        "another number of largest values",
        ("the target takes the 1 largest, and the JAX model the 2 largest",),
    ),
    "a gate and what is left of it exchanged": Fault(
        lambda p, x, real: gated(jax.nn.sigmoid(x @ p["w"]), x, x @ p["v"]),
        lambda p, x, real: gated(1 - torch.sigmoid(x @ p["w"]), x, x @ p["v"]),
        "operands exchanged",
        ("the same values, put together in another way",),
    ),
    "the parts of a vector exchanged": Fault(
        lambda p, x, real: jnp.cos((x @ p["w"])[..., :4]) @ p["v"][:4] + (x @ p["w"])[..., 4:] @ p["v"][4:],
        lambda p, x, real: torch.cos((x @ p["w"])[..., 4:]) @ p["v"][:4] + (x @ p["w"])[..., :4] @ p["v"][4:],
        "another operand",
        ("where the JAX model has",),
    ),
    "a factor of what is chosen missing": Fault(
        lambda p, x, real: chosen(p, x, 1.5), lambda p, x, real: routed(p, x), "operation missing", ("multiplies by 1.5",)
    ),
    "what is chosen with a bias": Fault(
        lambda p, x, real: chosen(p, x, 1.5),
        lambda p, x, real: routed(p, x, weighted=True, factor=1.5),
        "bias of a choice added to its weights",
        ("the target weights what it chooses with h added, and the JAX model without",),
    ),
    "chosen without a bias": Fault(
        lambda p, x, real: chosen(p, x, 1.0),
        lambda p, x, real: routed(p, x, biased=False),
        "operation missing and elements in another order",
        ("the JAX model adds h",),
    ),
    "limited on both sides": Fault(
        lambda p, x, real: jnp.tanh(jnp.minimum(x @ p["w"], 2.0)) @ p["v"],
        lambda p, x, real: torch.tanh((x @ p["w"]).clamp(-2.0, 2.0)) @ p["v"],
        "another constant",
        ("the target limits the values to -2 to 2", "the JAX model limits the values to at most 2"),
    ),
    "a number without its function": Fault(
        lambda p, x, real: jnp.tanh((x @ p["w"]) * jnp.exp(p["g"][0]) + p["h"][0]),
        lambda p, x, real: torch.tanh((x @ p["w"]) * p["g"][0] + p["h"][0]),
        "another function of a parameter",
        ("of g, the target takes index 0 of axis 0 (", "and the JAX model takes index 0 of axis 0, applies exp ("),
    ),
    "no key of its own in the softmax": Fault(
        lambda p, x, real: jax.nn.softmax(jnp.concatenate([x @ p["w"], x[..., :1] + p["h"][0]], -1), -1)[..., :8] @ p["v"],
        lambda p, x, real: torch.softmax(x @ p["w"], -1) @ p["v"],
        "operation missing",
        ("joins, takes the softmax",),
    ),
    "a recurrence that runs backwards": Fault(
        lambda p, x, real: jnp.stack(states(p, x, jnp.zeros((3, 8)), jnp.tanh), 1) @ p["w"],
        lambda p, x, real: torch.stack(states(p, x.flip(1), torch.zeros(3, 8, dtype=x.dtype), torch.tanh), 1).flip(1) @ p["w"],
        "another operand and elements in another order",
        (),
    ),
    "a factor missing in a recurrence that begins with zeros": Fault(
        lambda p, x, real: decayed(p, x, jnp, 1.5),
        lambda p, x, real: decayed(p, x, torch, 1.0),
        "operation missing",
        ("multiplies by 1.5",),
    ),
    "a parallel block": Fault(block, parallel, "another operand", ("the JAX model gives it",)),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(list(FAULTS)[::3], FAULTS))
def test_a_mistake_is_named(name: str) -> None:
    check(FAULTS[name])
