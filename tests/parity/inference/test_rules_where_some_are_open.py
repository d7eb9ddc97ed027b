"""A rule of which a tensor is open is a question, and takes no other rule with it: all were open, or none asked anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch

from convert.core.tensor_spec import TensorSpec
from convert.inference.derivation import Grade
from convert.inference.pair import Pair
from convert.inference.rule_file.from_pair import InferredRules, infer_rules
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.rules.parse import parse_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats

WIDTH, BLOCKS = 8, 2
SHAPES = {**dict.fromkeys(("w0", "w1", "back", "on"), (WIDTH, WIDTH)), **dict.fromkeys(("b0", "b1"), (WIDTH,))}
LEAVES = {f"{i}/{name}": shape for i in range(BLOCKS) for name, shape in SHAPES.items()}


class Block(torch.nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.back, self.on = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.layers = torch.nn.ModuleList([self.first, self.second] if shared else [])

    def forward(self, x: Any) -> Any:
        h = torch.relu(self.second(torch.relu(self.first(x))))
        return self.back(h), self.on(h)


class Net(torch.nn.Module):
    """Residual blocks; ``gated``: the next block is given its input times what the sum so far gives, and no residual."""

    def __init__(self, gated: bool, shared: bool = False) -> None:
        super().__init__()
        self.blocks, self.gated = torch.nn.ModuleList(Block(shared) for _ in range(BLOCKS)), gated

    def forward(self, x: Any) -> Any:
        y = 0
        for block in self.blocks:
            back, on = block(x)
            x, y = torch.tanh(y + on) * x if self.gated else x - back, y + on
        return y


def _forward(p: Any, given: Any) -> Any:
    x, y = given["x"], 0
    for i in range(BLOCKS):
        h = jax.nn.relu(jax.nn.relu(x @ p[f"{i}/w0"] + p[f"{i}/b0"]) @ p[f"{i}/w1"] + p[f"{i}/b1"])
        x, y = x - h @ p[f"{i}/back"], y + h @ p[f"{i}/on"]
    return {"y": y}


def _inferred(module: torch.nn.Module) -> InferredRules:
    pair = Pair(
        _forward,
        module,
        lambda net, given: {"y": net(given["x"])},
        lambda seed: {"x": np.random.default_rng(seed).normal(size=(5, WIDTH)).astype(np.float32)},
        "pair:pair",
    )
    specs = {name: TensorSpec(shape, "float32") for name, shape in LEAVES.items()}
    return infer_rules(pair, model_of_module(module, "Net"), specs, "net", option="--reference ")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_in_front_of_a_difference_has_rules(shared: bool) -> None:
    made = _inferred(Net(True, shared))
    grades = {tensor.name: tensor.grade for tensor in made.derivation.tensors}
    assert {grades[f"blocks.0.{layer}.{x}"] for layer in ("first", "second") for x in ("weight", "bias")} == {
        Grade.IN_FRONT
    }
    left = {name for name, grade in grades.items() if grade is Grade.OPEN}
    assert left == {"blocks.0.back.weight", "blocks.0.on.weight"}, "the difference is behind the first trunk"
    questions = parse_rules(made.written.text).questions
    assert [(question.key, question.path) for question in questions] == [("linear", "0/{back,on}")]
    assert made.written.text.count("    # question: ") == len(questions)
    if shared:
        assert "blocks.0.first: [blocks.0.layers.0]" in made.written.text


def test_only_what_is_open_is_asked() -> None:
    module = Net(False)
    made = _inferred(module)
    assert made.derivation.complete and not parse_rules(made.written.text).questions
    assert "linear: blocks.{i}.{first,second}\n" in made.written.text
    opened = tuple(
        replace(t, grade=Grade.OPEN) if t.name.startswith("blocks.1.second") else t for t in made.derivation.tensors
    )
    text = write_rules(replace(made.derivation, tensors=opened), model_of_module(module, "Net")).text
    (question,) = parse_rules(text).questions
    assert (question.key, question.path) == ("linear", "1/w1")
    assert "\n  # linear: blocks.1.second\n" in text


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.box, self.score = (torch.nn.Conv1d(WIDTH, out, 3, bias=False) for out in (5, 3))

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.stem(x)).mT
        return torch.cat([self.box(x), torch.sigmoid(self.score(x))], 1).mT


def _heads(p: Any, x: Any) -> Any:
    x = jax.numpy.tanh(x @ p["stem"])
    y = jax.lax.conv_general_dilated(x, p["heads"], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
    return jax.numpy.concatenate([y[..., :5], jax.nn.sigmoid(y[..., 5:])], -1)


def test_two_open_tensors_of_one_leaf_leave_the_rules_of_the_others() -> None:
    """A leaf of two open rules was left out twice, which is no rule file, and opened every tensor."""
    module = Heads()
    found = derive(_heads, module, {"stem": (WIDTH, WIDTH), "heads": (3, WIDTH, 5 + 3)}, floats(2, 9, WIDTH))
    assert found.complete
    opened = tuple(t if t.name == "stem.weight" else replace(t, grade=Grade.OPEN, guessed=True) for t in found.tensors)
    found = replace(found, tensors=opened, proof=None)
    written = write_rules(found, model_of_module(module, "Heads"))
    assert compare_rules(written.decided, found, (*written.open, *written.guessed)) == []
    assert "linear: stem" in written.decided and written.decided.count("drop: heads") == 1
