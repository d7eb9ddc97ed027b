"""Rule files as text: YAML with positions, hostile files refused quickly, and every error of the field declarations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import RuleError, load_rules
from convert.core.fields import (
    FLAG,
    INTEGER,
    TEXT,
    Anything,
    Choice,
    Either,
    Field,
    Key,
    ListOf,
    MapOf,
    Record,
    Scalar,
)
from convert.core.yaml_nodes import MAX_DEPTH, MAX_VALUES, Position, YamlNode, load_yaml, parse_scalar, read_text
from support.effort import calls_at_most
from support.paths import ROOT

LIMIT = 200_000  # calls; the most that one of the files takes is 86,000
NUMBER = Scalar((float, int), "a number", float)


@contextmanager
def rejected(code: str, at: str, *words: str) -> Iterator[None]:
    """Expect one finding with this code and position, whose text has these words."""
    with pytest.raises(RuleError) as error:
        yield
    (finding,) = error.value.findings
    assert (finding.code, finding.rule) == (code, at)
    assert all(word in str(finding) for word in words), finding


# --- YAML -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["libyaml", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once with libyaml, once as where PyYAML was built without it."""
    if request.param == "python":
        monkeypatch.delattr(yaml, "CSafeLoader")
    return str(request.param)


def test_nodes_remember_where_they_stand() -> None:
    node = load_yaml("a: 1\nb:\n  - x\n  - {c: 'd'}\n", "f.yaml")
    assert str(node.at) == "f.yaml:1:1"
    assert node.keys_at == {"a": Position("f.yaml", 1, 1), "b": Position("f.yaml", 2, 1)}
    inner = node.value["b"].value[1]
    assert str(inner.at) == "f.yaml:4:5"
    assert inner.value["c"].at == Position("f.yaml", 4, 9)
    assert inner.at.line_only == "f.yaml:4"
    assert node.plain() == {"a": 1, "b": ["x", {"c": "d"}]}
    assert [str(n) for n in (node, node.value["b"], node.value["a"], inner.value["c"])] == [
        "a mapping",
        "a list",
        "1",
        "'d'",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-12", -12),
        ("+3", 3),
        ("1.5", 1.5),
        ("1e-6", 1e-6),  # a string to YAML 1.1
        ("-.5E+3", -500.0),
        ("1.", 1.0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),  # a bool to YAML 1.1
        ("on", "on"),
        ("no", "no"),
        ("1:30", "1:30"),  # a number of base 60 to YAML 1.1
        ("1_000", "1_000"),
        ("1.2.3", "1.2.3"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("2*P", "2*P"),
        ("1e999", "1e999"),  # infinite, which JSON cannot hold
        ("9" * 5000, "9" * 5000),  # Python refuses to read such a number
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = load_yaml(f"k: {text}", "f").value["k"].value
    assert (found, type(found)) == (value, type(value))
    if not text.startswith(("'", '"')):
        assert parse_scalar(f" {text} ") == value


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ("rule-file-empty", "f", "convert rules show")),
        ("# only a comment\n", ("rule-file-empty", "f", "convert rules show")),
        ("a: 1\nb: 2\na: 3\n", ("rule-duplicate-key", "f:3:1", "'a'", "line 1")),
        ("x: {a: 1, 'a': 2}", ("rule-duplicate-key", "f:1:11", "'a'", "line 1")),
        ("? [a]\n: 1", ("rule-wrong-value", "f:1:3", "plain word", "a list")),
        ("? {a: 1}\n: 1", ("rule-wrong-value", "f:1:3", "plain word", "a mapping")),
        ("a: [1", ("rule-not-yaml", "f:1:6", "at the end of the file")),
        ("a: b: c", ("rule-not-yaml", "f:1:5", "at ':'")),
        ("a:\n\t- b", ("rule-not-yaml", "f:2:1", "at '\\t'")),
        ("a: 'x", ("rule-not-yaml", "f:1:6", "at the end of the file")),
        ("a: !own!word x", ("rule-not-yaml", "f:1:4", "at '!'")),
        ("a: 1\nä: \x00", ("rule-not-yaml", "f:2:4", "at '\\x00'")),
    ],
)
def test_what_is_not_yaml(text: str, error: tuple[str, ...]) -> None:
    with rejected(*error):
        load_yaml(text, "f")


