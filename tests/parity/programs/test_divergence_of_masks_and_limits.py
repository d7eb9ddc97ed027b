"""Masks, limits, means over what is real, losses and interpolations that differ: both sides are named as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.scipy.ndimage import map_coordinates

from convert.programs.divergence.knowledge import Knowledge
from convert.programs.divergence.shared_values import SharedValues
from convert.programs.fingerprint import EXACT
from support.marks import slow_but
from support.small_faults import Arrays, Fault, check, records, said

CAUSAL, ONE_MORE = (np.tril(np.ones((10, 10), bool), k) for k in (0, 1))


def hidden(p: Arrays, x: Any, real: Any) -> Any:
    return jnp.tanh(x @ p["w"])


def attention(p: Arrays, x: Any, real: Any) -> Any:
    s = jnp.einsum("btd,bsd->bts", x @ p["w"], x @ p["v"]) / 3
    return jax.nn.softmax(jnp.where(CAUSAL, s, -1e9), -1) @ x * p["g"] @ p["v"]


def with_added(p: Arrays, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    s = torch.einsum("btd,bsd->bts", x @ p["w"], x @ p["v"]) / 3
    mask = torch.zeros(10, 10).masked_fill(~torch.tensor(ONE_MORE), float("-inf")).to(x)
    return (s + mask).softmax(-1) @ x * p["g"] @ p["v"]


def cells(
    p: Arrays, x: Any, keeps: Any, of: Any, resets: tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]
) -> Any:
    """A recurrence of two states, which are set to zeros at some steps."""
    h = c = x[:, 0]
    found = []
    for k in range(1, 10):
        h, c = (reset(keeps[:, k][:, None], state) for reset, state in zip(resets, (h, c), strict=True))
        z = x[:, k] @ p["w"] + h @ p["v"]
        c = 1 / (1 + of.exp(-z)) * c + of.tanh(z * p["g"])
        h = of.tanh(c * p["h"])
        found.append(h)
    return of.stack(found, 1)


def by_product(kept: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return kept.to(state) * state


def by_choice(kept: Any, state: Any) -> Any:
    return jnp.where(kept, state, 0.0)


def as_it_is(kept: Any, state: Any) -> Any:
    return state


def sampled(p: Arrays, x: Any, real: Any) -> Any:
    at = 4 + 3 * jnp.tanh(x @ p["v"])
    sample = jax.vmap(lambda image, rows, columns: map_coordinates(image, [rows, columns], order=1, mode="constant"))
    return sample(jnp.tanh(x @ p["w"]), at[..., :4], at[..., 4:]) @ p["w"][:4]


def grid_sampled(p: Arrays, x: torch.Tensor, real: torch.Tensor, **settings: Any) -> torch.Tensor:
    at = 4 + 3 * torch.tanh(x @ p["v"])
    grid = torch.stack([2 * at[..., 4:] / 7 - 1, 2 * at[..., :4] / 9 - 1], -1)
    return torch.nn.functional.grid_sample(torch.tanh(x @ p["w"])[:, None], grid, **settings)[:, 0] @ p["w"][:4]


def over_slots(p: Arrays, x: Any, real: Any) -> Any:
    scores = jnp.einsum("bid,bjd->bij", x @ p["w"], (x @ p["v"])[:, :4])
    return jnp.einsum("bij,bid->bjd", jax.nn.softmax(scores, -1), x) @ p["w"]


def over_inputs(p: Arrays, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bjd,bid->bji", (x @ p["v"])[:, :4], x @ p["w"])
    return torch.einsum("bji,bid->bjd", scores.softmax(-1), x) @ p["w"]


def loss(p: Arrays, x: Any, real: Any, of: Any, beta: float) -> Any:
    z = of.tanh(x @ p["w"])
    one, two = z * p["g"] - x, z @ p["v"] - x
    return (two * two).mean() + (beta * (one * one).mean() if beta != 1 else (one * one).mean())


def resized(p: Arrays, x: Any, real: Any) -> Any:
    return jax.image.resize((x @ p["w"]).reshape(3, 10, 2, 4), (3, 20, 4, 4), "bilinear") * p["g"][:4]


def interpolated(p: Arrays, x: torch.Tensor, real: torch.Tensor, mode: str, **more: bool) -> torch.Tensor:
    y = (x @ p["w"]).reshape(3, 10, 2, 4).permute(0, 3, 1, 2)
    return torch.nn.functional.interpolate(y, size=(20, 4), mode=mode, **more).permute(0, 2, 3, 1) * p["g"][:4]


def of_every_second_key(p: Arrays, x: Any, real: Any) -> Any:
    s = jnp.einsum("btd,bsd->bts", x @ p["w"], x[:, ::2] @ p["v"]) / 3
    return jax.nn.softmax(jnp.where(real[:, None, ::2], s, -1e9), -1) @ x[:, ::2] @ p["v"]


def with_resized_padding(p: Arrays, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """As DETR resizes its mask of padding, in numbers of floating point."""
    padding = torch.nn.functional.interpolate((~real)[None].double(), size=5)[0].bool()
    s = torch.einsum("btd,bsd->bts", x @ p["w"], x[:, ::2] @ p["v"]) / 3
    return s.masked_fill(padding[:, None], -torch.inf).softmax(-1) @ x[:, ::2] @ p["v"]


FAULTS = {
    "another limit at one end": Fault(
        lambda p, x, real: jnp.clip(x, -1, 1) @ p["w"],
        lambda p, x, real: x.clamp(-1, 2) @ p["w"],
        "another constant",
        ("the target limits the values to -1 to 2", "the JAX model limits the values to -1 to 1"),
    ),
    "a limit at one end alone": Fault(
        lambda p, x, real: jnp.exp(jnp.clip(x @ p["w"], -1, 2)) * p["g"] @ p["v"],
        lambda p, x, real: torch.exp((x @ p["w"]).clamp(max=2)) * p["g"] @ p["v"],
        "another constant",
        ("the target limits the values to at most 2", "the JAX model limits the values to -1 to 2"),
    ),
    "no limits": Fault(
        lambda p, x, real: jnp.exp(jnp.clip(x @ p["w"], -1, 2)) * p["g"] @ p["v"],
        lambda p, x, real: torch.exp(x @ p["w"]) * p["g"] @ p["v"],
        "operation missing",
        ("the JAX model limits the values to -1 to 2", "uses it as it is"),
    ),
    "an added mask that is off by one": Fault(
        attention,
        with_added,
        "another mask",
        ("both mask the quotient", "up to 1 behind it; in the JAX model, itself and up to 9 in front of it"),
    ),
    "zeros in other rows, by a product": Fault(
        lambda p, x, real: jnp.where(real[..., None], jnp.tanh(x @ p["w"]), 0).sum(1) @ p["v"],
        lambda p, x, real: (torch.tanh(x @ p["w"]) * real.roll(1, 1)[..., None]).sum(1) @ p["v"],
        "another mask",
        ("the target shows 2 positions that the JAX model hides, and hides 2 that it shows",),
    ),
    "zeros in other rows, in front of a convolution": Fault(
        lambda p, x, real: (jnp.tanh(x @ p["w"]) * real[..., None]) @ p["v"],
        lambda p, x, real: torch.conv1d(torch.tanh(x @ p["w"]).mT.masked_fill(~real.roll(1, 1)[:, None], 0), p["v"].T[..., None]).mT,
        "another mask",
        ("both mask the tanh", "the target shows 2 positions that the JAX model hides, and hides 2 that it shows"),
    ),
    "a mask of other rows that each side computes": Fault(
        lambda p, x, real: jnp.where((jnp.arange(10) < real.sum(1)[:, None] // 2)[..., None], jnp.tanh(x @ p["w"]), 0).sum(1) @ p["v"],
        lambda p, x, real: torch.tanh(x @ p["w"]).masked_fill((torch.arange(10) >= (real.sum(1)[:, None] + 2) // 2)[..., None], 0).sum(1) @ p["v"],
        "another mask",
        ("both mask the tanh", "the target shows 3 positions that the JAX model hides, and hides 0 that it shows"),
    ),
    "a mask of other rows that is resized": Fault(
        of_every_second_key,
        lambda p, x, real: with_resized_padding(p, x, real.roll(1, 1)),
        "another mask",
        ("the target shows 2 positions that the JAX model hides",),
    ),
    "a state that is not set to zeros": Fault(
        lambda p, x, real: cells(p, x, x[..., 0] < 0.5, jnp, (by_choice, by_choice)),
        lambda p, x, real: cells(p, x, x[..., 0] < 0.5, torch, (by_product, as_it_is)),
        "operation missing",
        ("the JAX model masks a part of the input x in front of it", "the target does not"),
    ),
    "the largest of all": Fault(
        lambda p, x, real: jnp.where(real[..., None], hidden(p, x, real), -jnp.inf).max(1) @ p["v"] + (hidden(p, x, real) * real[..., None]).sum(1) @ p["w"],
        lambda p, x, real: torch.tanh(x @ p["w"]).max(1).values @ p["v"] + (torch.tanh(x @ p["w"]) * real[..., None]).sum(1) @ p["w"],
        "operation missing",
        ("the target takes the largest over axis 1", "the JAX model masks the tanh", "the target does not"),
    ),
    "the mean over padding": Fault(
        lambda p, x, real: (hidden(p, x, real) * real[..., None]).sum(1) / real.sum(1)[:, None] @ p["v"],
        lambda p, x, real: (torch.tanh(x @ p["w"]) * real[..., None]).sum(1) / 10 @ p["v"],
        "another factor",
        ("the target divides by 10", "the JAX model divides by the sum over the last axis of the input real"),
    ),
    "another weight of a term of the loss": Fault(
        partial(loss, of=jnp, beta=0.25),
        partial(loss, of=torch, beta=0.3),
        "another constant",
        ("the target multiplies by 0.3", "the JAX model multiplies by 0.25"),
    ),
    "no weight of a term of the loss": Fault(
        partial(loss, of=jnp, beta=0.25), partial(loss, of=torch, beta=1), "operation missing", ("the JAX model multiplies by 0.25",)
    ),
    "aligned corners": Fault(
        resized,
        partial(interpolated, mode="bilinear", align_corners=True),
        "another interpolation",
        ("the target takes linear interpolation with aligned corners, and the JAX model linear interpolation",),
    ),
    "a softmax over the last axis of another layout": Fault(
        over_slots,
        over_inputs,
        "softmax over the last axis for softmax over axis 1",
        ("; the JAX model computes softmax over axis 1 (", "as the target counts the axes"),
    ),
    "aligned corners of a grid": Fault(
        sampled,
        partial(grid_sampled, align_corners=False),
        "another interpolation",
        ("of the tanh at ", "the target samples with align_corners=False", "numbers are those of align_corners=True"),
    ),
    "the nearest element": Fault(
        resized,
        partial(interpolated, mode="nearest"),
        "another interpolation",
        ("the target takes the nearest element, and the JAX model linear interpolation",),
    ),
    "cubic interpolation": Fault(
        resized,
        partial(interpolated, mode="bicubic"),
        "another interpolation",
        ("the target takes cubic interpolation (-0.75), and the JAX model linear interpolation",),
    ),
}  # fmt: skip
QUICK = (
    "another limit at one end",
    "an added mask that is off by one",
    "the largest of all",
    "another weight of a term of the loss",
)


@pytest.mark.parametrize("name", slow_but(QUICK, FAULTS))
def test_a_mistake_is_named(name: str) -> None:
    check(FAULTS[name])


def test_a_mask_that_is_turned_over_and_resized_is_no_difference() -> None:
    """The JAX model has other numbers for it; what differs stands in front of the scores that it hides."""
    source, target = records(of_every_second_key, lambda p, x, real: with_resized_padding(p, x.tanh(), real))
    region = Knowledge(source, target, "y", SharedValues(source, EXACT)).region()
    assert not [k for k in region if "upsample" in target.operations[k].name]


def test_a_grid_with_the_same_settings_is_no_difference() -> None:
    assert said(sampled, partial(grid_sampled, align_corners=True)) is None


def test_the_mask_that_is_missing_is_named_and_not_one_that_it_covers() -> None:
    """Of positions that are set to zero later it makes no difference whom they see; nothing restores what follows."""

    def right(p: Arrays, x: Any, real: Any) -> Any:
        sees = real[:, :, None] & real[:, None]
        weights = jax.nn.softmax(jnp.where(sees, x @ jnp.swapaxes(x @ p["v"], 1, 2), -1e9), -1)
        y = (weights @ x + x) * real[..., None]
        return jnp.cumsum(jnp.tanh(y @ p["w"]) @ p["v"], 1) @ p["h"]

    def wrong(p: Arrays, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        scores = (x @ (x @ p["v"]).mT).masked_fill(~real[:, None], -torch.inf)
        y = scores.softmax(-1) @ x + x
        return torch.tanh(y @ p["w"]) @ (p["h"] * p["h"])

    found = said(right, wrong)
    assert found is not None and not found.name
    assert found.problem.startswith("of the sum at ") and "the JAX model multiplies by the input real" in found.problem


def test_the_state_that_is_masked_is_named() -> None:
    """At the first step all of it is zeros, which each factor of the product behind it would give."""
    first = np.zeros(10, bool)

    def right(p: Arrays, x: Any, real: Any) -> Any:
        return cells(p, x, real & first, jnp, (as_it_is, by_choice))

    def wrong(p: Arrays, x: Any, real: Any) -> Any:
        return cells(p, x, real, torch, (as_it_is, as_it_is))

    check(Fault(right, wrong, "operation missing", ("of a part of the input x, the JAX model masks",)))
