"""The tree that rules give for tensors: shapes from the tensors, config.json or --set, and what leaves it open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import convert
from support.memory_source import HEAD, MemorySource, rule_file

CONFIG_HEAD = (
    "model: m\ntitle: M\ntargets: {torch: {loads: T, config: {num_heads: $N, head_dim: $H, width: $D, rate: $rate}}}\n"
    "facts: {rate: 0.5}\naxes: {N: {is: heads}, H: {is: width of a head}, D: {is: model width}}\n"
)
HEADS = "- einsum: ...D,DNH->...NH\n  from: layers_{i}/w\n  bias: layers_{i}/b\n  linear: layers.{i}.w"


def tensors(path: Path, **shapes: tuple[int, ...]) -> Path:
    """Write tensors of random values; `__` in a name is a dot."""
    rng = np.random.default_rng(0)
    arrays = {name.replace("__", "."): rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    file = path / "model.safetensors" if path.is_dir() else path
    save_file(arrays, file, metadata={"format": "pt"})
    return path


def heads(path: Path, layers: int = 2, width: int = 5) -> Path:
    shapes = {f"layers__{k}__w__{role}": (12, width)[: 2 - (role == "bias")] for k in range(layers) for role in ("weight", "bias")}  # fmt: skip
    return tensors(path, **shapes)


def problem(rules: convert.RuleFile, path: Path, **options: Any) -> convert.core.findings.Finding:
    with pytest.raises(convert.PlanError) as error:
        convert.plan_reverse(rules, path, **options)
    (finding,) = error.value.findings
    return finding


def specs(plan: Any) -> dict[str, tuple[int, ...]]:
    return {name: leaf.spec.shape for name, leaf in plan.forward.checkpoint.leaves.items()}


def test_a_product_of_sizes_is_taken_apart_by_config_json_or_a_setting(tmp_path: Path) -> None:
    rules = rule_file(HEADS, CONFIG_HEAD)
    heads(tmp_path)
    found = problem(rules, tmp_path)
    assert (found.code, found.rule) == ("size-unknown", "r.yaml:7")
    assert "--set N=..." in found.fix and "N*H = 12 (layers.0.w.weight)" in found.got
    want = {name: shape for k in range(2) for name, shape in {f"layers_{k}/w": (5, 3, 4), f"layers_{k}/b": (3, 4)}.items()}  # fmt: skip
    assert specs(convert.plan_reverse(rules, tmp_path, settings={"N": 3})) == want
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 3, "rate": 0.25}))
    plan = convert.plan_reverse(rules, tmp_path)
    assert specs(plan) == want and plan.forward.facts["rate"] == 0.25


def test_the_last_layers_of_a_file_may_not_be_missing(tmp_path: Path) -> None:
    rules = rule_file(f"{HEADS}\n- from: layers_{{i}}/s\n  axes: D\n  parameter: layers.{{i}}.s", CONFIG_HEAD)
    file = tensors(
        tmp_path / "t.safetensors",
        **{f"layers__{k}__w__{role}": (12, 5)[: 2 - (role == "bias")] for k in range(3) for role in ("weight", "bias")},
        **{f"layers__{k}__s": (5,) for k in range(2)},
    )
    found = problem(rules, file, settings={"N": 3})
    assert (found.code, found.path, found.expected) == ("tensor-missing", "layers.2.s", "float32[5] (for layers_2/s)")


def test_a_tensor_of_another_shape_is_one_error(tmp_path: Path) -> None:
    rules = rule_file(HEADS, CONFIG_HEAD)
    shapes = {f"layers__{k}__w__{role}": (12, 5)[: 2 - (role == "bias")] for k in range(3) for role in ("weight", "bias")}  # fmt: skip
    file = tensors(tmp_path / "t.safetensors", **{**shapes, "layers__1__w__weight": (12, 6)})
    found = problem(rules, file, settings={"N": 3})
    assert found.code in ("tensor-spec-differs", "size-conflict") and found.path == "layers.1.w.weight"
    assert ("float32[12,6]" in str(found) and "float32[12,5]" in str(found)) or "D=5" in str(found)


def test_other_tensors_are_named(tmp_path: Path) -> None:
    rules = rule_file("- from: t\n  axes: VD\n  embedding: t")
    found = problem(rules, tensors(tmp_path / "t.safetensors", t__weight=(4, 3), u__weight=(2, 2)))
    assert (found.code, found.path) == ("tensor-unexpected", "u.weight")
    found = problem(rules, tensors(tmp_path / "u.safetensors", u__weight=(2, 2)))
    assert found.code == "rules-of-another-model"


VARIANTS = """- einsum: {plain: "...D,DF->...F", turned: "...D,FD->...F"}
  choice: side
  from: w
  linear: w"""


def test_a_variant_that_no_tensor_shows(tmp_path: Path) -> None:
    file = tensors(tmp_path / "t.safetensors", w__weight=(7, 5))
    found = problem(rule_file(VARIANTS), file)
    assert found.code == "variant-undecided" and "--set side=plain or --set side=turned" in found.fix
    assert specs(convert.plan_reverse(rule_file(VARIANTS), file, settings={"side": "turned"})) == {"w": (7, 5)}
    said = rule_file(VARIANTS, f"{HEAD}choices: {{side: turned}}\n")
    assert specs(convert.plan_reverse(said, file)) == {"w": (7, 5)}
    version = f"{HEAD}axes: {{D: {{is: width}}}}\nchoices: {{side: turned}}\nversions: {{small: {{sizes: {{D: 5}}, choices: {{side: plain}}}}}}\n"
    assert specs(convert.plan_reverse(rule_file(VARIANTS, version), file)) == {"w": (5, 7)}


def test_published_sizes_take_a_product_apart(tmp_path: Path) -> None:
    head = CONFIG_HEAD + "versions: {other: {sizes: {N: 3, H: 4, D: 9}}, ours: {sizes: {N: 2, H: 6, D: 5}}}\n"
    plan = convert.plan_reverse(rule_file(HEADS, head), heads(tmp_path / "t.safetensors"))
    assert specs(plan)["layers_0/w"] == (5, 2, 6) and plan.forward.version == "ours"


STACKS = """path_variants:
  layers_{i}:
  - {path: "units/layer_{p}", stacked: {s: 1}, order: [s, p], period: 3}
  - [{path: "units/layer_{p}", stacked: {s: 1}, order: [s, p], period: 3}, {path: "rest/layer_{q}", order: [q]}]
