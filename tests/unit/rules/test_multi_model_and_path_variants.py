"""The parts of the rule language that Gemma and MaxText need: several models in a file, path variants, parts, `absent_if`, padding."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import convert
from convert.core.path_pattern import parse_pattern
from convert.planning import rule_match
from convert.planning.planner import make_plan, plan_match
from convert.planning.select_rules import RuleMatch, pick, score
from convert.rules.file import RuleFile
from convert.rules.parse import parse_models
from convert.writing.model_card import add_figures, render_card
from support.memory_source import MemorySource, rule_file, run

MODELS = """
family: f
targets:
  torch: {loads: T, config: {width: $D, kind: shared}}
axes: {D: {is: width}}
facts: {epsilon: 1e-6, factor: 1}
models:
  one: {title: One}
  two:
    title: Two
    facts: {factor: 2}
    targets: {torch: {config: {kind: own}}}
rules:
- from: scale
  multiplies_by: scale
  epsilon: $epsilon
  axes: D
  rms_norm: norm
- only_models: two
  from: extra
  axes: D
  parameter: extra
""".strip()


def picked(candidates: tuple[RuleFile, ...], source: MemorySource) -> RuleMatch:
    choice = pick(score(candidates, source))
    assert isinstance(choice, RuleMatch), choice
    return choice


def test_models_share_the_file_and_have_their_own() -> None:
    one, two = parse_models(MODELS, "f.yaml")
    assert (one.model, two.model) == ("one", "two") and one.family == two.family == "f"
    assert one.sha256 == two.sha256 and [len(r.rules) for r in (one, two)] == [1, 2]
    assert one.facts == {"epsilon": 1e-6, "factor": 1} and two.facts["factor"] == 2
    assert two.targets["torch"].config == {"width": "$D", "kind": "own"} and two.targets["torch"].loads == "T"
    assert one.targets["torch"].config["kind"] == "shared"
    assert str(two.rules[1].at) == "f.yaml:18:3"
    tree = {"scale": np.ones(3, np.float32)}
    assert picked((one, two), MemorySource(tree)).rules.model == "one"
    assert picked((one, two), MemorySource({**tree, "extra": tree["scale"]})).rules.model == "two"


@pytest.mark.parametrize(
    ("old", "new", "code", "at", "said"),
    [
        ("only_models: two", "only_models: three", "rule-unknown-name", "18:16", "(one, two), got 'three'"),
        ("only_models: two", "only_models: tow", "rule-unknown-name", "18:16", "did you mean 'two'?"),
        ("one: {title: One}", "one: 3", "rule-wrong-value", "7:8", "the header of one"),
        ("title: Two", "rules: []", "rule-unknown-key", "9:5", "at the top of the file"),
        ("family: f", "model: f", "rule-name-clash", "1:1", "`model` or `models`"),
        ("one: {title: One}", "one: {}", "rule-missing-key", "1:1", "'title'"),
    ],
)
def test_errors_of_models(old: str, new: str, code: str, at: str, said: str) -> None:
    with pytest.raises(convert.RuleError) as error:
        parse_models(MODELS.replace(old, new), "f.yaml")
    finding = error.value.findings[0]
    assert (finding.code, finding.rule) == (code, f"f.yaml:{at}") and said in str(finding)


@pytest.mark.parametrize(("key", "at"), [("facts", "11:12"), ("allowed", "11:14"), ("layer_types", "11:18")])
@pytest.mark.parametrize("value", ["3.5", "[1]"])
def test_a_header_key_of_a_model_is_a_mapping(key: str, at: str, value: str) -> None:
    """Where the file has `allowed`, too, whose facts are those of each model."""
    text = MODELS.replace("    facts: {factor: 2}", f"    {key}: {value}")
    text = text.replace("models:\n", "allowed: {factor: {at_least: 0}}\nmodels:\n", 1)
    with pytest.raises(convert.RuleError) as error:
        parse_models(text, "f.yaml")
    assert (error.value.code, error.value.findings[0].rule) == ("rule-wrong-value", f"f.yaml:{at}"), str(error.value)


def test_a_model_may_declare_its_own_facts() -> None:
    assert parse_models(MODELS.replace("factor: 2", "fctor: $x"), "f.yaml")[1].facts["fctor"] == "$x"


@pytest.mark.parametrize(
    ("shared", "code", "at"),
    [
        ("targets: {torch: {loads: 3.5}}", "rule-wrong-value", "2:26"),
        ("targets: {torch: {load: T}}", "rule-unknown-key", "2:19"),
        ("title: 3.5", "rule-wrong-value", "2:8"),
        ("targets: 3.5", "rule-wrong-value", "2:10"),
        ("targets: {torch: T}", "rule-wrong-value", "2:18"),
    ],
)
def test_a_shared_header_is_read_even_if_every_model_replaces_it(shared: str, code: str, at: str) -> None:
    own = "title: One, targets: {torch: {loads: T}}"
    text = f"family: f\n{shared}\nmodels: {{one: {{{own}}}, two: {{{own}}}}}\nrules:\n- {{from: a, parameter: b}}\n"
    with pytest.raises(convert.RuleError) as error:
        parse_models(text, "f.yaml")
    assert (error.value.code, error.value.findings[0].rule) == (code, f"f.yaml:{at}")


def test_a_tree_is_matched_once_with_each_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = parse_models(MODELS, "f.yaml")
    covered, cover = [], rule_match.cover
    monkeypatch.setattr(rule_match, "cover", lambda rules, *more: covered.append(rules.model) or cover(rules, *more))
    assert plan_match(picked((one, two), MemorySource({"scale": np.ones(3, np.float32)}))).rules.model == "one"
    assert covered == ["one", "two"]


def test_one_model_is_asked_of_a_file_of_several() -> None:
    with pytest.raises(convert.RuleError) as error:
        convert.parse_rules(MODELS, "f.yaml")
    assert error.value.code == "rule-several-models" and error.value.findings[0].got == "one, two"


# ---- path variants

PLACES = """
model: m
title: M
targets: {torch: {loads: T}}
path_variants:
  layer_{i}:
  - {path: "stack/type_{p}", stacked: {s: 0}, order: [s, p]}
  - - {path: "units/layer_{p}", stacked: {s: 1}, order: [s, p]}
    - {path: "rest/layer_{q}", order: [q]}
  - {path: all, stacked: {i: 1}}
  w/w: w
