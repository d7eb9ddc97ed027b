"""Padding that is shared out between a convolution and the code around it, on either side: the check must accept what `infer` has proven."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from convert.inference.rule_file.write import write_rules
from convert.planning.planner import make_plan
from convert.references.module_facts import facts
from convert.rules.parse import parse_rules
from convert.verify.config.compare import _may_be_made_elsewhere
from convert.verify.config.declared import declared_facts
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats, linen
from support.memory_source import MemorySource

SLOW = pytest.mark.slow
D = 4


class Around(torch.nn.Module):
    """A convolution, with zeros before it, and with a part of its result."""

    def __init__(
        self, layer: torch.nn.Module, before: Any = (0, 0), cut: slice = slice(None), mode: str = "constant"
    ) -> None:
        super().__init__()
        self.c, self.before, self.cut, self.mode = layer, before, cut, mode

    def forward(self, x: Any) -> Any:
        y = self.c(pad(x.mT, self.before, self.mode))[..., self.cut]
        return torch.tanh(y.mT)


def source(
    padding: Any,
    before: Any = (0, 0),
    strides: int = 1,
    dilation: int = 1,
    cut: slice = slice(None),
    mode: str = "constant",
) -> Any:
    layer = nn.Conv(D, (3,), padding=padding, strides=strides, kernel_dilation=dilation)

    class Padded(nn.Module):
        def setup(self) -> None:
            self.c = layer

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(self.c(jnp.pad(x, ((0, 0), before, (0, 0)), mode=mode))[:, cut])

    return Padded()


def conv(padding: Any, **given: Any) -> Any:
    return torch.nn.Conv1d(D, D, 3, padding=padding, **given)


CASES = {
    "flax's CAUSAL, padded in code": (source("CAUSAL"), Around(conv(0), (2, 0)), "padding: CAUSAL"),
    "CAUSAL, padded and cut": (source("CAUSAL", dilation=2), Around(conv(4, dilation=2), cut=slice(-4)), "padding: CAUSAL"),
    "both cut": (source(((2, 2),), cut=slice(0, -2)), Around(conv(2), cut=slice(-2)), "padding: [[2, 2]]"),
    "zeros in the source's code": (source("VALID", (1, 1)), Around(conv(1)), "padding: [[1, 1]]"),
    "zeros on both, shared out": (source(((1, 1),), (1, 1)), Around(conv(2)), "padding: [[2, 2]]"),
    "half by the module": (source(((2, 2),)), Around(conv(1), (1, 1)), "padding: [[2, 2]]"),
    "to the right": (source(((0, 2),)), Around(conv(2), cut=slice(2, None)), "padding: [[0, 2]]"),
    "strides and one zero": (source(((0, 1),), strides=2), Around(conv(1, stride=2), (1, 0), slice(1, None)), "padding: [[0, 1]]"),
    "reflected": (source("VALID", (1, 1), mode="reflect"), Around(conv(1, padding_mode="reflect")), "padding: VALID"),
}  # fmt: skip
QUICK = ("CAUSAL, padded and cut", "half by the module", "reflected")


def compared(function: Any, module: torch.nn.Module, shapes: Any, inputs: Any) -> tuple[str, Any, list[str]]:
    """The rule file, the facts that it declares of the layer, and those of the module that the check would call wrong."""
    found = derive(function, module, shapes, inputs)
    assert found.complete, found.differences
    text = write_rules(found, model_of_module(module, "Model")).text
    leaves = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    declared = [f for f in declared_facts(make_plan(parse_rules(text), MemorySource(leaves))) if f.name == "padding"]
    value = facts(module.c)[""]["padding"]
    right = value == "unknown" or _may_be_made_elsewhere(declared, value) or value in declared[0].allowed
    return text, declared, [] if right else [str(value)]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=SLOW) for n in CASES])
def test_padding_around_a_convolution(name):
    model, module, said = CASES[name]
    function, shapes = linen(model, np.zeros((2, 8, D)))
    text, declared, wrong = compared(function, module, shapes, floats(2, 8, D))
    assert said in text and not wrong
    assert not any([7] in fact.allowed for fact in declared) and not _may_be_made_elsewhere(declared, [7])


def test_a_stated_padding_is_compared():
    model, module, _ = CASES["half by the module"]
    function, shapes = linen(model, np.zeros((2, 8, D)))
    text, declared, _ = compared(function, module, shapes, floats(2, 8, D))
    assert "conv: {module: c, padding: [1]}" in text
    assert [fact.allowed for fact in declared] == [([1],)] and not _may_be_made_elsewhere(declared, [0])


def test_a_transposed_convolution_whose_result_is_cut():
    class Up(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jnp.tanh(nn.ConvTranspose(D, (3,), strides=(2,), padding="SAME", name="c")(x))

    module = Around(torch.nn.ConvTranspose1d(D, D, 3, stride=2), cut=slice(0, -1))
    function, shapes = linen(Up(), np.zeros((2, 8, D)))
    text, _, wrong = compared(function, module, shapes, floats(2, 8, D))
    assert "conv_transpose:" in text and not wrong
