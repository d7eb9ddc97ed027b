"""Where one module has both a layer and what the layer is given, the sentence names the two places, and not the module twice."""

from __future__ import annotations

import numpy as np
import pytest

from convert.programs.divergence.naming.both import Both
from convert.programs.divergence.naming.brief import brief
from convert.programs.divergence.naming.operands import OPERAND, input_of_layer
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.rerun import Change
from convert.programs.divergence.words import Words
from convert.programs.program import Operation, Value

RNG = np.random.default_rng(0)
X, OTHER = (Value(RNG.normal(size=(3, 5)), data=True) for _ in range(2))


def product(given: Value, weight: str, module: str) -> Operation:
    weights = Value(RNG.normal(size=(5, 5)), leaves=frozenset({weight}))
    made = Value(given.array @ weights.array, data=True)
    return Operation("mm", (given, weights), (made,), {}, lambda arrays: arrays, "net.py:30", module)


@pytest.mark.parametrize(
    ("before", "weight", "said"),
    [
        ("attn", "attn.in_proj_weight", "the target gives attn.out_proj.weight what attn.in_proj_weight gives"),
        ("attn", "attn.out_proj.weight", "the target gives attn what it gives itself"),
        ("q", "q.weight", "the target gives attn what q gives"),
    ],
)
def test_two_layers_of_one_module_are_named_by_their_weights(before: str, weight: str, said: str) -> None:
    first = product(X, weight, before)
    (given,) = first.results
    layer = product(given, "attn.out_proj.weight", "attn")
    repair = Repair((), (), (given,), (given.array,), (OTHER,), given.array, OTHER.array, 1, Change({}), layer)
    both = Both(repair, Words((first, layer), {X: "the input x"}), Words((), {OTHER: "the input u"}), {}, ())
    name, problem = input_of_layer(both) or ("", "")
    assert (name, problem) == (OPERAND, f"{said} (net.py:30, in attn); the JAX model gives it the input u")
    assert brief(both, name, problem, 0) == f"{said}; the JAX model gives it the input u"
