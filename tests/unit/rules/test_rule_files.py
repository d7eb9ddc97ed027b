"""Rule files: every error by its full text, the JSON Schema against the loader, and what the shipped files may not hold."""

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


def refusal(text: str) -> str:
    with pytest.raises(RuleError) as refused:
        parse_rules(text, "r.yaml")
    return str(refused.value)


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
    assert [rule.word for rule in rules.rules] == ["linear", "rms_norm", "buffer", "drop"]
    assert [str(rule.at) for rule in rules.rules] == ["r.yaml:22:3", "r.yaml:26:3", "r.yaml:30:3", "r.yaml:33:3"]
    assert rules.axes["I"].equals == (2, "P")
    assert rules.sha256 == hashlib.sha256(GOOD.encode()).hexdigest()
    assert rules.rules[0].targets["other"].path.text == "layers.{i}.{a,b}"
    assert accepted_by_schema(GOOD)


# --- one rule -------------------------------------------------------------------------------------------------------

KNOWN = "linear, conv, conv_transpose, gru, lstm, rnn, cubic_spline, linear_interpolation, embedding, layer_norm, rms_norm, group_norm, batch_norm, parameter, buffer, drop, attention"
LINEAR_KEYS = (
    "(known: linear, einsum, times, plus, choice, bias, activation, prescaled_by, rope, flattened, "
    "weight_norm, spectral_norm, normalization_epsilon, from, stacked, index_from, absent_if, optional, layer_type, dtype)"
)

