"""Models with images: converted, loaded by transformers, compared with what the JAX models gave; and what goes wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import convert
from convert.planning.planner import make_plan
from convert.rules.library import load_models, shipped_rules_dir
from convert.verify.report.report import Verdict
from convert.verify.run import check
from support.gemma_image_models import BOUND, CASES, MODEL, directory, errors, path
from support.goldens import SpecsOnly
from support.memory_source import MemorySource, rule_file
from support.memory_source import run as run_plan
from support.paths import GOLDEN

pytestmark = pytest.mark.slow


def arrays(case: str) -> dict[str, np.ndarray]:
    source = convert.open_source(path(case))
    return {name: source.read(name) for name in source.leaves}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("vision")
    return {case: directory(case, top / case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_transformers_reproduces_what_jax_gave(case: str, converted: dict[str, Path]) -> None:
    """Image embeddings and logits; text alone, too, for Gemma 3."""
    found = errors(case, converted[case])
    assert set(found) >= {"logits"} and max(found.values()) < BOUND, found


@pytest.mark.parametrize("case", CASES)
def test_check_passes_coverage_weights_and_layers(case: str, converted: dict[str, Path]) -> None:
    report = check(converted[case], path(case), levels=("coverage", "weights", "layers"))
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 3, report


# ---- planted faults: each loads, as every projection is square, and is caught


@dataclasses.dataclass(frozen=True)
class Fault:
    name: str
    case: str
    old: str
    new: str


POOLING = """- attention: vision_model.head.attention    # torch.nn.MultiheadAttention
  layer: flax.linen.MultiHeadDotProductAttention
  from: img/MAPHead_0/MultiHeadDotProductAttention_0
  axes: WAB
"""
BY_HAND = """- einsum: ...W,WAB->...AB
  from: img/MAPHead_0/MultiHeadDotProductAttention_0/{query,key,value}/kernel
  bias: img/MAPHead_0/MultiHeadDotProductAttention_0/{query,key,value}/bias
  linear: {module: vision_model.head.attention, weight: in_proj_weight, bias: in_proj_bias}
- einsum: ...AB,ABW->...W
  from: img/MAPHead_0/MultiHeadDotProductAttention_0/out/kernel
  bias: img/MAPHead_0/MultiHeadDotProductAttention_0/out/bias
  linear: vision_model.head.attention.out_proj
