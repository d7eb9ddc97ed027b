"""What a shape check cannot protect: `other_layouts` against brute force over arrays, and the groups of a plan."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.planning.ambiguity import MAX_AXES, layout_text, other_layouts, twin_trees
from convert.planning.planner import make_plan
from support.memory_source import HEAD, MemorySource, rule_file, run, zeros

Axes = tuple[tuple[str, int], ...]


def element_orders(axes: Axes, groups: tuple[str, ...]) -> set[tuple[int, ...]]:
    """By doing it: each order of the axes whose array splits into the target's shape, as its elements in C order.

    Split means that consecutive axes make up each axis of the target: no axis of the source straddles two.
    """
    sizes = dict(axes)
    stored = np.arange(math.prod(sizes.values())).reshape([n for _, n in axes])
    target = tuple(math.prod(sizes[a] for a in group) for group in groups)
    right = stored.transpose([[a for a, _ in axes].index(a) for a in "".join(groups)]).ravel()
    found = set()
    for order in itertools.permutations(range(len(axes))):
        moved = stored.transpose(order)
        ends = set(itertools.accumulate((n for n in moved.shape), int.__mul__, initial=1))
        edges = list(itertools.accumulate(target, int.__mul__, initial=1))
        if all(edge in ends for edge in edges) and (moved.ravel() != right).any():
            found.add(tuple(moved.ravel().tolist()))
    return found


def elements_of(axes: Axes, layout: str) -> tuple[int, ...]:
    sizes = dict(axes)
    stored = np.arange(math.prod(sizes.values())).reshape([n for _, n in axes])
    order = [c for c in layout if c.isalpha()]
    return tuple(stored.transpose([[a for a, _ in axes].index(a) for a in order]).ravel().tolist())


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Axes, tuple[str, ...]]:
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 2, 3, 4, 6]), min_size=1, max_size=4))
    axes = tuple(zip("ABCD", sizes, strict=False))
    letters = draw(st.permutations([a for a, _ in axes]))
    cuts = sorted(draw(st.lists(st.integers(0, len(letters)), max_size=2)))
    bounds = [0, *cuts, len(letters)]
    return axes, tuple("".join(letters[a:b]) for a, b in itertools.pairwise(bounds))


def texts(axes: Axes, groups: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(layout_text, other_layouts(axes, tuple(map(tuple, groups))) or ()))


@pytest.mark.slow
@given(layouts())
@settings(max_examples=400, deadline=None)
def test_other_layouts_are_those_found_by_brute_force(case: tuple[Axes, tuple[str, ...]]) -> None:
    axes, groups = case
    found = texts(axes, groups)
    assert {elements_of(axes, layout) for layout in found} == element_orders(axes, groups)
    sizes = dict(axes)
    for layout in found:  # each is written so that it comes out with the target's shape
        flat = [math.prod(sizes[a] for a in group if a.isalpha()) for group in split_groups(layout)]
        assert flat == [math.prod(sizes[a] for a in group) for group in groups]
    assert len({elements_of(axes, layout) for layout in found}) == len(found)  # each once


def split_groups(layout: str) -> list[str]:
    out, depth = [""], 0
    for c in layout:
        depth += (c == "(") - (c == ")")
        if c == " " and depth == 0:
            out.append("")
        else:
            out[-1] += c
    return out


@pytest.mark.parametrize(
    ("axes", "groups", "others"),
    [
        ((("D", 7), ("F", 11)), ("F", "D"), ()),
        ((("D", 7), ("F", 7)), ("F", "D"), ("D F",)),  # square: a forgotten transpose fits
        ((("N", 4), ("H", 8), ("D", 32)), ("D", "NH"), ("(N H) D", "(H N) D", "D (H N)")),
        ((("N", 3), ("H", 5), ("D", 7)), ("D", "NH"), ("D (H N)",)),
        ((("N", 1), ("H", 5), ("D", 7)), ("D", "NH"), ()),
        ((("H", 5),), ("H",), ()),
        ((), (), ()),
        ((("A", 0), ("B", 0)), ("A", "B"), ()),  # nothing there to be in the wrong place
    ],
)
def test_known_layouts(axes: Axes, groups: tuple[str, ...], others: tuple[str, ...]) -> None:
    assert texts(axes, groups) == others


def test_the_stored_order_comes_first() -> None:
    assert texts((("D", 8), ("N", 2), ("H", 4)), ("NH", "D"))[0] == "D (N H)"


def test_many_axes_are_not_searched() -> None:
    axes = tuple((letter, 2) for letter in "ABCDEFG")
    assert len(axes) > MAX_AXES
    assert other_layouts(axes, (tuple("ABCDEFG"),)) is None
    (group,) = make_plan(rule_file("- from: w\n  parameter: m"), MemorySource(zeros(w=(2,) * 7))).shape_ambiguous
    assert group.others is None  # never taken for protected


def test_groups_of_a_plan() -> None:
    rules = """
- einsum: ...D,DNH->...NH
  from: "l_{i}/{q,k}/w"
  linear: m.{i}.qk