# What the file says of one rule (from line 5, column 3 on), what is answered, and whether the schema can tell as well.
ONE_RULE: list[tuple[str, str, bool]] = [
    (
        "- einsum: ...D,DF->...F\n  from: w\n  linear: m\n  transpose: true",
        f"r.yaml:8:3: unknown key 'transpose' in a `linear` rule {LINEAR_KEYS}",
        True,
    ),
    (
        "- einsum: ...D,DF->...F\n  from: w\n  linear: m\n  baias: b",
        f"r.yaml:8:3: unknown key 'baias' in a `linear` rule; did you mean 'bias'? {LINEAR_KEYS}",
        True,
    ),
    (
        "- from: w\n  linear: m",
        "r.yaml:5:3: a `linear` rule needs the key 'einsum': the source's equation, X,W->Y with the weight second, or X,A,B->Y with a pair that makes it; "
        "or several, named, to be told apart by sizes",
        True,
    ),
    (
        "- einsum: ...D,DF->...F\n  linear: m",
        "r.yaml:5:3: a `linear` rule needs the key 'from': path of the source leaf (the kernel, scale or table), with {i} "
        "for an index and {a,b} for alternatives",
        True,
    ),
    (
        "- from: w\n  epsilon: 1e-6\n  rms_norm: n",
        "r.yaml:5:3: a `rms_norm` rule needs the key 'multiplies_by': what the source multiplies by: scale, 1+scale, or 1 where it has no scale; then there is no `from`, and the paths of the bias and of the statistics name the leaves",
        True,
    ),
    (
        "- from: w\n  multiplies_by: scale\n  layer_norm: n",
        "r.yaml:5:3: a `layer_norm` rule needs the key 'epsilon': added to the variance: a number, or $name of a fact",
        True,
    ),
    ("- drop: w", "r.yaml:5:3: a `drop` rule needs the key 'because': why these leaves are not wanted", True),
    (
        "- from: w\n  linear: m\n  embedding: e",
        f"r.yaml:5:3: a rule names its target with one of {KNOWN}; it has linear and embedding",
        True,
    ),
    ("- from: w", f"r.yaml:5:3: a rule names its target with one of {KNOWN}; it has none of them", True),
    (
        "- from: w\n  embeding: e",
        f"r.yaml:5:3: a rule names its target with one of {KNOWN}; it has none of them; 'embeding'; did you mean "
        "'embedding'?",
        True,
    ),
    ("- w", "r.yaml:5:3: expected a rule, found 'w'", True),
    (
        "- einsum: ...D,DF\n  from: w\n  linear: m",
        "r.yaml:5:11: '...D,DF' is not an einsum of two operands, X,W->Y with the weight second",
        False,
    ),
    ("- einsum: 5\n  from: w\n  linear: m", "r.yaml:5:11: expected an einsum such as ...D,DNH->...NH, found 5", True),
    (
        "- einsum: ...hi,hij->...hj\n  from: w\n  linear: m",
        "r.yaml:5:3: h of ...hi,hij->...hj is an axis of all three operands: the matrices are block diagonal, which a "
        "Linear cannot hold; give the target the `einsum:` of its own code, or keep them as stored with `parameter:`",
        False,
    ),
    (
        "- einsum: ...D,DF->...F\n  from: w\n  linear: m\n  activation: gelu",
        "r.yaml:8:15: expected one of relu, silu, gelu_tanh, gelu_erf, tanh, sigmoid, softplus, elu, none, found 'gelu': "
        "say which one: gelu_tanh (jax.nn.gelu's default) or gelu_erf (torch's default); they differ by up to 4.7e-4",
        True,
    ),
    (
        "- einsum: ...D,DF->...F\n  from: w\n  linear: m\n  activation: swish",
        "r.yaml:8:15: expected one of relu, silu, gelu_tanh, gelu_erf, tanh, sigmoid, softplus, elu, none, found 'swish': "
        "write silu, the same function",
        True,
    ),
    (
        "- from: w\n  multiplies_by: 1 + scale\n  epsilon: 1e-6\n  rms_norm: n",
        "r.yaml:6:18: expected one of scale, 1+scale, 1, found '1 + scale': write it without spaces: 1+scale",
        True,
    ),
    (
        "- from: w\n  multiplies_by: weight\n  epsilon: 1e-6\n  rms_norm: n",
        "r.yaml:6:18: expected one of scale, 1+scale, 1, found 'weight': in the source it is called scale",
        True,
    ),
    (
        "- from: w\n  multiplies_by: scale\n  epsilon: small\n  rms_norm: n",
        "r.yaml:7:12: expected a number or a reference to a fact such as $epsilon, not 'small'",
        False,
    ),
    (
        "- from: w\n  multiplies_by: scale\n  epsilon: $eps\n  rms_norm: n",
        "r.yaml:5:3: there is no fact 'eps' in `facts`",
        False,
    ),
    (
        "- from: w\n  multiplies_by: scale\n  epsilon: 1e-6\n  rms_norm: {module: n, multiplies_by: scale}",
        "r.yaml:8:40: expected one of weight, 1+weight, found 'scale'",
        True,  # to the schema, `module` may be the name of a target
    ),
    ("- from: w/*\n  parameter: p", "r.yaml:5:9: w/* has a wildcard; name the leaves with {i} and {a,b} "
     "(only `drop` takes wildcards)", False),
    (
        "- einsum: ...D,DF->...F\n  from: w\n  bias: b/**\n  linear: m",
        "r.yaml:7:9: b/** has a wildcard; name the leaves with {i} and {a,b} (only `drop` takes wildcards)",
        False,
    ),
    ("- from: w\n  parameter: p.*", "r.yaml:5:3: the target p.* has a wildcard", False),
    ("- from: a{\n  parameter: p", "r.yaml:5:9: 'a{' has a stray '{'; write '\\{' for the character itself", False),
    ("- from: ''\n  parameter: p", "r.yaml:5:9: a path cannot be empty", False),
    (
        "- from: 5\n  parameter: p",
        "r.yaml:5:9: expected a tree path such as layers_{i}/{query,key}/w, found 5",
        True,
    ),
    (
        '- from: w_{i}\n  parameter: p',
        "r.yaml:5:3: the source has the indices {i} and the target none; each index of the source must be in the target, "
        "or two leaves would become one tensor",
        False,
    ),
    (
        '- from: w\n  parameter: "p.{i}"',
        "r.yaml:5:3: the source has the indices none and the target {i}; each index of the source must be in the target, "
        "or two leaves would become one tensor",
        False,
    ),
    (
        '- from: w\n  stacked: {layer: 0, j: 1}\n  parameter: {torch: "p.{i}.{j}"}',
        "r.yaml:5:3: the source has the indices {j}, {layer} and the target {i}, {j} (target torch); each index of the "
        "source must be in the target, or two leaves would become one tensor",
        False,
    ),
    (
        '- from: w_{i}\n  stacked: {i: 0}\n  parameter: "p.{i}"',
        "r.yaml:5:3: i is both in the path and stacked on an axis",
        False,
    ),
    (
        '- from: w\n  stacked: {i: 0, j: 0}\n  parameter: "p.{i}.{j}"',
        "r.yaml:6:12: two indices are stacked on one axis; each has an axis of its own",
        False,
    ),
    (
        '- from: w\n  stacked: [0]\n  parameter: p',
        "r.yaml:6:12: expected a mapping of an index to the axis that stacks it, such as {i: 0}, found a list",
        True,
    ),
    (
        '- einsum: ...D,DF->...F\n  from: "w_{i}"\n  bias: b\n  linear: "m.{i}"',
        "r.yaml:7:9: `bias` must have the same indices and as many alternatives as `from`, in the same order",
        False,
    ),
    (
        '- einsum: ...D,DF->...F\n  from: "{a,b}/w"\n  bias: "{a,b,c}/b"\n  linear: m',
        "r.yaml:7:9: `bias` must have the same indices and as many alternatives as `from`, in the same order",
        False,
    ),
    (
        '- from: "{a,b}/w"\n  parameter: "{x,y,z}"',
        "r.yaml:5:3: the alternatives of {a,b}/w and {x,y,z} do not pair up: as many on both sides, or one group less on "
        "the target to fuse its members, or one more to split",
        False,
    ),
    (
        '- einsum: ...D,DF->...F\n  from: "{a,b}/{c,d}/w"\n  linear: {torch: m}',
        "r.yaml:5:3: the alternatives of {a,b}/{c,d}/w and m do not pair up (target torch): as many on both sides, or one "
        "group less on the target to fuse its members, or one more to split",
        False,
    ),
    (
        '- from: "{a,b}/w"\n  parameter: p',
        "r.yaml:5:3: {a,b}/w lists more leaves than p has tensors, and a `parameter` cannot be fused",
        False,
    ),
    (
        "- from: w\n  parameter: {troch: p}",
        "r.yaml:6:15: 'troch' is no target of this file; did you mean 'torch'? (known: torch)",
        False,
    ),
    (
        "- from: w\n  parameter: {name: p, shape: 3}",
        "r.yaml:6:24: unknown key 'shape' in a target (known: name)",
        True,
    ),
    (
        "- from: w\n  embedding: {module: p, wieght: q}",
        "r.yaml:6:26: unknown key 'wieght' in a target; did you mean 'weight'? (known: module, weight, bias, part, tied)",
        True,
    ),
    (
        "- from: w\n  axes: D2\n  parameter: p",
        "r.yaml:6:9: an axis is called by one letter, as in an einsum, not '2'",
        False,
    ),
    ("- from: w\n  axes: DD\n  parameter: p", "r.yaml:6:9: axes are letters, each once, such as ED, not 'DD'", False),
    (
        "- from: w\n  dtype: float33\n  parameter: p",
        "r.yaml:6:10: expected one of bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, bfloat16, "
        "float32, float64, complex64, complex128, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz, "
        "float8_e4m3b11fnuz, float8_e8m0fnu, int4, uint4, int2, uint2, found 'float33'; did you mean 'float32'?",
        True,
    ),
    ("- from: w\n  optional: maybe\n  parameter: p", "r.yaml:6:13: expected true or false, found 'maybe'", True),
    (
        "- from: w\n  linear: m\n  einsum: {a: '...D,DF->...F', b: '...D,FD->...F'}",
        "r.yaml:5:3: several equations need a `choice:`, the name under which --set can choose one",
        False,
    ),
    (
        "- from: w\n  linear: m\n  choice: ''\n  einsum: {a: '...D,DF->...F', b: '...D,FD->...F'}",
        "r.yaml:5:3: several equations need a `choice:`, the name under which --set can choose one",
        False,
    ),
    (
        "- from: w\n  linear: m\n  choice: c\n  einsum: ...D,DF->...F",
        "r.yaml:5:3: `choice:` goes with several named equations",
        False,
    ),
    (
        "- from: w\n  linear: m\n  choice: c\n  einsum: {a: '...D,DF->...F'}",
        "r.yaml:5:3: named equations are at least two; a single one is written without a name",
        False,
    ),
    (
        "- from: w\n  linear: m\n  choice: c\n  einsum: {}",
        "r.yaml:5:3: named equations are at least two; a single one is written without a name",
        False,
    ),
    (
        "- timescales: DD\n  buffer: b",
        "r.yaml:5:15: an axis is called by one letter, as in an einsum, not 'DD'",
        False,
    ),
    (
        "- timescales: D\n  buffer: b",
        "r.yaml:5:3: there is no fact 'min_timescale' in `facts`",
        False,
    ),
    (
        '- timescales: D\n  buffer: "b.{i}"',
        "r.yaml:5:3: b.{i} is not the name of one tensor; a `buffer` fills one",
        False,
    ),
    (
        "- timescales: D\n  buffer: b\n  from: w",
        "r.yaml:7:3: unknown key 'from' in a `buffer` rule (known: buffer, timescales, positions, layout, endpoint, when)",
        True,
    ),
    (
        '- einsum: ...i,ij->...j\n  from: "w_{i}"\n  linear: "m.{i}"',
        "r.yaml:5:3: i is an axis here and the index {i} in line 5; call the index otherwise, such as {layer}",
        False,
    ),
    (
        '- from: v\n  axes: Ei\n  parameter: q\n- from: "w"\n  stacked: {i: 0}\n  parameter: "p.{i}"',
        "r.yaml:5:3: i is an axis here and the index {i} in line 8; call the index otherwise, such as {layer}",
        False,
    ),
    (
        "- &a\n  einsum: {x: '...D,DF->...F', y: '...D,FD->...F'}\n  from: w\n  linear: m\n  choice: c\n"
        "- einsum: {x: '...D,DF->...F', z: '...D,FD->...F'}\n  from: v\n  linear: n\n  choice: c",
        "r.yaml:10:3: 'c' chooses among x, z here and among x, y in line 5; name them alike, or give one of the two "
        "another name",
        False,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "message", "structural"), ONE_RULE)