@pytest.mark.parametrize(
    ("line", "column", "quoted"),
    [
        ("linear: {i}", 9, 'linear: "{i}"'),
        ("  linear: {q,k}.{i}  # of torch", 11, 'linear: "{q,k}.{i}"'),
        ("- from: {i}/kernel", 9, 'from: "{i}/kernel"'),
        ("- {einsum: x, from: l/{a,b}/kernel, linear: m}", 23, 'from: "l/{a,b}/kernel"'),
        ("  bias: {path: l/{i}/bias, optional: true}", 18, 'path: "l/{i}/bias"'),
        ("from: **/kernel", 8, 'from: "**/kernel"'),
        ("from: *", 8, 'from: "*"'),
        ("from: @w", 7, 'from: "@w"'),
    ],
)
def test_a_value_that_needs_quotes(line: str, column: int, quoted: str) -> None:
    """A value with the special characters of YAML: the error has the value with quotes, and with these it is YAML."""
    with rejected("rule-not-yaml", f"f:1:{column}", f"quote it: {quoted}"):
        load_yaml(f"{line}\n", "f")


@pytest.mark.parametrize("line", ["a: {i: 0", "a: [b/{i}, c", "a: {x: 1} y", "a: 'x", 'a: "{i}" y'])
def test_quotes_are_not_suggested_for_other_mistakes(line: str) -> None:
    with pytest.raises(RuleError) as refused:
        load_yaml(line, "f")
    assert refused.value.findings[0].fix == ""


def test_braces_of_mappings_stay() -> None:
    assert load_yaml("a: {i: 0}\nb: {}\nc: {x: null}\nd: {y: ~}\ne:\n  f:\n", "f").plain() == {
        "a": {"i": 0}, "b": {}, "c": {"x": None}, "d": {"y": None}, "e": {"f": None},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: *nope", ("rule-not-yaml", "f:1:4", "undefined alias 'nope'")),
        ("a: [*b, &b 1]", ("rule-not-yaml", "f:1:5", "undefined alias 'b'")),
        ("a: 1\n---\nb: 2", ("rule-not-yaml", "f:2:1", "a second document")),
        ("%YAML 1.3\n---\na: 1", ("rule-not-yaml", "f:1:1", "at '%'")),
        (
            "\ufeffa: 1\nb: x\u2028c: 2",
            ("rule-not-yaml", "f:2:5", "in double quotes"),
        ),
    ],
)
def test_what_is_no_rule_file(text: str, error: tuple[str, ...], reader: str) -> None:
    with rejected(*error):
        load_yaml(text, "f")


def nested(levels: int, value: str = "x") -> str:
    return "[" * levels + value + "]" * levels


