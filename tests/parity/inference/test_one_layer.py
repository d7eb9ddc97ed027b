"""The file of a pair with one layer becomes that of all layers by the changes of words that the guide lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.core.errors import ConvertError, PlanError
from convert.core.tensor_spec import TensorSpec
from convert.inference.pair import Pair
from convert.inference.rule_file.from_pair import InferredRules, infer_rules
from convert.inference.rule_file.proof import compare_rules
from convert.verify.target_model import model_of_module
from support.paths import ROOT

D, F, V, LAYERS = 6, 10, 7, 3
OF_A_LAYER = {"norm/scale": (D,), "norm/bias": (D,), "mix": (2, D), "up": (D, F), "down": (F, D)}
GUIDE = (ROOT / "docs" / "guides" / "infer.md").read_text().split("## From one layer to all")[-1].split("\n## ")[0]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(D)
        self.mix_a, self.mix_b = (torch.nn.Parameter(torch.zeros(D)) for _ in "ab")
        self.up, self.down = torch.nn.Linear(D, F, bias=False), torch.nn.Linear(F, D, bias=False)

    def forward(self, x: Any) -> Any:
        h = self.norm(x)
        return x + self.down(torch.tanh(self.up(h * self.mix_a))) * torch.sigmoid(h * self.mix_b)


class Net(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(V, D)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def _layer(x: Any, p: Mapping[str, Any]) -> Any:
    c = x - x.mean(-1, keepdims=True)
    h = c / jnp.sqrt((c * c).mean(-1, keepdims=True) + 1e-5) * p["norm/scale"] + p["norm/bias"]
    a, b = p["mix"]
    return x + (jnp.tanh((h * a) @ p["up"]) @ p["down"]) * jax.nn.sigmoid(h * b)


def _stacked(p: Mapping[str, Any], given: Any) -> Any:
    layers = {name: p[f"layers/{name}"] for name in OF_A_LAYER}
    y, _ = jax.lax.scan(lambda x, q: (_layer(x, q), None), p["embed"][given["x"]], layers)
    return {"y": y}


def _by_keys(p: Mapping[str, Any], given: Any) -> Any:
    x = p["embed"][given["x"]]
    for k in range(sum(name.endswith("/up") for name in p)):
        x = _layer(x, {name: p[f"layer_{k}/{name}"] for name in OF_A_LAYER})
    return {"y": x}


def _shapes(layers: int, stacked: bool) -> dict[str, tuple[int, ...]]:
    if stacked:
        return {"embed": (V, D)} | {f"layers/{name}": (layers, *shape) for name, shape in OF_A_LAYER.items()}
    every = {f"layer_{k}/{name}": shape for k in range(layers) for name, shape in OF_A_LAYER.items()}
    return {"embed": (V, D)} | every


def _inferred(layers: int, stacked: bool) -> InferredRules:
    pair = Pair(
        _stacked if stacked else _by_keys,
        Net(layers).eval(),
        lambda net, given: {"y": net(given["x"])},
        lambda seed: {"x": np.random.default_rng(seed).integers(0, V, (3, 5))},
        "pair:pair",
    )
    specs = {name: TensorSpec(shape, "float32") for name, shape in _shapes(layers, stacked).items()}
    made = infer_rules(pair, model_of_module(Net(layers), "Net"), specs, "net", option="--reference ")
    assert made.derivation.complete
    return made


def _all_layers(text: str, changes: Mapping[str, str]) -> str:
    """The file with the changed words; each of them must be in it."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


STACKED = {
    "axes: .(1 + 1)D\n": "axes: (1 + 1)D\n  stacked: {i: 0}\n",
    "axes: .D\n": "axes: D\n  stacked: {i: 0}\n",
    "einsum: ...D,NDH->...NH": "einsum: ...D,DH->...H",
    "einsum: ...C,NCA->...NA": "einsum: ...C,CA->...A",
    "from: layers/up\n": "from: layers/up\n  stacked: {i: 0}\n",
    "from: layers/down\n": "from: layers/down\n  stacked: {i: 0}\n",
    "blocks.0.": "blocks.{i}.",
}


@pytest.mark.parametrize(
    ("stacked", "changes"), [(True, STACKED), (False, {"layer_0/": "layer_{i}/", "blocks.0.": "blocks.{i}."})]
)
def test_the_file_of_one_layer_becomes_that_of_all(stacked: bool, changes: Mapping[str, str]) -> None:
    one, every = _inferred(1, stacked), _inferred(LAYERS, stacked)
    with pytest.raises(PlanError):  # it is of one layer
        compare_rules(one.written.text, every.derivation)
    assert compare_rules(_all_layers(one.written.text, changes), every.derivation) == []


def test_the_rules_of_the_guide_are_those_of_this_pair() -> None:
    of_one = _inferred(1, True).written.text
    both = (of_one, _all_layers(of_one, STACKED))
    blocks = re.findall(r"```yaml\n# [a-z ]+\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == len(both)
    for text, block in zip(both, blocks, strict=True):
        lines = _without_remarks(text).split("\n\n")
        assert all(
            set(rule.splitlines()) in [set(x.splitlines()) for x in lines]
            for rule in _without_remarks(block).split("\n\n")
        )


def _without_remarks(text: str) -> str:
    return re.sub(r" +#.*", "", text).strip()


def test_a_change_that_is_left_out_is_found() -> None:
    one, every = _inferred(1, True), _inferred(LAYERS, True)
    for left_out in STACKED:
        text = _all_layers(one.written.text, {old: new for old, new in STACKED.items() if old != left_out})
        try:
            found = compare_rules(text, every.derivation)
        except ConvertError:
            continue
        assert found, left_out
