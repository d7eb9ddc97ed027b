"""A value of `--set` that the tree contradicts is refused: the activation by the leaves, an image and a ratio by the sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import convert
from convert.layers.activations import NUMPY_ACTIVATIONS, activation_pair
from convert.layers.shared_keys import ACTIVATION_NAMES
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly
from support.paths import GOLDEN

IMAGE = "(image_size//P)*(image_size//P) + 1 to be"
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu", "swish", "tanh")
GATED, PLAIN = (f"one of {', '.join(start + name for name in ACTIVATIONS)}" for start in ("gated-", ""))


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


@pytest.mark.parametrize(("case", "start"), [("t5x/t5-1.0", ""), ("t5x/t5-1.1", "gated-")])
def test_t5_takes_each_activation_that_flax_and_torch_have(case: str, start: str) -> None:
    """The function that the rules mean is the one that T5's class takes for the name."""
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN
    from transformers.models.t5.configuration_t5 import T5Config

    folder, _, name = case.partition("/")
    source = SpecsOnly({leaf: (x, "float32") for leaf, x in DrawnCases(GOLDEN / folder).shapes(name).items()})
    x = np.linspace(-4, 4, 101)
    for one in ACTIVATIONS:
        stated = f"{start}{one}"
        assert convert.plan_conversion("t5x", source, settings={"feed_forward_proj": stated}).steps
        taken = ACT2FN[T5Config(feed_forward_proj=stated).dense_act_fn](torch.from_numpy(x)).numpy()
        meant = ACTIVATION_NAMES.get(stated, stated)
        jax, torchs = activation_pair(meant)
        for made in (NUMPY_ACTIVATIONS[meant](x), np.asarray(jax(x)), torchs(torch.from_numpy(x)).numpy()):
            np.testing.assert_allclose(made, taken, rtol=0, atol=1e-6, err_msg=stated)
