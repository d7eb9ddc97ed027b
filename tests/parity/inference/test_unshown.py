"""A limit that no value reaches, and a choice whose other side is never taken, are named: the proof does not show them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import convert
from support.inferred import WIDTH, derive, tokens

D = WIDTH
SHAPES = {"a": (D, D), "b": (D, D)}


class Model(torch.nn.Module):
    def __init__(self, limited: Callable[[Any], Any]) -> None:
        super().__init__()
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(2))
        self.limited = limited

    def forward(self, x: Any) -> Any:
        return self.m[1](self.limited(self.m[0](x)))


def same(y: Any) -> Any:
    return y


def emptied(y: Any) -> Any:
    y = y.clone()
    y[y > 100] = 0
    return y


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        (same, lambda y: y.clamp(max=50), ["`clamp` of the PyTorch module: no value is above 50"]),
        (
            lambda y: jnp.clip(y, -50, 50),
            same,
            ["`max` of the JAX function: no value is below -50", "`min` of the JAX function: no value is above 50"],
        ),
        (lambda y: jnp.clip(y, -50, 50), lambda y: y.clamp(-50, 50), []),  # both have them
        (
            lambda y: jnp.minimum(y, 50),
            lambda y: y.clamp(max=60),
            ["`min` of the JAX function: no value is above 50", "`clamp` of the PyTorch module: no value is above 60"],
        ),
        (lambda y: jnp.clip(y, -1, 1), lambda y: y.clamp(-1, 1), []),  # reached
        (jax.nn.relu, functional.relu6, ["`hardtanh` of the PyTorch module: no value is above 6"]),
        (jax.nn.relu, functional.relu, []),
        (lambda y: jnp.where(y > 0, y, 50 * y), lambda y: functional.leaky_relu(y, 50.0), []),  # a slope is no limit
        (
            lambda y: y / jnp.sqrt((y * y).sum(-1, keepdims=True)),
            lambda y: functional.normalize(y, dim=-1),
            ["`clamp_min` of the PyTorch module: no value is below 1e-12"],
        ),
        (lambda y: jnp.where(y > -100, y, -y), same, ["`select_n` of the JAX function: every element takes the same side"]),
        (same, lambda y: y.masked_fill(y > 100, 0), ["`masked_fill` of the PyTorch module: every element takes"]),
        (same, lambda y: torch.fmax(y, torch.tensor(-70, dtype=y.dtype)), ["`fmax` of the PyTorch module: no value is below -70"]),
        (same, lambda y: torch.fmod(y, 1000), ["`fmod` of the PyTorch module: it leaves every number as it is"]),
        (same, lambda y: functional.hardshrink(y, 1e-6), ["`hardshrink` of the PyTorch module: no value is between -1e-06 and 1e-06, where it gives 0"]),
        (same, lambda y: y * (1 - (y > 500).any(-1, keepdim=True).to(y.dtype)), ["`gt` of the PyTorch module: every element has one answer"]),
        (same, lambda y: y + torch.bucketize(y, torch.tensor([200, 300], dtype=y.dtype)), ["`bucketize` of the PyTorch module: every element gives 0"]),
        (same, lambda y: y * torch.heaviside(y + 100, torch.ones((), dtype=y.dtype)), ["`heaviside` of the PyTorch module: every element gives 1"]),
        (lambda y: y + jnp.floor(jnp.abs(y) / 1000), same, ["`floor` of the JAX function: every element gives 0"]),
        (lambda y: y + (jnp.abs(y) / 1000).astype(int), same, ["`convert_element_type` of the JAX function: every element gives 0"]),
        (lambda y: y + jnp.floor(y), lambda y: y + y.floor(), []),  # shown
        (lambda y: y + jnp.sign(jnp.exp(y)), lambda y: y + 1, []),  # no input gives another sign
        (same, lambda y: torch.where(torch.ones_like(y).bool(), y, -y), ["`where` of the PyTorch module: every element takes the same side, and no number of the inputs changes it"]),
        (jnp.exp, lambda y: y.exp().abs(), []),  # no input would, as in what follows
        (lambda y: jnp.maximum(jax.nn.softmax(y), 0), lambda y: y.softmax(-1), []),
        (lambda y: jnp.clip(jnp.tanh(y), -1, 1), torch.tanh, []),
        (lambda y: jnp.minimum(jnp.tanh(y) * 2, 2.5), lambda y: 2 * y.tanh(), []),
        (lambda y: jnp.minimum(jnp.tanh(y) * 3, 2.9999), lambda y: 3 * y.tanh(), ["`min` of the JAX function: no value is above 2.9999"]),
        (lambda y: y / jnp.sqrt(jnp.maximum(jnp.var(y, -1, keepdims=True), 0) + 1e-6), lambda y: y / (y.var(-1, keepdim=True, correction=0) + 1e-6).sqrt(), []),
        (lambda y: jnp.maximum(y * y + jnp.exp(y), 0), lambda y: y * y + y.exp(), []),
        (lambda y: jnp.maximum(y * y, 1e-12), lambda y: y * y, ["`max` of the JAX function: no value is below 1e-12"]),
        (lambda y: jnp.where(jnp.exp(y) > 0, jnp.exp(y), -y), torch.exp, []),
        (lambda y: y * jnp.minimum(1, 90 / jnp.linalg.norm(y, axis=-1, keepdims=True)), same, ["`min` of the JAX function: no value is below 1 (from "]),
        (same, lambda y: y * (90 / y.norm(dim=-1, keepdim=True)).clamp(max=1), ["`clamp` of the PyTorch module: no value is below 1 (from "]),
        (lambda y: y * y * (y * y > 1e-30), lambda y: y * y, ["`gt` of the JAX function: every element has one answer, and multiplies by it"]),
        (same, lambda y: y * (y < 1e3), ["`lt` of the PyTorch module: every element has one answer"]),
        (lambda y: y * (y > 0), lambda y: y * (y > 0), []),
        (jax.nn.softplus, lambda y: functional.softplus(y, threshold=90), ["`softplus` of the PyTorch module: no value is above 90"]),
        (same, lambda y: torch.renorm(y, 2, 0, 1e5), ["`renorm` of the PyTorch module: it leaves every number as it is"]),
        (same, lambda y: y.clone().masked_scatter_(y > 100, torch.zeros_like(y)), ["`masked_scatter` of the PyTorch module: every element takes"]),
        (same, emptied, ["`index_put` of the PyTorch module: every element takes"]),
        (lambda y: jnp.log(jax.nn.sigmoid(y / 9) / (1 - jax.nn.sigmoid(y / 9))), lambda y: torch.logit(torch.sigmoid(y / 9), eps=1e-9), ["`logit` of the PyTorch module: no value is below 1e-09 or above"]),
        (jax.nn.softplus, functional.softplus, []),  # the source guards against what is not a number
    ],
)  # fmt: skip
def test_what_no_run_shows_is_named(source: Any, target: Any, said: list[str]) -> None:
    found = derive(lambda w, x: 0.1 * source(x @ w["a"]) @ w["b"], Model(lambda y: 0.1 * target(y)), SHAPES)
    assert found.complete, found.differences
    named = [note.replace(note[note.index(" at ") : note.index(": ")], "") for note in found.notes]
    assert len(named) == len(said) and all(map(str.startswith, named, said)), found.notes


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        (lambda x: jnp.where(x > 20, 0, x), same, "`select_n` of the JAX function: every element takes the same side"),
        (lambda x: jnp.minimum(x, 20), same, "`min` of the JAX function: no value is above 20 (up to 14)"),
        (
            lambda x: x % 30,
            same,
            "`rem` of the JAX function: it leaves every number as it is; give numbers that it changes",
        ),
        (same, lambda x: x & 15, "`bitwise_and` of the PyTorch module: it leaves every number"),
        (same, lambda x: x.masked_fill(x == 33, 0), "`masked_fill` of the PyTorch module: every element takes"),
        (lambda x: x % 30, lambda x: x % 30, ""),
        (lambda x: x % 7, lambda x: x % 7, ""),
        (same, same, ""),  # JAX asks whether an index counts from the end
    ],
)
def test_what_no_token_shows_is_named(source: Any, target: Any, said: str) -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(15, D)

        def forward(self, x: Any) -> Any:
            return self.table(target(x))

    found = derive(lambda w, x: w["a"][source(x)], Table(), {"a": (15, D)}, tokens(15, 9, 7))
    assert found.proof is not None, found.differences
    named = [note.replace(note[note.index(" at ") : note.index(": ")], "") for note in found.notes]
    assert len(named) == bool(said) and all(note.startswith(said) for note in named), found.notes


def test_the_variance_of_a_norm_is_not_said_to_be_limited() -> None:
    """flax's norms limit a mean of squares without the square of the mean, which is negative by rounding only."""

    def function(w: Any, x: Any) -> Any:
        y = x @ w["a"]
        variance = jnp.maximum(0.0, (y * y).mean(-1, keepdims=True) - jnp.square(y.mean(-1, keepdims=True)))
        return (y - y.mean(-1, keepdims=True)) / jnp.sqrt(variance + 1e-6) @ w["b"]

    found = derive(function, Model(lambda y: functional.layer_norm(y, (D,), eps=1e-6)), SHAPES)
    assert found.complete and found.notes == ()


