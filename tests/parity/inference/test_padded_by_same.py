"""SAME pads by the size of the input, and PyTorch by fixed numbers: where they agree for the drawn sizes alone, a note says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox
import flax.linen as nn
import haiku
import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx

import convert
from support.inferred import derive, floats, linen

D, ODD, EVEN = 4, 9, 8


class Net(torch.nn.Module):
    def __init__(self, strides: int = 2, padding: int = 1, before: Any = (0, 0), pool: Any = None) -> None:
        super().__init__()
        self.c, self.before, self.pool = torch.nn.Conv1d(D, D, 3, strides, padding), before, pool

    def forward(self, x: Any) -> Any:
        y = self.c(torch.nn.functional.pad(x.mT, self.before))
        return torch.tanh((y if self.pool is None else self.pool(y)).mT)


class Linen(nn.Module):
    strides: int = 2
    padding: Any = "SAME"
    pool: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.Conv(D, (3,), self.strides, self.padding)(x)
        return jnp.tanh(nn.max_pool(y, (3,), (2,), "SAME") if self.pool else y)


def of_linen(size: int, **settings: Any) -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    return linen(Linen(**settings), jnp.zeros((2, size, D)))


def of_nnx() -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    layer = nnx.Conv(D, D, (3,), 2, padding="SAME", rngs=nnx.Rngs(0))

    run = nnx.jit(lambda layer, x: jnp.tanh(layer(x)))
    return lambda w, x: run(convert.fill_pytree(layer, w), x), {"kernel": (3, D, D), "bias": (D,)}


def of_haiku() -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    model = haiku.without_apply_rng(haiku.transform(lambda x: jnp.tanh(haiku.Conv1D(D, 3, 2)(x))))
    return lambda w, x: model.apply({"conv1_d": w}, x), {"w": (3, D, D), "b": (D,)}


def of_equinox() -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    layer = equinox.nn.Conv1d(D, D, 3, 2, padding="SAME", key=jax.random.key(0))

    def function(w: Any, x: Any) -> Any:
        own = equinox.tree_at(lambda one: (one.weight, one.bias), layer, (w["weight"], w["bias"]))
        return jnp.tanh(jax.vmap(own)(x.swapaxes(1, 2)).swapaxes(1, 2))

    return function, {"weight": (D, D, 3), "bias": (D, 1)}


def notes(model: Any, module: Any, size: int) -> list[str]:
    found = derive(model[0], module, model[1], floats(2, size, D))
    assert found.complete, found.differences
    return [note for note in found.notes if "SAME" in note]


@pytest.mark.parametrize(
    "model", [of_linen(ODD), *(pytest.param(of(), marks=pytest.mark.slow) for of in (of_nnx, of_haiku, of_equinox))]
)
def test_a_note_says_that_same_pads_otherwise_for_other_sizes(model: Any):
    (note,) = notes(model, Net(), ODD)
    assert note.startswith("the JAX function pads by SAME at test_padded_by_same.py:")
    assert (
        "with strides of 2: (1, 1) for the sizes of these inputs, as the PyTorch module at test_padded_by_same.py:"
        in note
    )
    assert note.endswith("the two differ; give inputs of the sizes that you will use")


def test_a_pooling_has_the_note_too():
    (conv, pool) = notes(of_linen(ODD, pool=True), Net(pool=torch.nn.MaxPool1d(3, 2, 1)), ODD)
    assert "strides of 2: (1, 1)" in conv and "strides of 2: (1, 1)" in pool
    assert conv != pool


@pytest.mark.parametrize(
    ("model", "module", "size"),
    [
        pytest.param(of_linen(ODD, padding=1), Net(), ODD, id="numbers in both"),
        pytest.param(of_linen(ODD, strides=1), Net(1), ODD, id="no strides"),
        pytest.param(of_linen(EVEN), Net(padding=0, before=(0, 1)), EVEN, id="the module's code pads"),
    ],
)
def test_there_is_no_note_where_it_would_say_nothing(model: Any, module: Any, size: int):
    assert notes(model, module, size) == []


@pytest.mark.slow
def test_an_even_size_shows_the_difference():
    found = derive(of_linen(EVEN)[0], Net(), of_linen(EVEN)[1], floats(2, EVEN, D))
    assert "the target pads (1, 1) with zeros, and the JAX model (0, 1) with zeros" in found.differences[0].problem


class Image(torch.nn.Module):
    def __init__(self, padding: str, pool: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.c, self.pool = torch.nn.Conv2d(D, D, 3, 2 if padding == "valid" else 1, padding), pool

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.pool(self.c(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1))


class LinenImage(nn.Module):
    padding: str
    pool: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        strides = (2, 2) if self.padding == "VALID" else (1, 1)
        return jnp.tanh(self.pool(nn.Conv(D, (3, 3), strides, self.padding)(x), (3, 3), (2, 2)))


@pytest.mark.parametrize(
    ("padding", "jax_pool", "pool"),
    [
        ("valid", nn.max_pool, lambda x: torch.nn.functional.max_pool2d(x, 3, 2)),
        ("same", nn.avg_pool, lambda x: torch.nn.functional.avg_pool2d(x, (3, 3), 2)),
    ],
)
def test_settings_of_torch_that_have_one_number_for_all_axes(padding: str, jax_pool: Any, pool: Any):
    """`aten.convolution` of ``padding="valid"`` has one number for both axes, as SigLIP's patches."""
    function, shapes = linen(LinenImage(padding.upper(), jax_pool), jnp.zeros((2, 11, 11, D)))
    found = derive(function, Image(padding, pool), shapes, floats(2, 11, 11, D))
    assert found.complete, found.differences
    assert not [note for note in found.notes if "SAME" in note]
