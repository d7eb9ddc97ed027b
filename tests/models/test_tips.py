"""TIPS's text and image encoders: what upstream's flax code computed, and what transformers computes from the converted directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import convert
from convert.core.errors import PlanError
from convert.writing.written import open_written
from support.goldens import SpecsOnly
from support.rule_mistakes import assert_mistake_is_named
from support.tips import SET, converted, errors, write
from support.value_mistakes import assert_mistakes_are_named, replace_tensors
from support.weights_level import check_weights

pytestmark = pytest.mark.slow
MODELS = {"text": "tips-text", "image": "tips-image", "image-swiglu": "tips-image-swiglu"}


@pytest.mark.parametrize("case", SET)
def test_transformers_computes_what_upstream_did(case: str, tmp_path: Path) -> None:
    """Two texts are padded; the class keeps its table of sinusoids, and resizes that of an image's positions, in float32 in any precision."""
    _, out = converted(case, tmp_path)
    single, double = errors(case, out)
    assert single < 2e-6 and double < 1e-7


@pytest.mark.parametrize("case", SET)
def test_forth_and_back_gives_the_same_leaves(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    name = MODELS[case]
    convert.convert_back(name, out, tmp_path / "back.npz", source, form="npz")
    convert.convert_back(name, out, tmp_path / "alone.npz", form="npz", settings=SET[case])
    first = dict(np.load(source))
    for second in (dict(np.load(tmp_path / "back.npz")), dict(np.load(tmp_path / "alone.npz"))):
        assert {*first} - {*second} <= {"temperature_contrastive"}
        assert all(first[name].tobytes() == second[name].tobytes() for name in second)


def test_tensors_that_no_leaf_holds_are_named_and_found(tmp_path: Path) -> None:
    source, out = converted("image", tmp_path)
    right = load_file(out / "model.safetensors")
    table = right["embeddings.position_embeddings"]
    assert not table[:, 0].any() and table[:, 1:].all()
    card = (out / "README.md").read_text()
    for words in ("embeddings.mask_token is 0 in all elements: the token for masked patches", "lambda1 is 1 in all elements: a scale behind", "zeros that no leaf holds: 1 in front of T"):  # fmt: skip
        assert words in card
    plan = convert.plan_conversion("tips", source, settings=SET["image"])
    for name, wrong, said in (
        ("encoder.layer.1.layer_scale2.lambda1", np.full(18, 0.1, np.float32), "another number than the rule gives"),
        ("embeddings.mask_token", np.ones((1, 18), np.float32), "another number than the rule gives"),
        ("embeddings.position_embeddings", np.roll(table, -1, 1), "rows rolled"),
    ):
        replace_tensors(out, {name: wrong})
        (found,) = check_weights(plan, open_written(out)).findings
        assert found.path == name and found.data["diagnosis"] == said, found
        with pytest.raises(PlanError, match="no leaf for this tensor|no float32 in the leaf"):
            convert.convert_back("tips-image", out, tmp_path / "back.npz", source, form="npz")
        replace_tensors(out, {name: right[name]})


PUBLISHED = {  # vit.py, get_vit_config: layers, width, heads, feed-forward width
    "s14": (12, 384, 6, 1536),
    "b14": (12, 768, 12, 3072),
    "l14": (12, 1024, 16, 4096),
    "so400m14": (27, 1152, 16, 4304),
    "g14": (12, 1536, 24, 6144),
}


def block(width: int, heads: int, hidden: int, block: str = "MlpBlock_0") -> dict[str, tuple[int, ...]]:
    """Return the leaves of one layer."""
    head, attention = width // heads, "MultiHeadDotProductAttention_0"
    shapes: dict[str, tuple[int, ...]] = {f"LayerNorm_{k}/{x}": (width,) for k in (0, 1) for x in ("scale", "bias")}
    sides = [(width, hidden)] * (1 if block == "MlpBlock_0" else 2) + [(hidden, width)]
    for k, (rows, columns) in enumerate(sides):
        shapes |= {f"{block}/Dense_{k}/kernel": (rows, columns), f"{block}/Dense_{k}/bias": (columns,)}
    for name in ("query", "key", "value"):
        shapes |= {f"{attention}/{name}/kernel": (width, heads, head), f"{attention}/{name}/bias": (heads, head)}
    return shapes | {f"{attention}/out/kernel": (heads, head, width), f"{attention}/out/bias": (width,)}


def assert_loadable(tree: dict[str, tuple[int, ...]], size: str) -> None:
    from transformers import AutoConfig, AutoModel

    plan = convert.plan_conversion("tips", SpecsOnly({name: (shape, "float32") for name, shape in tree.items()}))
    assert plan.version == size and plan.config is not None
    with torch.device("meta"):
        made = AutoModel.from_config(AutoConfig.for_model(**plan.config)).state_dict()
    assert {name: tuple(x.shape) for name, x in made.items()} == {step.name: step.spec.shape for step in plan.steps}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_need_no_setting(size: str) -> None:
    layers, width, heads, hidden = PUBLISHED[size]
    each = block(width, heads, hidden).items()
    tree = {f"transformer/encoderblock_{i}/{name}": shape for i in range(layers) for name, shape in each}
    tree |= {"token_emb/emb_var": (32000, width), "temperature_contrastive": ()}
    tree |= {f"text_encoder_norm/{leaf}": (width,) for leaf in ("scale", "bias")}
    assert_loadable(tree, size)

    layers, heads = {"l14": 24, "g14": 40}.get(size, layers), 16 if size == "so400m14" else heads
    one = block(width, heads, 4096, "FFNSwiGluFused_0") if size == "g14" else block(width, heads, hidden)
    tree = {f"encoder/transformer/encoderblock_{i}/{name}": shape for i in range(layers) for name, shape in one.items()}
    tree |= {f"encoder/encoder_norm/{leaf}": (width,) for leaf in ("scale", "bias")}
    patches = "encoder/ToTokenSequence_0"
    tree |= {f"{patches}/embedding/kernel": (14, 14, 3, width), f"{patches}/embedding/bias": (width,)}
    assert_loadable(tree | {f"{patches}/cls": (1, 2, width), f"{patches}/posembed_input": (1, 32, 32, width)}, size)


RESCALED, OTHER = "weight rescaled although the source does not prescale it", "of another tensor"
QKV = "self_attn.{q,k,v}_proj"
NORM = "multiplies_by: scale\n  epsilon: $epsilon\n  axes: D\n  layer_norm: "
RULE_MISTAKES = (  # the case; a text of its rules, what stands there instead, what the check calls it
    ("text", QKV, QKV.replace("q,k", "k,q"), OTHER),
    ("text", "layers.{i}.layer_norm{1,2}", "layers.{i}.layer_norm{2,1}", OTHER),
    ("text", f"{NORM}final", f"{NORM}final".replace("scale", "1+scale"), "1+scale on a plain norm"),
    ("text", "- from: token_emb/emb_var", "- prescaled_by: sqrt(D)\n  from: token_emb/emb_var", RESCALED),
    ("text", QKV, QKV.replace("k,v", "v,k"), OTHER),
    ("text", "- einsum: ...D,DF->...F\n", "- einsum: ...D,DF->...F\n  prescaled_by: 2\n", "multiplied by a number"),
    ("image", "{C:cls_token,register_tokens}", "{C:register_tokens,cls_token}", OTHER),
    ("image", ".(T X)D", ".(X T)D", "axes of a head swapped"),
    ("image", "- value: 1\n", "- value: 0\n", "another number than the rule gives"),
    ("image", "{q,k,v}_proj", "{q,v,k}_proj", OTHER),
    ("image", f"{NORM}layernorm", f"{NORM}layernorm".replace("scale", "1+scale"), "1+scale on a plain norm"),
)  # fmt: skip


@pytest.mark.parametrize("mistake", RULE_MISTAKES, ids=range(len(RULE_MISTAKES)))
def test_a_mistake_in_the_rules_is_named(mistake: tuple[str, str, str, str], tmp_path: Path) -> None:
    case, old, new, name = mistake
    assert_mistake_is_named(MODELS[case], write(case, tmp_path), old, new, name, tmp_path / "out", settings=SET[case])


@pytest.mark.parametrize("case", SET)
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9
