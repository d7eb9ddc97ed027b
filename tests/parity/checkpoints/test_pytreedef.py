"""The parser against what jax prints, for trees of every kind, and against damaged text."""

import contextlib
import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import flax.core
import flax.struct
import jax
import pytest
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st

from convert.checkpoints.encodings.pytreedef import MAX_DEPTH, Slot, parse, slots
from convert.core.errors import CheckpointError
from support.effort import calls_at_most

Point = namedtuple("Point", "x y")
Nothing = namedtuple("Nothing", "")


@flax.struct.dataclass
class Struct:
    step: Any
    vars: Any
    note: Any = flax.struct.field(pytree_node=False, default=())


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    x: Any
    y: Any


class NestedMap(dict[str, Any]):  # registered as praxis does it: praxis/pytypes.py
    pass


jax.tree_util.register_pytree_with_keys(
    NestedMap,
    lambda m: ([(jax.tree_util.DictKey(k), m[k]) for k in sorted(m)], tuple(sorted(m))),
    lambda keys, values: NestedMap(zip(keys, values, strict=True)),
)


def printed(tree: Any) -> str:
    return str(jax.tree_util.tree_structure(tree))


def key_of(entry: Any) -> str:
    """A key of jax's path as the parser gives it; fields of classes are not in the text."""
    if isinstance(entry, jax.tree_util.DictKey):
        return entry.key if isinstance(entry.key, str) else repr(entry.key)
    if isinstance(entry, jax.tree_util.SequenceKey):
        return str(entry.idx)
    return "?"


def expected(tree: Any) -> list[tuple[str, ...]]:
    return [tuple(map(key_of, path)) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def found(text: str) -> list[tuple[str, ...]]:
    return [slot.keys for slot in slots(parse(text)) if slot.why is None]


leaves = st.one_of(st.integers(), st.none())
keys = st.one_of(
    st.text(),
    st.text("'\"\\\n\r\t*,:()[]{} bé\x00\u2028😀", max_size=6),
    st.sampled_from(["*", "PyTreeDef(", "CustomNode(", "None", "], [", "', '", "x_layers_10", "it's"]),
)
odd_keys = st.one_of(st.integers(), st.tuples(st.integers(), st.text(max_size=3)), st.binary(max_size=3), st.booleans())


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(keys, children, max_size=4)
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        named,
        st.one_of(*(st.dictionaries(kind, children, max_size=3) for kind in (st.integers(), st.binary(max_size=3)))),
        named.map(NestedMap),
        named.map(lambda d: OrderedDict(reversed(d.items()))),
        named.map(lambda d: defaultdict(list, d)),
        named.map(flax.core.FrozenDict),
    )


@pytest.mark.slow
@given(st.recursive(leaves, containers, max_leaves=25))
@example({"x_layers_2": 1, "x_layers_10": 2})
@example({"it's": {'"': 1}, "'\"": (2,), "\\": [3], "\n": ()})
def test_every_leaf_of_a_tree_of_named_nodes_has_jax_s_own_path(tree: Any) -> None:
    assert found(printed(tree)) == expected(tree)
    assert all(slot.named for slot in slots(parse(printed(tree))))


def with_classes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    aux = st.one_of(keys, st.lists(keys), st.dictionaries(keys, odd_keys, max_size=2), st.just(int), st.floats())
    return st.one_of(
        containers(children),
        st.builds(Point, children, children),
        st.builds(Nothing),
        st.builds(Struct, children, children, aux),
        st.builds(Data, children, children),
        st.dictionaries(odd_keys.map(repr), children, max_size=3).map(nnx.State),
    )


@pytest.mark.slow
@given(st.recursive(leaves, with_classes, max_leaves=25))
def test_classes_have_positions_in_place_of_fields(tree: Any) -> None:
    got = found(printed(tree))
    want = expected(tree)
    assert len(got) == len(want)
    for mine, jaxs in zip(got, want, strict=True):
        assert len(mine) == len(jaxs)
        assert all(b in ("?", a) for a, b in zip(mine, jaxs, strict=True))


@pytest.mark.parametrize(
    ("tree", "keys"),
    [
        ({(1, "a: *"): 0}, "(1, 'a: *')"),
        ({1.5: 0}, "1.5"),
        ({True: 0}, "True"),
        ({b"a:'": 0}, repr(b"a:'")),
        ({-3: 0}, "-3"),
        ({None: 0}, "None"),
    ],
)
def test_keys_that_are_no_strings_are_as_printed(tree: Any, keys: str) -> None:
    assert found(printed(tree)) == [(keys,)]


def test_what_stands_where_no_leaf_is() -> None:
    tree = {"a": None, "b": {}, "c": [], "d": (), "e": Nothing(), "f": NestedMap(), "g": Struct(None, 1)}
    assert slots(parse(printed(tree))) == [
        Slot(("a",), "None"),
        Slot(("b",), "empty dict"),
        Slot(("c",), "empty list"),
        Slot(("d",), "empty tuple"),
        Slot(("e",), "empty Nothing"),
        Slot(("f",), "empty NestedMap"),
        Slot(("g", "0"), "None", named=False),
        Slot(("g", "1"), None, named=False),
    ]


