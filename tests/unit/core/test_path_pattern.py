"""Patterns for tree paths: what they match, that `fill` undoes `match`, and the words of every error."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.core.path_pattern import Match, Pattern, _search, parse_pattern
from support.effort import calls_at_most

SPECIAL = "{}*\\"


def escaped(text: str) -> str:
    return "".join("\\" + c if c in SPECIAL else c for c in text)


# --- fill and match -------------------------------------------------------------------------------------------------

keys = st.text("abz.-_ {}*\\é漢", min_size=1, max_size=5)
words = st.lists(st.text("qkv._,*\\{}", max_size=4), min_size=2, max_size=4, unique=True)


@st.composite
def patterns(draw: st.DrawFn) -> tuple[str, dict[str, int], tuple[int, ...], str]:
    """A pattern, values for its indices and choices, and the path that they make, built without `fill`."""
    text, path = "", ""
    indices: dict[str, int] = {}
    choices: list[int] = []
    for k in range(draw(st.integers(1, 5))):
        lead = ("/" if k else "") + draw(st.sampled_from(["a_", "x.", "-"]))  # keeps neighbours apart
        kind = draw(st.sampled_from(["text", "index", "again", "words"]))
        if kind == "text":
            key = draw(keys)
            text, path = text + lead + escaped(key), path + lead + key
        elif kind == "words":
            group = [w.strip() for w in draw(words)]
            if len(set(group)) < len(group):
                continue
            choices.append(draw(st.integers(0, len(group) - 1)))
            inside = ",".join("".join("\\" + c if c in SPECIAL + "," else c for c in w) for w in group)
            text, path = text + lead + "{" + inside + "}/", path + lead + group[choices[-1]] + "/"
        else:
            name = draw(st.sampled_from(list(indices) if kind == "again" and indices else ["i", "j", "layer", "_0"]))
            value = indices.setdefault(name, draw(st.integers(0, 10**18 - 1)))
            text, path = text + lead + f"{{{name}}}", path + lead + str(value)
    return text or "x", indices, tuple(choices), path or "x"


@given(patterns())
def test_fill_and_match_undo_each_other(case: tuple[str, dict[str, int], tuple[int, ...], str]) -> None:
    text, indices, choices, path = case
    pattern = parse_pattern(text)
    assert str(pattern) == text
    assert set(pattern.indices) == set(indices)
    assert len(pattern.groups) == len(choices)
    assert pattern.fill(indices, choices) == path
    match = pattern.match(path)
    assert match is not None
    assert dict(match.indices) == indices
    assert pattern.fill(dict(match.indices), match.choices) == path
    assert match.choices == choices
    assert choices in list(pattern.all_choices())
    assert pattern.match(path + "x") is None and pattern.match("x" + path) is None  # the whole path, not a part


@given(patterns(), st.data())
def test_fill_each_is_fill_for_each(
    case: tuple[str, dict[str, int], tuple[int, ...], str], data: st.DataObject
) -> None:
    text, indices, choices, _ = case
    pattern = parse_pattern(text + "/50%/{E:up,100%}/{k+3}")
    indices = {**indices, "E": 1, "k": 4}
    names = data.draw(st.lists(st.sampled_from(sorted(indices)), unique=True))
    elements = data.draw(st.lists(st.tuples(*[st.integers(0, 1) for _ in names]), max_size=3))
    each = [pattern.fill({**indices, **dict(zip(names, element, strict=True))}, choices) for element in elements]
    assert pattern.fill_each(indices, names, elements, choices) == each


@pytest.mark.slow
@given(st.text(max_size=12))
def test_any_text_is_a_pattern_or_a_value_error(text: str) -> None:
    try:
        pattern = parse_pattern(text)
    except ValueError:
        return
    pattern.match(text)  # builds the regular expression


@given(keys)
def test_escaped_text_matches_itself_alone(text: str) -> None:
    pattern = parse_pattern(escaped(text))
    assert pattern.match(text) == Match((), ())
    assert not pattern.wild
    assert pattern.match(text + "/value") is None


def test_the_fill_property_sees_an_unescaped_star() -> None:
    assert parse_pattern("a*").match("ab") == Match((), ())
    assert parse_pattern("a\\*").match("ab") is None
    assert parse_pattern("a\\*").match("a*") == Match((), ())


# --- single cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "match"),
    [
        ("x_layers_{i}/w", "x_layers_10/w", Match((("i", 10),), ())),
        ("x_layers_{i}/w", "x_layers_/w", None),
        ("x_layers_{i}/w", "x_layers_-1/w", None),
        ("x_layers_{i}/w", "x_layers_1a/w", None),
        ("x_layers_{i}/w", "x_layers_1/w/value", None),
        ("x_layers_{i}/w", "x_layers_\u0661/w", None),  # an Arabic digit is a digit to Python
        ("x_layers_{i}/w", "x_layers_" + "1" * 5000 + "/w", None),  # Python refuses to read this number
        ("a.{i}", "a.007", Match((("i", 7),), ())),
        ("{i}/{i}", "3/3", Match((("i", 3),), ())),
        ("{i}/{i}", "3/4", None),
        ("{i}/{j}/{i}", "3/4/3", Match((("i", 3), ("j", 4)), ())),
        ("{q,k,v}/w", "k/w", Match((), (1,))),
        ("{ q , k }/w", "k/w", Match((), (1,))),
        ("{q,k}/{a,b}", "k/a", Match((), (1, 0))),
        ("{,pre_}norm", "norm", Match((), (0,))),
        ("{,pre_}norm", "pre_norm", Match((), (1,))),
        ("{a,ab}c", "abc", Match((), (1,))),
        ("a.b/c", "a.b/c", Match((), ())),
        ("a.b/c", "axb/c", None),
        ("(a|b)+[c]$", "(a|b)+[c]$", Match((), ())),
        ("*/w", "a/w", Match((), ())),
        ("*/w", "a/b/w", None),
        ("**/w", "a/b/w", Match((), ())),
        ("opt/**", "opt/a.b/0/c", Match((), ())),
        ("opt/**", "opt", None),
        ("**", "", Match((), ())),
        ("a\\{i\\}", "a{i}", Match((), ())),
        ("a\\\\b", "a\\b", Match((), ())),
        ("{a\\,b,c}", "a,b", Match((), (0,))),
        ("{a\\*,\\{i\\}}", "{i}", Match((), (1,))),
        ("line\nbreak/**", "line\nbreak/x\ny", Match((), ())),
        ("{_0}/{a,b}", "5/b", Match((("_0", 5),), (1,))),  # not to be mixed up with a group of the regular expression
        ("{g_0}/{a,b}", "5/b", Match((("g_0", 5),), (1,))),
    ],
)
def test_match(pattern: str, path: str, match: Match | None) -> None:
    assert parse_pattern(pattern).match(path) == match


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a path cannot be empty"),
        ("a{", "'a{' has a stray '{'; write '\\{' for the character itself"),
        ("a}", "'a}' has a stray '}'; write '\\}' for the character itself"),
        ("a\\", "'a\\\\' has a stray '\\'; write '\\\\' for the character itself"),
        ("{a{i}}", "'{a{i}}' has a stray '{'; write '\\{' for the character itself"),
        ("a/{}", "{} in 'a/{}' is neither an index such as {i} nor alternatives such as {a,b}"),
        ("a/{0}", "{0} in 'a/{0}' is neither an index such as {i} nor alternatives such as {a,b}"),
        ("a/{i j}", "{i j} in 'a/{i j}' is neither an index such as {i} nor alternatives such as {a,b}"),
        ("a/{é}", "{é} in 'a/{é}' is neither an index such as {i} nor alternatives such as {a,b}"),
        ("a/{a\\,b}", "{a\\,b} in 'a/{a\\\\,b}' is neither an index such as {i} nor alternatives such as {a,b}"),
        ("{q, q }", "{q, q } in '{q, q }' lists the same alternative twice"),
    ],
)
def test_what_is_no_pattern(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_pattern(text)
    assert str(refused.value) == message


def test_a_percent_sign_stays() -> None:
    assert parse_pattern("100%/%s/{a%,b}/{i}%d").fill({"i": 7}, (0,)) == "100%/%s/a%/7%d"


def test_fill_needs_every_index() -> None:
    with pytest.raises(KeyError):
        parse_pattern("{i}/{j}").fill({"i": 1})
    assert parse_pattern("{i}.*.**").fill({"i": 1}) == "1.*.**"


def test_all_choices_run_like_an_odometer() -> None:
    pattern = parse_pattern("{a,b}/{c,d,e}")
    assert list(pattern.all_choices()) == list(itertools.product(range(2), range(3)))
    assert [pattern.fill({}, c) for c in pattern.all_choices()] == ["a/c", "a/d", "a/e", "b/c", "b/d", "b/e"]
    assert list(parse_pattern("a").all_choices()) == [()]


def test_properties() -> None:
    pattern = parse_pattern("{j}/{i}/{j}/{a,b}/*")
    assert (pattern.indices, len(pattern.groups), pattern.wild) == (("j", "i"), 1, True)
    assert isinstance(pattern, Pattern)


def test_matching_many_paths_is_quick() -> None:
    pattern = parse_pattern("layers_{i}/{query,key,value}/w")
    names = [f"layers_{i}/{k}/w" for i in range(5000) for k in ("query", "key", "value", "post")]
    with calls_at_most(10 * len(names)):
        assert sum(pattern.match(name) is not None for name in names) == 15000


# --- effort ---------------------------------------------------------------------------------------------------------

LONG = [
    ("**a" * 10 + "b", "a" * 61),
    ("**a**a" + "b", "a" * 20_000),
    ("*a" * 12 + "b", "a" * 61),
    ("{a,aa,aaa}" * 30 + "b", "a" * 80),
    ("{i}{j}{k}{l}x{m}y", "1" * 90),
    ("**{i}**{i}**{i}x", "1" * 40),
    ("{0,00}" * 40 + "**b", "0" * 90),
]


@pytest.mark.parametrize(("text", "path"), LONG)
def test_matching_is_polynomial(text: str, path: str) -> None:
    """With backtracking, the first of these does not end within a day."""
    pattern = parse_pattern(text)
    with calls_at_most(3_000_000):
        assert _search(pattern.pieces, path) is None
        assert pattern.match(path) is None


wild_patterns = st.lists(st.sampled_from(["a", "1", "/", "*", "**", "{i}", "{j}", "{a,aa}", "{p:1,11}", "{q,}"]), min_size=1, max_size=7).map("".join)  # fmt: skip


@given(wild_patterns, st.text("aq1/", max_size=9))
def test_the_search_agrees_with_the_regular_expression(text: str, path: str) -> None:
    try:
        pattern = parse_pattern(text)
    except ValueError:
        return
    found = pattern._regex.fullmatch(path)
    assert _search(pattern.pieces, path) == (None if found is None else found.groups())


@pytest.mark.parametrize("text", ["{a,b}" * 101, "{i}{j}{k}{l}{m}{n}"])
def test_patterns_with_too_many_parts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="too many|at most"):
        parse_pattern(text)
