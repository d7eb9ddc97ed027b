"""Drafts of networks with convolutions of many widths: one rule for each layer of a block, with axes that vary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from convert.drafting.draft import draft_rules
from convert.planning.planner import make_plan
from convert.rules.parse import parse_rules
from support.drafts import answered
from support.memory_source import MemorySource, run

ANSWERS = {
    "*": {
        "conv": 0,
        "batch_norm": 0,
        "linear": 0,
        "padding": "SAME",
        "multiplies_by": "scale",
        "epsilon": "1e-5",
        "flattened": None,
    }
}


def resnet(stages: tuple[int, ...], width: int) -> MemorySource:
    """The tree of flax's ResNet (examples/imagenet) with bottleneck blocks."""
    shapes: dict[str, tuple[int, ...]] = {}

    def layer(name: str, norm: str, kernel: int, inner: int, outer: int) -> None:
        shapes[f"params/{name}/kernel"] = (kernel, kernel, inner, outer)
        for leaf in ("scale", "bias"):
            shapes[f"params/{norm}/{leaf}"] = (outer,)
        for leaf in ("mean", "var"):
            shapes[f"batch_stats/{norm}/{leaf}"] = (outer,)

    layer("conv_init", "bn_init", 7, 3, width)
    block, inner = 0, width
    for stage, count in enumerate(stages):
        for first in range(count):
            name, outer = f"BottleneckResNetBlock_{block}", width * 2**stage
            for k, (kernel, a, b) in enumerate(((1, inner, outer), (3, outer, outer), (1, outer, 4 * outer))):
                layer(f"{name}/Conv_{k}", f"{name}/BatchNorm_{k}", kernel, a, b)
            if not first:
                layer(f"{name}/conv_proj", f"{name}/norm_proj", 1, inner, 4 * outer)
            block, inner = block + 1, 4 * outer
    shapes |= {"params/Dense_0/kernel": (inner, 10), "params/Dense_0/bias": (10,)}
    rng = np.random.default_rng(0)
    return MemorySource({name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})


def test_a_resnet_50_is_a_page() -> None:
    source = resnet((3, 4, 6, 3), 2)  # the widths of ResNet-50, divided by 32
    text = draft_rules(source, "resnet50")
    assert len(text.splitlines()) < 115
    assert "BottleneckResNetBlock_{i}/BatchNorm_{j}/scale    # float32[*], 48 leaves" in text
    rules = parse_rules(answered(text, ANSWERS))
    assert len(rules.rules) == 8
    assert {name for name, axis in rules.axes.items() if axis.varies} == {"I", "O"}
    plan = make_plan(rules, source)
    made = run(plan)
    assert sum(len(step.parts) for step in plan.steps) == len(source.leaves)
    for i in (0, 15):
        for j in (0, 1, 2):
            kernel = source.read(f"params/BottleneckResNetBlock_{i}/Conv_{j}/kernel")
            np.testing.assert_array_equal(made[f"BottleneckResNetBlock_{i}.Conv_{j}.weight"], np.einsum("pqio->oipq", kernel))  # fmt: skip
            var = source.read(f"batch_stats/BottleneckResNetBlock_{i}/BatchNorm_{j}/var")
            np.testing.assert_array_equal(made[f"BottleneckResNetBlock_{i}.BatchNorm_{j}.running_var"], var)


def test_a_small_network_has_a_letter_for_each_size() -> None:
    text = draft_rules(resnet((1,), 4), "small")
    assert "varies" not in text
    assert "float32[*" not in text


@pytest.mark.parametrize("layout", ["haiku", "equinox"])
def test_the_channels_of_other_libraries_vary(layout: str) -> None:
    widths = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31]
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (inner, outer) in enumerate(itertools.pairwise(widths)):
        if layout == "haiku":
            shapes |= {f"net/conv_{i}/w": (3, 3, inner, outer), f"net/conv_{i}/b": (outer,)}
        else:
            shapes |= {f"convs/{i}/weight": (outer, inner, 3, 3), f"convs/{i}/bias": (outer, 1, 1)}
    source = MemorySource({name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    text = draft_rules(source, "vgg")
    rules = parse_rules(answered(text, ANSWERS))
    assert [rule.kind.axes for rule in rules.rules] == ["PQIO" if layout == "haiku" else "OIPQ"]  # type: ignore[attr-defined]
    assert sum(len(step.parts) for step in make_plan(rules, source).steps) == len(shapes)


def test_kernels_of_other_ranks_and_dense_layers_stay_apart() -> None:
    shapes = {f"Conv_{i}/kernel": (3, 3, i + 2, i + 3) for i in range(9)}
    shapes |= {f"Dense_{i}/kernel": (i + 20, i + 30) for i in range(3)}
    shapes |= {"Conv_9/kernel": (3, 1, 1, 64)}
    source = MemorySource({name: np.ones(shape, np.float32) for name, shape in shapes.items()})  # fmt: skip
    text = draft_rules(source, "mixed")
    assert "from: Conv_{0,1,2,3,4,5,6,7,8}/kernel    # float32[3,3,*,*], 9 leaves" in text
    assert [f"from: Dense_{i}/kernel" in text for i in range(3)] == [True] * 3
    assert "from: Conv_9/kernel    # float32[3,1,1,64]" in text
