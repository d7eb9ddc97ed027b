"""A value of `--set` that the tree contradicts is refused: the activation by the leaves, an image and a ratio by the sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.checkpoints import Source
from convert.core.errors import OptionError
from convert.layers.activations import NUMPY_ACTIVATIONS, activation_pair
from convert.layers.shared_keys import ACTIVATION_NAMES
from support import flax_families, gemma_drawn, maxtext, t5x_cases
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly, checkpoint
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
        ("vit/vit", "vit-jax", {"mlp_ratio": 2.0, "image_size": 12}, {"mlp_ratio": 3, "image_size": 12}, "int(mlp_ratio*D) to be 24"),
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


@pytest.mark.parametrize(
    ("case", "family", "given", "of"),
    [
        ("vit-big-vision/tok", "vit-jax", {"image_size": 20}, "vit-big-vision"),  # a table of positions tells the image
        ("vit-big-vision/gap", "vit-jax", {"posemb": "sincos2d"}, "vit-jax-gap"),
        ("vit/jax-pre-logits", "vit-jax", {"mlp_ratio": 2.0, "image_size": 12}, "vit-jax-pooler"),
        ("vit-big-vision/tok", "vit-jax", {"global_pool": "max"}, "vit-big-vision"),
        ("siglip2/naflex", "siglip2", {"mlp_ratio": 3.0}, "siglip2-naflex"),
    ],
)
def test_a_setting_of_another_model_of_the_family_is_refused(
    case: str, family: str, given: dict[str, Any], of: str
) -> None:
    folder, _, name = case.partition("/")
    source = SpecsOnly(
        {f"params/{leaf}": (x, "float32") for leaf, x in DrawnCases(GOLDEN / folder).shapes(name).items()}
    )
    needed = {key: value for key, value in given.items() if key == "image_size" and of == "vit-jax-pooler"}
    assert convert.plan_conversion(family, source, settings=needed).rules.model == of
    with pytest.raises(convert.ConvertError) as refused:
        convert.plan_conversion(family, source, settings=given)
    (finding,) = refused.value.findings
    key, value = next(iter(given.items()))
    assert finding.code == "setting-has-no-effect" and finding.path == f"--set {key}={value}"
    assert f"the tree is that of {of} " in finding.problem and finding.fix == "leave it out"


def opened(case: str) -> tuple[str, Source, dict[str, Any]]:
    """Return the family of a golden, its tree, and what a user must say of it."""
    folder, _, name = case.partition("/")
    if folder == "maxtext":
        return maxtext.rules(name), convert.open_source(maxtext.checkpoint(name)), maxtext.settings(name)
    shapes = DrawnCases(GOLDEN / folder).shapes(name)
    if folder == "openpi":
        return (
            "openpi",
            SpecsOnly({f"params/{leaf}": (x, "float32") for leaf, x in shapes.items()}),
            {"action_horizon": 3},
        )
    said = gemma_drawn.settings(name) if folder == "gemma4" else t5x_cases.RULES[name][1]
    return (
        "gemma" if folder == "gemma4" else "t5x",
        SpecsOnly({leaf: (x, "float32") for leaf, x in shapes.items()}),
        said,
    )


MIXTURES = (
    "mixtral",
    "deepseek3",
    "qwen3-next",
    "qwen3-moe",
    "gpt-oss",
    "gemma4-moe",
    "qwen3-vl-moe",
    "qwen3-omni",
    "qwen3.5",
)
EXPERTS = "experts_per_token to be an integer of at least 1 and at most E = "
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("case", "key", "wrong", "expected"),
    [
        *((f"maxtext/{case}", "experts_per_token", 99, EXPERTS) for case in MIXTURES),
        *((f"maxtext/{case}", "experts_per_token", 0, "an integer of at least 1 and at most E") for case in MIXTURES),
        ("gemma4/gemma4-26b-a4b", "experts_per_token", 99, EXPERTS),
        ("gemma4/gemma3n", "kv_shared_layers", 5, "kv_shared_layers to be an integer of at least 0 and at most i = 4 (layers)"),
        ("gemma4/gemma3n", "kv_shared_layers", 4, "where the last kv_shared_layers = 4 have no value that those before lack"),
        ("gemma4/gemma3n", "attention_pattern", [SLIDING, FULL, SLIDING], "a list of i = 4 (layers) values"),
        ("gemma4/gemma3n", "activation_sparsity", [0.95], "activation_sparsity to be a list of i = 4 (layers) numbers, each at least 0 and below 1"),
        ("gemma4/gemma3n", "activation_sparsity", [0.95, 1.0, 0, 0], "each at least 0 and below 1"),
        ("gemma4/gemma3n", "vocab_size", -5, "an integer of at least 1"),
        ("gemma4/gemma4-e2b", "attention_pattern", [SLIDING, FULL], "a list of i = 4 (layers) values"),
        ("gemma4/gemma4-e2b", "attention_pattern", [SLIDING, SLIDING, SLIDING, FULL], "one for each H of the layers"),
        ("gemma4/gemma4-e2b", "attention_pattern", [FULL, SLIDING, SLIDING, FULL], "with sliding_attention at the start"),
        ("gemma4/gemma4-e2b", "attention_pattern", [SLIDING, FULL, FULL, SLIDING], "with full_attention at the end"),
        ("gemma4/gemma4-e2b", "kv_shared_layers", 1, "2: the last layers with F ="),
        ("gemma4/gemma4-e2b", "double_wide_mlp", False, "true or false equal to F[-1]/F[0] - 1 = 1"),
        ("maxtext/gemma4-e", "kv_shared_layers", 3, "equal to i - m = 4"),
        ("maxtext/qwen3-vl", "deepstack_layers", [0], "a list of m = 2 (layers of the vision tower whose features go to the decoder) integers, each at least 0 and below j"),
        ("maxtext/qwen3-vl", "deepstack_layers", [0, 99], "below j = 4 (layers of the vision tower)"),
        ("maxtext/qwen3-vl", "deepstack_layers", [2, 0], "in rising order"),
        ("maxtext/qwen3-omni", "deepstack_layers", [0], "a list of m = 2"),
        ("maxtext/qwen3-vl", "mrope_section", [2, 2, 3], "a list of 3 integers, each at least 0, together H//2 = 6"),
        ("maxtext/qwen3-omni", "mrope_section", [4, 4, 4], "together H//2 = 4"),
        ("maxtext/qwen3.5", "mrope_section", [2, 2, 2], "together int(H*rotated)//2 = 3"),
        ("maxtext/deepseek3", "qk_nope_head_dim", 7, "qk_nope_head_dim + qk_rope_head_dim to be 12"),
        ("maxtext/deepseek3", "qk_rope_head_dim", 6, "qk_nope_head_dim + qk_rope_head_dim to be 12"),
        ("maxtext/qwen3-next", "key_heads", 4, "2*key_heads*key_head_width + Z to be"),
        ("maxtext/qwen3-next", "key_head_width", 5, "2*key_heads*key_head_width + Z to be"),
        ("maxtext/qwen3-next", "attention_pattern", [FULL] + ["linear_attention"] * 3, "linear_attention in layers 0, 1, 2, 4, 5, 6, which have"),
        ("maxtext/deepseek4", "attention_pattern", [SLIDING] * 3, "compressed_sparse_attention in layers 1, which have"),
        *(("maxtext/mistral", key, 10**6, f"{key} to be the id of a token below V =") for key in ("eos_token_id", "bos_token_id")),
        ("maxtext/qwen3-vl", "image_token", 10**6, "below V ="),
        ("maxtext/gpt-oss", "sliding_window", 0, "an integer of at least 1"),
        ("maxtext/gpt-oss", "rope_theta", 1, "a number above 1"),
        ("maxtext/gemma2", "attn_logit_softcapping", -1.0, "a number above 0"),
        ("openpi/pi0", "action_horizon", 0, "an integer of at least 1"),
        ("openpi/pi0", "pad_token_id", 10**6, "below V ="),
        ("t5x/t5-1.1", "layer_norm_epsilon", 5, "a number above 0 and at most 0.1"),
        ("t5x/t5-1.1", "decoder_start_token_id", 10**6, "below V ="),
        ("t5x/t5-1.1", "relative_attention_max_distance", 1, "above B//2 ="),
    ],
)  # fmt: skip
def test_a_value_that_no_model_of_this_tree_has_is_refused(case: str, key: str, wrong: Any, expected: str) -> None:
    family, source, said = opened(case)
    with pytest.raises((convert.PlanError, OptionError)) as refused:
        convert.plan_conversion(family, source, settings=said | {key: wrong})
    found = [one for one in refused.value.findings if expected in one.expected]
    assert found, refused.value
    assert f"--set {key}=" in str(refused.value) and all(key in one.fix and one.got and one.rule for one in found)


@pytest.mark.parametrize(
    "case", ["gemma4/gemma3n", "gemma4/gemma4-e2b", "maxtext/gemma4-e", "maxtext/qwen3.5", "maxtext/deepseek4"]
)
def test_a_default_of_the_rules_is_no_statement_about_a_tree(case: str) -> None:
    """A tree that is smaller than the published models has no tokens 151645 and 262144, which the rules assume: nobody stated them."""
    family, source, said = opened(case)
    assert convert.plan_conversion(family, source, settings=said).steps


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


RATE = "a number of at least 0 and at most 1 or null"


@pytest.mark.parametrize(
    ("case", "key", "wrong", "expected"),
    [
        *((case, key, wrong, RATE) for case, key in (("bert", "hidden_dropout_prob"), ("t5", "dropout_rate"), ("whisper", "attention_dropout")) for wrong in (1.5, -0.1, "x")),
        *((case, "pad_token_id", 10**6, "the id of a token below V = ") for case in ("bert", "gpt2", "llama")),
        *(("roberta.RobertaForSequenceClassification", key, 5, RATE) for key in ("hidden_dropout_prob", "classifier_dropout")),
        ("roberta.RobertaForSequenceClassification", "layer_norm_eps", 5, "a number above 0 and at most 0.1"),
        ("electra.ElectraForSequenceClassification", "pad_token_id", 10**6, "the id of a token below vocab_size = "),
    ],
)  # fmt: skip
def test_a_key_of_config_json_at_which_the_class_stops_is_refused(
    case: str, key: str, wrong: Any, expected: str, tmp_path: Path
) -> None:
    """A rate of dropout is no fact, and goes to the output: torch.nn.Dropout(5) is an error, and so is a padding row that the table lacks."""
    if "." in case:
        source, family = flax_families.specs(case, tmp_path, **{key: wrong}), "flax-transformers"
    else:
        source, family = SpecsOnly({k: (x.spec.shape, x.spec.dtype) for k, x in convert.open_source(checkpoint(case)).leaves.items()}), case  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(json.loads((checkpoint(case) / "config.json").read_text()) | {key: wrong}))  # fmt: skip
        source.path = tmp_path
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(family, source)
    (finding,) = (one for one in refused.value.findings if one.problem.startswith(key))
    assert (
        finding.code == "config-conflict" and finding.expected.startswith(expected) and finding.got == json.dumps(wrong)
    )
