"""Convolutions of the same data whose kernels one program has one after the other in one kernel, and the rules of such layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats, rules

C, T = 6, 9
LAYERS = 3


class Gated(torch.nn.Module):
    """Causal convolutions with gates (WaveNet): one kernel for filter and gate, one for what is kept and what is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.ModuleList([torch.nn.Conv1d(C, 2 * C, 2, dilation=1 + k % 2) for k in range(LAYERS)])
        self.out = torch.nn.ModuleList([torch.nn.Conv1d(C, C if k == LAYERS - 1 else 2 * C, 1) for k in range(LAYERS)])

    def forward(self, x: Any) -> Any:
        x, skipped = x.transpose(1, 2), []
        for k, (conv, out) in enumerate(zip(self.conv, self.out, strict=True)):
            a, b = conv(torch.nn.functional.pad(x, (1 + k % 2, 0))).chunk(2, 1)
            kept = out(torch.tanh(a) * torch.sigmoid(b))
            if k < LAYERS - 1:
                more, kept = kept.split(C, 1)
                x = x + more
            skipped.append(kept)
        return torch.stack(skipped).sum(0).transpose(1, 2)


def convolved(x: Any, kernel: Any, dilation: int) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), [(dilation, 0)], rhs_dilation=(dilation,), dimension_numbers=("NWC", "WIO", "NWC")
    )


def gated(w: Mapping[str, Any], x: Any, gate: str = "gate") -> Any:
    skipped = 0
    for k in range(LAYERS):
        a, b = (convolved(x, w[f"{of}_{k}/w"], 1 + k % 2) + w[f"{of}_{k}/b"] for of in ("filter", gate))
        z = jnp.tanh(a) * jax.nn.sigmoid(b)
        skipped = skipped + z @ w[f"skip_{k}/w"] + w[f"skip_{k}/b"]
        if k < LAYERS - 1:
            x = x + (z @ w[f"keep_{k}/w"] + w[f"keep_{k}/b"])
    return skipped


SHAPES = {
    f"{of}_{k}/{leaf}": ((2, C, C) if of in ("filter", "gate") else (C, C)) if leaf == "w" else (C,)
    for k in range(LAYERS)
    for of in ("filter", "gate", "skip", "keep")
    for leaf in ("w", "b")
    if of != "keep" or k < LAYERS - 1
}


def test_kernels_one_after_the_other_are_a_rule() -> None:
    found = derive(gated, Gated(), SHAPES, floats(2, T, C))
    assert found.proof is not None, found.differences
    assert {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}
    written = rules(found, Gated())
    assert any('"{filter,gate}_0/w"' in rule and "conv: conv.0" in rule for rule in written)
    assert any('"{keep,skip}_0/w"' in rule and " + " in rule.split("axes:")[-1] for rule in written)
    assert any("linear: {module: out.2" in rule for rule in written)  # no rule with {i}: it would take this leaf too


@pytest.mark.slow
def test_one_kernel_for_both_is_a_difference() -> None:
    found = derive(lambda w, x: gated(w, x, "filter"), Gated(), SHAPES, floats(2, T, C))
    assert any(tensor.grade is not Grade.DERIVED for tensor in found.tensors) or sorted(found.dropped) == sorted(
        f"gate_{k}/{leaf}" for k in range(LAYERS) for leaf in ("w", "b")
    )


class NormedGate(torch.nn.Module):
    """Filter and gate in one convolution with a weight norm (WaveGlow, Glow-TTS)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(C, 2 * C, 3, padding=1))

    def forward(self, x: Any) -> Any:
        a, b = self.conv(x.transpose(1, 2)).chunk(2, 1)
        return (torch.tanh(a) * torch.sigmoid(b)).transpose(1, 2)


@pytest.mark.parametrize("summed", [(0, 1), (0,)])
def test_normed_kernels_one_after_the_other_are_rules(summed: tuple[int, ...]) -> None:
    def normed(w: Mapping[str, Any], name: str, x: Any) -> Any:
        v = w[f"{name}/v"]
        kernel = v * (w[f"{name}/g"] / jnp.sqrt((v * v).sum(summed)[None if summed == (0, 1) else slice(None)]))
        out = jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return out + w[f"{name}/b"]

    sizes = {"v": (3, C, C), "g": (C,), "b": (C,)}
    shapes = {f"{of}/{leaf}": size for of in ("filter", "gate") for leaf, size in sizes.items()}
    function = lambda w, x: jnp.tanh(normed(w, "filter", x)) * jax.nn.sigmoid(normed(w, "gate", x))  # noqa: E731
    found = derive(function, NormedGate(), shapes, floats(2, T, C))
    if summed == (0,):  # the module has no such norm, and holds the kernels that it gives; no rule computes them
        assert found.proof is not None
        why = write_rules(found, model_of_module(NormedGate(), "Model")).open
        assert any("it is computed from" in text for text in why.values()), why
        return
    written = rules(found, NormedGate())
    assert any('"{filter,gate}/g"' in rule and 'original0, axes: "(D + D).."' in rule for rule in written)
    assert any('"{filter,gate}/v"' in rule and "original1" in rule for rule in written)


class Bags(torch.nn.Module):
    """Tables of fields (DLRM), the rows of each added up or their mean taken."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags = torch.nn.ModuleList([torch.nn.EmbeddingBag(11, C, mode=mode) for _ in range(2)])
        self.layers = torch.nn.Sequential(*(layer for _ in "ab" for layer in (torch.nn.Linear(C, C), torch.nn.ReLU())))

    def forward(self, x: Any) -> Any:
        rows = torch.stack([bag(x[:, k]) for k, bag in enumerate(self.bags)], 1)
        return self.layers(rows)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("count", [1, 3])
def test_bags_of_rows_are_embeddings(mode: str, count: int) -> None:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        rows = getattr(jnp, mode)(w["table"][jnp.arange(2)[:, None], x], 2)
        for k in range(2):
            rows = jax.nn.relu(rows @ w["w"][k] + w["b"][k])
        return rows

    shapes = {"table": (2, 11, C), "w": (2, C, C), "b": (2, C)}
    inputs = lambda seed: {"x": np.random.default_rng(seed).integers(0, 11, (40, 2, count))}  # noqa: E731
    found = derive(function, Bags(mode), shapes, inputs)
    assert found.proof is not None, found.differences
    written = rules(found, Bags(mode))
    assert any("embedding: bags.{i}" in rule for rule in written)
    assert any("linear: layers.{0,2}" in rule and "activation: relu" in rule for rule in written)
