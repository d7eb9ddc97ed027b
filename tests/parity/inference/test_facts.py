"""What `infer` finds beside weights: each fact is read from the programs' values or settings, not from a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from convert.inference.derivation import Derivation
from convert.inference.rule_file.write import write_rules
from convert.rules.parse import parse_rules
from convert.verify.target_model import model_of_module
from support.inferred import WIDTH, derive, floats, layer_norm, rms_norm, rules

D = WIDTH
SQUARE = (D, D)


def _facts(found: Derivation, tensor: str) -> dict[str, Any]:
    assert found.complete
    return {fact.name: fact.value for fact in found.facts if tensor in fact.tensors}


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, 1) for name in ("relu", "silu", "gelu_tanh", "gelu_erf", "tanh", "softplus")]
    + [("relu", 100), ("silu", 100), ("softplus", 100)],  # large numbers, of which the three are nearly equal
)
def test_the_activation_behind_a_layer(name, size):
    ours = {"gelu_tanh": lambda x: jax.nn.gelu(x), "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False)}
    theirs = {"gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "gelu_erf": functional.gelu}
    act = theirs.get(name) or getattr(functional, name)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(D, D), torch.nn.Linear(D, D)

        def forward(self, x: Any) -> Any:
            return self.b(act(self.a(x)))

    def function(w, x):
        return (ours.get(name) or getattr(jax.nn, name))(x @ w["a"] + w["s"]) @ w["b"] + w["t"]

    def given(seed: int) -> dict[str, Any]:
        return {"x": size * floats(3, 7, D)(seed)["x"]}

    found = derive(function, Model(), {"a": SQUARE, "b": SQUARE, "s": (D,), "t": (D,)}, given)
    assert _facts(found, "a.weight") == _facts(found, "a.bias") == {"activation": name}
    assert "activation" not in _facts(found, "b.weight")


@pytest.mark.parametrize("size", [1.0, 400.0])
def test_zeros_are_no_relu_or_silu_of_negative_numbers(size):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = torch.nn.ModuleList(torch.nn.Linear(D, 1, bias=False) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return torch.cat([self.m[0](size * x), self.m[1](-size * x)], -1)  # one of them is negative

    def function(w, x):
        x = size * jnp.where(x < -1e3, 0.0, x)  # the comparison is false, a zero, for each element
        return jnp.concatenate([x @ w["a"], -x @ w["b"]], -1)

    rows = np.arange(1.0, 4.0)[:, None] if size > 1 else np.ones((1, 1))
    found = derive(function, Model(), {"a": (D, 1), "b": (D, 1)}, lambda seed: {"x": rows * floats(1, D)(seed)["x"]})
    assert found.complete and "activation" not in {fact.name for fact in found.facts}


@pytest.mark.parametrize("epsilon", [1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("plus", [0, 1])
def test_epsilon_and_what_a_norm_multiplies_by(epsilon, plus):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.LayerNorm(D, eps=epsilon), torch.nn.RMSNorm(D, eps=1e-4)

        def forward(self, x: Any) -> Any:
            return self.b(torch.tanh(self.a(x)))

    def function(w, x):
        return rms_norm(jnp.tanh(layer_norm(x, w["a"], w["b"], epsilon)), plus + w["c"], 1e-4)

    found = derive(function, Model(), dict.fromkeys("abc", (D,)))
    assert _facts(found, "a.weight") == {"epsilon": epsilon, "multiplies_by": "scale", "weight": "weight"}
    expected = {"epsilon": 1e-4, "multiplies_by": "1+scale" if plus else "scale", "weight": "weight"}
    assert _facts(found, "b.weight") == expected


def test_a_group_norm_with_a_group_for_each_channel_says_how_many():
    """Of one position, such a norm gives zero for every input: what it computes does not tell the number."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.m = torch.nn.GroupNorm(D, D), torch.nn.Linear(D, D)

        def forward(self, x: Any) -> Any:
            return self.m(self.n(x.transpose(1, 2)).transpose(1, 2))

    def function(w, x):
        x = x - x.mean(1, keepdims=True)
        x = x / jnp.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * w["s"] + w["t"]
        return x @ w["m"] + w["b"]

    module = Model()
    found = derive(function, module, {"m": SQUARE, "s": (D,), "t": (D,), "b": (D,)})
    (norm,) = (rule for rule in rules(found, module) if "group_norm" in rule)
    assert f"num_groups: {D}" in norm


@pytest.mark.slow
def test_the_groups_of_a_norm_in_front_of_a_difference_are_a_question():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.m = torch.nn.GroupNorm(D, D), torch.nn.Linear(D, D)

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.m(self.n(x.transpose(1, 2)).transpose(1, 2)))

    def function(w, x):
        x = x - x.mean(1, keepdims=True)
        x = x / jnp.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * w["s"] + w["t"]
        return jax.nn.relu(x @ w["m"] + w["b"])

    found = derive(function, Model(), {"m": SQUARE, "s": (D,), "t": (D,), "b": (D,)})
    text = write_rules(found, model_of_module(Model(), "Model")).text
    assert found.differences and "num_groups: ask" in text
    parse_rules(text)


def test_a_scale_behind_moments_over_time_is_no_norm_of_the_features() -> None:
    class RevIN(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(D))

        def forward(self, x: Any) -> Any:
            return x / torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5) * self.weight

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.revin, self.out = RevIN(), torch.nn.Linear(D, D, bias=False)

        def forward(self, x: Any) -> Any:
            return self.out(self.revin(x))

    module = Model()
    found = derive(
        lambda w, x: x / jnp.sqrt(x.var(1, keepdims=True) + 1e-5) * w["s"] @ w["m"], module, {"s": (D,), "m": (D, D)}
    )
    assert "- from: s\n  parameter: revin.weight" in rules(found, module)


def test_a_relu_inside_of_another_function_is_no_activation() -> None:
    """Only one of the two computes a PReLU from it."""

    def function(w: Mapping[str, Any], x: Any) -> Any:
        y = x @ w["w"] + w["b"]
        return (jnp.maximum(y, 0) + w["slope"] * jnp.minimum(y, 0)) @ w["v"]

    net = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.PReLU(D), torch.nn.Linear(D, D, bias=False))
    shapes = {"w": (D, D), "b": (D,), "slope": (D,), "v": (D, D)}
    found = derive(function, net, shapes, floats(7, D))
    assert found.complete and not [fact for fact in found.facts if fact.name == "activation"]