"""


FAULTS = (
    Fault("patch rows and columns swapped", "gemma3-vision", "NHWC,HWIO->NHWC", "NHWC,WHIO->NHWC"),
    Fault("heads and features of the output swapped", "paligemma2", "...AB,ABW->...W", "...BA,ABW->...W"),
    Fault("key and query swapped", "siglip", "{query,key,value}/kernel", "{key,query,value}/kernel"),
    Fault("key and query biases swapped", "siglip", "{query,key,value}/bias", "{key,query,value}/bias"),
    Fault("q, k, v of the pooling head in another order", "siglip", POOLING, BY_HAND.replace("{query,key,value}/kernel", "{key,query,value}/kernel")),
    Fault("1 added to a LayerNorm's scale", "paligemma1", "multiplies_by: scale  ", "multiplies_by: 1+scale  "),
    Fault("1 folded into the norm before the projector", "gemma3-vision", "mm_soft_emb_norm, multiplies_by: 1+weight", "mm_soft_emb_norm"),
    Fault("the norms of a layer swapped", "gemma3-vision", ".layer_norm{1,2}", ".layer_norm{2,1}"),
    Fault("temperature and bias swapped", "siglip", "parameter: logit_scale", "parameter: logit_bias"),
    Fault("erf in place of tanh in the tower", "paligemma1", "image_size: $Z\n            hidden_act: gelu_pytorch_tanh", "image_size: $Z\n            hidden_act: gelu"),
    Fault("windows where PaliGemma 2 has none", "paligemma2", "{repeat: [full_attention]}", "{repeat: [sliding_attention]}"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name} ({fault.case})")
def test_the_outputs_tell_a_fault_in_the_rules(fault: Fault, tmp_path: Path) -> None:
    file = "siglip.yaml" if fault.case == "siglip" else "gemma.yaml"
    text = (shipped_rules_dir() / file).read_text()
    assert fault.old in text
    text = text.replace(fault.old, fault.new)
    if fault.new == "parameter: logit_bias":
        text = text.replace("parameter: logit_bias", "parameter: logit_scale", 2).replace(
            "parameter: logit_scale", "parameter: logit_bias", 1
        )
    (tmp_path / file).write_text(text)
    out = directory(fault.case, tmp_path / "out", str(tmp_path / file))
    assert max(errors(fault.case, out).values()) > 2 * BOUND


def test_the_pooling_head_in_burn(tmp_path: Path) -> None:
    """What an `attention` rule writes is what is written by hand; Burn, which has queries, keys and values apart, gets it, too."""
    from support import burn_modules as burn

    text = (shipped_rules_dir() / "siglip.yaml").read_text()
    (tmp_path / "siglip.yaml").write_text(text.replace(POOLING, BY_HAND))
    by_hand, plan = (run_plan(convert.plan_conversion(rules, path("siglip"))) for rules in (str(tmp_path / "siglip.yaml"), "siglip"))  # fmt: skip
    assert by_hand.keys() == plan.keys() and all(np.array_equal(by_hand[name], plan[name]) for name in plan)
    file = run_plan(convert.plan_conversion("siglip", path("siglip"), to="burn"))
    name, width = "vision_model.head.attention", plan["vision_model.head.probe"].shape[-1]
    heads = next(
        x for key, x in arrays("siglip").items() if key.endswith("MAPHead_0/MultiHeadDotProductAttention_0/query/bias")
    ).shape[0]
    torch_own = torch.nn.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64)
    own = {key.removeprefix(f"{name}."): torch.tensor(x).double() for key, x in plan.items() if key.startswith(name)}
    torch_own.load_state_dict(own)
    x = np.random.default_rng(0).normal(size=(2, 7, width))
    want = torch_own(*[torch.tensor(x)] * 3)[0].detach().numpy()
    np.testing.assert_allclose(burn.attention({k: v.astype(np.float64) for k, v in file.items()}, name, x, heads), want, atol=1e-12)  # fmt: skip
    with pytest.raises(convert.PlanError, match="in_proj_weight and in_proj_bias are not parameters of Burn's Linear, .*write the layer as an `attention:` rule, which gives Burn's MultiHeadAttention"):  # fmt: skip
        convert.plan_conversion(str(tmp_path / "siglip.yaml"), path("siglip"), to="burn")


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.T.reshape(x.shape).contiguous()


DAMAGE = {  # tensor -> what is done to it, in a file that still loads
    "vision_tower.embeddings.position_embedding.weight": transposed,
    "multi_modal_projector.mm_input_projection_weight": transposed,
    "vision_tower.encoder.layers.1.self_attn.q_proj.bias": torch.zeros_like,
    "vision_tower.encoder.layers.1.self_attn.v_proj.bias": torch.zeros_like,
    "vision_tower.embeddings.patch_embedding.weight": lambda x: x.transpose(2, 3).contiguous(),
    "vision_tower.encoder.layers.0.layer_norm1.weight": lambda x: x + 1,
    "multi_modal_projector.mm_soft_emb_norm.weight": lambda x: x + 1,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_the_weights_level_tells_a_damaged_tensor(name: str, converted: dict[str, Path], tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    source = converted["gemma3-vision"]
    with safe_open(source / "model.safetensors", "pt") as file:
        header = file.metadata()
    tensors = load_file(source / "model.safetensors")
    full = f"model.{name}"
    damaged = DAMAGE[name](tensors[full])
    assert damaged.shape == tensors[full].shape and not torch.equal(damaged, tensors[full])
    save_file({**tensors, full: damaged}, tmp_path / "model.safetensors", header)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    report = check(tmp_path, path("gemma3-vision"), levels=("coverage", "weights"))
    coverage, weights = report.levels
    assert coverage.verdict is Verdict.PASSED and weights.verdict is Verdict.FAILED
    assert any(full in str(finding) or full in str(finding) for finding in weights.findings)


# ---- the tree chooses the model


def test_a_text_target_drops_the_tower_with_the_reason() -> None:
    settings = {k: v for k, v in CASES["gemma3-vision"][1].items() if k != "mm_tokens_per_image"}
    whole = convert.plan_conversion("gemma", path("gemma3-vision"), settings=CASES["gemma3-vision"][1])
    assert whole.rules.model == "gemma3_vision" and not whole.dropped
    for model, to in (("gemma3", None), ("gemma3", "plain_norms"), ("gemma", "gemma_pytorch")):
        plan = convert.plan_conversion(model, path("gemma3-vision"), to=to, settings=settings)
        reasons = {dropped.reason for dropped in plan.dropped}
        assert plan.rules.model == "gemma3" and len(plan.dropped) == 55 and len(reasons) == 2
        assert all("which a text model does not have" in reason for reason in reasons)
        assert not any("vision" in step.name or "multi_modal" in step.name for step in plan.steps)
    with pytest.raises(
        convert.PlanError,
        match=r"the rule \(and 9 more\) has no target for 'gemma_pytorch', so /vision_encoder/siglip_encoder/embedding/kernel",
    ):
        convert.plan_conversion("gemma3_vision", path("gemma3-vision"), to="gemma_pytorch", settings=settings)


def test_a_text_tree_is_no_vision_model() -> None:
    tree = {k: v for k, v in arrays("gemma3-vision").items() if "vision_encoder" not in k and "/mm_" not in k}
    settings = CASES["gemma3-vision"][1]
    of_text = {k: v for k, v in settings.items() if k != "mm_tokens_per_image"}
    assert convert.plan_conversion("gemma", MemorySource(tree), settings=of_text).rules.model == "gemma3"
    with pytest.raises(convert.PlanError, match="the tree is that of gemma3 .*; it is one of gemma3_vision"):
        convert.plan_conversion("gemma", MemorySource(tree), settings=settings)
    with pytest.raises(convert.PlanError, match=r"img/embedding/kernel \(conv, weight\): expected a leaf"):
        convert.plan_conversion("gemma3_vision", MemorySource(tree), settings=settings)


def stack(tree: dict[str, np.ndarray], before: str, after: str) -> dict[str, np.ndarray]:
    """The layers `{before}{k}` stacked on axis 0 under `{after}`."""
    names = [name for name in tree if before in name]
    one = [name for name in names if f"{before}0/" in name]
    count = len(names) // len(one)
    kept = {name: x for name, x in tree.items() if name not in names}
    for name in one:
        parts = [tree[name.replace(f"{before}0/", f"{before}{k}/")] for k in range(count)]
        kept[name.replace(f"{before}0/", f"{after}/")] = np.stack(parts)
    return kept


def unstack(tree: dict[str, np.ndarray], before: str, after: str) -> dict[str, np.ndarray]:
    """The reverse."""
    kept = {name: x for name, x in tree.items() if before not in name}
    for name in tree.keys() - kept.keys():
        kept |= {name.replace(before, f"{after}{k}/"): x for k, x in enumerate(tree[name])}
    return kept


def same(case: str, tree: dict[str, np.ndarray], converted: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    convert.convert(MODEL[case], MemorySource(tree), out, settings=CASES[case][1])
    got, want = load_file(out), load_file(converted[case] / "model.safetensors")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_layouts_of_gemma_3(converted: dict[str, Path], tmp_path: Path) -> None:
    """FLAT, with the tower beside `transformer`; KAULDRON; and a tower whose layers are stacked."""
    nested = arrays("gemma3-vision")
    flat = {
        name.replace("vision_encoder", "SigLiPFromPatches_0")
        if name.startswith("vision_encoder")
        else f"transformer/{name}{'/w' if name.endswith(('mlp/linear', 'gating_einsum')) else ''}": x
        for name, x in nested.items()
    }
    kauldron = {f"params/{name}": x for name, x in nested.items()} | {"step": np.zeros((), np.int32)}
    for k, tree in enumerate((flat, kauldron, stack(flat, "encoderblock_", "encoderblock"))):
        (tmp_path / str(k)).mkdir()
        same("gemma3-vision", tree, converted, tmp_path / str(k))


def test_scanned_and_unscanned_layers_of_big_vision(converted: dict[str, Path], tmp_path: Path) -> None:
    one, two, pair = arrays("paligemma1"), arrays("paligemma2"), arrays("siglip")
    assert "params/llm/layers/attn/q_einsum/w" in one and "params/llm/layers/0/attn/q_einsum/w" in two
    trees = {
        "paligemma1": unstack(unstack(one, "llm/layers/", "llm/layers/"), "/encoderblock/", "/encoderblock_"),
        "paligemma2": stack(stack(two, "llm/layers/", "llm/layers"), "encoderblock_", "encoderblock"),
        "siglip": stack(pair, "img/Transformer/encoderblock_", "img/Transformer/encoderblock"),
    }
    for case, tree in trees.items():
        assert tree.keys() != arrays(case).keys()
        (tmp_path / case).mkdir()
        same(case, tree, converted, tmp_path / case)


def test_bfloat16_of_an_npz_stays_bfloat16(converted: dict[str, Path]) -> None:
    assert {x.dtype for x in load_file(converted["paligemma2"] / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((converted["paligemma2"] / "config.json").read_text())["dtype"] == "bfloat16"


# ---- published sizes, from shapes alone


def tower(width: int, layers: int, heads: int, mlp: int, patch: int, patches: int) -> dict[str, tuple[int, ...]]:
    """The scanned tower of big_vision."""
    block = "Transformer/encoderblock"
    shapes: dict[str, tuple[int, ...]] = {
        "embedding/kernel": (patch, patch, 3, width),
        "embedding/bias": (width,),
        "pos_embedding": (1, patches, width),
        f"{block}/MlpBlock_0/Dense_0/kernel": (layers, width, mlp),
        f"{block}/MlpBlock_0/Dense_0/bias": (layers, mlp),
        f"{block}/MlpBlock_0/Dense_1/kernel": (layers, mlp, width),
        f"{block}/MlpBlock_0/Dense_1/bias": (layers, width),
        f"{block}/MultiHeadDotProductAttention_0/out/kernel": (layers, heads, width // heads, width),
        f"{block}/MultiHeadDotProductAttention_0/out/bias": (layers, width),
    }
    for x in ("query", "key", "value"):
        shapes[f"{block}/MultiHeadDotProductAttention_0/{x}/kernel"] = (layers, width, heads, width // heads)
        shapes[f"{block}/MultiHeadDotProductAttention_0/{x}/bias"] = (layers, heads, width // heads)
    for x in ("scale", "bias"):
        shapes |= {f"{block}/LayerNorm_{k}/{x}": (layers, width) for k in (0, 1)}
        shapes[f"Transformer/encoder_norm/{x}"] = (width,)
    return shapes


SO400M = {"width": 1152, "layers": 27, "heads": 16, "mlp": 4304, "patch": 14}


def match_transformers(plan: convert.Plan) -> Any:
    import transformers

    config = plan.config
    assert config is not None
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        state = getattr(transformers, config["architectures"][0])(made).state_dict()
    state.pop("lm_head.weight", None)  # tied: stored once
    assert {name: tuple(x.shape) for name, x in state.items()} == {step.name: step.spec.shape for step in plan.steps}
    return made


@pytest.mark.parametrize(("patches", "side"), [(256, 224), (1024, 448), (4096, 896)])
def test_paligemma_3b_needs_no_setting(patches: int, side: int) -> None:
    """PaliGemma 1, whose sizes are Gemma 2B's and those of So400m/14."""
    i, D, N, K, H, F = 18, 2048, 8, 1, 256, 16384
    layers = {
        "attn/q_einsum/w": (i, N, D, H),
        "attn/kv_einsum/w": (i, 2, K, D, H),
        "attn/attn_vec_einsum/w": (i, N, H, D),
        "mlp/gating_einsum": (i, 2, D, F),
        "mlp/linear": (i, F, D),
        "pre_attention_norm/scale": (i, D),
        "pre_ffw_norm/scale": (i, D),
    }
    shapes = {f"llm/layers/{name}": shape for name, shape in layers.items()}
    shapes |= {"llm/embedder/input_embedding": (257152, D), "llm/final_norm/scale": (D,)}
    shapes |= {f"img/{name}": shape for name, shape in tower(**SO400M, patches=patches).items()}
    shapes |= {"img/head/kernel": (1152, D), "img/head/bias": (D,)}
    source = SpecsOnly({f"params/{name}": (shape, "float32") for name, shape in shapes.items()})
    plan = convert.plan_conversion("gemma", source)
    assert (plan.rules.model, plan.version) == ("paligemma1", "1-2b")
    made = match_transformers(plan)
    assert (made.vision_config.image_size, made.text_config.num_image_tokens) == (side, patches)


