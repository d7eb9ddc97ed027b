"""Boundaries that the reference does not return: the modules of linen, nnx, Equinox and Haiku, matched by the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import numpy as np
import pytest
import torch

from convert.numerics.lift_jax import lift
from convert.verify.sides.jax_modules import with_module_calls
from faults.catalogue import run
from faults.plants import InTarget, attribute, each
from support import named_modules
from support.marks import slow_but

LIBRARIES = ("linen", "nnx", "equinox")


@pytest.mark.parametrize("library", slow_but(["nnx"], LIBRARIES))
def test_every_layer_is_recorded_by_its_path(library: str) -> None:
    weights = named_modules.source(library).arrays
    side, calls = with_module_calls(lambda weights, inputs: named_modules.apply(library, weights, inputs))
    inputs = {"x": np.ones((2, named_modules.STEPS, named_modules.WIDTH), np.float32)}
    lift(side)(weights, inputs)
    found = {call.path: call for call in calls()}
    leaves = {name.rpartition("/")[0] for name in weights if name.endswith(("kernel", "weight", "scale"))}
    assert leaves <= set(found)
    embed = found["embed"]
    assert embed.given is not None and embed.result is not None
    assert embed.given.shape == embed.result.shape == (2, named_modules.STEPS, named_modules.WIDTH)


@pytest.mark.slow
def test_modules_of_haiku_have_the_names_of_their_parameters() -> None:
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([5, 3])(x)))
    params = model.init(jax.random.key(0), np.ones((2, 4), np.float32))
    side, calls = with_module_calls(lambda weights, inputs: {"y": model.apply(weights, inputs["x"])})
    lift(side)(params, {"x": np.ones((2, 4), np.float32)})
    found = {call.path: call.result for call in calls()}
    assert set(params) <= set(found)
    assert found["mlp/~/linear_0"] is not None and found["mlp/~/linear_0"].shape == (2, 5)


@pytest.mark.slow
def test_values_of_a_compiled_loop_are_not_recorded() -> None:
    """They exist only within the loop; a call without values is no boundary."""
    side, calls = with_module_calls(lambda weights, inputs: named_modules.apply("linen", weights, inputs))
    inputs = {"x": np.ones((2, named_modules.STEPS, named_modules.WIDTH), np.float32)}
    jax.make_jaxpr(side)(named_modules.source("linen").arrays, inputs)
    assert calls() and all(call.given is None and call.result is None for call in calls())


def test_hooks_are_removed() -> None:
    before = named_modules.EquinoxModel.__call__
    side, _ = with_module_calls(dict)
    side()
    assert named_modules.EquinoxModel.__call__ is before


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Another function, computed by NumPy, in which no record looks."""

    def changed(*args: Any) -> torch.Tensor:
        value = function(*args).numpy()
        return torch.tensor(value + value**2)

    return changed


@pytest.mark.slow
def test_an_unknown_mistake_is_located_between_two_layers_whose_weights_are_right() -> None:
    plant = InTarget(each("Block", attribute("scored", doubled(named_modules.Block.scored))))
    said = next(level.diagnosis for level in run("linen-modules", "torch", plant).levels if level.level == "model")
    assert said is not None and said["name"] == "" and said["boundary"] == "blocks.0.out:in"
    assert "between blocks.0.v, which is equal, and blocks.0.out:in" in said["problem"]
    assert "blocks.0.q, blocks.0.k, blocks.0.v give the same output, so the weights there are right" in said["problem"]


@pytest.mark.slow
def test_a_layer_that_is_given_the_same_and_gives_another_value_is_named() -> None:
    def wrong(module: Any) -> None:
        layer = module.blocks[1].up
        function = layer.forward
        layer.forward = doubled(function)

    said = next(
        level.diagnosis for level in run("nnx-modules", "torch", InTarget(wrong)).levels if level.level == "model"
    )
    assert said is not None and said["name"] == "" and said["boundary"] == "blocks.1.up"
    assert "blocks.1.up is given what the JAX model gives it, and gives another value" in said["problem"]
