"""Heads of a detector whose channels lie anchor by anchor, `(anchors, 4 numbers of a box + 1)`, in one program, and one head for the boxes and one for the rest in the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.core.tensor_spec import TensorSpec
from convert.inference.derivation import Derivation, Grade
from convert.inference.pair import Pair
from convert.inference.rule_file.from_pair import InferredRules, infer_rules
from convert.verify.target_model import model_of_module
from support.inferred import grades, sources

D, ANCHORS, CLASSES, ROWS, COLUMNS = 6, 3, 4, 4, 5
TOWERS = {"box": D, "class": D}
HEADS = {"boxes": ANCHORS * 5, "classes": ANCHORS * CLASSES}
HEADS_APART = {"boxes": ANCHORS * 4, "objectness": ANCHORS, "classes": ANCHORS * CLASSES}
OUTPUTS = ("classes", "boxes", "objectness")


def specs(taps: int, apart: bool) -> dict[str, TensorSpec]:
    """Kernels of as many taps in the towers; of none: matrices."""
    layers = {"stem": (taps, D), **{name: (taps, out) for name, out in TOWERS.items()}}
    layers |= {name: (taps, out) for name, out in (HEADS_APART if apart else HEADS).items()}
    kernels = {name: (*(n, n)[: 2 * n], D, out) for name, (n, out) in layers.items()}
    biases = {f"{name}/bias": TensorSpec((out,), "float32") for name, (_, out) in layers.items()}
    return {f"{name}/kernel": TensorSpec(shape, "float32") for name, shape in kernels.items()} | biases


def layer(p: Mapping[str, Any], name: str, x: Any) -> Any:
    kernel, bias = p[f"{name}/kernel"], p[f"{name}/bias"]
    if kernel.ndim == 2:
        return x @ kernel + bias
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y + bias


def detect(p: Mapping[str, Any], given: Mapping[str, Any], *, fault: str = "") -> dict[str, Any]:
    x = jnp.tanh(layer(p, "stem", given["x"]))
    towers = {name: jnp.tanh(layer(p, name, x)) for name in TOWERS}

    def head(name: str, tower: str = "box") -> Any:
        return layer(p, name, towers[tower]).reshape(len(x), ROWS * COLUMNS, ANCHORS, -1)

    boxes = head("boxes")
    objectness = head("objectness") if "objectness/kernel" in p else boxes[..., 4:]
    if fault == "first":  # the objectness of the first anchor for all
        objectness = jnp.broadcast_to(objectness[:, :, :1], objectness.shape)
    elif fault == "tower":
        objectness = head("boxes", "class")[..., 4:]
    elif fault == "tanh":
        objectness = jnp.tanh(objectness)
    boxes = jnp.concatenate([jax.nn.sigmoid(boxes[..., :2]), jnp.exp(boxes[..., 2:4])], -1)
    return {"classes": head("classes", "class"), "boxes": boxes, "objectness": objectness}


class Detector(nn.Module):
    """Joins what its heads give, and takes its outputs of that; ``taps``: 0 for matrices."""

    def __init__(self, taps: int, apart: bool) -> None:
        super().__init__()

        def made(out: int, taps: int = taps) -> nn.Module:
            return nn.Conv2d(D, out, taps, padding="same") if taps else nn.Linear(D, out)

        self.stem, self.towers = made(D), nn.ModuleList([made(D), made(D)])
        self.heads = nn.ModuleList(made(out) for out in (HEADS_APART if apart else HEADS).values())
        self.maps = taps > 0

    def by_anchor(self, y: Any) -> Any:
        y = y.permute(0, 2, 3, 1) if self.maps else y
        return y.flatten(1, 2).unflatten(-1, (ANCHORS, -1))

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.stem(x.permute(0, 3, 1, 2) if self.maps else x))
        *a, b = (torch.tanh(self.towers[k](x)) for k in (0,) * (len(self.heads) - 1) + (1,))
        y = torch.cat([self.by_anchor(head(of)) for head, of in zip(self.heads, (*a, b), strict=True)], -1)
        boxes = torch.cat([y[..., :2].sigmoid(), y[..., 2:4].exp()], -1)
        return dict(zip(OUTPUTS, (y[..., 5:], boxes, y[..., 4:5]), strict=True))


def inferred(taps: int, jax_apart: bool, torch_apart: bool, fault: str = "") -> InferredRules:
    module = Detector(taps, torch_apart).eval()
    pair = Pair(
        lambda p, given: detect(p, given, fault=fault),
        module,
        lambda net, given: net(given["x"]),
        lambda seed: {"x": np.random.default_rng(seed).normal(size=(2, ROWS, COLUMNS, D))},
        "pair:pair",
    )
    return infer_rules(pair, model_of_module(module, "Net"), specs(taps, jax_apart), "net", option="--reference ")


def positions(found: Derivation, name: str) -> list[int]:
    (part,) = found.tensor(name).parts
    return list(part.positions)


@pytest.mark.slow
@pytest.mark.parametrize("taps", [0, 1, 3])
def test_the_channels_of_one_kernel_are_those_of_two(taps: int) -> None:
    made = inferred(taps, False, True)
    found = made.derivation
    assert found.complete and not made.written.open and grades(found) == {Grade.DERIVED}
    assert sources(found)["heads.0.weight"] == sources(found)["heads.1.weight"] == "boxes/kernel"
    assert sources(found)["towers.0.weight"] == "box/kernel"
    assert positions(found, "heads.0.bias") == [5 * anchor + k for anchor in range(ANCHORS) for k in range(4)]
    assert positions(found, "heads.1.bias") == [5 * anchor + 4 for anchor in range(ANCHORS)]
    assert found.tried < 60  # no other channels are tried first


@pytest.mark.parametrize("taps", [0, 1, 3])
def test_the_channels_of_two_kernels_are_those_of_one(taps: int) -> None:
    made = inferred(taps, True, False)
    found = made.derivation
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert sources(found)["heads.0.weight"] == ("boxes/kernel", "objectness/kernel")
    assert found.tried < 60
    assert bool(made.written.open) == (taps > 0)  # the rows of a matrix have words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("first", "takes index 0 of axis 2"),
        ("tanh", "applies tanh"),
        ("tower", "what boxes/kernel gives"),
    ],
)
def test_all_layers_are_in_front_of_what_becomes_of_one_head(fault: str, said: str) -> None:
    """The place is that of the objectness, of which the target makes an output with the other heads; no layer is to blame."""
    found = inferred(3, False, True, fault).derivation
    assert grades(found) == {Grade.IN_FRONT} and found.proof is None
    assert sources(found)["towers.0.weight"] == "box/kernel"
    (difference,) = found.differences
    assert difference.is_certain and said in difference.problem and "convolves" not in difference.problem


@pytest.mark.slow
def test_rows_of_another_anchor_are_a_difference() -> None:
    found = inferred(1, True, False, "first").derivation
    assert not found.complete and found.proof is None and found.differences