def test_a_line_that_runs_again_has_one_note() -> None:
    def limited(y: Any) -> Any:
        for _ in range(3):
            y = jnp.minimum(y * 2, 5000)
        return y

    found = derive(lambda w, x: 0.1 * limited(x @ w["a"]) @ w["b"], Model(lambda y: 0.1 * y * 8), SHAPES)
    assert found.complete and len(found.notes) == 1 and ", 3 times: no value is above 5000" in found.notes[0]


def test_choices_of_several_lines_are_one_note() -> None:
    def chosen(y: Any) -> Any:
        y = jnp.where(y > -100, y, -y)
        return jnp.where(y < 100, y, -y)

    found = derive(lambda w, x: chosen(x @ w["a"]) @ w["b"], Model(same), SHAPES)
    (note,) = found.notes
    places = note.split(" at ")[1].split(": ")[0].split(", ")
    assert found.complete and len({*places}) == 2 and all(place.startswith("test_unshown.py:") for place in places)


def test_a_mask_that_the_search_takes_apart_is_seen_whole() -> None:
    """No query may see a later token, and each sees all of the memory in front: the part of the mask that lies over the memory hides nothing."""
    tokens, remembered = 4, 5
    hidden = np.triu(np.ones((tokens, remembered + tokens), bool), 1 + remembered)

    def function(w: Any, inputs: Any) -> Any:
        both = jnp.concatenate([inputs["memory"], inputs["x"]], 1)
        scores = jnp.where(hidden, -1e30, inputs["x"] @ w["q"] @ jnp.swapaxes(both @ w["k"], 1, 2))
        return jax.nn.softmax(scores) @ (both @ w["v"])

    class Remembering(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = torch.nn.Linear(D, 3 * D, bias=False)

        def forward(self, x: Any, memory: Any) -> Any:
            queries, keys, values = self.m(torch.cat([memory.swapaxes(0, 1), x.swapaxes(0, 1)])).chunk(3, -1)
            scores = torch.einsum("ibd,jbd->ijb", queries[remembered:], keys)
            scores = scores.masked_fill(torch.as_tensor(hidden)[:, :, None], -1e30)
            return torch.einsum("ijb,jbd->bid", scores.softmax(1), values)

    def inputs(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return {"x": rng.normal(size=(3, tokens, D)), "memory": rng.normal(size=(3, remembered, D))}

    found = convert.infer(function, Remembering(), lambda m, i: m(**i), inputs, dict.fromkeys("qkv", (D, D)))
    assert found.complete and found.notes == ()


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        (lambda y: jnp.where(y > 0.5, y, 0), lambda y: torch.where(y > 0.5 + 1e-6, y, 0.0), "changes at 0.500001, and `gt` of the JAX function at 0.5"),
        (jax.nn.relu, lambda y: y * (y > 1e-6), "`gt` of the PyTorch module changes at 1e-06, and `max` of the JAX function at 0"),
        (lambda y: jnp.where(jnp.abs(y) > 0.5, y, 0), lambda y: functional.hardshrink(y, 0.5 + 1e-6), "`hardshrink` of the PyTorch module changes at 0.500001"),
        (jax.nn.relu, lambda y: functional.threshold(y, 1e-6, 0), "`threshold` of the PyTorch module changes at 1e-06, and `max` of the JAX function at 0"),
        (lambda y: jnp.where(y > 0.5, y, 0), lambda y: torch.where(y > 0.5, y, 0.0), ""),
        (lambda y: jnp.where(y > 0, y, 0.1 * y), lambda y: functional.leaky_relu(y, 0.1), ""),
        (lambda y: jnp.clip(y, -1, 1), lambda y: y.clamp(-1, 1), ""),
    ],
)  # fmt: skip
def test_numbers_that_no_value_lies_between_are_named(source: Any, target: Any, said: str) -> None:
    found = derive(lambda w, x: source(x @ w["a"]) @ w["b"], Model(target), SHAPES)
    assert found.complete, found.differences
    named = [
        re.sub(r" at \S+py:\d+", "", note) for note in found.notes if "no value that was drawn lies between" in note
    ]
    assert len(named) == bool(said) and all(said in note for note in named), found.notes