def laughs(levels: int, width: int = 9) -> str:
    """The 'billion laughs': a few lines whose aliases spell out ``width ** levels`` values."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * width)}]" for k in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (laughs(30), ("rule-too-large", "f", "100000 values")),
        (
            f"a: &a [{', '.join('x' * 400)}]\nb: [{', '.join(['*a'] * 300)}]",
            ("rule-too-large", "f", "100000 values"),
        ),
        ("a: &a [*a, *a, *a]", ("rule-not-yaml", "f:1:8", "'a'", "line 1")),
        ("a: &a\n  b: [c, *a]", ("rule-not-yaml", "f:2:10", "'a'", "line 1")),
        ("[" * 40 + "]" * 40, ("rule-too-large", "f:1:34", "32 levels")),
        ("{a: " * 40 + "1" + "}" * 40, ("rule-too-large", "f:1:133", "32 levels")),
        ("[" * 100_000, ("rule-too-large", "f:1:34", "32 levels")),
        ("{a: " * 100_000, ("rule-too-large", "f:1:133", "32 levels")),
        ("\n".join(" " * k + "a:" for k in range(2000)), ("rule-too-large", "f:34:34", "32 levels")),
        (f"- &a {nested(20)}\n- {nested(13, '*a')}", ("rule-too-large", "f:2:16", "32 levels")),
    ],
    ids=[
        "laughs",
        "many",
        "self-list",
        "self-mapping",
        "lists",
        "mappings",
        "open-lists",
        "open-mappings",
        "block",
        "two",
    ],
)
def test_hostile_files_are_refused_quickly(text: str, error: tuple[str, ...], reader: str) -> None:
    with calls_at_most(LIMIT), rejected(*error):  # without the limit of values the first would take 9**30 calls
        load_yaml(text, "f")


def test_as_deep_as_may_be(reader: str) -> None:
    load_yaml(nested(MAX_DEPTH), "f")
    load_yaml(f"- &a {nested(20)}\n- {nested(11, '*a')}", "f")


@pytest.mark.slow
def test_as_many_values_as_may_be() -> None:
    """With libyaml only, as PyYAML takes seconds for a file of this size."""
    assert len(load_yaml(f"[{'x,' * (MAX_VALUES - 1)}]", "f").value) == MAX_VALUES - 1
    with rejected("rule-too-large", "f", f"{MAX_VALUES} values"):
        load_yaml(f"[{'x,' * MAX_VALUES}]", "f")


def test_aliases_are_fine_in_moderation(reader: str) -> None:
    assert load_yaml("a: &x {k: [1]}\nb: *x\nc: &x 2\nd: *x", "f").plain() == {
        "a": {"k": [1]},
        "b": {"k": [1]},
        "c": 2,
        "d": 2,
    }
    assert load_yaml(laughs(4), "f").plain()["a3"][0][0][0] == ["x"]
    again = load_yaml("&k 10: &b [&b 2, *b]\nx: {*k : *b}", "f")  # a name that is given twice, and one of a key
    assert again.plain() == {"10": [2, 2], "x": {"10": 2}}
    assert again.value["x"].value["10"].at == Position("f", 1, 12)  # where the value is written


def test_tags_construct_nothing(reader: str) -> None:
    assert load_yaml("a: !!python/object/apply:os.system ['false']", "f").plain() == {"a": ["false"]}
    assert load_yaml("%TAG !o! tag:o,1:\n---\n!o!x {!!str a: !!int x, b: !!str 1, c: !y }", "f").plain() == {
        "a": "x",
        "b": 1,
        "c": None,
    }


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("title: Zürich".encode("latin-1"))
    with rejected("rule-file-unreadable", "name", "UTF-8"):
        read_text(latin, "name")
    with rejected("rule-file-unreadable", str(tmp_path), "Is a directory"):
        load_rules(tmp_path)
    with rejected("file-not-found", f"{tmp_path}/none.yaml", "there is no such rule file", "convert rules new"):
        load_rules(tmp_path / "none.yaml")
    with rejected("rule-file-unreadable", str(latin), "UTF-8"):
        load_rules(latin)


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    node = load_yaml(read_text(path, "r"), "r")
    assert node.plain() == {"a": 1, "b": "x"}
    assert node.value["b"].at == Position("r", 2, 4)


SHIPPED = sorted((ROOT / "rules").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_libyaml_and_python_read_alike(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_libyaml = load_yaml(path.read_text(), "f")
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert load_yaml(path.read_text(), "f") == by_libyaml  # with every position


WORD = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORD, inner, max_size=4),
    max_leaves=20,
)


def keys_of(node: YamlNode) -> Iterator[tuple[str, Position]]:
    yield from (node.keys_at or {}).items()
    for child in node.value.values() if node.is_mapping else node.value if isinstance(node.value, tuple) else ():
        yield from keys_of(child)


@pytest.mark.slow
@given(VALUES, st.sampled_from([None, 0, 2]))
@settings(deadline=None)
def test_json_is_yaml(value: Any, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    node = load_yaml(text, "f")
    assert json.dumps(node.plain()) == json.dumps(value)  # which tells 1 from True
    lines = text.split("\n")
    for key, at in keys_of(node):
        assert lines[at.line - 1][at.column - 1 :].startswith(json.dumps(key, ensure_ascii=False))


@given(st.text(max_size=40))
@settings(deadline=None)
def test_any_text_is_a_node_or_a_rule_error(text: str) -> None:
    try:
        assert isinstance(load_yaml(text, "f"), YamlNode)
    except RuleError as error:
        assert str(error).startswith("f:")


# --- fields ---------------------------------------------------------------------------------------------------------

POINT = Record({"x": Key(INTEGER, "how far", required=True, example="2"), "word": Key(TEXT, "a word")}, "a point")


def parse_even(value: int) -> int:
    if value % 2:
        raise ValueError(f"{value} is odd")
    return value


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        (TEXT, "x", "x"),
        (NUMBER, "1", 1.0),
        (NUMBER, "1e-6", 1e-6),
        (INTEGER, "-3", -3),
        (FLAG, "true", True),
        (Scalar(int, "an even number", parse_even), "4", 4),
        (Choice(("a", "b")), "b", "b"),
        (Anything(), "{a: [1, x]}", {"a": [1, "x"]}),
        (ListOf(INTEGER), "[1, 2]", (1, 2)),
        (ListOf(INTEGER, or_one=True), "1", (1,)),
        (MapOf(INTEGER), "{a: 1}", {"a": 1}),
        (Either(TEXT, POINT), "x", "x"),
        (Either(TEXT, POINT), "{x: 1}", {"x": 1}),
        (POINT, "{word: hi, x: 1}", {"word": "hi", "x": 1}),
    ],
)
def test_fields_read(field: Field, text: str, value: object) -> None:
    node = load_yaml(f"k: {text}", "f").value["k"]
    assert field.read(node) == value
    jsonschema.validate(node.plain(), field.schema(), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("field", "text", "error"),
    [
        (TEXT, "1", ("rule-wrong-value", "f:1:4", "expected text, got 1")),
        (TEXT, "[a]", ("rule-wrong-value", "f:1:4", "expected text, got a list")),
        (NUMBER, "true", ("rule-wrong-value", "f:1:4", "expected a number, got True")),
        (NUMBER, "abc", ("rule-wrong-value", "f:1:4", "expected a number, got 'abc'")),
        (INTEGER, "1.5", ("rule-wrong-value", "f:1:4", "expected an integer, got 1.5")),
        (INTEGER, "'1'", ("rule-wrong-value", "f:1:4", "expected an integer, got '1'")),
        (FLAG, "yes", ("rule-wrong-value", "f:1:4", "expected true or false, got 'yes'")),
        (FLAG, "1", ("rule-wrong-value", "f:1:4", "expected true or false, got 1")),
        (
            Choice(("left", "right")),
            "lefft",
            ("rule-wrong-value", "f:1:4", "expected one of left, right, got 'lefft'", "did you mean 'left'?"),
        ),
        (Choice(("left", "right")), "7", ("rule-wrong-value", "f:1:4", "expected one of left, right, got 7")),
        (Choice(("left", "right")), "[left]", ("rule-wrong-value", "f:1:4", "expected one of left, right, got a list")),
        (ListOf(INTEGER), "1", ("rule-wrong-value", "f:1:4", "expected a list, got 1")),
        (ListOf(INTEGER), "[1, x]", ("rule-wrong-value", "f:1:8", "expected an integer, got 'x'")),
        (
            MapOf(INTEGER, "a mapping of letters"),
            "1",
            ("rule-wrong-value", "f:1:4", "expected a mapping of letters, got 1"),
        ),
        (MapOf(INTEGER), "{a: x}", ("rule-wrong-value", "f:1:8", "expected an integer, got 'x'")),
        (POINT, "x", ("rule-wrong-value", "f:1:4", "expected a point, got 'x'")),
        (POINT, "{word: hi}", ("rule-missing-key", "f:1:4", "'x'", "add `x:`, such as `x: 2`")),
        (
            POINT,
            "{x: 1, wrod: hi}",
            ("rule-unknown-key", "f:1:11", "'wrod'", "x, word", "did you mean 'word'?"),
        ),
        (POINT, "{x: 1, zzz: hi}", ("rule-unknown-key", "f:1:11", "'zzz'", "x, word")),
    ],
)
def test_fields_refuse(field: Field, text: str, error: tuple[str, ...]) -> None:
    node = load_yaml(f"k: {text}", "f").value["k"]
    with rejected(*error):
        field.read(node)
    with pytest.raises(jsonschema.ValidationError):  # an editor shows it, too
        jsonschema.validate(node.plain(), field.schema(), cls=jsonschema.Draft202012Validator)


def test_fields_refuse_what_only_code_can_tell() -> None:
    with rejected("rule-wrong-value", "f:1:4", "3 is odd"):
        Scalar(int, "an even number", parse_even).read(load_yaml("k: 3", "f").value["k"])
    with rejected("rule-wrong-value", "f:1:5", "'b' is no key"):
        MapOf(INTEGER, key=key_a).read(load_yaml("k: {b: 1}", "f").value["k"])
    hinted = Choice(("a",), (("b", "b was renamed to a"),))
    with rejected("rule-wrong-value", "f:1:4", "expected one of a, got 'b'", "b was renamed to a"):
        hinted.read(load_yaml("k: b", "f").value["k"])


def key_a(text: str) -> None:
    if text != "a":
        raise ValueError(f"{text!r} is no key")


def test_all_problems_of_a_value_are_reported_at_once() -> None:
    pair = Record({"first": Key(POINT, "one"), "points": Key(ListOf(POINT), "more")}, "a pair")
    node = load_yaml("first: {x: a, wrd: b}\npoints: [{x: 1}, {}, 3]\nthird: 1", "f")
    with pytest.raises(RuleError) as error:
        pair.read(node)
    assert [(finding.code, finding.rule) for finding in error.value.findings] == [
        ("rule-unknown-key", "f:3:1"),
        ("rule-unknown-key", "f:1:15"),
        ("rule-wrong-value", "f:1:12"),
        ("rule-missing-key", "f:2:18"),
        ("rule-wrong-value", "f:2:22"),
    ]
    assert str(error.value).startswith("The rules have 5 problems:")


def test_a_misspelt_key_is_not_reported_as_missing_as_well() -> None:
    record = Record({"title": Key(TEXT, "a title", required=True)}, "a file")
    with rejected("rule-unknown-key", "f:1:1", "did you mean 'title'?"):
        record.read(load_yaml("titel: x", "f"))