def test_errors_of_one_rule(rules: str, message: str, structural: bool) -> None:
    with pytest.raises(RuleError) as refused:
        rule_file(rules)
    assert str(refused.value) == message
    text = f"model: m\ntitle: M\ntargets: {{torch: {{loads: T}}}}\nrules:\n{rules}\n"
    assert accepted_by_schema(text) != structural


# --- the file -------------------------------------------------------------------------------------------------------

FILE_KEYS = "(known: model, family, title, reference, root, leaf_names, path_variants, axes, facts, sidecar, must_divide, needs_confirmation, layer_types, versions, targets, rules)"

WHOLE_FILE: list[tuple[str, str, bool]] = [
    ("- a", "r.yaml:1:1: expected a rule file, found a list", True),
    ("just text", "r.yaml:1:1: expected a rule file, found 'just text'", True),
    ("model: m", "r.yaml:1:1: a rule file needs the key 'title': the model's name, for people", True),
    (edited(("title: M", "titel: M")), f"r.yaml:2:1: unknown key 'titel' in a rule file; did you mean 'title'? {FILE_KEYS}", True),
    (edited(("title: M\n", "title: M\ntitle: N\n")), "r.yaml:3:1: the key 'title' stands twice in one mapping (first in line 2); remove one", False),
    (edited(("model: m", "model: 2.5")), "r.yaml:1:8: expected a name, found 2.5", True),
    (edited(("D: {is: width}", "D: width")), "r.yaml:4:6: expected an axis, found 'width'", True),
    (edited(("D: {is: width}", "D: {is: width, equal: 3}")), "r.yaml:4:18: unknown key 'equal' in an axis; did you mean 'equals'? (known: is, equals)", True),
    (edited(("D: {is: width}", "2D: {is: width}")), "r.yaml:4:3: an axis is called by a letter (or an index by its name), not '2D'", False),
    (edited(("2*P", "2+P")), "r.yaml:5:26: expected a product of integers and letters such as 2*P, not '2+P'", False),
    (edited(("2*P", "0*P")), "r.yaml:5:26: expected a product of integers and letters such as 2*P, not '0*P'", False),
    (edited(("2*P", "2*")), "r.yaml:5:26: expected a product of integers and letters such as 2*P, not '2*'", False),
    (edited(("2*P", "2.5")), "r.yaml:5:26: expected a product such as 2*P, found 2.5", True),
    (edited(("2*P", "2*Q")), "r.yaml:5:6: I equals a product with Q, which `axes` does not declare", False),
    (edited(("sizes: {D: 8}", "sizes: {D: eight}")), "r.yaml:14:16: expected an integer, found 'eight'", True),
    (edited(("sizes: {D: 8}", "sizes: {W: 8}")), "r.yaml:13:3: version small has a size of 'W', which `axes` does not declare", False),
    (edited(("    sizes: {D: 8}\n", "")), "r.yaml:14:5: a version needs the key 'sizes': sizes by which the published model is recognised", True),
    (edited(("facts: {rope: true}", "facts: {roop: true}")), "r.yaml:13:3: version small sets 'roop', which `facts` does not declare", False),
    (edited(("epsilon: 1e-6", "epsilonn: 1e-6")), "r.yaml:26:3: there is no fact 'epsilon' in `facts`; did you mean 'epsilonn'?", False),
    (edited(("when: rope", "when: rop")), "r.yaml:30:3: there is no fact 'rop' in `facts`; did you mean 'rope'?", False),
    (edited(("width: $D", "width: $Depth")), "r.yaml:19:5: config refers to $Depth, which is in neither `facts` nor `axes`", False),
    (edited(("[$epsilon]", "{a: [$epsilom]}")), "r.yaml:19:5: config refers to $epsilom, which is in neither `facts` nor `axes`; did you mean 'epsilon'?", False),
    (edited(("torch: {loads: T}", "torch: {}")), "r.yaml:17:10: a target needs the key 'loads': the class that loads the result", True),
    ("model: m\ntitle: M\ntargets: {}\nrules: [{drop: x, because: y}]", "r.yaml:3:10: a rule file needs at least one target", False),
    ("model: m\ntitle: M\ntargets: {t: {loads: T}}\nrules: []", "r.yaml:4:8: a rule file needs at least one rule", False),
    ("model: m\ntitle: M\ntargets: {t: {loads: T}}\nrules: {a: b}", "r.yaml:4:8: expected a list, found a mapping", True),
    ("model: m\ntitle: M\ntargets: {t: {loads: T}}\nrules:\n", "r.yaml:4:7: expected a list, found None", True),
    ("model: m\ntitle: M\nroot: [1]\ntargets: {t: {loads: T}}\nrules: []", "r.yaml:3:8: expected a path, found 1", True),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message", "structural"), WHOLE_FILE)
def test_errors_of_a_file(text: str, message: str, structural: bool) -> None:
    assert refusal(text) == message
    try:
        told_by_schema = not accepted_by_schema(text)
    except RuleError:  # not even a document
        return
    assert told_by_schema == structural


def test_an_empty_file_and_no_yaml() -> None:
    assert refusal("") == "r.yaml: the file is empty; see `convert rules show timesfm-2.5` for an example"
    assert refusal("{") == "r.yaml:1:2: not YAML: did not find expected node content, at the end of the file"


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


def test_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_files_fit_the_schema_and_load(path: Path) -> None:
    VALIDATOR.validate(load_yaml(path.read_text(), path.name).plain())
    models = load_models(path)
    assert path.stem in (models[0].model, models[0].family)
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
            if key not in ("facts", "config", "generation"):
                found += places(child, (*path, key))
    elif isinstance(value, list):
        for k, child in enumerate(value):
            found += places(child, (*path, k))
    return found


FREE = tuple(
    (word,)
    for word in (
        "axes",
        "layer_types",
        "leaves",
        "path_variants",
        "models",
        "versions",
        "targets",
        "sizes",
        "rename_prefixes",
        "stacked",
        "supported",
        "index_from",
        "einsum",
        "requires",
        "must_divide",
        "needs_confirmation",
        *KINDS,
    )
)


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
    mutation = data.draw(st.sampled_from(["unknown", "wrong type"]))
    if mutation == "unknown":
        target[data.draw(st.sampled_from(["transpose", "permute", "einsums", "x"]))] = "DN"
    else:
        any_number = {"epsilon", "prescaled_by"} | ({"is"} if "requires" in where else set())
        target[data.draw(st.sampled_from(sorted(set(target) - any_number)))] = 3.5
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
    with pytest.raises(RuleError) as refused:
        find_rules("timesfn-1", tmp_path)
    assert str(refused.value) == (
        "there are no rules called 'timesfn-1'; did you mean 'timesfm-1'? (known: bert, bert_answers, bert_classification, bert_masked_lm, bert_model, bert_pretraining, bert_tokens, gemma, gemma1, gemma2, gemma3, gemma3_vision, gpt2, gpt2_lm, gpt2_lm_untied, gpt2_model, m, maxtext, maxtext-gemma2, maxtext-gemma3, maxtext-llama3, maxtext-llama3.1, paligemma1, paligemma2, recurrentgemma, siglip, t5, t5_encoder, t5_tied, t5_untied, timesfm, "
        "timesfm-1, timesfm-2.5, whisper; a file of your own is given by its path, such as ./my-model.yaml)"
    )


def test_only_the_files_that_are_meant_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(text: str, called: str) -> tuple[RuleFile, ...]:
        parsed.append(Path(called).name)
        return parse_models(text, called)

    monkeypatch.setattr("convert.rules.library.parse_models", parse)
    library._parsed.cache_clear()
    every = {rules.model: (Path(rules.path).name, rules.family) for rules in available_rules()}
    assert len(parsed) == len(set(parsed)) == len({file for file, _ in every.values()})
    for name in {*every, *(family for _, family in every.values() if family)}:
        library._parsed.cache_clear()
        parsed.clear()
        assert {r.model for r in find_rules(name)} == {m for m, (_, f) in every.items() if name in (m, f)}
        meant = {file for model, (file, family) in every.items() if name in (model, family)}
        assert set(parsed) == meant if name in ("gemma", "timesfm") else set(parsed) >= meant
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
        "rules/recurrentgemma.yaml",
        "rules/siglip.yaml",
        "rules/timesfm-2.5.yaml",
        "rules/whisper.yaml",
    ]
    with pytest.raises(RuleError) as refused:
        available_rules(tmp_path / "x.yaml")
    assert str(refused.value) == (
        f"{tmp_path}/x.yaml: --rules takes a directory of rule files; a single file is given in place of MODEL"
    )


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
        assert str(refused.value) == f"--set takes key=value, not {pair!r}"


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
    assert "r.yaml:6: theta is 1.0, and T computes with 2.0: it is fixed. Take another target: --to other" in str(
        refused.value
    )
    assert make_plan(rules, source, settings={"theta": 2.0}).config_notes == ()
    assert make_plan(rules, source, to="other").config_notes == ("no tree tells it",)
    with pytest.raises(
        ConvertError, match="word says what the source computes \\(fast\\), and nothing that is written"
    ):
        make_plan(rules, source, settings={"theta": 2.0, "word": "slow"})
    for old, new in (
        ("needs_confirmation: {theta", "needs_confirmation: {thetta"),
        ("requires: {theta", "requires: {thetta"),
    ):
        with pytest.raises(RuleError, match="speaks of 'thetta', which is no fact of `facts`; did you mean 'theta'"):
            rule_file("- from: w\n  parameter: w", head.replace(old, new))


