"""Looking leaves up by their spelling finds what trying every pattern on every leaf finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.core.path_index import TemplateIndex, path_template
from convert.core.path_pattern import parse_pattern

KEYS = st.sampled_from(
    ["a", "b", "a1", "1", "12", "1b", "layer_1", "layer_12", "layer_1x2", "local", "value", "q", "0"]
)
NAMES = st.lists(st.lists(KEYS, min_size=1, max_size=3).map("/".join), max_size=12, unique=True)
PIECES = st.sampled_from(
    [
        "a",
        "b",
        "1",
        "a1",
        "layer_{i}",
        "layer_1{i}",
        "{i}",
        "{j}",
        "{i}{j}",
        "{a,1}",
        "{q,layer_1,b2}",
        "{p:local,a1}",
        "*",
        "1*",
        "**",
        "x{i}",
    ]
)
PATTERNS = st.lists(PIECES, min_size=1, max_size=3).map("/".join)


@pytest.mark.slow
@given(NAMES, PATTERNS)
@settings(max_examples=400, deadline=None)
def test_it_is_the_same_as_trying_all(names: list[str], text: str) -> None:
    pattern = parse_pattern(text)
    calls = [(name, (name, name.removesuffix("/value"))) for name in names]
    tried = [(name, match) for name, said in calls if (match := next(filter(None, map(pattern.match, said)), None))]
    assert TemplateIndex(calls).matches(pattern) == tried


def test_spelling() -> None:
    assert path_template("layers_12/w/3") == "layers_#/w/#"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("**a" * 10 + "b{i}", "a" * 61),
        ("{a,aa,aaa}" * 30 + "b{i}", "a" * 80),
        ("{i}{j}{k}{l}" + "**#" * 9 + "b{m}", "#" * 61),
    ],
)
def test_candidates_are_found_in_polynomial_time(text: str, name: str) -> None:
    """With backtracking, the first of these does not end within a day."""
    index = TemplateIndex([(name, (name,)), ("w", ("w",))])
    assert not index.matches(parse_pattern(text))
