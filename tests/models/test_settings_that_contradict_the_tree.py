"""A value of `--set` that the tree contradicts is refused: the activation by the leaves, an image and a ratio by the sizes."""

from __future__ import annotations

from typing import Any

import pytest

import convert
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly
from support.paths import GOLDEN

IMAGE = "(image_size//P)*(image_size//P) + 1 to be"
GATED, PLAIN = "one of gated-gelu, gated-silu, gated-relu", "one of relu, gelu, gelu_new, silu"


@pytest.mark.parametrize(
    ("case", "family", "right", "wrong", "expected"),
    [
        ("t5x/t5-1.1", "t5x", {"feed_forward_proj": "gated-gelu"}, {"feed_forward_proj": "relu"}, GATED),
        ("t5x/t5-1.1", "t5x", {"feed_forward_proj": "gated-silu"}, {"feed_forward_proj": "nonsense"}, GATED),
        ("t5x/umt5", "t5x", {"feed_forward_proj": "gated-gelu"}, {"feed_forward_proj": "gelu_new"}, GATED),
        ("t5x/t5-1.0", "t5x", {"feed_forward_proj": "relu"}, {"feed_forward_proj": "gated-gelu"}, PLAIN),
        ("vit/vit", "vit-jax", {"image_size": 12}, {"image_size": 16}, f"{IMAGE} 10"),
        ("vit/jax-pre-logits", "vit-jax", {"image_size": 12}, {"image_size": 16}, f"{IMAGE} 10"),
        ("vit-big-vision/tok", "vit-jax", {"mlp_ratio": 40 / 24}, {"mlp_ratio": 3}, "int(mlp_ratio*D) to be 40"),
        ("vit-big-vision/map", "vit-jax", {"mlp_ratio": 40 / 24}, {"mlp_ratio": 3}, "int(mlp_ratio*W) to be 40"),
        ("tips/image", "tips", {"mlp_ratio": 2}, {"mlp_ratio": 9}, "int(mlp_ratio*D) to be 36"),
        ("tips/image-swiglu", "tips", {"mlp_ratio": 4}, {"mlp_ratio": 9}, "(int(int(mlp_ratio*D)*2/3) + 7)//8*8 to be 48"),
        ("scenic/owlvit", "owl-vit", {"image_size": 20}, {"image_size": 64}, f"{IMAGE} 26"),
        ("scenic/vivit", "vivit", {"image_size": 12, "num_frames": 6}, {"image_size": 16, "num_frames": 6}, "(num_frames//T)*"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused(
    case: str, family: str, right: dict[str, Any], wrong: dict[str, Any], expected: str
) -> None:
    folder, _, name = case.partition("/")
    source = SpecsOnly({leaf: (x, "float32") for leaf, x in DrawnCases(GOLDEN / folder).shapes(name).items()})
    to = "timm" if family == "vit-jax" and "mlp_ratio" in right else None
    assert convert.plan_conversion(family, source, settings=right, to=to).steps
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(family, source, settings=wrong, to=to)
    (finding,) = refused.value.findings
    key, value = next(iter(wrong.items()))
    assert expected in finding.expected and f"--set {key}={value}" in finding.path and key in finding.fix