rules:
- einsum: ...D,DF->...F
  from: layer_{i}/w/w
  linear: layers.{i}
""".strip()
KERNELS = [np.random.default_rng(k).standard_normal((3, 5)).astype(np.float32) for k in range(8)]
UNITS = 3


def trees() -> dict[str, dict[str, np.ndarray]]:
    """Eight layers in units of three: two whole units, and two layers more."""
    w = KERNELS
    return {
        "nested": {f"layer_{i}/w/w": x for i, x in enumerate(w)},
        "short": {f"layer_{i}/w": x for i, x in enumerate(w)},
        "stacked": {f"stack/type_{p}/w/w": np.stack(w[p::UNITS]) for p in range(UNITS)},
        "units": {
            **{f"units/layer_{p}/w": np.stack(w[p:6:UNITS], axis=1) for p in range(UNITS)},
            **{f"rest/layer_{q}/w": w[6 + q] for q in range(2)},
        },
        "scanned": {"all/w": np.stack(w, axis=1)},
    }


@pytest.mark.parametrize("layout", ["nested", "short", "stacked", "units", "scanned"])
def test_a_layer_is_found_in_every_variant(layout: str) -> None:
    plan = make_plan(convert.parse_rules(PLACES, "p.yaml"), MemorySource(trees()[layout]))
    assert plan.sizes["i"] == 8
    made = run(plan)
    assert sorted(made) == [f"layers.{i}.weight" for i in range(8)]
    for i, x in enumerate(KERNELS):
        assert np.array_equal(made[f"layers.{i}.weight"], x.T), i


@pytest.mark.parametrize(
    ("layout", "damage", "said"),
    [
        ("nested", lambda t: t.pop("layer_4/w/w"), r"{i} runs from 0 to 7 in the tree, without 4; the checkpoint is incomplete"),
        ("stacked", lambda t: t.update({"stack/type_1/w/w": t["stack/type_1/w/w"][:2]}), None),  # 8 -> 7 layers, all there
        ("stacked", lambda t: t.update({"stack/type_0/w/w": t["stack/type_0/w/w"][:2]}), r"without 6; the stack of layers is truncated"),
        ("stacked", lambda t: t.pop("stack/type_1/w/w"), r"{p} runs from 0 to 2 in the tree, without 1"),
        ("units", lambda t: t.pop("rest/layer_0/w"), r"without 0; the checkpoint is incomplete"),
    ],
)  # fmt: skip
def test_a_truncated_stack_is_named(layout: str, damage: Any, said: str | None) -> None:
    tree = dict(trees()[layout])
    damage(tree)
    rules = convert.parse_rules(PLACES, "p.yaml")
    if said is None:
        assert make_plan(rules, MemorySource(tree)).sizes["i"] == 7
        return
    with pytest.raises(convert.PlanError, match=re.escape(said).replace(r"\{", "{")):
        make_plan(rules, MemorySource(tree))


@pytest.mark.parametrize(
    ("old", "new", "code", "expected", "got"),
    [
        ("order: [q]", "order: [r]", "rule-path-variants", "{r}", "{q}"),
        ("order: [s, p]", "order: [s]", "rule-path-variants", "{s}", "{p}, {s}"),
        ("w/w: w", "w/w: w_{k}", "rule-path-variants", "none", "{k}"),
        ("order: [s, p]", "order: [s, p], period: $pattern", "rule-path-variants", "repeat", "$pattern"),
        ("order: [s, p]", "order: [s, p], period: 0", "rule-wrong-value", "at least 1", "0"),
        ("stacked: {i: 1}", "stacked: {i: 1}, period: 3", "rule-path-variants", "`order`", "`period`"),
        ("rules:", "axes: {p: {is: pairs}}\nrules:", "rule-name-clash", "p is an axis here (pairs)", "stack/type_{p}"),
    ],
)
def test_errors_of_path_variants(old: str, new: str, code: str, expected: str, got: str) -> None:
    with pytest.raises(convert.RuleError) as error:
        convert.parse_rules(PLACES.replace(old, new, 1), "p.yaml")
    finding = error.value.findings[0]
    assert finding.code == code and finding.rule.startswith("p.yaml:")
    assert expected in str(finding) and got in str(finding)


def test_an_index_spelt_in_words_counts_within_a_unit() -> None:
    """MaxText's Gemma 2: a scanned unit holds a local and a global layer."""
    rules = rule_file("""
- einsum: ...D,DF->...F
  from: layers/attention_{p:local,global}/kernel
  stacked: {u: 1}
  index_from: {i: [u, p]}
  linear: layers.{i}
""")
    words = ("local", "global")
    tree = {f"layers/attention_{word}/kernel": np.stack(KERNELS[k::2], axis=1) for k, word in enumerate(words)}
    made = run(make_plan(rules, MemorySource(tree)))
    assert all(np.array_equal(made[f"layers.{i}.weight"], x.T) for i, x in enumerate(KERNELS))
    pattern = parse_pattern("a_{p:local,global}/b")
    found = pattern.match("a_global/b")
    assert found is not None and found.indices == (("p", 1),) and pattern.fill({"p": 0}) == "a_local/b"
    assert pattern.match("a_other/b") is None
    with pytest.raises(ValueError, match="neither an index"):
        parse_pattern("a_{p:local}/b")
    with pytest.raises(convert.RuleError) as error:
        rule_file("- from: w_{p}\n  index_from: {i: [v, p]}\n  parameter: w.{i}")
    assert error.value.code == "rule-index-mismatch" and error.value.findings[0].got == "v"