def test_gemma3_4b_with_its_tower_needs_no_setting() -> None:
    i, D, N, K, H, F = 34, 2560, 8, 4, 256, 10240
    shapes: dict[str, tuple[int, ...]] = {"embedder/input_embedding": (262144, D), "final_norm/scale": (D,)}
    for k in range(i):
        shapes |= {
            f"layer_{k}/attn/q_einsum/w": (N, D, H),
            f"layer_{k}/attn/kv_einsum/w": (2, K, D, H),
            f"layer_{k}/attn/attn_vec_einsum/w": (N, H, D),
            f"layer_{k}/mlp/gating_einsum/w": (2, F, D),
            f"layer_{k}/mlp/linear/w": (F, D),
            **{f"layer_{k}/attn/_{x}_norm/scale": (H,) for x in ("query", "key")},
            **{f"layer_{k}/{x}_norm/scale": (D,) for x in ("pre_attention", "post_attention", "pre_ffw", "post_ffw")},
        }
    shapes |= {"embedder/mm_input_projection/w": (1152, D), "embedder/mm_soft_embedding_norm/scale": (1152,)}
    leaves = {f"transformer/{name}": (shape, "bfloat16") for name, shape in shapes.items()}
    for name, shape in tower(**SO400M, patches=4096).items():
        full = f"SigLiPFromPatches_0/siglip_encoder/{name}"
        if "encoderblock/" in full:
            leaves |= {full.replace("block/", f"block_{k}/"): (shape[1:], "float32") for k in range(27)}
        else:
            leaves[full] = (shape, "float32")
    plan = convert.plan_conversion("gemma", SpecsOnly(leaves))
    assert (plan.rules.model, plan.version, len(plan.dropped)) == ("gemma3_vision", "3-4b", 0)
    made = match_transformers(plan)
    assert (made.vision_config.image_size, made.mm_tokens_per_image) == (896, 256)
    assert made.text_config.rope_parameters["full_attention"]["factor"] == 8.0


