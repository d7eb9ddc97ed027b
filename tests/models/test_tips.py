"""TIPS's text encoder: what upstream's flax code computed, and what transformers computes from the converted directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import convert
from support.goldens import SpecsOnly
from support.rule_mistakes import assert_mistake_is_named
from support.tips import converted, errors, write
from support.value_mistakes import assert_mistakes_are_named

pytestmark = pytest.mark.slow


def test_transformers_computes_what_upstream_did(tmp_path: Path) -> None:
    """Two texts are padded. The class keeps its table of sinusoids in float32 in any precision."""
    _, out = converted(tmp_path)
    single, double = errors(out)
    assert single < 2e-6 and double < 1e-7


def test_forth_and_back_gives_the_same_leaves(tmp_path: Path) -> None:
    source, out = converted(tmp_path)
    convert.convert_back("tips", out, tmp_path / "back.npz", source, form="npz")
    first, second = np.load(source), np.load(tmp_path / "back.npz")
    assert sorted(first.files) == sorted(second.files)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first.files)


PUBLISHED = {  # vit.py, get_vit_config: layers, width, heads, feed-forward width
    "s14": (12, 384, 6, 1536),
    "b14": (12, 768, 12, 3072),
    "l14": (12, 1024, 16, 4096),
    "so400m14": (27, 1152, 16, 4304),
    "g14": (12, 1536, 24, 6144),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_need_no_setting(size: str) -> None:
    from transformers import AutoConfig, AutoModel

    layers, width, heads, hidden = PUBLISHED[size]
    head = width // heads
    shapes: dict[str, tuple[int, ...]] = {
        f"LayerNorm_{k}/{leaf}": (width,) for k in (0, 1) for leaf in ("scale", "bias")
    }
    shapes |= {"MlpBlock_0/Dense_0/kernel": (width, hidden), "MlpBlock_0/Dense_0/bias": (hidden,)}
    shapes |= {"MlpBlock_0/Dense_1/kernel": (hidden, width), "MlpBlock_0/Dense_1/bias": (width,)}
    attention = "MultiHeadDotProductAttention_0"
    for name in ("query", "key", "value"):
        shapes |= {f"{attention}/{name}/kernel": (width, heads, head), f"{attention}/{name}/bias": (heads, head)}
    shapes |= {f"{attention}/out/kernel": (heads, head, width), f"{attention}/out/bias": (width,)}
    tree = {f"transformer/encoderblock_{i}/{name}": shape for i in range(layers) for name, shape in shapes.items()}
    tree |= {"token_emb/emb_var": (32000, width), "temperature_contrastive": ()}
    tree |= {f"text_encoder_norm/{leaf}": (width,) for leaf in ("scale", "bias")}
    plan = convert.plan_conversion("tips", SpecsOnly({name: (shape, "float32") for name, shape in tree.items()}))
    assert plan.version == size and plan.config is not None
    with torch.device("meta"):
        made = AutoModel.from_config(AutoConfig.for_model(**plan.config)).state_dict()
    assert {name: tuple(x.shape) for name, x in made.items()} == {step.name: step.spec.shape for step in plan.steps}


RESCALED = "weight rescaled although the source does not prescale it"
QKV = "self_attn.{q,k,v}_proj"
RULE_MISTAKES = (  # a text of the rules, what stands there instead, what the check calls it
    (QKV, QKV.replace("q,k", "k,q"), "of another tensor"),
    ("layers.{i}.layer_norm{1,2}", "layers.{i}.layer_norm{2,1}", "of another tensor"),
    ("multiplies_by: scale\n  epsilon: $epsilon\n  axes: D\n  layer_norm: final", "multiplies_by: 1+scale\n  epsilon: $epsilon\n  axes: D\n  layer_norm: final", "1+scale on a plain norm"),
    ("- from: token_emb/emb_var", "- prescaled_by: sqrt(D)\n  from: token_emb/emb_var", RESCALED),
    (QKV, QKV.replace("k,v", "v,k"), "of another tensor"),
    ("- einsum: ...D,DF->...F\n", "- einsum: ...D,DF->...F\n  prescaled_by: 2\n", "multiplied by a number"),
)  # fmt: skip


@pytest.mark.parametrize("mistake", RULE_MISTAKES, ids=range(len(RULE_MISTAKES)))
def test_a_mistake_in_the_rules_is_named(mistake: tuple[str, str, str], tmp_path: Path) -> None:
    old, new, name = mistake
    assert_mistake_is_named("tips", write(tmp_path), old, new, name, tmp_path / "out")


def test_mistakes_in_the_file_are_named(tmp_path: Path) -> None:
    source, out = converted(tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9
