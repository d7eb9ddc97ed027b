"""Sizes of one tree that contradict one another, or that the class of the target does not take, are refused before data is read."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import convert
from support import gemma_drawn, gemma_towers, maxtext, t5gemma
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly
from support.other_sizes import Shapes, with_size
from support.paths import GOLDEN


def shapes_of(case: str) -> Shapes:
    """Return the leaves of a golden."""
    folder, _, name = case.partition("/")
    if (GOLDEN / case).is_dir() or folder == "maxtext":
        path = maxtext.checkpoint(name) if folder == "maxtext" else GOLDEN / case
        return {leaf: x.spec.shape for leaf, x in convert.open_source(path).leaves.items()}
    if name == "ckpt":
        with np.load(GOLDEN / f"{case}.npz") as stored:
            return {leaf: stored[leaf].shape for leaf in stored.files}
    return DrawnCases(GOLDEN / folder).shapes(name)


def planned(family: str, shapes: Shapes, said: dict[str, object], to: str | None = None) -> convert.Plan:
    specs = {leaf: (shape, "float32") for leaf, shape in shapes.items()}
    return convert.plan_conversion(family, SpecsOnly(specs), settings=said, to=to)


def resized(shapes: Shapes, where: str, old: int, new: int) -> Shapes:
    """Give each axis of this size, in the leaves that `where` finds, another one."""
    return {
        leaf: tuple(new if size == old else size for size in shape) if re.search(where, leaf) else shape
        for leaf, shape in shapes.items()
    }


QWEN = {"key_heads": 2, "key_head_width": 6}
CASES = [
    ("siglip", "siglip/ckpt", {}, "txt/.*Attention", 2, 4, "48, as N = 4, H = 12 by", "24, by"),
    ("siglip", "siglip/ckpt", {}, "img/.*Attention", 8, 16, "48, as A = 3, B = 16 by", "24, by"),
    ("owl-vit", "scenic/owlv2", {"image_size": 20}, "clip/text/.*attn", 4, 8, "40, as N = 5, H = 8 by", "20, by"),
    ("gemma", "paligemma1/ckpt", {"vocab_size": 101}, "img/.*Attention", 8, 16, "48, as A = 3, B = 16 by", "24, by"),
    ("openpi", "openpi/pi0", {}, "img/.*Attention", 8, 16, "32, as A = 2, B = 16 by", "16, by"),
    ("tips", "tips/text", {}, "Attention", 6, 12, "36, as N = 3, H = 12 by", "18, by"),
    ("tips", "tips/image", {}, "Attention", 6, 12, "36, as N = 3, H = 12 by", "18, by"),
    ("videoprism", "videoprism/encoder", {}, "self_attention", 7, 14, "42, as N = 3, H = 14 by", "21, by"),
    ("vivit", "scenic/vivit", {}, "Attention", 5, 10, "30, as N = 3, H = 10 by", "15, by"),
    ("gemma", "gemma4-towers/gemma4-e2b", gemma_towers.settings("gemma4-e2b"), "fflayer", 96, 192, "96, as U = 24 by", "192, by"),
    ("maxtext", "maxtext/qwen3.5", {**QWEN, "rotated": 0.5}, "conv1d", 64, 128, "2*key_heads*key_head_width + Z to be 128", "64 with"),
    ("maxtext", "maxtext/deepseek4", maxtext.settings("deepseek4"), "o_a_proj", 16, 12, "N*H/G to be 12", "16 with N = 4; H = 8; G = 2"),
    ("maxtext", "maxtext/qwen3-next", QWEN, "qkvz", 104, 208, "2*key_heads*key_head_width + 2*Z to be 208", "104 with"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "case", "said", "where", "old", "new", "expected", "got"), CASES)
def test_sizes_that_contradict_one_another_are_refused(
    family: str, case: str, said: dict[str, object], where: str, old: int, new: int, expected: str, got: str
) -> None:
    shapes = shapes_of(case)
    model = planned(family, shapes, said).rules.model
    with pytest.raises(convert.PlanError) as refused:
        planned(model, resized(shapes, where, old, new), said)
    found = [one for one in refused.value.findings if one.code == "size-conflict"]
    assert any(one.expected.startswith(expected) and one.got.startswith(got) for one in found), found
    assert all(one.rule and one.fix for one in found)


def test_a_head_of_the_indexer_has_the_numbers_that_rope_turns() -> None:
    case = "deepseek3.2"
    shapes, said = shapes_of(f"maxtext/{case}"), maxtext.settings(case)
    plan = planned(maxtext.rules(case), shapes, said)
    with pytest.raises(convert.PlanError) as refused:
        planned(plan.rules.model, with_size(plan, shapes, "Y", 3), said)
    (finding,) = refused.value.findings
    assert "at most Y = 3 (width of a head of the indexer)" in finding.expected


def test_a_wrong_leaf_of_a_rule_with_several_paths_is_named() -> None:
    """Scanned layers begin with some that stand alone, and a rule has no leaves at one of its paths: it was an internal error."""
    case = "deepseek4-scanned"
    shapes, leaf = shapes_of(f"maxtext/{case}"), "nnx_aux/model/decoder/layers_0/mlp/MoeBlock_0/tid2eid"
    with pytest.raises(convert.PlanError) as refused:
        planned(maxtext.rules(case), {**shapes, leaf: (41, shapes[leaf][1])}, maxtext.settings(case))
    (finding,) = refused.value.findings
    assert finding.path == leaf and "makes V = 41 (rows of the embedding table)" in finding.problem


GEMMA2 = {"vocab_size": 256, "sliding_window": 8, "query_pre_attn_scalar": 12}
GEMMA3 = {**GEMMA2, "rope_factor_global": 1.0, "context_length": 1024}


@pytest.mark.parametrize(("case", "said"), [("gemma2-2b/ckpt", GEMMA2), ("gemma3/ckpt", GEMMA3)])
def test_a_width_that_is_no_multiple_of_the_heads_is_refused_for_the_class_that_refuses_it(
    case: str, said: dict[str, object]
) -> None:
    shapes = resized(shapes_of(case), "attn/(q_einsum|attn_vec_einsum)", 4, 10)
    with pytest.raises(convert.PlanError) as refused:
        planned("gemma", shapes, said)
    (finding,) = refused.value.findings
    assert finding.code == "target-requirement" and "--to gemma_pytorch" in finding.fix
    assert (
        finding.expected == "D (model width) to be a multiple of N = 10 (attention heads)" and finding.got == "D = 48"
    )
    assert planned("gemma", shapes, said, to="gemma_pytorch").sizes["N"] == 10


TUNIX = {**GEMMA3, "sliding_window": 4, "query_pre_attn_scalar": 4}
del TUNIX["vocab_size"]
GROUPED = [
    ("gemma", "gemma2-2b/ckpt", GEMMA2),
    ("gemma", "gemma3/ckpt", GEMMA3),
    *(("gemma", f"gemma4/{case}", gemma_drawn.settings(case)) for case in ("gemma3n", "gemma4-31b", "gemma4-26b-a4b")),
    ("gemma", "t5gemma/t5gemma-2b-2b", t5gemma.settings("t5gemma-2b-2b")),
    ("tunix-gemma3", "tunix/gemma3", TUNIX),
    *(
        (maxtext.rules(case), f"maxtext/{case}", maxtext.settings(case))
        for case in ("gemma3", "gemma4", "gpt-oss", "llama3.1", "olmo3", "qwen3", "qwen3-next", "qwen3-omni", "qwen3-vl")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "case", "said"), GROUPED)
def test_query_heads_that_cannot_share_the_key_heads_are_refused(
    family: str, case: str, said: dict[str, object]
) -> None:
    """All leaves with this letter agree."""
    shapes = shapes_of(case)
    plan = planned(family, shapes, said)
    shown = {name for step in plan.steps for part in step.parts for name, _ in part.stored}
    letters = {x: axis.divides for x, axis in plan.rules.axes.items() if axis.divides and x in shown}
    for letter, whole in letters.items():
        wrong = plan.sizes[whole] + 1
        with pytest.raises(convert.PlanError) as refused:
            planned(plan.rules.model, with_size(plan, shapes, letter, wrong), said)
        (finding,) = (one for one in refused.value.findings if "multiple" in one.expected)
        assert finding.code == "size-conflict" and f"{whole} to be a multiple of {wrong}, by" in finding.expected
        assert finding.got.startswith(f"{plan.sizes[whole]}, by") and finding.path and finding.fix
    assert letters


TURNED = [
    *((family, case, said, "H") for family, case, said in GROUPED),
    ("gemma", "gemma1-mha/ckpt", {"vocab_size": 256, "context_length": 1024}, "H"),
    ("gemma", "gemma4/gemma4-e2b", gemma_drawn.settings("gemma4-e2b"), "H"),
    ("gemma", "gemma4-towers/gemma4-e2b", gemma_towers.settings("gemma4-e2b"), "B"),
    ("gemma", "t5gemma/t5gemma-s-s", t5gemma.settings("t5gemma-s-s"), "A"),
    ("openpi", "openpi/pi0", {"action_horizon": 3}, "H"),
    ("recurrentgemma", "recurrentgemma/ckpt", {"attention_window": 5, "logits_soft_cap": 3.0}, "H"),
    *(
        (maxtext.rules(case), f"maxtext/{case}", maxtext.settings(case), letter)
        for case, letter in (("deepseek4", "H"), ("gemma4-e", "H"), ("gemma4", "J"), ("mistral", "H"), ("qwen3-vl", "B"), ("qwen3-omni", "B"), ("qwen3.5-vision", "b"))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "case", "said", "letter"), TURNED)
def test_heads_of_which_rope_turns_no_pairs_are_refused(
    family: str, case: str, said: dict[str, object], letter: str
) -> None:
    """All leaves with this letter agree. Of the heads of a vision tower, pairs turn in two directions; of some heads, RoPE turns a part."""
    shapes = shapes_of(case)
    plan = planned(family, shapes, said)
    sizes = {n for step in plan.steps for part in step.parts for name, n in part.stored if name == letter}
    part = 0.5 if letter in "Bb" else plan.facts.get("rotated", 1)  # of a head, which is turned at a time
    other = next(n for n in range(max(sizes), 99) if int(n * part) % 2)
    with pytest.raises(convert.PlanError) as refused:
        planned(plan.rules.model, with_size(plan, shapes, letter, other), said)
    found = [one for one in refused.value.findings if re.search("RoPE turns", one.problem)]
    assert found and all(one.code == "size-conflict" and f"{letter}" in one.got and one.fix for one in found)


@pytest.mark.parametrize(
    ("family", "case", "said", "where", "letter"),
    [
        ("gemma", "gemma1-mha/ckpt", {"vocab_size": 256, "context_length": 1024}, "layer_", "N"),
        ("gemma", "t5gemma/t5gemma-s-s", t5gemma.settings("t5gemma-s-s"), "encoder", "N"),
        ("gemma", "t5gemma/t5gemma-s-s", t5gemma.settings("t5gemma-s-s"), "decoder", "M"),
    ],
)
@pytest.mark.parametrize("factor", [0.5, 2])
def test_one_leaf_of_queries_keys_and_values_has_the_heads_of_the_output(
    family: str, case: str, said: dict[str, object], where: str, letter: str, factor: float
) -> None:
    """Where the layout has one leaf, there are as many key heads as query heads."""
    shapes = shapes_of(case)
    plan = planned(family, shapes, said)
    wrong = int(plan.sizes[letter] * factor)
    others = with_size(plan, shapes, letter, wrong)
    mixed = {leaf: shape if "qkv_einsum" in leaf else others[leaf] for leaf, shape in shapes.items()}
    with pytest.raises(convert.PlanError) as refused:
        planned(plan.rules.model, mixed, said)
    found = [one for one in refused.value.findings if one.code == "size-conflict"]
    assert found and all(where in one.path for one in found)
    assert all("qkv_einsum" in str(one) and re.search("attn_vec_einsum|/q_einsum", str(one)) for one in found)


SQUARE = [
    ("pix2struct", "t5x/pix2struct", {}, "E", "N*H to be 12", "24 with N = 3; H = 8"),
    ("timesfm", "timesfm-2.5/ckpt", {}, "G", "D (model width) to be a multiple of G = 64", "D = 32"),
    (
        "timesfm",
        "timesfm-2.5/ckpt",
        {},
        "D",
        "G (width of the residual blocks' hidden layers) to be a multiple of D = 64",
        "G = 32",
    ),
    *(
        ("gemma", "gemma4-towers/gemma4-e2b", gemma_towers.settings("gemma4-e2b"), letter, "3", "6, by")
        for letter in "hw"
    ),
    ("whisper", "whisper/ckpt", {"encoder_attention_heads": 2, "decoder_attention_heads": 3}, "K", "3", "6, by"),
    ("dinov2", "dinov2/ckpt", {"num_attention_heads": 3, "mlp_ratio": 2}, "E", "24, as D = 24", "48, by"),
]


@pytest.mark.parametrize(("family", "case", "said", "letter", "expected", "got"), SQUARE)
def test_sizes_that_the_class_has_once_are_equal(
    family: str, case: str, said: dict[str, object], letter: str, expected: str, got: str
) -> None:
    """All leaves with this letter agree, and the class of transformers makes such a layer of another size."""
    shapes = shapes_of(case)
    plan = planned(family, shapes, said, "transformers")
    with pytest.raises(convert.PlanError) as refused:
        planned(plan.rules.model, with_size(plan, shapes, letter, 2 * plan.sizes[letter]), said, "transformers")
    (finding,) = refused.value.findings
    assert finding.code in ("size-conflict", "target-requirement")
    assert finding.expected.startswith(expected) and finding.got.startswith(got)


def one_wider(config: dict[str, Any]) -> dict[str, Any]:
    """Add one to each width of the configuration of a language model."""
    return {
        key: one_wider(value)
        if isinstance(value, dict) and key != "vision_config"
        else value + 1
        if key == "hidden_size"
        else value
        for key, value in config.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "case", "said"),
    [
        ("gemma", "gemma1-mha/ckpt", {"vocab_size": 256, "context_length": 1024}),
        ("gemma", "gemma2-2b/ckpt", GEMMA2),
        ("gemma", "gemma3/ckpt", GEMMA3),
        ("gemma", "paligemma2/ckpt", {"vocab_size": 101, "sliding_window": 4, "query_pre_attn_scalar": 8}),
        *(("gemma", f"gemma4/{case}", gemma_drawn.settings(case)) for case in ("gemma3n", "gemma4-31b")),
        ("gemma", "t5gemma/t5gemma-s-s", t5gemma.settings("t5gemma-s-s")),
        ("tunix-gemma3", "tunix/gemma3", {name: x for name, x in GEMMA3.items() if name != "vocab_size"}),
        *(
            (maxtext.rules(case), f"maxtext/{case}", maxtext.settings(case))
            for case in ("deepseek2", "deepseek3", "gemma2", "gemma3", "gemma3-vision", "llama3.1", "mistral", "qwen2.5", "qwen3")
        ),
    ],
)  # fmt: skip
def test_no_other_class_refuses_such_a_width(family: str, case: str, said: dict[str, object]) -> None:
    """The rules name the classes of the installed transformers that do, and none beside them."""
    import transformers

    plan = planned(family, shapes_of(case), said)
    config = plan.config
    assert config is not None and transformers.AutoConfig.for_model(**config)
    try:
        transformers.AutoConfig.for_model(**one_wider(config))
    except Exception as refused:  # noqa: BLE001  # of huggingface_hub, which is no part of transformers
        assert "not a multiple of the number of attention heads" in str(refused)
        assert plan.rules.targets["transformers"].multiples
    else:
        assert not plan.rules.targets["transformers"].multiples
