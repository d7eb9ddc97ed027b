"""Norms whose leaf has an axis of heads or groups, and whose module has one axis, as QK-norm over the full width in OLMo 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import HEADS, WIDTH, derive, grades, rules

D, N, H = WIDTH, HEADS, WIDTH // HEADS
SHAPES = {**dict.fromkeys("qkv", (D, N, H)), "o": (N, H, D)}


def _attention(norm: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def function(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[c]) for c in "qkv")
        scores = jnp.einsum("btnh,bsnh->bnts", norm(q, w["qn"]), norm(k, w["kn"])) / H**0.5
        return jnp.einsum("bnts,bsnh,nhd->btd", jax.nn.softmax(scores, -1), v, w["o"])

    return function


def _over_heads(x: Any, scale: Any) -> Any:
    return x / jnp.sqrt((x * x).mean((-1, -2), keepdims=True) + 1e-6) * scale


def _offset_over_heads(x: Any, scale: Any) -> Any:
    return _over_heads(x, 1 + scale)


class Attention(torch.nn.Module):
    """Norms queries and keys over all heads, or over each."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(D, D, bias=False) for _ in range(4))
        self.qn, self.kn = (torch.nn.RMSNorm(width, 1e-6) for _ in range(2))
        self.width = width

    def forward(self, x: Any) -> Any:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k = (norm(y.unflatten(-1, (-1, self.width))).flatten(-2) for norm, y in ((self.qn, q), (self.kn, k)))
        q, k, v = (y.unflatten(-1, (N, H)).transpose(1, 2) for y in (q, k, v))
        y = (q @ k.transpose(-1, -2) / H**0.5).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(-2))


def test_a_scale_with_an_axis_of_heads_becomes_one_of_the_full_width() -> None:
    module = Attention()
    found = derive(_attention(_over_heads), module, SHAPES | dict.fromkeys(("qn", "kn"), (N, H)))
    assert grades(found) == {Grade.DERIVED}
    assert [rule for rule in rules(found, module) if "n.weight" in rule] == [
        f'- from: {name}\n  axes: CE\n  parameter: {{name: {name}.weight, axes: "(C E)"}}' for name in ("qn", "kn")
    ]


def test_a_scale_plus_one_with_an_axis_of_heads() -> None:
    module = Attention()
    found = derive(_attention(_offset_over_heads), module, SHAPES | dict.fromkeys(("qn", "kn"), (N, H)))
    written = [rule for rule in rules(found, module) if "n.weight" in rule]
    assert [rule.partition("\n")[0] for rule in written] == ["- from: qn + 1", "- from: kn + 1"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(N, H), (D,)])
def test_a_norm_over_each_head_is_another_one(shape: tuple[int, ...]) -> None:
    scale = (lambda x, s: _over_heads(x, s.reshape(N, H))) if shape == (D,) else _over_heads
    found = derive(_attention(scale), Attention(H), SHAPES | dict.fromkeys(("qn", "kn"), shape))
    assert not found.complete and found.differences and found.proof is None


def test_a_flat_scale_keeps_the_rule_of_a_norm() -> None:
    module = Attention()
    flat = _attention(lambda x, s: _over_heads(x, s.reshape(N, H)))
    found = derive(flat, module, SHAPES | dict.fromkeys(("qn", "kn"), (D,)))
    written = write_rules(found, model_of_module(module, "Model"))
    assert 'rms_norm: "{qn,kn}"' in written.text and compare_rules(written.text, found) == []


class Normed(torch.nn.Module):
    """A norm of all channels behind a product."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.w, self.n = torch.nn.Linear(D, D, bias=False), norm

    def forward(self, x: Any) -> Any:
        return x + self.n(self.w(x).flatten(0, 1)).view_as(x)


def _norm_of_groups(w: Any, x: Any, axis: int = -1) -> Any:
    """A norm over each group of channels, with a scale and a bias that may have an axis of groups."""
    y = (x @ w["w"]).reshape(*x.shape[:2], N, H)
    y = (y - y.mean(axis, keepdims=True)) / jnp.sqrt(y.var(axis, keepdims=True) + 1e-5)
    return x + (y * w["s"].reshape(N, H) + w["b"].reshape(N, H)).reshape(x.shape)


def _batch_norm(w: Any, x: Any) -> Any:
    y = (x @ w["w"]).reshape(*x.shape[:2], N, H)
    return x + ((y - w["m"]) / jnp.sqrt(w["v"] + 1e-5) * w["s"] + w["b"]).reshape(x.shape)


@pytest.mark.parametrize(("scale", "bias"), [((N, H), (N, H)), ((N, H), (D,)), ((D,), (N, H))])
def test_a_group_norm_whose_leaves_have_an_axis_of_groups(scale: tuple[int, ...], bias: tuple[int, ...]) -> None:
    module = Normed(torch.nn.GroupNorm(N, D))
    found = derive(_norm_of_groups, module, {"w": (D, D), "s": scale, "b": bias})
    assert grades(found) == {Grade.DERIVED}
    written = " ".join(rules(found, module))
    assert written.count('"(E F)"') == 1 and "group_norm" not in written


def test_a_batch_norm_whose_leaves_have_an_axis_of_heads() -> None:
    module = Normed(torch.nn.BatchNorm1d(D))
    found = derive(_batch_norm, module, {"w": (D, D), **dict.fromkeys("sbmv", (N, H))})
    assert 'parameter: {name: "n.{weight,bias,running_mean,running_var}", axes: "(E F)"}' in " ".join(
        rules(found, module)
    )


@pytest.mark.slow
def test_a_group_norm_over_every_fourth_channel_is_another_one() -> None:
    def other(w: Any, x: Any) -> Any:
        return _norm_of_groups(w, x, axis=-2)

    found = derive(other, Normed(torch.nn.GroupNorm(N, D)), {"w": (D, D), "s": (N, H), "b": (N, H)})
    assert not found.complete and found.differences and found.proof is None