layouts:
- {name: ONE_BY_ONE}
- {name: UNITS, variants: ["units/layer_{p}"]}
- {name: FLAT, flat: true, leaf: value}
"""


def test_layouts_stack_layers_and_join_keys(tmp_path: Path) -> None:
    rules = rule_file(HEADS, CONFIG_HEAD + STACKS)
    file = heads(tmp_path / "t.safetensors", layers=8)
    plan = convert.plan_reverse(rules, file, layout="UNITS", settings={"N": 3})
    assert plan.layout == "UNITS"
    assert specs(plan) == {
        **{f"rest/layer_{q}/{name}": shape for q in range(2) for name, shape in (("w", (5, 3, 4)), ("b", (3, 4)))},
        **{f"units/layer_{p}/{n}": shape for p in range(3) for n, shape in (("w", (5, 2, 3, 4)), ("b", (3, 2, 4)))},
    }
    whole = specs(convert.plan_reverse(rules, heads(tmp_path / "u.safetensors", layers=6), layout="UNITS", settings={"N": 3}))  # fmt: skip
    assert set(whole) == {f"units/layer_{p}/{name}" for p in range(3) for name in "wb"}
    flat = convert.plan_reverse(rules, file, layout="FLAT", settings={"N": 3})
    assert next(iter(flat.forward.checkpoint.leaves.values())).keys == ("layers_0", "b", "value")
    assert convert.plan_reverse(rules, file, settings={"N": 3}).layout == "ONE_BY_ONE"
    assert problem(rules, file, layout="TWO").code == "layout-unknown"


EXPERTS = """- einsum: ...D,DF->...F
  from: dense_{d}/w
  linear: layers.{d}.mlp
- from: dense_{d}/s
  axes: D
  parameter: layers.{d}.s
- einsum: E...D,EDM->E...M
  from: moe_{m}/w
  linear: layers.{m+1}.experts.{E}