- einsum: ...D,DF->...F
  from: l_{i}/up/w
  linear: m.{i}.up
- einsum: ...F,FD->...D
  from: l_{i}/down/w
  linear: m.{i}.down
- from: square
  parameter: s
- from: norm
  axes: D
  parameter: n
"""
    tree = zeros(square=(3, 3), norm=(6,))
    for i in range(2):
        tree |= zeros(
            **{f"l_{i}/q/w": (6, 2, 3), f"l_{i}/k/w": (6, 2, 3), f"l_{i}/up/w": (6, 6), f"l_{i}/down/w": (6, 6)}
        )
    made = make_plan(rule_file(rules), MemorySource(tree))
    assert [group.to_dict() for group in made.shape_ambiguous] == [
        {
            "rule": "r.yaml:5",
            "tensors": ["m.0.qk.weight", "m.1.qk.weight"],
            "layout": "D N H -> (N H) D",
            "others": ["D (N H)", "D (H N)", "(H N) D"],
            "interchangeable_parts": ["l_0/q/w", "l_0/k/w"],
            "interchangeable_siblings": 1,
            "rope_axis": None,
            "sum_of_parts": None,
        },
        {
            "rule": "r.yaml:8",
            "tensors": ["m.0.up.weight", "m.1.up.weight"],
            "layout": "D F -> F D",
            "others": ["D F"],
            "interchangeable_parts": [],
            "interchangeable_siblings": 1,
            "rope_axis": None,
            "sum_of_parts": None,
        },
        {
            "rule": "r.yaml:11",
            "tensors": ["m.0.down.weight", "m.1.down.weight"],
            "layout": "F D -> D F",
            "others": ["F D"],
            "interchangeable_parts": [],
            "interchangeable_siblings": 1,
            "rope_axis": None,
            "sum_of_parts": None,
        },
        {
            "rule": "r.yaml:14",
            "tensors": ["s"],
            "layout": "as stored",
            "others": ["b a"],
            "interchangeable_parts": [],
            "interchangeable_siblings": 1,
            "rope_axis": None,
            "sum_of_parts": None,
        },
    ]


def test_a_protected_plan_has_no_groups() -> None:
    rules = "- einsum: ...D,DF->...F\n  from: w\n  bias: b\n  linear: m"
    assert make_plan(rule_file(rules), MemorySource(zeros(w=(7, 11), b=(11,)))).shape_ambiguous == ()


@pytest.mark.parametrize("wrong", [(0, 1, 2), (2, 0, 1), (1, 0, 2), (0, 2, 1), (2, 1, 0)])
def test_a_listed_layout_is_a_planted_fault_that_fits(wrong: tuple[int, ...]) -> None:
    """N H D -> D (N H) with sizes 2 3 6: an order of axes either is listed, or does not give the shape."""
    w = np.random.default_rng(0).standard_normal((2, 3, 6))
    made = make_plan(rule_file('- einsum: "BNH,NHD->BD"\n  from: w\n  linear: m'), MemorySource({"w": w}))
    right = run(made)["m.weight"]
    letters = ["NHD"[k] for k in wrong]
    planted = w.transpose(wrong)
    part = made.steps[0].parts[0]
    found = other_layouts(part.axes, tuple(map(tuple, part.groups))) or ()
    listed = any([letter for group in layout for letter in group] == letters for layout in found)
    fits = planted.shape[0] == 6 or planted.shape[0] * planted.shape[1] == 6
    correct = fits and (planted.reshape(right.shape) == right).all()
    assert listed == (fits and not correct)


def test_tensors_that_differ_in_a_name_only() -> None:
    """Separate q, k, v load in any order; fused ones are listed as parts."""
    rules = '- einsum: ...D,DE->...E\n  from: "{q,k}/w"\n  linear: m.{q,k}\n'
    (group,) = make_plan(rule_file(rules), MemorySource(zeros(**{"q/w": (2, 3), "k/w": (2, 3)}))).shape_ambiguous
    assert (group.names, group.others, group.parts, group.siblings) == (("m.q.weight", "m.k.weight"), (), (), 2)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_stack_on_another_axis_of_the_same_size(axis: int) -> None:
    """Four layers of width four: stacked on axis 0 or 1, the names and shapes are the same, the values are not."""
    rules = f"- einsum: ...D,DE->...E\n  from: w\n  stacked: {{i: {axis}}}\n  linear: l.{{i}}\n"
    (group,) = make_plan(rule_file(rules), MemorySource(zeros(w=(4, 4, 3)))).shape_ambiguous
    assert len(group.names) == 4
    assert group.layout == ("i D E -> i E D" if axis == 0 else "D i E -> i E D")
    assert group.others == ("D E i",)


def test_a_split_axis_of_the_same_size() -> None:
    rules = "- einsum: ...D,CDF->...CF\n  from: w\n  linear: m.{a,b}\n"
    (group,) = make_plan(rule_file(rules), MemorySource(zeros(w=(2, 2, 3)))).shape_ambiguous
    assert (group.layout, group.others, group.siblings) == ("C D F -> C F D", ("D F C",), 2)


def test_siblings_have_one_shape() -> None:
    """A list of leaves of different shapes is no list of twins."""
    rules = '- from: "{a,b,c}"\n  parameter: p.{a,b,c}\n'
    tree = zeros(a=(1, 6), b=(2,), c=(2,))
    groups = make_plan(rule_file(rules), MemorySource(tree)).shape_ambiguous
    assert [(group.names, group.siblings) for group in groups] == [(("p.b", "p.c"), 2)]


# ---- trees


TREE = {"params/enc/w": (2, 3), "params/enc/b": (3,), "params/dec/w": (3, 4), "params/dec/b": (4,)}


def twins_of(**trees: dict[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """Trees of other names, all dropped, beside `TREE`, which is converted."""
    dropped = {f"{tree}/{path}": shape for tree, leaves in trees.items() for path, shape in leaves.items()}
    source = MemorySource(zeros(**TREE, **dropped))
    return [(twin.tree, twin.of) for twin in twin_trees(source.leaves, set(dropped))]


def test_an_average_of_the_weights_is_a_twin() -> None:
    inner = {path.removeprefix("params/"): shape for path, shape in TREE.items()}
    assert twins_of(ema_params=inner) == [("ema_params", "params")]
    assert twins_of(ema=TREE) == [("ema", "")]  # the outermost tree only
    assert twins_of(ema=TREE, other=inner) == [("ema", ""), ("other", "params")]
    larger = {**inner, "step": ()}
    assert twins_of(ema_params=larger) == [("ema_params", "params")]


def test_other_trees_are_no_twins() -> None:
    inner = {path.removeprefix("params/"): shape for path, shape in TREE.items()}
    assert twins_of() == []
    assert twins_of(opt_state={f"0/mu/{path}": shape for path, shape in inner.items()}) == []
    assert twins_of(ema={**inner, "dec/w": (4, 3)}) == []
    assert twins_of(other={path: shape for path, shape in inner.items() if path != "enc/b"}) == []
    assert twins_of(opt_state={f"0/exp_avg/{path}": shape for path, shape in inner.items()}) == []


@pytest.mark.parametrize(
    ("converted", "dropped", "tree", "of"),
    [
        ("model/params/w", "model/ema_params/w", "model/ema_params", "model/params"),
        ("params/w", "ema/w", "ema", "params"),
        ("params/w", "opt_state/1/ema/w", "opt_state/1/ema", "params"),
        ("params/w", "optimizer/target/ema/w", "optimizer/target/ema", "params"),
        ("w", "w_ema", "w_ema", "w"),
        ("params/Dense_0/w", "params/ema_Dense_0/w", "params/ema_Dense_0", "params/Dense_0"),
        ("a/params/w", "a/ema/w", "a/ema", "a/params"),
    ],
)
def test_a_name_tells_an_average_of_one_leaf(converted: str, dropped: str, tree: str, of: str) -> None:
    source = MemorySource(zeros(**{converted: (2, 3), dropped: (2, 3)}))
    (twin,) = twin_trees(source.leaves, {dropped})
    assert (twin.tree, twin.of, twin.leaves) == (tree, of, ((dropped, converted),))
    other = MemorySource(zeros(**{converted: (2, 3), dropped: (3, 2)}))
    assert twin_trees(other.leaves, {dropped}) == ()


def test_an_average_may_lack_a_leaf() -> None:
    inner = {path.removeprefix("params/"): shape for path, shape in TREE.items()}
    assert twins_of(ema={path: shape for path, shape in inner.items() if path != "enc/b"}) == [("ema", "params")]
    for tree, of in (("ema_params", "model/params"), ("ema_state/model", "model"), ("state/ema", "model/params")):
        kept = {f"{of}/{path}": shape for path, shape in inner.items()}
        dropped = {f"{tree}/{path}": shape for path, shape in inner.items() if path != "enc/b"}
        source = MemorySource(zeros(**kept, **dropped))
        (twin,) = twin_trees(source.leaves, set(dropped))
        assert (twin.tree, twin.of, len(twin.leaves)) == (tree, of, 3)


def test_the_plan_says_that_a_twin_is_dropped() -> None:
    rules = """
- {einsum: "...D,DF->...F", from: "layers_{i}/w", linear: "m.{i}"}
- {drop: "/ema/**", because: an average}
"""
    tree = {f"{root}/layers_{i}/w": (3, 4) for root in ("model", "ema") for i in range(2)}
    file = rule_file(rules, HEAD + "root: model\n")
    made = make_plan(file, MemorySource(zeros(**tree)))
    assert [note for note in made.notes if note.startswith("ema has the paths and shapes of model and is dropped")]
    assert not [
        note
        for note in make_plan(file, MemorySource(zeros(**{**tree, "ema/layers_0/w": (4, 3)}))).notes
        if "ema" in note
    ]
