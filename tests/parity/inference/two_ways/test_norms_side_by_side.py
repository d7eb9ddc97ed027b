"""Norms of each channel: one over the channels of two layers in one program, one for each layer in the other, as in the CSP blocks of detectors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.rule_file.drawn import DrawnLeaves
from convert.inference.rule_file.layers.cells import plan_of
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats, grades, rules

D = 8
KERNEL, VECTOR = (1, 1, D, D), (D,)
VECTORS = ("scale", "bias", "mean", "var")


def _conv(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _batch_norm(x: Any, w: Any, name: str) -> Any:
    scale, bias, mean, var = (w[f"{name}/{of}"] for of in VECTORS)
    return (x - mean) / jnp.sqrt(var + 1e-3) * scale + bias


def _group_norm(x: Any, w: Any, name: str, groups: int) -> Any:
    y = x.reshape(*x.shape[:-1], groups, -1)
    mean, var = (f(y, axis=(1, 2, 4), keepdims=True) for f in (jnp.mean, jnp.var))
    return ((y - mean) / jnp.sqrt(var + 1e-6)).reshape(x.shape) * w[f"{name}/scale"] + w[f"{name}/bias"]


def _norm(kind: str, x: Any, w: Any, name: str, groups: int) -> Any:
    return _batch_norm(x, w, name) if kind == "batch" else _group_norm(x, w, name, groups)


def _one(kind: str) -> Any:
    """Both layers as one, with one norm, and the channels split behind it."""

    def function(w: Any, x: Any) -> Any:
        x = jnp.moveaxis(x, 1, -1)
        y = jax.nn.silu(_norm(kind, _conv(x, w["both/kernel"]), w, "both", 4))
        a, b = jnp.split(y, 2, -1)
        return jnp.moveaxis(_conv(a, w["last"]) * b, -1, 1)

    return function


def _two(kind: str) -> Any:
    def function(w: Any, x: Any) -> Any:
        x = jnp.moveaxis(x, 1, -1)
        a, b = (jax.nn.silu(_norm(kind, _conv(x, w[f"{n}/kernel"]), w, n, 2)) for n in ("main", "short"))
        return jnp.moveaxis(_conv(a, w["last"]) * b, -1, 1)

    return function


def shapes(kind: str, *names: str) -> dict[str, tuple[int, ...]]:
    width = 2 * D // len(names)
    vectors = VECTORS if kind == "batch" else VECTORS[:2]
    found: dict[str, tuple[int, ...]] = {"last": KERNEL}
    for name in names:
        found |= {f"{name}/kernel": (1, 1, 2 * D, width), **{f"{name}/{of}": (width,) for of in vectors}}
    return found


def _made(kind: str, width: int, groups: int, epsilon: float = 0) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(width, eps=epsilon or 1e-3)
    return nn.GroupNorm(groups, width, eps=epsilon or 1e-6)


class Two(nn.Module):
    def __init__(self, kind: str, epsilon: float = 0) -> None:
        super().__init__()
        self.main, self.short = (nn.Conv2d(2 * D, D, 1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = _made(kind, D, 2), _made(kind, D, 2, epsilon)
        self.last = nn.Conv2d(D, D, 1, bias=False)

    def forward(self, x: Any) -> Any:
        a, b = (nn.functional.silu(y) for y in (self.norm1(self.main(x)), self.norm2(self.short(x))))
        return self.last(a) * b


class One(nn.Module):
    def __init__(self, kind: str, swapped: bool = False) -> None:
        super().__init__()
        self.both, self.norm = nn.Conv2d(2 * D, 2 * D, 1, bias=False), _made(kind, 2 * D, 4)
        self.last, self.swapped = nn.Conv2d(D, D, 1, bias=False), swapped

    def forward(self, x: Any) -> Any:
        a, b = nn.functional.silu(self.norm(self.both(x))).chunk(2, 1)
        return self.last(a) * (a if self.swapped else b)


def _derive(function: Any, module: nn.Module, of: dict[str, tuple[int, ...]]) -> Any:
    return derive(function, module, of, floats(2, 2 * D, 5, 4))


def _made_by(text: str, found: Derivation) -> set[str]:
    return {step.name for step in plan_of(text, DrawnLeaves(found.leaves, "", found.weights)).steps}


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_one_norm_becomes_two(kind: str) -> None:
    module = Two(kind)
    found = _derive(_one(kind), module, shapes(kind, "both"))
    assert grades(found) == {Grade.DERIVED}
    written = write_rules(found, model_of_module(module, "Two"))
    assert compare_rules(written.text, found) == []
    assert _made_by(written.text, found) == set(module.state_dict()), "the counters of a batch norm, too"
    last = {"scale": "weight", "bias": "bias"} | (
        {"mean": "running_mean", "var": "running_var"} if kind == "batch" else {}
    )
    for leaf, name in last.items():
        assert f'- from: both/{leaf}\n  axes: (D + D)\n  parameter: "{{norm1,norm2}}.{name}"' in rules(found, module)


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_two_norms_become_one(kind: str) -> None:
    module = One(kind)
    found = _derive(_two(kind), module, shapes(kind, "main", "short"))
    assert grades(found) == {Grade.DERIVED}
    written = write_rules(found, model_of_module(module, "One"))
    assert compare_rules(written.text, found) == []
    assert _made_by(written.text, found) == set(module.state_dict())
    (scale,) = (rule for rule in rules(found, module) if "norm.weight" in rule)
    assert scale.startswith('- from: "{main,short}/scale"\n')


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batch", "group"])
def test_another_epsilon_in_one_of_two_norms_is_no_derivation(kind: str) -> None:
    """The JAX model has no value between the kernel of both and the norm of both that the second layer could share: the layer is named."""
    found = _derive(_one(kind), Two(kind, 1e-2), shapes(kind, "both"))
    assert found.differences and found.proof is None and "in short" in found.differences[0].problem


@pytest.mark.slow
def test_the_wrong_half_is_no_derivation() -> None:
    found = _derive(_two("batch"), One("batch", swapped=True), shapes("batch", "main", "short"))
    assert not found.complete and found.differences and found.proof is None
