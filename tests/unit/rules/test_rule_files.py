"""Rule files: every error by its code and position, the JSON Schema against the loader, and what shipped files may not contain."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import ConvertError, RuleError, RuleFile, available_rules, parse_rules
from convert.cli.options import parse_settings
from convert.core.yaml_nodes import load_yaml
from convert.layers import KINDS
from convert.planning.planner import make_plan
from convert.rules import library
from convert.rules.library import find_rules, load_models, shipped_rules_dir
from convert.rules.parse import parse_models
from convert.rules.schema import schema
from support.memory_source import MemorySource, rule_file
from support.paths import ROOT

RULES_DIR = ROOT / "rules"
SHIPPED = sorted(RULES_DIR.glob("*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(schema())

GOOD = """\
model: m
title: M
axes:
  D: {is: width}
  I: {is: input, equals: 2*P}
  P: {is: patch}
facts:
  epsilon: 1e-6
  rope: ask
  min_timescale: 1
  max_timescale: 10000
versions:
  small:
    sizes: {D: 8}
    facts: {rope: true}
targets:
  torch: {loads: T}
  other:
    loads: O
    config: {width: $D, eps: [$epsilon]}
rules:
- einsum: ...D,DF->...F
  from: layers_{i}/{q,k}/w
  bias: layers_{i}/{q,k}/b
  linear: {torch: "layers.{i}.qk", other: "layers.{i}.{a,b}"}
- from: layers_{i}/norm/scale
  multiplies_by: scale
  epsilon: $epsilon
  rms_norm: layers.{i}.norm
- timescales: D
  when: rope
  buffer: {other: inv}