def test_what_the_tree_does_not_hold_is_asked_for() -> None:
    plan = convert.plan_conversion("gemma3_vision", path("gemma3-vision"), settings={"vocab_size": 131})
    with pytest.raises(convert.PlanError, match="mm_tokens_per_image"):
        _ = plan.config


# ---- bad input


def test_patches_that_are_no_square_are_refused() -> None:
    tree = arrays("siglip")
    tree["params/img/pos_embedding"] = tree["params/img/pos_embedding"][:, :35]
    with pytest.raises(
        convert.PlanError,
        match=r"L = T\*T \(patches of an image\): 35 is not such a product of integers .*img/pos_embedding",
    ):
        convert.plan_conversion("siglip", MemorySource(tree))


def test_an_axis_that_goes_has_size_one() -> None:
    tree = arrays("siglip")
    tree["params/txt/pos_embedding"] = np.concatenate([tree["params/txt/pos_embedding"]] * 2)
    with pytest.raises(
        convert.PlanError, match=r"the rule's axes \. S D have size 1 where there is a dot, and this one has 2"
    ):
        convert.plan_conversion("siglip", MemorySource(tree))


def test_a_truncated_tower_is_refused() -> None:
    tree = arrays("gemma3-vision")
    del tree["vision_encoder/siglip_encoder/Transformer/encoderblock_1/MlpBlock_0/Dense_1/bias"]
    with pytest.raises(
        convert.PlanError,
        match=r": vision_encoder/siglip_encoder/Transformer/encoderblock_1/MlpBlock_0/Dense_1/bias: this leaf is not in the checkpoint",
    ):
        convert.plan_conversion("gemma3_vision", MemorySource(tree), settings=CASES["gemma3-vision"][1])
    with pytest.raises(
        convert.PlanError,
        match=r"(?s)Dense_1/bias: this leaf is not in the .*\nName gemma3 in place of gemma to convert",
    ):
        convert.plan_conversion("gemma", MemorySource(tree), settings=CASES["gemma3-vision"][1])