- from: moe_{m}/s
  axes: D
  parameter: layers.{m+1}.s"""


def test_names_number_the_experts_and_the_rules_state_how_many_layers_are_dense(tmp_path: Path) -> None:
    head = f"{HEAD}axes: {{d: {{is: dense layers, equals: 1}}, E: {{is: experts}}}}\n"
    rules = rule_file(EXPERTS, head)
    shapes = {f"layers__{k}__s": (5,) for k in range(3)} | {"layers__0__mlp__weight": (7, 5)}
    experts = {f"layers__{k}__experts__{e}__weight": (4, 5) for k in (1, 2) for e in range(6)}
    file = tensors(tmp_path / "t.safetensors", **shapes, **experts)
    want = {"dense_0/w": (5, 7), "dense_0/s": (5,)} | {f"moe_{m}/{n}": s for m in (0, 1) for n, s in (("w", (6, 5, 4)), ("s", (5,)))}  # fmt: skip
    assert specs(convert.plan_reverse(rules, file)) == want
    experts.pop("layers__2__experts__5__weight")
    found = problem(rules, tensors(tmp_path / "u.safetensors", **shapes, **experts))
    assert (found.code, found.path) == ("tensor-missing", "layers.2.experts.5.weight")


def test_what_only_a_tree_shows_is_refused(tmp_path: Path) -> None:
    rules = rule_file(
        "- from: u{u}/x{p}/w\n  index_from: {i: [u, p]}\n  einsum: ...D,DF->...F\n  linear: layers.{i}", HEAD
    )
    file = tensors(tmp_path / "t.safetensors", layers__0__weight=(3, 2), layers__1__weight=(3, 2))
    found = problem(rules, file)
    assert found.code == "tree-not-derived" and "{p}" in found.problem and "--like" in found.fix


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("layouts: [{name: A, root: x}]", "the root of the layout A refers to 'x'"),
        ("layouts: [{name: A, variants: [x]}]", "the layout A refers to 'x'"),
        ("layouts: [{name: A}, {name: A}]", "two layouts are called 'A'"),
        ("choices: {other: plain}", "`choices` refers to 'other'"),
        ("choices: {side: flat}", "`choices`, side refers to 'flat'"),
        ("axes: {D: {is: width}}\nversions: {v: {sizes: {D: 1}, choices: {side: flat}}}", "version v, side refers to 'flat'"),
    ],
)  # fmt: skip
def test_a_header_that_names_nothing_is_refused(header: str, words: str) -> None:
    with pytest.raises(convert.RuleError) as error:
        rule_file(VARIANTS, f"{HEAD}{header}\n")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_heads": 3, "width": 6}, ("width", "5: D (model width)", "6")),
        ({"num_heads": 5}, ("layers.0.w.weight", "sizes that give the shapes of the tensors", "N = 5 (heads)")),
        ({"num_heads": 3, "head_dim": 5}, ("layers.0.w.weight", "sizes that give", "N = 3 (heads), H = 5 (width of a head)")),
    ],
)  # fmt: skip
def test_a_config_json_of_another_model_is_one_error(config: dict[str, int], expected: Any, tmp_path: Path) -> None:
    heads(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = problem(rule_file(HEADS, CONFIG_HEAD), tmp_path)
    assert found.code == "config-conflict" and found.path == expected[0]
    assert found.expected.startswith(expected[1]) and found.got == expected[2]


@pytest.mark.parametrize("like", [False, True])
def test_a_config_json_of_another_kind_of_model_is_one_error(like: bool, tmp_path: Path) -> None:
    """Although all names and shapes fit: Llama's tensors are those of Gemma 1."""
    rules = rule_file(HEADS, CONFIG_HEAD.replace("config: {", "config: {model_type: ours, "))
    heads(tmp_path)
    given = MemorySource({f"layers_{k}/{x}": np.zeros((5, 3, 4)[x == "b" :], np.float32) for k in (0, 1) for x in "wb"})
    options: dict[str, Any] = {"like": given} if like else {}
    for stated in ("ours", None, "theirs"):
        (tmp_path / "config.json").write_text(json.dumps({"num_heads": 3, "model_type": stated}))
        if stated != "theirs":
            assert len(convert.plan_reverse(rules, tmp_path, **options).leaves) == 4
    found = problem(rules, tmp_path, **options)
    assert (found.code, found.path, found.got) == ("config-conflict", "model_type", "theirs")


def test_a_config_json_is_compared_where_a_checkpoint_gives_the_tree(tmp_path: Path) -> None:
    rules = rule_file(HEADS, CONFIG_HEAD)
    heads(tmp_path)
    arrays = {f"layers_{k}/{n}": np.zeros(shape, np.float32) for k in range(2) for n, shape in (("w", (5, 3, 4)), ("b", (3, 4)))}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 3, "head_dim": 4, "width": 5}))
    assert len(convert.plan_reverse(rules, tmp_path, MemorySource(arrays)).leaves) == 4
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 4, "head_dim": 3, "width": 5}))
    with pytest.raises(convert.PlanError) as error:
        convert.plan_reverse(rules, tmp_path, MemorySource(arrays))
    assert [(found.code, found.path, found.got) for found in error.value.findings] == [
        ("config-conflict", "num_heads", "4"),
        ("config-conflict", "head_dim", "3"),
    ]


def test_buffers_that_a_constructor_computes_are_left_out_with_a_reason(tmp_path: Path) -> None:
    """As older versions of transformers saved them; another tensor is still an error."""
    rules = rule_file("- from: t\n  axes: VD\n  embedding: t")
    arrays = {
        "t.weight": np.ones((4, 3), ml_dtypes.bfloat16),
        "e.position_ids": np.arange(7)[None],
        "h.0.attn.bias": np.tri(5, dtype=np.uint8)[None, None],
        "h.0.attn.masked_bias": np.array(-1e4, np.float32),
        "l.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    save_file(arrays, tmp_path / "t.safetensors")
    plan = convert.plan_reverse(rules, tmp_path / "t.safetensors", dtype="float32")
    assert plan.left_out.keys() == arrays.keys() - {"t.weight"} and all(plan.left_out.values())
    assert plan.to_dict()["left_out"] == plan.left_out and [made.leaf for made in plan.leaves] == ["t"]
    assert [made.spec.dtype for made in plan.leaves] == ["float32"]
    save_file({**arrays, "h.0.attn.bias": np.ones(5, np.float32)}, tmp_path / "t.safetensors")
    assert problem(rules, tmp_path / "t.safetensors").path == "h.0.attn.bias"
