"""Drafts of the examples, the goldens and random trees: whole, and right once their questions are answered."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example as tried
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import (
    ConvertError,
    PlanError,
    Source,
    draft_rules,
    load_rules,
    open_source,
    parse_rules,
    plan_conversion,
    survey_rules,
)
from convert.planning.matching.match import cover
from convert.planning.planner import make_plan
from support.command_line import Run
from support.drafts import answered, tree
from support.memory_source import MemorySource, run
from support.paths import EXAMPLES, GOLDEN


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


NORM = {"multiplies_by": 0, "epsilon": 1, "layer_norm": "norm"}
SQUARE = {"linear": "layers.{i}", "+": ["activation: silu"]}
OWN = {
    "block_{i}/merge/kernel": {"linear": (0, "blocks.{i}.merge")},
    "block_{i}/split/kernel": {"linear": "blocks.{i}.split", "+": ["activation: gelu_tanh"]},
    "block_{i}/norm/scale": {"multiplies_by": "scale", "epsilon": 0, "layer_norm": "blocks.{i}.norm"},
    "embed/embedding": {"embedding": 0},
    "head/kernel": {"linear": 0},
}
FLAX = {
    "dense_{i}/kernel": {"einsum": 0, **SQUARE},
    "norm/scale": NORM,
    "head/kernel": {"linear": 0},
}
EQUINOX = {
    "layers/{i}/weight": {"einsum": 1, **SQUARE},
    "norm/weight": NORM,
    "head/weight": {"linear": 0},
}
KERAS = {
    "layers/dense_{0,1}/vars/0": {"einsum": 0, "linear": "layers.{0,1}"},
    "layers/layer_normalization/vars/0": NORM,
    "layers/dense_2/vars/0": {"linear": "head"},
}
CONV = {
    "*": {"padding": "SAME", "conv": 0, "multiplies_by": 0, "epsilon": 1},
    "params/dense/kernel": {"flattened": 0, "linear": 1},
    "params/depthwise/kernel": {"feature_group_count": 0},
    "params/group/scale": {"layer_norm": 1, "+": ["num_groups: 3"]},
    "params/head/kernel": {"linear": 0},
    "params/mix/kernel": {"+": ["weight_standardization: (w - mean) / (std + 1e-5)"]},
    "params/norm/scale": {"batch_norm": 0},
    "params/stem/kernel": {"+": ["strides: 2", "input_size: [9, 8]"]},
    "params/up/kernel": {"conv": 1, "+": ["strides: 2"]},
}


def example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, convert: Run) -> tuple[Source, Path]:
    """The checkpoint that an example's own script writes, and the example's rules."""
    if name == "own-model":
        module(EXAMPLES / name / "model_jax.py").main(str(folder / "ckpt"), str(folder / "io.npz"))
        return open_source(folder / "ckpt"), EXAMPLES / name / "rules.yaml"
    if name == "conv-net":
        module(EXAMPLES / name / "model_jax.py").main(str(folder / "ckpt.npz"))
        return open_source(folder / "ckpt.npz"), EXAMPLES / name / "rules.yaml"
    formats = EXAMPLES / "formats"
    if name == "flax":
        module(formats / "flax_model.py").main("msgpack", str(folder / "ckpt.msgpack"), str(folder / "io.npz"))
        return open_source(folder / "ckpt.msgpack"), formats / "flax.yaml"
    if name == "keras":
        module(formats / "keras_model.py").main(str(folder / "ckpt.weights.h5"), str(folder / "io.npz"))
        return open_source(folder / "ckpt.weights.h5"), formats / "keras.yaml"
    monkeypatch.syspath_prepend(str(formats))
    module(formats / "equinox_model.py").main(str(folder / "ckpt.eqx"), str(folder / "io.npz"))
    (folder / "skeleton.json").write_text(convert("skeleton", "equinox_model:make")[0])
    return open_source(folder / "ckpt.eqx", skeleton=folder / "skeleton.json"), formats / "equinox.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "answers"),
    [("own-model", OWN), ("flax", FLAX), ("equinox", EQUINOX), ("keras", KERAS), ("conv-net", CONV)],
)
def test_a_draft_of_an_example_with_its_questions_answered_is_the_examples_rules(
    name: str, answers: Mapping[str, Mapping[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, convert: Run
) -> None:
    source, rules = example(name, tmp_path, monkeypatch, convert)
    text = draft_rules(source)
    draft = parse_rules(text, "draft.yaml")
    coverage = cover(draft, source)
    assert not coverage.findings and coverage.claimed == len(source.leaves) and draft.questions
    assert not survey_rules(draft, source).uncovered
    with pytest.raises(PlanError) as open_still:
        make_plan(draft, source)
    assert draft.leaf_names == source.names_in_order
    assert [*open_still.value.findings] == [question.finding for question in draft.questions]
    whole = answered(text, answers, "  R: {is: rows, equals: 8}\n  S: {is: columns, equals: 4}\n")
    if name != "conv-net":
        whole = whole.replace("  R: {is: rows, equals: 8}\n  S: {is: columns, equals: 4}\n", "")
    ours = run(plan_conversion(parse_rules(whole), source))
    theirs = run(plan_conversion(load_rules(rules), source))
    assert ours.keys() == theirs.keys()
    for tensor, value in theirs.items():
        np.testing.assert_array_equal(ours[tensor], value, err_msg=tensor)


def test_a_wrong_answer_gives_another_conversion(tmp_path: Path) -> None:
    """The question about a square kernel is one: its two answers differ."""
    source = tree(params__dense__kernel=(6, 6))
    text = draft_rules(source)
    one, other = (
        run(plan_conversion(parse_rules(answered(text, {"dense/kernel": {"einsum": k, "linear": 0}})), source))
        for k in (0, 1)
    )  # fmt: skip
    np.testing.assert_array_equal(one["dense.weight"], other["dense.weight"].T)


@pytest.mark.slow
def test_every_golden_tree_is_covered_and_nothing_contradicts() -> None:
    seen = 0
    for folder in sorted(path for path in GOLDEN.iterdir() if path.is_dir()):
        try:
            source = open_source(folder / "ckpt" if (folder / "ckpt").exists() else folder)
        except ConvertError:
            continue  # several checkpoints
        rules = parse_rules(draft_rules(source), "draft.yaml")
        assert cover(rules, source).claimed == len(source.leaves), folder
        with pytest.raises(PlanError) as error:
            make_plan(rules, source)
        assert [*error.value.findings] == [question.finding for question in rules.questions], folder
        seen += 1
    assert seen > 15


KEYS = ["params", "state", "block_0", "block_1", "block_2", "b0_x", "b1_x", "attn", "query", "key", "value", "out", "lora", "lstm", "cell", "vars", "conv", "norm", "batch_norm", "~", "mean_ema", "query_proj", "{i}", "a*"]  # fmt: skip
LAST = ["kernel", "w", "weight", "bias", "b", "scale", "offset", "mean", "average", "hidden", "counter", "lora_a", "lora_b", "embedding", "gating_einsum", "linear", "0", "1", "2", "u", "step"]  # fmt: skip
SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 12]), max_size=5).map(tuple)
TREES = st.dictionaries(
    st.tuples(st.lists(st.sampled_from(KEYS), max_size=3), st.sampled_from(LAST)).map(
        lambda x: "/".join([*x[0], x[1]])
    ),
    SHAPES,
    min_size=1,
    max_size=14,
).filter(lambda t: not any(other.startswith(f"{name}/") for name in t for other in t))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@tried({"vars/0": ()})
@tried({"vars/0": (2, 2, 2, 2, 2, 2, 2)})
@given(TREES)
def test_a_draft_of_any_tree_covers_it_and_contradicts_nothing(shapes: dict[str, tuple[int, ...]]) -> None:
    source = MemorySource({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    rules = parse_rules(draft_rules(source), "draft.yaml")
    coverage = cover(rules, source)
    assert coverage.claimed == len(source.leaves) and not coverage.findings
    try:
        make_plan(rules, source)
    except PlanError as error:
        open_ones = [question.finding for question in rules.questions]
        assert [*error.findings] == open_ones or error.code == "rules-of-another-model"


def test_a_draft_names_the_leaves_of_a_file_without_names(tmp_path: Path) -> None:
    names, shapes = ("b/weight", "a/weight", "a/bias"), ((2, 3), (4, 2), (4,))
    records = [
        {"path": name.split("/"), "shape": shape, "dtype": "float32"} for name, shape in zip(names, shapes, strict=True)
    ]
    skeleton, file = tmp_path / "skeleton.json", tmp_path / "model.eqx"
    skeleton.write_text(json.dumps({"format": "convert skeleton 1", "records": records}))
    with file.open("wb") as stream:
        for shape in shapes:
            np.save(stream, np.zeros(shape, np.float32))
    draft = parse_rules(draft_rules(open_source(file, skeleton=skeleton)), "draft.yaml")
    assert draft.leaf_names == names
    assert list(open_source(file, leaf_names=[draft.leaf_names]).leaves) == list(names)