- drop: opt/**
  because: optimizer
"""


def refusal(text: str) -> RuleError:
    with pytest.raises(RuleError) as error:
        parse_rules(text, "r.yaml")
    return error.value


def edited(*edits: tuple[str, str]) -> str:
    text = GOOD
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def accepted_by_schema(text: str) -> bool:
    return VALIDATOR.is_valid(load_yaml(text, "r.yaml").plain())


def test_a_good_file() -> None:
    rules = parse_rules(GOOD, "r.yaml")
    assert (rules.model, rules.title, rules.family, rules.root) == ("m", "M", None, ("",))
    assert [rule.kind_name for rule in rules.rules] == ["linear", "rms_norm", "buffer", "drop"]
    assert [str(rule.at) for rule in rules.rules] == ["r.yaml:22:3", "r.yaml:26:3", "r.yaml:30:3", "r.yaml:33:3"]
    assert rules.axes["I"].equals == (2, "P")
    assert rules.sha256 == hashlib.sha256(GOOD.encode()).hexdigest()
    assert rules.rules[0].targets["other"].path.text == "layers.{i}.{a,b}"
    assert accepted_by_schema(GOOD)


# --- one rule -------------------------------------------------------------------------------------------------------

# One rule (which starts in line 5, column 3), the code of the error, its line and column, a word of its text, and whether the
# JSON Schema rejects it as well.
ONE_RULE: list[tuple[str, str, str, str, bool]] = [
    ("- einsum: ...D,DF->...F\n  from: w\n  linear: m\n  transpose: true", "rule-unknown-key", '8:3', 'transpose', True),
    ("- einsum: ...D,DF->...F\n  from: w\n  linear: m\n  baias: b", "rule-unknown-key", '8:3', 'baias', True),
    ("- from: w\n  linear: m", "rule-missing-key", '5:3', 'einsum', True),
    ("- einsum: ...D,DF->...F\n  linear: m", "rule-missing-key", '5:3', 'from', True),
    ("- from: w\n  epsilon: 1e-6\n  rms_norm: n", "rule-missing-key", '5:3', 'multiplies_by', True),
    ("- from: w\n  multiplies_by: scale\n  layer_norm: n", "rule-missing-key", '5:3', 'epsilon', True),
    ("- drop: w", "rule-missing-key", '5:3', 'because', True),
    ("- from: w\n  linear: m\n  embedding: e", "rule-kind", '5:3', "'linear' and 'embedding'", True),
    ("- from: w", "rule-kind", '5:3', "'from'", True),
    ("- from: w\n  embeding: e", "rule-kind", '5:3', "'embeding'", True),
    ("- w", "rule-wrong-value", '5:3', "'w'", True),
    ("- einsum: ...D,DF\n  from: w\n  linear: m", "rule-wrong-value", '5:11', '', False),
    ("- einsum: 5\n  from: w\n  linear: m", "rule-wrong-value", '5:11', '5', True),
    ("- einsum: ...hi,hij->...hj\n  from: w\n  linear: m", "rule-layer-conflict", '5:3', '', False),
    ("- einsum: ...D,DF->...F\n  from: w\n  linear: m\n  activation: gelu", "rule-wrong-value", '8:15', "'gelu'", True),
    ("- einsum: ...D,DF->...F\n  from: w\n  linear: m\n  activation: swish", "rule-wrong-value", '8:15', "'swish'", True),
    ("- from: w\n  multiplies_by: 1 + scale\n  epsilon: 1e-6\n  rms_norm: n", "rule-wrong-value", '6:18', "'1 + scale'", True),
    ("- from: w\n  multiplies_by: weight\n  epsilon: 1e-6\n  rms_norm: n", "rule-wrong-value", '6:18', "'weight'", True),
    ("- from: w\n  multiplies_by: scale\n  epsilon: small\n  rms_norm: n", "rule-wrong-value", '7:12', '', False),
    ("- from: w\n  multiplies_by: scale\n  epsilon: $eps\n  rms_norm: n", "rule-unknown-name", '5:3', 'eps', False),
    ("- from: w\n  multiplies_by: scale\n  epsilon: 1e-6\n  rms_norm: {module: n, multiplies_by: scale}", "rule-wrong-value", '8:40', "'scale'", True),
    ("- from: w/*\n  parameter: p", "rule-wildcard", '5:9', 'w/*', False),
    ("- einsum: ...D,DF->...F\n  from: w\n  bias: b/**\n  linear: m", "rule-wildcard", '7:9', 'b/**', False),
    ("- from: w\n  parameter: p.*", "rule-wildcard", '5:3', 'p.*', False),
    ("- from: a{\n  parameter: p", "rule-wrong-value", '5:9', '', False),
    ("- from: ''\n  parameter: p", "rule-wrong-value", '5:9', '', False),
    ("- from: 5\n  parameter: p", "rule-wrong-value", '5:9', '5', True),
    ('- from: w_{i}\n  parameter: p', "rule-index-mismatch", '5:3', 'none', False),
    ('- from: w\n  parameter: "p.{i}"', "rule-index-mismatch", '5:3', '{i}', False),
    ('- from: w\n  stacked: {layer: 0, j: 1}\n  parameter: {torch: "p.{i}.{j}"}', "rule-index-mismatch", '5:3', '{i}, {j}', False),
    ('- from: w_{i}\n  stacked: {i: 0}\n  parameter: "p.{i}"', "rule-index-mismatch", '5:3', '', False),
    ('- from: w\n  stacked: {i: 0, j: 0}\n  parameter: "p.{i}.{j}"', "rule-index-mismatch", '6:12', '', False),
    ('- from: w\n  stacked: [0]\n  parameter: p', "rule-wrong-value", '6:12', 'a list', True),
    ('- einsum: ...D,DF->...F\n  from: "w_{i}"\n  bias: b\n  linear: "m.{i}"', "rule-index-mismatch", '7:9', 'b', False),
    ('- einsum: ...D,DF->...F\n  from: "{a,b}/w"\n  bias: "{a,b,c}/b"\n  linear: m', "rule-index-mismatch", '7:9', '{a,b,c}/b', False),
    ('- from: "{a,b}/w"\n  parameter: "{x,y,z}"', "rule-index-mismatch", '5:3', 'groups of [2] in the source and of [3] in the target', False),
    ('- einsum: ...D,DF->...F\n  from: "{a,b}/{c,d}/w"\n  linear: {torch: m}', "rule-index-mismatch", '5:3', 'groups of [2, 2] in the source and of [] in the target', False),
    ('- from: "{a,b}/w"\n  parameter: p', "rule-index-mismatch", '5:3', '', False),
    ("- from: w\n  parameter: {troch: p}", "rule-unknown-name", '6:15', 'troch', False),
    ("- from: w\n  parameter: {name: p, shape: 3}", "rule-unknown-key", '6:24', 'shape', True),
    ("- from: w\n  embedding: {module: p, wieght: q}", "rule-unknown-key", '6:26', 'wieght', True),
    ("- from: w\n  axes: D2\n  parameter: p", "rule-wrong-value", '6:9', '', False),
    ("- from: w\n  axes: DD\n  parameter: p", "rule-wrong-value", '6:9', '', False),
    ("- from: w\n  dtype: float33\n  parameter: p", "rule-wrong-value", '6:10', "'float33'", True),
    ("- from: w\n  optional: maybe\n  parameter: p", "rule-wrong-value", '6:13', "'maybe'", True),
    ("- from: w\n  linear: m\n  einsum: {a: '...D,DF->...F', b: '...D,FD->...F'}", "rule-layer-conflict", '5:3', '', False),
    ("- from: w\n  linear: m\n  choice: ''\n  einsum: {a: '...D,DF->...F', b: '...D,FD->...F'}", "rule-layer-conflict", '5:3', '', False),
    ("- from: w\n  linear: m\n  choice: c\n  einsum: ...D,DF->...F", "rule-layer-conflict", '5:3', '', False),
    ("- from: w\n  linear: m\n  choice: c\n  einsum: {a: '...D,DF->...F'}", "rule-layer-conflict", '5:3', '', False),
    ("- from: w\n  linear: m\n  choice: c\n  einsum: {}", "rule-layer-conflict", '5:3', '', False),
    ("- timescales: DD\n  buffer: b", "rule-wrong-value", '5:15', '', False),
    ("- timescales: D\n  buffer: b", "rule-unknown-name", '5:3', 'min_timescale', False),
    ("- from: w\n  axes: DN\n  same_size: {N: K}\n  parameter: p", "rule-unknown-name", '5:3', 'K', False),
    ("- from: w\n  axes: DN\n  same_size: {K: N}\n  parameter: p", "rule-layer-conflict", '7:14', 'K', False),
    ("- from: w\n  axes: DN\n  same_size: {N: KV}\n  parameter: p", "rule-wrong-value", '7:18', 'KV', False),
    ('- timescales: D\n  buffer: "b.{i}"', "rule-index-mismatch", '5:3', 'b.{i}', False),
    ("- timescales: D\n  buffer: b\n  from: w", "rule-unknown-key", '7:3', 'from', True),
    ('- einsum: ...i,ij->...j\n  from: "w_{i}"\n  linear: "m.{i}"', "rule-name-clash", '5:3', 'in line 5', False),
    ('- from: v\n  axes: Ei\n  parameter: q\n- from: "w"\n  stacked: {i: 0}\n  parameter: "p.{i}"', "rule-name-clash", '5:3', 'in line 8', False),
    ("- &a\n  einsum: {x: '...D,DF->...F', y: '...D,FD->...F'}\n  from: w\n  linear: m\n  choice: c\n"
        "- einsum: {x: '...D,DF->...F', z: '...D,FD->...F'}\n  from: v\n  linear: n\n  choice: c", "rule-name-clash", '10:3', 'x, z', False),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "code", "at", "word", "structural"), ONE_RULE)
def test_errors_of_one_rule(rules: str, code: str, at: str, word: str, structural: bool) -> None:
    with pytest.raises(RuleError) as error:
        rule_file(rules)
    finding = error.value.findings[0]
    assert (finding.code, finding.rule) == (code, f"r.yaml:{at}")
    assert word in str(finding) and finding.problem + finding.expected
    text = f"model: m\ntitle: M\ntargets: {{torch: {{loads: T}}}}\nrules:\n{rules}\n"
    assert accepted_by_schema(text) != structural


# --- the file -------------------------------------------------------------------------------------------------------

WHOLE_FILE: list[tuple[str, str, str, str, bool]] = [
    ("- a", "rule-wrong-value", '1:1', 'a list', True),
    ("just text", "rule-wrong-value", '1:1', "'just text'", True),
    ("model: m", "rule-missing-key", '1:1', 'title', True),
    (edited(("title: M", "titel: M")), "rule-unknown-key", '2:1', 'titel', True),
    (edited(("title: M\n", "title: M\ntitle: N\n")), "rule-duplicate-key", '3:1', 'title', False),
    (edited(("model: m", "model: 2.5")), "rule-wrong-value", '1:8', '2.5', True),
    (edited(("D: {is: width}", "D: width")), "rule-wrong-value", '4:6', "'width'", True),
    (edited(("D: {is: width}", "D: {is: width, equal: 3}")), "rule-unknown-key", '4:18', 'equal', True),
    (edited(("D: {is: width}", "2D: {is: width}")), "rule-wrong-value", '4:3', '', False),
    (edited(("2*P", "2+P")), "rule-wrong-value", '5:26', '', False),
    (edited(("2*P", "0*P")), "rule-wrong-value", '5:26', '', False),
    (edited(("2*P", "2*")), "rule-wrong-value", '5:26', '', False),
    (edited(("2*P", "2.5")), "rule-wrong-value", '5:26', '2.5', True),
    (edited(("2*P", "2*Q")), "rule-unknown-name", '5:6', 'Q', False),
    (edited(("equals: 2*P", "divides: Q")), "rule-unknown-name", '5:6', 'Q', False),
    (edited(("sizes: {D: 8}", "sizes: {D: eight}")), "rule-wrong-value", '14:16', "'eight'", True),
    (edited(("sizes: {D: 8}", "sizes: {W: 8}")), "rule-unknown-name", '14:5', 'W', False),
    (edited(("    sizes: {D: 8}\n", "")), "rule-missing-key", '14:5', 'sizes', True),
    (edited(("facts: {rope: true}", "facts: {roop: true}")), "rule-unknown-name", '14:5', 'roop', False),
    (edited(("epsilon: 1e-6", "epsilonn: 1e-6")), "rule-unknown-name", '26:3', 'epsilon', False),
    (edited(("when: rope", "when: rop")), "rule-unknown-name", '30:3', 'rop', False),
    (edited(("width: $D", "width: $Depth")), "rule-unknown-name", '19:5', 'Depth', False),
    (edited(("[$epsilon]", "{a: [$epsilom]}")), "rule-unknown-name", '19:5', 'epsilom', False),
    (edited(("torch: {loads: T}", "torch: {}")), "rule-missing-key", '17:10', 'loads', True),
    ("model: m\ntitle: M\ntargets: {}\nrules: [{drop: x, because: y}]", "rule-missing-key", '3:10', 'none', False),
    ("model: m\ntitle: M\ntargets: {t: {loads: T}}\nrules: []", "rule-missing-key", '4:8', 'none', False),
    ("model: m\ntitle: M\ntargets: {t: {loads: T}}\nrules: {a: b}", "rule-wrong-value", '4:8', 'a mapping', True),
    ("model: m\ntitle: M\ntargets: {t: {loads: T}}\nrules:\n", "rule-wrong-value", '4:7', 'None', True),
    ("model: m\ntitle: M\nroot: [1]\ntargets: {t: {loads: T}}\nrules: []", "rule-wrong-value", '3:8', '1', True),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code", "at", "word", "structural"), WHOLE_FILE)
def test_errors_of_a_file(text: str, code: str, at: str, word: str, structural: bool) -> None:
    finding = refusal(text).findings[0]
    assert (finding.code, finding.rule) == (code, f"r.yaml:{at}")
    assert word in str(finding) and finding.problem + finding.expected
    try:
        rejected_by_schema = not accepted_by_schema(text)
    except RuleError:  # not even a document
        return
    assert rejected_by_schema == structural


def test_a_wrong_value_has_both_sides_and_a_wrong_name_a_suggestion() -> None:
    value = refusal(edited(("sizes: {D: 8}", "sizes: {D: eight}"))).findings[0]
    assert (value.expected, value.got) == ("an integer", "'eight'")
    key = refusal(edited(("title: M", "titel: M"))).findings[0]
    assert key.expected.startswith("one of model, family, title") and key.fix == "did you mean 'title'?"
    name = refusal(edited(("when: rope", "when: rop"))).findings[0]
    assert name.expected == "one of epsilon, rope, min_timescale, max_timescale" and name.fix == "did you mean 'rope'?"


def test_a_header_and_the_rules_are_reported_at_once() -> None:
    error = refusal(
        "model: m\ntargets: {t: {loads: x}}\nrules:\n- from: a/kernel\n  linaer: {t: a}\n  einsum: XD,DE->XE\n"
    )
    assert [finding.code for finding in error.findings] == ["rule-missing-key", "rule-kind"]
    assert error.findings[0].fix == "add `title:`, such as `title: My model`"
    assert (error.findings[1].got, error.findings[1].fix) == ("'linaer'", "did you mean 'linear'?")
    assert "\n  - r.yaml:4:3 [rule-kind]: a rule has one key that names its kind" in str(error)


def test_a_target_that_is_no_mapping() -> None:
    error = refusal("model: m\ntitle: m\ntargets: {mine: own code, other: {laods: x}}\nrules: []\n")
    wrong, misspelt = error.findings
    assert str(wrong) == (
        "r.yaml:3:17: targets: mine: expected a mapping, got 'own code'; write `mine: {loads: my_package.Model}`"
    )
    assert (misspelt.code, misspelt.fix) == ("rule-unknown-key", "did you mean 'loads'?")


def test_all_problems_of_a_file_are_reported_at_once() -> None:
    text = edited(
        ("equals: 2*P", "equals: 2*Q"),
        ("sizes: {D: 8}", "sizes: {W: 8}"),
        ("multiplies_by: scale", "multiplies_by: weight"),
        ('linear: {torch: "layers.{i}.qk"', "linear: {torch: layers.qk"),
        ("when: rope", "when: rop\n  unknown: 1"),
    )
    error = refusal(text)
    assert [finding.code for finding in error.findings] == [
        "rule-wrong-value",
        "rule-unknown-key",
        "rule-index-mismatch",
        "rule-unknown-name",
        "rule-unknown-name",
    ]
    assert error.headline == "The rules have 5 problems:" and str(error).count("\n  - r.yaml:") == 5


def test_problems_of_a_header_that_models_share_are_reported_once() -> None:
    text = (
        "title: M\ntargets: {t: {loads: T}}\naxes: {I: {is: x, equals: 2*Q}}\nmodels: {a: {}, b: {}}\n"
        "rules: [{from: w, parameter: p}]\n"
    )
    with pytest.raises(RuleError) as error:
        parse_models(text, "r.yaml")
    assert [(f.code, f.rule) for f in error.value.findings] == [("rule-unknown-name", "r.yaml:3:11")]


def test_an_empty_file_and_no_yaml() -> None:
    assert refusal("").code == "rule-file-empty" and refusal("").findings[0].fix
    assert refusal("{").code == "rule-not-yaml" and refusal("{").findings[0].rule == "r.yaml:1:2"


def test_root_may_be_one_path_or_several() -> None:
    for given_root, expected in (
        ("root: params\n", ("params",)),
        ("root: /a/b/\n", ("a/b",)),
        ("root: [params, ~, '']\n", ("params", "", "")),
        ("root: []\n", ("",)),
        ("root:\n", ("",)),
    ):
        assert parse_rules(given_root + GOOD, "r.yaml").root == expected


# --- the schema -----------------------------------------------------------------------------------------------------


def test_schema_file_is_the_generated_one() -> None:
    assert json.loads((RULES_DIR / "schema.json").read_text()) == schema()


@pytest.mark.slow
def test_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_files_fit_the_schema_and_load(path: Path) -> None:
    VALIDATOR.validate(load_yaml(path.read_text(), path.name).plain())
    models = load_models(path)
    assert path.stem in (models[0].model, models[0].family) or path.stem.startswith(f"{models[0].family}-")
    for rules in models:
        assert rules.path == f"rules/{path.name}"
        assert rules.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "# yaml-language-server: $schema=schema.json" in path.read_text()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all mappings with fixed keys in a rule file."""
    found = []
    if isinstance(value, dict):
        if path == () or path[-1:] not in FREE:
            found.append(path)
        for key, child in value.items():
            if key not in ("facts", "config", "defaults", "generation", "renamed_with", "is"):
                found += places(child, (*path, key))
    elif isinstance(value, list):
        for k, child in enumerate(value):
            found += places(child, (*path, k))
    return found


FREE = tuple(
    (word,)
    for word in (
        "allowed",
        "axes",
        "layer_types",
        "leaves",
        "path_variants",
        "choices",
        "models",
        "versions",
        "targets",
        "sizes",
        "rename_prefixes",
        "stacked",
        "supported",
        "ignored",
        "adapted",
        "index_from",
        "einsum",
        "requires",
        "products",
        "formulas",
        "fact_values",
        "same_size",
        "needs_confirmation",
        "classes",
        "renamed",
        "renamed_with",
        "absent",
        *KINDS,
    )
)


NUMBERS = {
    "above",
    "at_least",
    "below",
    "at_most",
    "equals",
    "divides",
    "multiple_of",
    "length",
    "sum",
    "or",
    "starts_with",
    "ends_with",
}  # of `allowed`


@pytest.mark.slow
@given(st.data())
@settings(max_examples=80, deadline=None)
def test_schema_and_loader_refuse_the_same_mutations(data: st.DataObject) -> None:
    """An unknown key anywhere, a missing required key, a value of the wrong type: neither lets it pass."""
    path = data.draw(st.sampled_from(SHIPPED))
    tree = load_yaml(path.read_text(), path.name).plain()
    where = data.draw(st.sampled_from(places(tree)))
    target = tree
    for step in where:
        target = target[step]
    any_number = {"epsilon", "prescaled_by", "value"} | ({"is"} if "requires" in where else set())
    any_number |= NUMBERS if "allowed" in where else set()
    typed = sorted(set(target) - any_number)
    mutation = data.draw(st.sampled_from(["unknown", "wrong type"] if typed else ["unknown"]))
    if mutation == "unknown":
        target[data.draw(st.sampled_from(["transpose", "permute", "einsums", "x"]))] = "DN"
    else:
        target[data.draw(st.sampled_from(typed))] = 3.5
    assert not VALIDATOR.is_valid(tree)
    with pytest.raises(RuleError):
        parse_models(json.dumps(tree), "mutated.yaml")


@pytest.mark.parametrize("word", [w for w in KINDS if w != "drop"])
def test_every_kind_is_described(word: str) -> None:
    described = {kind["title"]: kind for kind in schema()["properties"]["rules"]["items"]["oneOf"]}
    assert list(described) == [*KINDS, "attention"]
    assert described[word]["additionalProperties"] is False
    assert all(key["description"] for key in described[word]["properties"].values())


# --- no transposes --------------------------------------------------------------------------------------------------

TRANSPOSING = re.compile(r"transpos|permut|\bperm\b|\bswapaxes\b|\bmoveaxis\b|\brearrange\b|[\w)\]]\.T\b")


def without_comments(text: str) -> str:
    return "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_no_rule_says_transpose(path: Path) -> None:
    text = without_comments(path.read_text())
    assert "einsum" in text and "linear" in text
    assert TRANSPOSING.findall(text) == []
    for planted in ("  transpose: true", "  permute: [1, 0]", "  perm: 10", "  from: w.T"):
        assert TRANSPOSING.search(text + planted)


def test_no_key_of_the_language_says_transpose() -> None:
    keys = set(re.findall(r'"(\w+)": \{', json.dumps(schema()["properties"])))
    assert {"einsum", "linear", "stacked"} <= keys
    operation = {
        "conv_transpose",
        "transpose_kernel",
    }  # the names of an operation and of its argument, in both libraries
    assert {key for key in keys if TRANSPOSING.search(key)} == operation


# --- finding rules --------------------------------------------------------------------------------------------------


def test_rules_are_found_by_name_family_and_path(tmp_path: Path) -> None:
    assert [r.model for r in find_rules("timesfm-2.5")] == ["timesfm-2.5"]
    assert [r.model for r in find_rules("timesfm")] == ["timesfm-1", "timesfm-2.5"]
    mine = tmp_path / "mine.yaml"
    mine.write_text(GOOD)
    assert [r.path for r in find_rules(str(mine))] == [str(mine)]
    assert [r.model for r in find_rules("m", tmp_path)] == ["m"]
    assert find_rules("m", tmp_path)[0].text == GOOD
    assert find_rules("timesfm-1")[0].text == (shipped_rules_dir() / "timesfm-1.yaml").read_text()
    with pytest.raises(RuleError) as error:
        find_rules("timesfn-1", tmp_path)
    finding = error.value.findings[0]
    assert finding.code == "rules-not-found" and "did you mean 'timesfm-1'?" in finding.fix
    assert finding.expected == "" and "./my-model.yaml" in finding.fix


@pytest.mark.slow
def test_only_the_files_that_are_meant_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(text: str, name: str) -> tuple[RuleFile, ...]:
        parsed.append(Path(name).name)
        return parse_models(text, name)

    monkeypatch.setattr("convert.rules.library.parse_models", parse)
    library._parsed.cache_clear()
    every = {rules.model: (Path(rules.path).name, rules.families) for rules in available_rules()}
    assert len(parsed) == len(set(parsed)) == len({file for file, _ in every.values()})
    for name in set(every).union(*(families for _, families in every.values())):
        library._parsed.cache_clear()
        parsed.clear()
        assert {r.model for r in find_rules(name)} == {m for m, (_, f) in every.items() if name in (m, *f)}
        meant = {file for model, (file, families) in every.items() if name in (model, *families)}
        assert set(parsed) == meant if name in ("maxtext-gemma3", "timesfm") else set(parsed) >= meant
    # A file of the user's takes a model out of its family, though the family's name stands in it as a part of another alone.
    (tmp_path / "own.yaml").write_text(GOOD.replace("model: m", "model: gemma3\nfamily: own"))
    assert {"gemma1", "gemma2"} < {r.model for r in find_rules("gemma", tmp_path)}
    assert "gemma3" not in {r.model for r in find_rules("gemma", tmp_path)}
    library._parsed.cache_clear()


def test_a_directory_of_rules_comes_before_the_shipped_ones(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(GOOD.replace("model: m", "model: timesfm-1"))
    found = [r.path for r in available_rules(tmp_path) if r.family in (None, "timesfm")]
    assert found == [
        str(tmp_path / "x.yaml"),
        "rules/pix2struct.yaml",
        "rules/recurrentgemma.yaml",
        "rules/siglip-image.yaml",
        "rules/timesfm-2.5.yaml",
        "rules/vivit.yaml",
        "rules/whisper.yaml",
    ]
    with pytest.raises(RuleError) as error:
        available_rules(tmp_path / "x.yaml")
    assert (error.value.code, error.value.findings[0].rule) == ("rules-not-found", f"{tmp_path}/x.yaml")


def test_settings_are_yaml_scalars() -> None:
    assert parse_settings(["a=1", "b = x=y ", "c=true", "d=1e-5", "e="]) == {
        "a": 1,
        "b": "x=y",
        "c": True,
        "d": 1e-5,
        "e": None,
    }
    assert parse_settings(()) == {}
    for pair in ("a", "=1", " =1"):
        with pytest.raises(ConvertError) as refused:
            parse_settings([pair])
        assert refused.value.code == "usage" and repr(pair) in refused.value.findings[0].got


def test_needs_and_what_is_untold_speak_of_facts() -> None:
    head = "model: m\ntitle: M\nfacts: {theta: 1.0, word: fast}\nneeds_confirmation: {theta: no tree tells it}\ntargets:\n  torch: {loads: T, requires: {theta: {is: 2.0, because: it is fixed}}}\n  other: {loads: U, config: {t: $theta}}\n"
    rules = rule_file("- from: w\n  parameter: w", head)
    assert (
        rules.needs_confirmation == {"theta": "no tree tells it"}
        and rules.targets["torch"].requires["theta"].because == "it is fixed"
    )
    source = MemorySource({"w": np.ones(2, np.float32)})
    with pytest.raises(ConvertError) as refused:
        make_plan(rules, source)
    (finding,) = refused.value.findings
    assert (finding.code, finding.rule) == ("target-requirement", "r.yaml:6")
    assert (finding.expected, finding.got) == ("theta = 2.0", "theta = 1.0") and "--to other" in finding.fix
    assert make_plan(rules, source, settings={"theta": 2.0}).config_notes == ()
    assert make_plan(rules, source, to="other").config_notes == ("no tree tells it",)
    with pytest.raises(ConvertError) as refused:
        make_plan(rules, source, settings={"theta": 2.0, "word": "slow"})
    assert refused.value.code == "setting-has-no-effect"
    for old, new in (
        ("needs_confirmation: {theta", "needs_confirmation: {thetta"),
        ("requires: {theta", "requires: {thetta"),
    ):
        with pytest.raises(RuleError) as error:
            rule_file("- from: w\n  parameter: w", head.replace(old, new))
        assert error.value.code == "rule-unknown-name" and error.value.findings[0].fix == "did you mean 'theta'?"


def test_a_size_is_a_multiple_of_a_letter_that_is_declared() -> None:
    head = "model: m\ntitle: M\naxes: {D: {is: width}, N: {is: heads}}\ntargets: {torch: {loads: T, multiples: {D: {of: N, because: it is cut}}}}\n"
    assert rule_file("- from: w\n  axes: DN\n  parameter: w", head).targets["torch"].multiples["D"].of == "N"
    for old, new in (("multiples: {D", "multiples: {E"), ("of: N", "of: M")):
        with pytest.raises(RuleError) as error:
            rule_file("- from: w\n  axes: DN\n  parameter: w", head.replace(old, new))
        assert error.value.code == "rule-unknown-name" and "`multiples` of torch" in str(error.value)


def test_rows_are_behind_columns_of_the_same_layers() -> None:
    head = "model: m\ntitle: M\naxes: {P: {is: first}, I: {is: rows, varies: i, behind: [P, O]}, O: {is: columns, varies: i}}\ntargets: {torch: {loads: T}}\n"
    rules = "- einsum: ...I,IO->...O\n  from: w_{i}\n  linear: m.{i}"
    sizes = {"w_0": (2, 3), "w_1": (3, 5), "w_2": (5, 1)}

    def planned(**other: tuple[int, ...]) -> object:
        tree = {name: np.ones(shape, np.float32) for name, shape in {**sizes, **other}.items()}
        return make_plan(rule_file(rules, head), MemorySource(tree))

    assert rule_file(rules, head).axes["I"].behind == ("P", "O") and planned()
    for other, said in (
        ({"w_2": (4, 1)}, "makes O[1] = 4"),
        ({"w_1": (3, 4)}, "makes O[1] = 5"),
        ({"w_1": (4, 5)}, "makes O[0] = 4"),
    ):
        with pytest.raises(ConvertError) as refused:
            planned(**other)
        assert [one.code for one in refused.value.findings] == ["size-conflict"] and said in str(refused.value)
    for old, new, code in (
        ("[P, O]", "[P, U]", "rule-unknown-name"),
        ("[P, O]", "[P]", "rule-layer-conflict"),
        ("varies: i, behind", "varies: true, behind", "rule-layer-conflict"),
        ("columns, varies: i", "columns, varies: true", "rule-layer-conflict"),
    ):
        with pytest.raises(RuleError) as error:
            rule_file(rules, head.replace(old, new))
        assert error.value.code == code and "`behind` of I" in str(error.value)


def test_a_version_says_what_another_model_of_its_sizes_has() -> None:
    head = """model: m
title: M
axes: {D: {is: width}}
facts: {theta: 1.0, end: 2}
needs_confirmation: {theta: no tree tells it, end: nor this}
versions:
  small: {sizes: {D: 3}}
  large: {sizes: {D: 4}, needs_confirmation: {theta: --set theta=7.0 for the other large one}}
targets: {torch: {loads: T, config: {t: $theta, e: $end}}}
"""
    text = "- {from: w, axes: D, parameter: w}"
    rules = rule_file(text, head)
    small, large = (MemorySource({"w": np.ones(size, np.float32)}) for size in (3, 4))
    assert make_plan(rules, small).config_notes == ("no tree tells it", "nor this")
    assert make_plan(rules, large).config_notes == ("--set theta=7.0 for the other large one", "nor this")
    assert make_plan(rules, large, settings={"theta": 7.0}).config_notes == ("nor this",)
    with pytest.raises(RuleError) as error:
        rule_file(text, head.replace("{theta: --set", "{thetta: --set"))
    assert error.value.code == "rule-unknown-name" and error.value.findings[0].fix == "did you mean 'theta'?"


def test_a_product_of_facts_is_a_size() -> None:
    head = "model: m\ntitle: M\naxes: {D: {is: model width}, K: {is: width of all keys}, H: {is: width of a head}}\nfacts: {heads: ask, keys: ask}\nproducts: {heads*H: D, keys*H: K}\ntargets: {torch: {loads: T}}\n"
    text = "- {from: w, axes: DK, parameter: w}"
    rules, source = rule_file(text, head), MemorySource({"w": np.ones((12, 6), np.float32)})
    assert "H" not in make_plan(rules, source).sizes, "unknown: the configuration asks for it"
    assert make_plan(rules, source, settings={"heads": 4, "keys": 2}).sizes["H"] == 3
    assert make_plan(rules, source, settings={"heads": 4}).sizes["H"] == 3
    written = rule_file(text, head.replace("heads: ask", "heads: 7"))
    divide = "heads to be a positive integer that divides 12"
    for file, chosen, place, expected, got in (
        (rules, {"heads": 5}, "--set heads=5", divide, "heads = 5"),
        (rules, {"heads": 0}, "--set heads=0", divide, "heads = 0"),
        (rules, {"heads": True}, "--set heads=True", divide, "heads = True"),
        (written, {}, "r.yaml", divide, "heads = 7"),
        (rules, {"heads": 4, "keys": 3}, "--set keys=3", "keys*H to be 6", "keys = 3; H = 3, by heads*H = D = 12"),
        (rules, {"heads": 6, "keys": 2}, "--set keys=2", "keys*H to be 6", "keys = 2; H = 2, by heads*H = D = 12"),
        (rules, {"heads": 4, "H": 2}, "--set heads=4", "heads*H to be 12", "heads = 4; H = 2"),
    ):
        with pytest.raises(ConvertError) as refused:
            make_plan(file, source, settings=chosen)
        (finding,) = refused.value.findings
        assert (finding.code, finding.path, finding.expected, finding.got) == ("size-conflict", place, expected, got)
        assert finding.problem in ("the tree has D = 12 (model width)", "the tree has K = 6 (width of all keys)")
    for old, new, at in (("{heads*H", "{hheads*H", "5:12"), ("H: D", "H: E", "5:12")):
        with pytest.raises(RuleError) as error:
            rule_file(text, head.replace(old, new))
        assert (error.value.code, error.value.findings[0].rule) == ("rule-unknown-name", f"r.yaml:{at}")


FORMULAS = "model: m\ntitle: M\naxes: {D: {is: model width}, F: {is: feed-forward width}}\nfacts: {ratio: ask, side: ask}\nformulas: {int(ratio*D): F, '(side//2)*(side//2) + 1': D}\ntargets: {torch: {loads: T}}\n"


def test_a_formula_of_facts_is_a_size() -> None:
    text = "- {from: w, axes: DF, parameter: w}"
    rules, source = rule_file(text, FORMULAS), MemorySource({"w": np.ones((10, 16), np.float32)})
    for right in ({}, {"ratio": 1.6667}, {"ratio": 1.6, "side": 6}, {"side": 7}):
        assert make_plan(rules, source, settings=right).sizes == {"D": 10, "F": 16}
    written = rule_file(text, FORMULAS.replace("ratio: ask", "ratio: 2"))
    square = "(side//2)*(side//2) + 1 to be 10"
    for file, chosen, place, expected, got in (
        (rules, {"ratio": 4}, "--set ratio=4", "int(ratio*D) to be 16", "40 with ratio = 4; D = 10"),
        (rules, {"ratio": "x"}, "--set ratio=x", "int(ratio*D) to be 16", "ratio = 'x'; D = 10"),
        (rules, {"ratio": True}, "--set ratio=True", "int(ratio*D) to be 16", "ratio = True; D = 10"),
        (rules, {"side": 8}, "--set side=8", square, "17 with side = 8"),
        (written, {}, "", "int(ratio*D) to be 16", "20 with ratio = 2; D = 10"),
    ):
        with pytest.raises(ConvertError) as refused:
            make_plan(file, source, settings=chosen)
        (finding,) = refused.value.findings
        assert (finding.code, finding.path, finding.expected, finding.got) == ("size-conflict", place, expected, got)
        assert finding.fix in ("give the ratio of the model that was trained", "give the side of the model that was trained")  # fmt: skip


def test_the_only_unknown_of_a_formula_has_its_only_whole_number() -> None:
    rules = rule_file("- {from: w, axes: DF, parameter: w}", FORMULAS)

    def facts(width: int, *, rows: int = 10) -> dict[str, object]:
        return dict(make_plan(rules, MemorySource({"w": np.ones((rows, width), np.float32)})).facts)

    assert facts(20) == {"ratio": 2} and facts(10) == {"ratio": 1}
    assert facts(16) == facts(7) == {}, "no whole number, and several numbers for the side"
    assert facts(6, rows=1) == {"ratio": 6}
    even = rule_file("- {from: w, axes: DF, parameter: w}", FORMULAS + "allowed: {ratio: {multiple_of: 2}}\n")
    with pytest.raises(
        ConvertError, match="ratio to be a number that is a multiple of 2, got 1, by the sizes of the tree;"
    ):
        make_plan(even, MemorySource({"w": np.ones((10, 10), np.float32)}))


def test_a_size_that_no_leaf_shows_is_a_whole_number() -> None:
    head = FORMULAS.replace("F: {", "h: {is: half}, F: {").replace("int(ratio*D): F", "F/2: h")
    rules = rule_file("- {from: w, axes: DF, parameter: w}", head)
    assert make_plan(rules, MemorySource({"w": np.ones((10, 16), np.float32)})).sizes == {"D": 10, "F": 16}
    with pytest.raises(ConvertError) as refused:
        make_plan(rules, MemorySource({"w": np.ones((10, 7), np.float32)}))
    (finding,) = refused.value.findings
    assert (finding.expected, finding.got) == ("F/2 to be a whole number", "3.5 with F = 7")
    assert (
        finding.problem == "the sizes give no h (half)" and finding.fix == "convert a tree whose leaves fit one another"
    )


@pytest.mark.parametrize(
    "formula", ["ratio**9", "open(ratio)", "int(ratio, 2)", "ratio.real", "True*D", "'a'*D", "ratio*", "[ratio]", "-D"]
)
def test_what_is_no_formula_is_refused(formula: str) -> None:
    with pytest.raises(RuleError, match=r"r.yaml:5:\d+") as error:
        rule_file("- {from: w, axes: DF, parameter: w}", FORMULAS.replace("int(ratio*D)", f'"{formula}"'))
    assert error.value.code == "rule-wrong-value"


def test_names_of_a_formula_are_declared() -> None:
    for old, new in (("int(ratio*D)", "int(rate*D)"), ("D): F", "D): G")):
        with pytest.raises(RuleError) as error:
            rule_file("- {from: w, axes: DF, parameter: w}", FORMULAS.replace(old, new))
        assert (error.value.code, error.value.findings[0].rule) == ("rule-unknown-name", "r.yaml:5:12")


SIZES = "model: m\ntitle: M\naxes: {D: {is: model width}, F: {is: feed-forward width}}\nsidecar: {file: c.json, below: config, sizes: {width: 2*F, depth: F//D}}\ntargets: {torch: {loads: T}}\n"


def test_a_sidecar_states_sizes_as_formulas_of_letters(tmp_path: Path) -> None:
    rules, source = rule_file("- {from: w, axes: DF, parameter: w}", SIZES), MemorySource({"w": np.ones((10, 16), np.float32)})  # fmt: skip
    source.path = tmp_path
    for stated in ({}, {"width": 32}, {"width": None}, {"width": "wide"}, {"width": 32, "depth": 1}):
        (tmp_path / "c.json").write_text(json.dumps({"config": stated}))
        assert make_plan(rules, source).sizes == {"D": 10, "F": 16}
    (tmp_path / "c.json").write_text(json.dumps({"config": {"width": 16}}))
    with pytest.raises(ConvertError) as refused:
        make_plan(rules, source)
    (finding,) = refused.value.findings
    assert finding.code == "config-conflict" and finding.problem == "the c.json of the checkpoint has width = 16, and the tree has 2*F = 32"  # fmt: skip
    for old, new, code in (("2*F", "2*G", "rule-unknown-name"), ("2*F", "2**F", "rule-wrong-value")):
        with pytest.raises(RuleError) as error:
            rule_file("- {from: w, axes: DF, parameter: w}", SIZES.replace(old, new))
        assert (error.value.code, error.value.findings[0].rule) == (code, "r.yaml:4:55")


@pytest.mark.parametrize("digits", ["1" + 400 * "0", "-1" + 400 * "0", 3_999 * "9"])
def test_a_number_beyond_all_measure_is_none(digits: str) -> None:
    text = f"model: m\ntitle: M\ntargets: {{torch: {{loads: x.M}}}}\nrules:\n- from: s\n  multiplies_by: scale\n  epsilon: {digits}\n  rms_norm: n\n"
    with pytest.raises(RuleError, match=r"^r.yaml:\d+:\d+: "):
        parse_models(text, "r.yaml")
