"""Mistakes with what a layer reads: paddings, steps, parts of fused layers, and functions in another place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional
from torch.nn.functional import conv1d, gelu, leaky_relu, mish, pad, softplus

from support.marks import slow_but
from support.small_faults import Arrays, Fault, check, said


def windows(p: Arrays, x: Any, padding: tuple[int, int] = (1, 1), stride: int = 1, dilation: int = 1) -> Any:
    kernel = jnp.asarray(p["conv"]).transpose(2, 1, 0)
    names = ("NWC", "WIO", "NWC")
    y = jax.lax.conv_general_dilated(
        x @ p["w"], kernel, (stride,), [padding], rhs_dilation=(dilation,), dimension_numbers=names
    )
    return jnp.tanh(y) @ p["v"]


def reflected(p: Arrays, x: Any, padding: tuple[int, int] = (1, 1)) -> Any:
    y = jnp.pad(x @ p["w"], ((0, 0), padding, (0, 0)), mode="reflect")
    kernel = jnp.asarray(p["conv"]).transpose(2, 1, 0)
    y = jax.lax.conv_general_dilated(y, kernel, (1,), [(0, 0)], dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.tanh(y) @ p["v"]


def read(p: Arrays, x: torch.Tensor, padding: tuple[int, int] = (1, 1), mode: str = "constant", stride: int = 1) -> Any:
    y = conv1d(pad((x @ p["w"]).transpose(1, 2), padding, mode=mode), p["conv"], stride=stride)
    return torch.tanh(y.transpose(1, 2)) @ p["v"]


def cut(p: Arrays, x: torch.Tensor) -> Any:
    y = conv1d((x @ p["w"]).transpose(1, 2), p["conv"], padding=2)[..., 1:11]
    return torch.tanh(y.transpose(1, 2)) @ p["v"]


def flipped(p: Arrays, x: torch.Tensor) -> Any:
    return read({**p, "conv": p["conv"].flip(-1)}, x)


def heads(q: Any, k: Any, v: Any, of: Any) -> Any:
    softmax = jax.nn.softmax if of is jnp else torch.softmax
    a = softmax(of.einsum("bnth,bnsh->bnts", q, k) / 2, -1)
    return of.einsum("bnts,bnsh->btnh", a, v).reshape(3, 10, 8)


def fused(p: Arrays, x: Any) -> Any:
    z = x @ jnp.concatenate([p["w"], p["v"], p["w"] * p["g"]], -1)
    return heads(*jnp.transpose(z.reshape(3, 10, 3, 2, 4), (2, 0, 3, 1, 4)), jnp) @ p["v"]


def heads_first(p: Arrays, x: torch.Tensor) -> Any:
    z = x @ torch.cat([p["w"], p["v"], p["w"] * p["g"]], -1)
    return heads(*z.view(3, 10, 2, 3, 4).permute(3, 0, 2, 1, 4), torch) @ p["v"]


def parts_of_heads(p: Arrays, x: Any) -> Any:
    k, v = jnp.split((x @ jnp.concatenate([p["w"], p["v"]], -1)).reshape(3, 10, 2, 8), 2, -1)
    return heads(*(z.swapaxes(1, 2) for z in (x.reshape(3, 10, 2, 4), k, v)), jnp) @ p["v"]


def heads_of_parts(p: Arrays, x: torch.Tensor) -> Any:
    k, v = (z.reshape(3, 10, 2, 4) for z in (x @ torch.cat([p["w"], p["v"]], -1)).chunk(2, -1))
    return heads(*(z.transpose(1, 2) for z in (x.reshape(3, 10, 2, 4), k, v)), torch) @ p["v"]


def selective(p: Arrays, x: Any, of: Any, exchanged: bool = False) -> Any:
    """A state space whose input and output are chosen by the data."""
    h = x @ p["w"]
    step = (jax.nn.softplus if of is jnp else softplus)(h * p["g"])
    into, out = h @ p["v"][:, :5], h @ p["v"][:, 3:]
    into, out = (out, into) if exchanged else (into, out)
    rate, state, found = -of.exp(p["w"][:, :5]), of.zeros_like(x[:, 0, :, None] * x[:, 0, None, :5]), []
    for k in range(10):
        state = of.exp(step[:, k, :, None] * rate) * state + (step[:, k] * h[:, k])[..., None] * into[:, k, None]
        found.append((state * out[:, k, None]).sum(-1))
    return (of.stack(found, 1) + p["h"] * h) @ p["w"]


def mean_of_each(p: Arrays, x: Any) -> Any:
    """The mean over three positions in steps of two, of those that are there."""
    y = jnp.tanh(x @ p["w"])
    sums = [jax.lax.reduce_window(z, 0.0, jax.lax.add, (1, 3, 1), (1, 2, 1), "SAME") for z in (y, jnp.ones_like(y))]
    return (sums[0] / sums[1]) @ p["v"]


def mean_with_padding(p: Arrays, x: torch.Tensor) -> Any:
    y = pad(torch.tanh(x @ p["w"]).transpose(1, 2), (0, 1))
    return functional.avg_pool1d(y, 3, 2).transpose(1, 2) @ p["v"]


def stretched(p: Arrays, x: torch.Tensor, mode: str) -> Any:
    return functional.interpolate((x @ p["w"]).transpose(1, 2), scale_factor=2, mode=mode).transpose(1, 2) @ p["v"]


def with_key_of_its_own(p: Arrays, x: Any) -> Any:
    s = jnp.einsum("btd,bsd->bts", x @ p["w"], x)
    s = jnp.concatenate([s, jnp.broadcast_to(p["h"][0], (3, 10, 1))], -1)
    return jax.nn.softmax(s, -1)[..., :-1] @ x


def before(x: Any, p: Arrays) -> Any:
    return (x * p["g"] + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] * (1 - p["g"])) @ p["w"]


def behind(x: torch.Tensor, p: Arrays) -> Any:
    return (x * p["g"] + pad(x, (0, 0, 0, 1))[:, 1:] * (1 - p["g"])) @ p["w"]


def modulated(p: Arrays, x: Any, of: Any, one: Any, two: Any) -> Any:
    return (of.tanh(x * (1 + one) @ p["w"]) * (1 + two)) @ p["v"]


def shuffled(p: Arrays, x: Any, of: Any, groups: int = 2) -> Any:
    """ShuffleNet's channels, of which a ReLU leaves zeros, in one of them nothing else; half of them pass a layer."""
    y = (jax.nn.relu if of is jnp else torch.relu)(x @ p["w"] * of.asarray([1.0] * 7 + [0]))
    y = y.reshape(3, 10, groups, 8 // groups).swapaxes(2, 3).reshape(3, 10, 8)
    return of.concatenate([y[..., :4], of.tanh(y[..., 4:] @ p["v"][:4, :4])], -1) @ p["w"]


FAULTS = {
    "reflected edges": Fault(
        lambda p, x, real: windows(p, x),
        lambda p, x, real: read(p, x, mode="reflect"),
        "another padding",
        ("the target pads (1, 1) with what the edges reflect, and the JAX model (1, 1) with zeros",),
    ),
    "zeros for reflected edges": Fault(
        lambda p, x, real: reflected(p, x),
        lambda p, x, real: read(p, x),
        "another padding",
        ("the target pads (1, 1) with zeros, and the JAX model (1, 1) with what the edges reflect",),
    ),
    "zeros for reflected edges, in front alone": Fault(
        lambda p, x, real: reflected(p, x, (2, 0)),
        lambda p, x, real: read(p, x, (2, 0)),
        "another padding",
        ("the target pads (2, 0) with zeros, and the JAX model (2, 0) with what the edges reflect",),
    ),
    "repeated for reflected edges": Fault(
        lambda p, x, real: reflected(p, x, (2, 2)),
        lambda p, x, real: read(p, x, (2, 2), "replicate"),
        "another padding",
        ("the target pads (2, 2) with the values of the edges, and the JAX model (2, 2) with what the edges reflect",),
    ),
    "the other end's values for zeros": Fault(
        lambda p, x, real: windows(p, x),
        lambda p, x, real: read(p, x, mode="circular"),
        "another padding",
        ("the target pads (1, 1) with the values of the other end, and the JAX model (1, 1) with zeros",),
    ),
    "strided, and padded at the end alone": Fault(
        lambda p, x, real: windows(p, x, stride=2),
        lambda p, x, real: read(p, x, (0, 2), stride=2),
        "another padding",
        ("the target pads (0, 2) with zeros, and the JAX model (1, 1) with zeros",),
    ),
    "a causal convolution that sees the next": Fault(
        lambda p, x, real: windows(p, x, (2, 0)),
        lambda p, x, real: read(p, x),
        "another padding",
        ("the target pads (1, 1) with zeros, and the JAX model (2, 0) with zeros",),
    ),
    "a causal convolution cut in the middle": Fault(
        lambda p, x, real: windows(p, x, (2, 0)),
        lambda p, x, real: cut(p, x),
        "another padding",
        (
            "takes the indices 1 to 10 of axis 2",
            "index k of axis 2 in the target is index k + 1 in the JAX model",
            "pads (2, 2) with zeros and takes the indices 1 to 10 of axis 2, and the JAX model (2, 0) with zeros",
        ),
    ),
    "another dilation": Fault(
        lambda p, x, real: windows(p, x, (2, 2), dilation=2),
        lambda p, x, real: read(p, x),
        "another dilation and another padding",
        ("the target has dilation (1,), and the JAX model (2,)",),
    ),
    "a kernel read backwards": Fault(
        lambda p, x, real: windows(p, x),
        lambda p, x, real: flipped(p, x),
        "kernel flipped",
        ("the target reads the taps of the kernel in the reverse order",),
    ),
    "a kernel whose channels are exchanged": Fault(
        lambda p, x, real: windows(p, x),
        lambda p, x, real: read({**p, "conv": p["conv"].transpose(0, 1)}, x),
        "axes of the kernel exchanged",
        ("the target reads the kernel with its axes in another order",),
    ),
    "padding that counts in a mean": Fault(
        lambda p, x, real: mean_of_each(p, x),
        lambda p, x, real: mean_with_padding(p, x),
        "another padding",
        ("the padding counts in the target's mean, and not in the JAX model's",),
    ),
    "interpolated between neighbours": Fault(
        lambda p, x, real: jnp.repeat(x @ p["w"], 2, 1) @ p["v"],
        lambda p, x, real: stretched(p, x, "linear"),
        "another interpolation",
        ("interpolates linearly", "the JAX model repeats the elements"),
    ),
    "heads before parts": Fault(
        lambda p, x, real: fused(p, x),
        lambda p, x, real: heads_first(p, x),
        "another part",
        ("of 24 indices of", "the target takes 0 to 3, 12 to 15, and the JAX model 0 to 7"),
    ),
    "parts of all heads at once": Fault(
        lambda p, x, real: parts_of_heads(p, x),
        lambda p, x, real: heads_of_parts(p, x),
        "another part",
        ("of 16 indices of", "the target takes 0 to 7, and the JAX model 0 to 3, 8 to 11"),
    ),
    "the last position for the end of each": Fault(
        lambda p, x, real: jnp.tanh(x @ p["w"])[jnp.arange(3), real.sum(1) - 1] @ p["v"],
        lambda p, x, real: torch.tanh(x @ p["w"])[:, -1] @ p["v"],
        "another part",
        ("of 10 indices of", "the target takes 9, and the JAX model 5, 7, 9"),
    ),
    "the next for the one before": Fault(
        lambda p, x, real: before(x, p),
        lambda p, x, real: behind(x, p),
        "another part",
        ("the target takes the indices 1 to 10 of axis 1", "the JAX model takes the indices 0 to 9 of axis 1"),
    ),
    "two steps behind for one": Fault(
        lambda p, x, real: jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1) @ p["w"],
        lambda p, x, real: pad(x, (0, 0, 2, 0))[:, :-2] @ p["w"],
        "another part",
        (
            "index k of axis 1 in the target is index k - 1 in the JAX model",
            "2 zeros and the indices 0 to 7 of axis 1 of the input x, and the JAX model 1 zero and the indices 0 to 8",
        ),
    ),
    "the first part of a product used twice": Fault(
        lambda p, x, real: modulated(p, x, jnp, *jnp.split(x @ jnp.concatenate([p["w"], p["v"]], -1), 2, -1)),
        lambda p, x, real: modulated(p, x, torch, *[(x @ torch.cat([p["w"], p["v"]], -1)).chunk(2, -1)[0]] * 2),
        "another operand",
        ("the target adds 1, multiplies", "of 16 indices of", "the target takes 0 to 7, and the JAX model 8 to 15"),
    ),
    "another value for one that is used twice": Fault(
        lambda p, x, real: modulated(p, x, jnp, *[x @ p["w"]] * 2),
        lambda p, x, real: modulated(p, x, torch, x @ p["w"], x),
        "another operand",
        ("the JAX model adds 1, multiplies", "the target uses the input x, and the JAX model what w gives"),
    ),
    "added up by another index": Fault(
        lambda p, x, real: jnp.zeros((3, 2, 8)).at[jnp.arange(3)[:, None], real.cumsum(1) % 2].add(x @ p["w"]),
        lambda p, x, real: torch.zeros(3, 2, 8).scatter_add(1, real.long()[..., None].expand(-1, -1, 8), x @ p["w"]),
        "another computation",
        ("of the input real and what w gives, the target runs scatter_add",),
    ),
    "softplus times the input": Fault(
        lambda p, x, real: (jax.nn.softplus(x @ p["w"]) * x) @ p["v"],
        lambda p, x, real: softplus(x @ p["w"]) @ p["v"],
        "operation missing",
        ("the JAX model multiplies by the input x (",),
    ),
    "what goes into a state and what comes out of it exchanged": Fault(
        lambda p, x, real: selective(p, x, jnp),
        lambda p, x, real: selective(p, x, torch, exchanged=True),
        "operands exchanged",
        (),
    ),
    "a bias behind softplus": Fault(
        lambda p, x, real: jax.nn.softplus(x @ p["w"] + p["h"]) @ p["v"],
        lambda p, x, real: (softplus(x @ p["w"]) + p["h"]) @ p["v"],
        "operations in another order",
        ("the target applies softplus, adds h", "the JAX model adds h, computes softplus"),
    ),
    "a bias behind gelu": Fault(
        lambda p, x, real: jax.nn.gelu(x @ p["w"] + p["h"]) @ p["v"],
        lambda p, x, real: (gelu(x @ p["w"], approximate="tanh") + p["h"]) @ p["v"],
        "operations in another order",
        ("the target applies gelu_tanh, adds h",),
    ),
    "a score of edges behind leaky relu": Fault(
        lambda p, x, real: jax.nn.softmax(jax.nn.leaky_relu(x @ p["w"] + x @ p["v"], 0.2), -1) @ p["v"],
        lambda p, x, real: torch.softmax(leaky_relu(x @ p["w"], 0.2) + x @ p["v"], -1) @ p["v"],
        "operations in another order",
        ("the JAX model adds, computes leaky_relu with slope 0.2",),
    ),
    "mish for tanh times softplus": Fault(
        lambda p, x, real: (jnp.tanh(x @ p["w"]) * jax.nn.softplus(x @ p["w"])) @ p["v"],
        lambda p, x, real: mish(x @ p["w"]) @ p["v"],
        "mish for softplus times tanh",
        ("applies tanh, computes softplus, multiplies",),
    ),
    "log1p for log": Fault(
        lambda p, x, real: jnp.log(jnp.abs(x @ p["w"]) + 0.5) @ p["v"],
        lambda p, x, real: torch.log1p((x @ p["w"]).abs() + 0.5) @ p["v"],
        "log1p for log",
        (),
    ),
    "squared in front of the product": Fault(
        lambda p, x, real: jnp.square(jax.nn.relu(x @ p["w"]) * (x @ p["v"])) @ p["w"],
        lambda p, x, real: (torch.square(torch.relu(x @ p["w"])) * (x @ p["v"])) @ p["w"],
        "operations in another order",
        ("the target squares, multiplies", "the JAX model multiplies, squares"),
    ),
    "channels shuffled the other way": Fault(
        lambda p, x, real: shuffled(p, x, jnp),
        lambda p, x, real: shuffled(p, x, torch, groups=4),
        "another part",
        ("of 8 indices of the relu", "the target takes 0, 2, 4, 6, and the JAX model 0 to 1, 4 to 5"),
    ),
    "no key of its own": Fault(
        lambda p, x, real: with_key_of_its_own(p, x),
        lambda p, x, real: torch.softmax(torch.einsum("btd,bsd->bts", x @ p["w"], x), -1) @ x,
        "operation missing",
        ("joins h to it",),
    ),
}


@pytest.mark.parametrize("name", slow_but(list(FAULTS)[::3], FAULTS))
def test_a_mistake_is_named(name: str) -> None:
    check(FAULTS[name])


def test_a_correct_padding_is_no_difference() -> None:
    """JAX pads within the convolution, torch in front of it."""
    assert said(lambda p, x, real: windows(p, x), lambda p, x, real: read(p, x)) is None