def test_what_divides_a_size() -> None:
    head = "model: m\ntitle: M\naxes: {D: {is: model width}}\nfacts: {heads: ask}\nmust_divide: {heads: D}\ntargets: {torch: {loads: T}}\n"
    rules, source = rule_file("- {from: w, axes: D, parameter: w}", head), MemorySource({"w": np.ones(12, np.float32)})
    assert make_plan(rules, source).settings == {}, "unknown: the configuration asks for it"
    assert make_plan(rules, source, settings={"heads": 3}).facts == {"heads": 3}
    said = "and the tree has D = 12 (model width), which"
    for heads, why in ((5, "does not divide by 5"), (0, "divides by a whole number above 0 alone"), (True, "divides by a whole number above 0 alone")):  # fmt: skip
        with pytest.raises(ConvertError) as refused:
            make_plan(rules, source, settings={"heads": heads})
        assert f"--set heads={heads} says {heads}, {said} {why}; one of the two is of another checkpoint" in str(refused.value)  # fmt: skip
    written = rule_file("- {from: w, axes: D, parameter: w}", head.replace("ask", "7"))
    with pytest.raises(ConvertError, match=f"r.yaml: heads is 7, {re.escape(said)} does not divide by 7"):
        make_plan(written, source)
    with pytest.raises(RuleError, match="`must_divide` speaks of 'hheads', which is no fact of `facts`; did you mean 'heads'"):  # fmt: skip
        rule_file("- {from: w, axes: D, parameter: w}", head.replace("must_divide: {heads", "must_divide: {hheads"))
    with pytest.raises(RuleError, match=r"r.yaml:5:14: `must_divide` speaks of E, which `axes` does not declare"):
        rule_file("- {from: w, axes: D, parameter: w}", head.replace("heads: D", "heads: E"))


@pytest.mark.parametrize("digits", ["1" + 400 * "0", "-1" + 400 * "0", 3_999 * "9"])
def test_a_number_beyond_all_measure_is_none(digits: str) -> None:
    text = f"model: m\ntitle: M\ntargets: {{torch: {{loads: x.M}}}}\nrules:\n- from: s\n  multiplies_by: scale\n  epsilon: {digits}\n  rms_norm: n\n"
    with pytest.raises(RuleError, match=r"^r.yaml:\d+:\d+: "):
        parse_models(text, "r.yaml")