def test_heads_and_features_of_a_bias_are_told_apart(tmp_path: Path) -> None:
    """The kernel alone does not tell; its bias does, before anything is read."""
    text = (shipped_rules_dir() / "siglip.yaml").read_text()
    (tmp_path / "s.yaml").write_text(text.replace("...W,WAB->...AB ", "...W,WAB->...BA "))
    with pytest.raises(convert.PlanError, match="makes B = 3"):
        convert.plan_conversion(str(tmp_path / "s.yaml"), path("siglip"))


# ---- the rule language: `like`, `below`, `names`


HEAD = """
axes: {A: {is: a}}
targets: {t: {loads: T, config: {width: $A}}}
models:
  one: {title: One, targets: {t: {config: {kind: one}}}}
"""


def models(more: str, tmp_path: Path, rules: str = "- {from: x, axes: A, parameter: top.x}") -> Any:
    file = tmp_path / "m.yaml"
    file.write_text(f"{HEAD}{more}rules:\n{rules}\n")
    return load_models(file)


def test_like_and_below_and_names(tmp_path: Path) -> None:
    two = "  two: {title: Two, extends: one, targets: {t: {sidecar_key: inner, rename_prefixes: {top: in.top}, config: {kind: two}}}}\n"
    one, other = models(two, tmp_path)
    assert one.targets["t"].config == {"width": "$A", "kind": "one"}
    assert other.targets["t"].config == {"inner": {"width": "$A", "kind": "one"}, "kind": "two"}
    plan = make_plan(other, MemorySource({"x": np.zeros(3, np.float32)}))
    assert [step.name for step in plan.steps] == ["in.top.x"]
    assert plan.config == {"inner": {"width": 3, "kind": "one"}, "kind": "two", "dtype": "float32"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "  two: {title: Two, extends: three}\n",
            r"m\.yaml:6:\d+: expected a model declared above two \(one\), got 'three'",
        ),
        ("  two: {title: Two, extends: two}\n", r"expected a model declared above two .one., got 'two'"),
        (
            "  two: {title: Two, targets: {u: {loads: U, sidecar_key: k}}}\n",
            r"needs a config of the target 'u' to extend",
        ),
    ],
)
def test_what_cannot_be_taken_over(more: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(convert.RuleError, match=message):
        models(more, tmp_path)


def test_a_dot_is_refused_where_axes_are_roles() -> None:
    with pytest.raises(convert.RuleError, match="the name of an axis is one letter"):
        rule_file("- {from: k, dimension_numbers: 'NWC,WIO->NWC', axes: .IO, conv: c}")


def test_goldens_are_small() -> None:
    assert sum(f.stat().st_size for case in CASES for f in (GOLDEN / case).rglob("*") if f.is_file()) < 1_200_000