POSITIONS = """model: units
title: units
targets: {torch: {loads: Torch}}
path_variants:
  layers_{i}:
  - - &local {path: units/local, stacked: {s: 0, p: 1}, order: [s, p], period: 3, positions: [0, 1]}
    - &global {path: units/global, stacked: {s: 0}, order: [s, p], period: 3, positions: [2]}
  local_{i}: [*local, {path: "layers_{i}", period: 3, positions: [0, 1]}]
  global_{i}: [*global, {path: "layers_{i}", period: 3, positions: [2]}]
"""
OF_UNITS = """
- from: layers_{i}/scale
  parameter: layers.{i}.scale
- einsum: ...D,DF->...F
  from: local_{i}/kernel
  linear: layers.{i}
- einsum: ...D,DG->...G
  from: global_{i}/kernel
  linear: layers.{i}
"""


def unit_trees() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two units of three layers, the third of which is wider: layer by layer, and stacked as MaxText's Gemma 4."""
    rng = np.random.default_rng(3)
    single: dict[str, np.ndarray] = {}
    for i in range(6):
        single[f"layers_{i}/kernel"] = rng.standard_normal((4, 7 if i % 3 == 2 else 5)).astype(np.float32)
        single[f"layers_{i}/scale"] = rng.standard_normal(4).astype(np.float32)
    stacked = {}
    for leaf in ("kernel", "scale"):
        stacked[f"units/local/{leaf}"] = np.stack([np.stack([single[f"layers_{3 * s + p}/{leaf}"] for p in (0, 1)]) for s in (0, 1)])  # fmt: skip
        stacked[f"units/global/{leaf}"] = np.stack([single[f"layers_{3 * s + 2}/{leaf}"] for s in (0, 1)])
    return single, stacked