def test_fields_that_are_known_from_elsewhere() -> None:
    fields = {"Struct": ("step", "mdl_vars", "opt_states")}
    assert slots(parse(printed(Struct(1, {"w": 2}))), fields) == [Slot(("step",)), Slot(("mdl_vars", "w"))]
    too_many = parse("PyTreeDef(CustomNode(Struct[()], [*, *, *, *]))")
    assert [slot.keys for slot in slots(too_many, fields)] == [("0",), ("1",), ("2",), ("3",)]


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        # jaxlib before 2022: classes with their repr
        ("CustomNode(namedtuple[<class '__main__.ATuple'>], [*, None])", [("0",)]),
        ("CustomNode(<class '__main__.AnObject'>[[4, 'foo']], [*, None])", [("0",)]),
        ("CustomNode(<class 'flax.core.FrozenDict'>[()], [{'a': *}])", [("0", "a")]),
        # flax before 0.7
        ("CustomNode(FrozenDict[()], [{'params': {'w': *}}])", [("params", "w")]),
        # Python 3.15
        ("frozendict({'a': *, 'b': (*,)})", [("a",), ("b", "0")]),
        # no aux data; aux data with an apostrophe in a word, brackets and quotes
        ("CustomNode(A, [*])", [("0",)]),
        ("CustomNode(A[it's], [*, {'b': *}])", [("0",), ("1", "b")]),
        ("CustomNode(A[f(']', x[0], \"[\")], [*])", [("0",)]),
        # mappings whose aux data is not what we know
        ("CustomNode(State[<odd>], [*])", [("0",)]),
        ("CustomNode(NestedMap[('a', 'b')], [*])", [("0",)]),
        ("CustomNode(NestedMap[(1, 'b')], [*, *])", [("1",), ("b",)]),
        ("CustomNode(defaultdict[(None, ('b',))], [*])", [("b",)]),
        ("CustomNode(defaultdict[(<function f(a, b)>, ('b',))], [*])", [("b",)]),
    ],
)
def test_text_of_other_versions(text: str, paths: list[tuple[str, ...]]) -> None:
    assert found(f"PyTreeDef({text})") == paths


@pytest.mark.parametrize(
    ("text", "column", "expected", "got"),
    [
        ("", 1, "'PyTreeDef('", "the end"),
        ("PyTreeDef", 1, "'PyTreeDef('", "'PyTreeDef'"),
        ("PyTreeDef(*", 12, "')'", "the end"),
        ("PyTreeDef(*))", 13, "the end", "')'"),
        ("PyTreeDef(x)", 11, "a node ", "'x)'"),
        ("PyTreeDef([*,*])", 13, "', '", "',*])'"),
        ("PyTreeDef([*, ])", 15, "a node", ""),
        ("PyTreeDef((*))", 13, "', '", ""),
        ("PyTreeDef({'a'})", 15, "': '", ""),
        ("PyTreeDef({'a: *})", 12, "a closing quote", '"\'a: *})"'),
        ("PyTreeDef({'\\d': *})", 12, "an escape", ""),
        ("PyTreeDef({'\\xg0': *})", 12, "an escape", ""),
        ("PyTreeDef({'\\U00110000': *})", 12, "an escape", ""),
        ("PyTreeDef({: *})", 12, "a key", ""),
        ("PyTreeDef({1)", 13, "one of ':', or a bracket that matches", ""),
        ("PyTreeDef({1", 13, "one of ':' after column 12", "the end"),
        ("PyTreeDef({'a': *, })", 20, "", ""),
        ("PyTreeDef(CustomNode(, [*]))", 22, "the name of a class", ""),
        ("PyTreeDef(CustomNode(A[(], [*]))", 25, "one of ']', or a bracket that matches", ""),
        ("PyTreeDef(CustomNode(A[()]))", 27, "', ['", ""),
        ("PyTreeDef(" + "[" * 300, 211, "at most 200 levels", ""),
    ],
)
def test_damaged_text(text: str, column: int, expected: str, got: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(text)
    (finding,) = caught.value.findings
    assert (finding.code, finding.problem) == ("checkpoint-corrupt", f"column {column} of the PyTreeDef")
    assert finding.expected.startswith(expected) and finding.got
    assert not got or finding.got == got


def test_deepest_tree() -> None:
    depth = MAX_DEPTH - 1
    assert found("PyTreeDef(" + "[" * depth + "*" + "]" * depth + ")") == [("0",) * depth]


@given(st.text("PyTreeDef(CustomNode*[]{}()'\", :ab\\ None"))
def test_any_text_gives_slots_or_an_error(text: str) -> None:
    with contextlib.suppress(CheckpointError):
        slots(parse(f"PyTreeDef({text})"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    ["CustomNode(A[", "CustomNode(A['", "{(", "{'a': ", "[", "'", "\\'", "{'\\'", "CustomNode(A[it's", "{b'", "[*, "],
)
def test_work_grows_with_the_length_of_the_text(unit: str) -> None:
    for text in (unit * (500_000 // len(unit)), "[" + f"CustomNode(A[{unit * 5}], [*]), " * 5000):
        with calls_at_most(4 * len(text)), pytest.raises(CheckpointError):
            parse(f"PyTreeDef({text}")
