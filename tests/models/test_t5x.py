"""T5X's T5, mT5, ByT5, UL2, UMT5, LongT5, Pix2Struct and Switch Transformers: what T5X's and flaxformer's own networks computed, and what transformers computes from the converted file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import convert
from convert.numerics.lift_torch import lifted
from convert.planning.plan import Plan
from convert.verify.run import check
from support import t5x_cases
from support.goldens import SpecsOnly, relative_error
from support.paths import DOCS
from support.rule_mistakes import assert_mistake_is_named
from support.t5x_cases import CASES, RULES
from support.value_mistakes import assert_mistakes_are_named

pytestmark = pytest.mark.slow


def converted(case: str, tmp_path: Path, **options: Any) -> tuple[Path, Path]:
    """Return the checkpoint and what becomes of it."""
    source, out = t5x_cases.write(case, tmp_path / "source"), tmp_path / "out"
    convert.convert(t5x_cases.rules(case), source, out, settings=RULES[case][1], **options)
    return source, out


def load(out: Path) -> torch.nn.Module:
    """By the class that config.json names; nothing may be missing, left over or of another shape."""
    import transformers

    name = json.loads((out / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, name).from_pretrained(
        out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model.requires_grad_(False).eval()


def logits(model: torch.nn.Module, case: str, exact: bool = False) -> np.ndarray[Any, Any]:
    given = t5x_cases.as_tensors(case)
    if exact and "flattened_patches" in given:
        given["flattened_patches"] = given["flattened_patches"].double()
    with lifted() if exact else torch.no_grad():
        return model(**given).logits[:, ::4].numpy()


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_what_t5x_did(case: str, tmp_path: Path) -> None:
    """In float64 with casts removed, on both sides; in float32 within what rounding changes in T5X's own logits.

    In UMT5's cases the head's kernel is rounded after it was multiplied by sqrt(D), and a scan is lifted with its constants rounded.
    """
    _, out = converted(case, tmp_path)
    model = load(out)
    rounded, exact = (t5x_cases.ALL.values(case, kind)["logits"] for kind in ("out", "out64"))
    drift = relative_error(rounded, exact)
    assert drift < 5e-6 and relative_error(logits(model, case), rounded) < 1e-5
    assert relative_error(logits(model.double(), case, exact=True), exact) < (
        1e-7 if case in ("umt5", "umt5-unscanned") else 1e-12
    )  # whose head is rounded


@pytest.mark.parametrize("case", ["t5-1.0", "umt5"])
def test_one_msgpack_file_gives_the_same_bytes(case: str, tmp_path: Path) -> None:
    _, out = converted(case, tmp_path)
    file = t5x_cases.write_msgpack(case, tmp_path / "params.msgpack")
    convert.convert("t5x", file, tmp_path / "again", settings=RULES[case][1])
    assert tensors(tmp_path / "again") == tensors(out)


def tensors(out: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    return {name: x.tobytes() for name, x in load_file(out / "model.safetensors").items()}


def planned(case: str, tmp_path: Path) -> Plan:
    source = t5x_cases.write(case, tmp_path / "source")
    return convert.plan_conversion(t5x_cases.rules(case), source, settings=RULES[case][1])


@pytest.mark.parametrize("case", CASES)
def test_the_tree_selects_the_model(case: str, tmp_path: Path) -> None:
    plan = planned(case, tmp_path)
    assert plan.rules.model == RULES[case][0]
    assert {drop.reason for drop in plan.dropped} == {"optimizer state and step"}
    assert plan.source.format == "T5X, version 3"


def test_mt5_is_chosen_by_name_and_has_the_tensors_of_t5(tmp_path: Path) -> None:
    source, out = converted("t5-1.1", tmp_path)
    convert.convert("t5x-mt5", source, tmp_path / "mt5", settings=RULES["t5-1.1"][1])
    assert tensors(tmp_path / "mt5") == tensors(out)
    model = load(tmp_path / "mt5")
    assert type(model).__name__ == "MT5ForConditionalGeneration"


def test_the_activation_is_asked_for_where_the_size_was_never_published(tmp_path: Path) -> None:
    source = t5x_cases.write("t5-1.1", tmp_path / "source")
    with pytest.raises(convert.ConvertError) as refused:
        convert.convert("t5x", source, tmp_path / "out")
    assert "feed_forward_proj" in str(refused.value) and not (tmp_path / "out").exists()


PUBLISHED = {  # t5x/examples/t5/*/*.gin: layers, width, heads, width of a head, feed-forward, vocabulary; activation
    "1.0-base": (12, 12, 768, 12, 64, 3072, 32128, "relu"),
    "1.0-11b": (24, 24, 1024, 128, 128, 65536, 32128, "relu"),
    "1.1-small": (8, 8, 512, 6, 64, 1024, 32128, "gated-gelu"),
    "1.1-xxl": (24, 24, 4096, 64, 64, 10240, 250112, "gated-gelu"),
    "byt5-base": (18, 6, 1536, 12, 64, 3968, 384, "gated-gelu"),
    "ul2": (32, 32, 4096, 16, 256, 16384, 32128, "gated-silu"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_need_no_setting_and_match_transformers(name: str) -> None:
    from transformers import AutoConfig, T5ForConditionalGeneration

    encoder, decoder, *widths, activation = PUBLISHED[name]
    width, heads, head, hidden, rows = widths
    case = "t5-1.0" if activation == "relu" else "ul2"
    size = {12: width, 3: heads, 15: heads * head, 20: hidden, 23: rows, 32: 32}
    specs = {}
    for leaf, x in t5x_cases.leaves(case).items():
        side, layer = leaf.partition("/")[0], leaf.split("/")[1]
        for k in range({"encoder": encoder, "decoder": decoder}[side]) if layer == "layers_0" else [0]:
            if layer in ("layers_1", "layers_2"):
                continue
            shape = tuple(size[n] for n in x.shape)
            specs["target/" + leaf.replace("layers_0", f"layers_{k}")] = (shape, "float32")
    plan = convert.plan_conversion("t5x", SpecsOnly(specs))
    config = plan.config
    assert plan.version == name and config is not None and config["feed_forward_proj"] == activation
    assert config["d_kv"] == head
    with torch.device("meta"):
        made = T5ForConditionalGeneration(AutoConfig.for_model(**config)).state_dict()
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"} | ({"lm_head.weight"} if case == "t5-1.0" else set())  # fmt: skip
    assert {key: tuple(x.shape) for key, x in made.items() if key not in copies} == {
        step.name: step.spec.shape for step in plan.steps
    }


SWITCH = {  # flaxformer/t5x/configs/moe/models/switch_*.gin: layers, width, heads, feed-forward, experts
    "base": (12, 768, 12, 3072, 8),
    "large": (24, 1024, 16, 4096, 16),
    "c-2048": (15, 2080, 30, 6144, 2048),
}


def switch_specs(name: str, gated: bool = False, first: int = 0) -> dict[str, Any]:
    """Return the leaves of a published size; `first` is the layer of the golden that the first one is like."""
    layers, width, heads, hidden, experts = SWITCH[name]
    case = "switch-c" if name == "c-2048" else "switch"
    size = {3: heads, 5: experts, 12: width, 20: hidden, 23: 32128, 32: 32}
    specs = {}
    for leaf, x in t5x_cases.leaves(case).items():
        shape = tuple(size[n] for n in x.shape)
        if "attention/" in leaf:
            shape = (64 * heads, width) if "/out/" in leaf else (width, 64 * heads)
        layer = leaf.split("/")[1]
        likes = [f"layers_{(k + first) % 2}" for k in range(layers)] if layer.startswith("layers_") else [layer]
        for k, like in enumerate(likes):
            if like == layer:
                path = "target/" + leaf.replace(layer, f"layers_{k}" if len(likes) > 1 else layer)
                for part in ("wi_0", "wi_1") if gated and "/wi/" in path else ("wi",):
                    specs[path.replace("/wi/", f"/{part}/")] = (shape, "float32")
    return specs


@pytest.mark.parametrize("name", SWITCH)
def test_published_sizes_of_switch_transformers_match_transformers(name: str) -> None:
    from transformers import AutoConfig, SwitchTransformersForConditionalGeneration

    plan = convert.plan_conversion("t5x", SpecsOnly(switch_specs(name)))
    experts = SWITCH[name][-1]
    assert plan.version == name and plan.config is not None and plan.config["num_experts"] == experts
    with torch.device("meta"):  # with one expert: the modules of 61440 take half a minute
        made = SwitchTransformersForConditionalGeneration(AutoConfig.for_model(**{**plan.config, "num_experts": 1}))
    copies = set() if name == "c-2048" else {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}  # fmt: skip
    assert {step.name: step.spec.shape for step in plan.steps} == {
        key.replace("expert_0", f"expert_{k}"): (experts, *x.shape[1:]) if "router" in key else tuple(x.shape)
        for key, x in made.state_dict().items()
        if key not in copies
        for k in range(experts if "expert_0" in key else 1)
    }


@pytest.mark.parametrize(("changed", "named"), [({"gated": True}, "wi_0"), ({"first": 1}, "every second layer")])
def test_what_the_class_of_switch_transformers_does_not_have_is_refused(changed: dict[str, Any], named: str) -> None:
    """Gated blocks, as of XXL; experts in the first layer of two, which flaxformer has by another `sparse_layout`."""
    with pytest.raises(convert.ConvertError) as refused:
        convert.plan_conversion("t5x", SpecsOnly(switch_specs("base", **changed)))
    assert named in str(refused.value), str(refused.value)


# ---- planted mistakes


@pytest.mark.parametrize("case", CASES)
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9


@pytest.mark.parametrize("case", ["t5-1.0", "umt5", "umt5-tied"])
def test_a_right_file_passes_all_levels(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    levels = check(out, source).levels
    assert {level.level: level.verdict.value for level in levels} == dict.fromkeys(
        ("coverage", "weights", "layers", "model"), "passed"
    ), [level.findings for level in levels]


RULE_MISTAKES = (  # case, a text of the rules, what stands there instead, what the check calls it
    ("t5-1.0", "pre_mlp}_layer_norm/scale\n  multiplies_by: scale", "pre_mlp}_layer_norm/scale\n  multiplies_by: 1+scale", "1+scale on a plain norm"),
    ("t5-1.0", '{name: "{encoder,decoder}.block', '{name: "{decoder,encoder}.block', "of another tensor"),
    ("t5-1.1", "einsum: ...D,DE->...E\n  from: encoder", "einsum: ...E,DE->...D\n  from: encoder", "transposed"),
    ("t5-1.1", "from: decoder/layers_{j}/{self,encoder_decoder}_attention/out", "from: decoder/layers_{j}/{encoder_decoder,self}_attention/out", "of another tensor"),
    ("ul2", "attention/{query,key,value}/kernel", "attention/{key,query,value}/kernel", "of another tensor"),
    ("umt5", "  prescaled_by: 1/sqrt(D)\n", "", "prescale not removed"),
    ("longt5-tglobal", '"encoder/{relpos_bias,side_relpos_bias}', '"encoder/{side_relpos_bias,relpos_bias}', "of another tensor"),
    ("longt5-tglobal", "einsum: ...E,ED->...D\n  from: encoder", "einsum: ...D,ED->...E\n  from: encoder", "transposed"),
    ("pix2struct", "{row,column}_embedder", "{column,row}_embedder", "of another tensor"),
    ("pix2struct", "encoder_decoder}_attention/{query,key", "encoder_decoder}_attention/{key,query", "of another tensor"),
    ("switch", 'from: "{encoder,decoder}/relpos_bias', 'from: "{decoder,encoder}/relpos_bias', "of another tensor"),
    ("switch-c", "attention/{query,key,value}/kernel\n  linear: encoder", "attention/{key,query,value}/kernel\n  linear: encoder", "of another tensor"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "old", "new", "name"), RULE_MISTAKES)
def test_a_mistake_in_the_rules_is_named(case: str, old: str, new: str, name: str, tmp_path: Path) -> None:
    source = t5x_cases.write(case, tmp_path / "source")
    assert_mistake_is_named(t5x_cases.rules(case), source, old, new, name, tmp_path / "out", settings=RULES[case][1])


CONFIG_MISTAKES = (
    ("t5-1.1", "feed_forward_proj", "gated-silu"),
    ("t5-1.0", "relative_attention_max_distance", 64),
    ("umt5", "layer_norm_epsilon", 1e-5),
    ("longt5-tglobal", "local_radius", 6),
)


@pytest.mark.parametrize(("case", "key", "value"), CONFIG_MISTAKES)
def test_another_value_in_config_json_is_named(case: str, key: str, value: Any, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, key: value}))
    (report,) = check(out, source, levels=["layers"]).levels
    assert report.verdict.value == "failed" and any(key in str(f) for f in report.findings), report.findings


def test_the_page_has_a_row_of_every_case() -> None:
    rows = [line.split("|")[1].strip() for line in (DOCS / "models" / "t5x.md").read_text().splitlines() if line.count("|") == 6]  # fmt: skip
    assert rows[2:] == list(CASES)