def test_paths_hold_positions_of_a_unit() -> None:
    single, stacked = unit_trees()
    for tree in (single, stacked):
        made = run(make_plan(rule_file(OF_UNITS, POSITIONS), MemorySource(tree)))
        assert len(made) == 12
        for i in range(6):
            assert np.array_equal(made[f"layers.{i}.weight"], single[f"layers_{i}/kernel"].T)
            assert np.array_equal(made[f"layers.{i}.scale"], single[f"layers_{i}/scale"])


def test_trees_without_a_position_are_refused() -> None:
    single, stacked = unit_trees()
    for k in (3, 5):
        tree = {name: x for name, x in single.items() if name != f"layers_{k}/kernel"}
        with pytest.raises(convert.PlanError) as refused:
            make_plan(rule_file(OF_UNITS, POSITIONS), MemorySource(tree))
        assert any(f.code in ("leaf-missing", "layers-missing") and str(k) in str(f) for f in refused.value.findings)
    wide = {name: np.concatenate([x, x[:, :1]], 1) if "local" in name else x for name, x in stacked.items()}
    with pytest.raises(convert.PlanError) as refused:
        make_plan(rule_file(OF_UNITS, POSITIONS), MemorySource(wide))
    assert any(f.code == "layers-missing" and "2 layers of each unit of 3" in str(f) for f in refused.value.findings)
    with pytest.raises(convert.RuleError, match="different positions"):
        rule_file(OF_UNITS, POSITIONS.replace("positions: [0, 1]", "positions: [0, 3]"))


# ---- tensors that several rules make

JOINED = """
- einsum: BTD,NDH->BTNH
  from: layer_{i}/q
  absent_if: layer_{i}/qkv
  linear: {module: "layers.{i}.qkv", part: 1 of 2}
- einsum: BSD,CKDH->CBSKH
  from: layer_{i}/kv
  absent_if: layer_{i}/qkv
  linear: {module: "layers.{i}.qkv", part: 2 of 2}
- einsum: BTD,SKDH->SBTKH
  from: layer_{i}/qkv
  absent_if: layer_{i}/q
  linear: layers.{i}.qkv
"""


def test_parts_are_rows_in_their_order() -> None:
    rng = np.random.default_rng(0)
    q, kv = rng.standard_normal((4, 7, 5)).astype(np.float32), rng.standard_normal((2, 2, 7, 5)).astype(np.float32)
    qkv = rng.standard_normal((3, 2, 7, 5)).astype(np.float32)
    want = [q.transpose(0, 2, 1).reshape(20, 7), *(kv[c].transpose(0, 2, 1).reshape(10, 7) for c in (0, 1))]
    for text in (JOINED, "\n- ".join(["", *reversed(JOINED.strip().removeprefix("- ").split("\n- "))])):
        made = run(make_plan(rule_file(text), MemorySource({"layer_0/q": q, "layer_0/kv": kv, "layer_1/qkv": qkv})))
        assert np.array_equal(made["layers.0.qkv.weight"], np.concatenate(want))
        assert np.array_equal(made["layers.1.qkv.weight"], qkv.transpose(0, 1, 3, 2).reshape(30, 7))


def test_a_part_that_is_missing_is_named() -> None:
    q = np.zeros((4, 7, 5), np.float32)
    with pytest.raises(convert.PlanError) as refused:
        make_plan(rule_file(JOINED), MemorySource({"layer_0/q": q}))
    missing = next(finding for finding in refused.value.findings if finding.code == "tensor-parts-incomplete")
    assert (missing.path, missing.got) == ("layers.0.qkv.weight", "1 of 2 (r.yaml:5)")
    with pytest.raises(convert.PlanError, match=r"float32\[6,3\] and float32\[20,7\] .* cannot be rows of one tensor"):
        make_plan(
            rule_file(JOINED.replace("CKDH->CBSKH", "CKEH->CBSKH").replace("BSD", "BSE")),
            MemorySource({"layer_0/q": q, "layer_0/kv": np.zeros((2, 1, 3, 3), np.float32)}),
        )
    with pytest.raises(convert.RuleError, match="expected a part such as 1 of 2, not '3 of 2'"):
        rule_file(JOINED.replace("1 of 2", "3 of 2"))


# ---- the card


def test_figures_of_a_check_are_added_and_replaced() -> None:
    plan = make_plan(convert.parse_rules(PLACES, "p.yaml"), MemorySource(trees()["nested"]))
    card = render_card(plan, "tool 1.0")
    once = add_figures(card, [("weights", "passed", "8 of 8 | bit for bit")])
    assert once.startswith(card) and "| weights | passed | 8 of 8 \\| bit for bit |" in once
    twice = add_figures(once, [("model", "failed", "1e-2")])
    assert "| weights |" not in twice and twice.startswith(card) and twice.count("## Checked") == 1
