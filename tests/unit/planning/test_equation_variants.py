"""Several equations for one leaf: sizes choose, or the user does; what both leave open is refused, never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from convert import Plan, PlanError
from convert.planning.planner import make_plan
from support.memory_source import HEAD, MemorySource, rule_file, run, zeros

# Older checkpoints store the output projection as D N H, newer ones as N H D; the embedding fixes D.
RULES = """
- from: table
  axes: VD
  embedding: e
- einsum: {old: "...NH,DNH->...D", new: "...NH,NHD->...D"}
  choice: output_layout
  from: layers_{i}/out
  linear: layers.{i}.o
"""  # the choice stands in line 8


def plan(tree: Mapping[str, np.ndarray], rules: str = RULES, head: str = HEAD, **settings: Any) -> Plan:
    return make_plan(rule_file(rules, head), MemorySource(tree), settings=settings)


def findings(tree: Mapping[str, np.ndarray], rules: str = RULES, head: str = HEAD, **settings: Any) -> list[str]:
    with pytest.raises(PlanError) as refused:
        plan(tree, rules, head, **settings)
    return [str(finding) for finding in refused.value.findings]


def places(tree: Mapping[str, np.ndarray], **settings: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(PlanError) as refused:
        plan(tree, **settings)
    return [(finding.code, finding.rule, finding.path) for finding in refused.value.findings]


def tree(out: tuple[int, ...], width: int = 7) -> dict[str, np.ndarray]:
    return zeros(**{"table": (11, width), "layers_0/out": out, "layers_1/out": out})


@pytest.mark.parametrize(("shape", "variant"), [((7, 3, 5), "old"), ((3, 5, 7), "new")])
def test_sizes_choose(shape: tuple[int, ...], variant: str) -> None:
    w = np.arange(105.0).reshape(shape)
    arrays = {**tree(shape), "layers_0/out": w, "layers_1/out": -w}
    made = plan(arrays)
    assert made.choices == {"output_layout": variant}
    assert made.sizes == {"i": 2, "V": 11, "D": 7, "N": 3, "H": 5}
    expected = w.reshape(7, 15) if variant == "old" else w.reshape(15, 7).T
    np.testing.assert_array_equal(run(made)["layers.0.o.weight"], expected)
    np.testing.assert_array_equal(run(made)["layers.1.o.weight"], -expected)
    assert made.to_dict()["choices"] == {"output_layout": variant}


def test_sizes_that_leave_both_open_are_refused() -> None:
    """Square: D = 7, N = 3 heads of 7, or N = 7 heads of 3."""
    shape = (7, 3, 7)
    assert places(tree(shape)) == [("variant-undecided", "r.yaml:8", "layers_0/out")]
    (text,) = findings(tree(shape))
    assert "(float32[7,3,7]) fits old and new" in text
    assert text.endswith("--set output_layout=old or --set output_layout=new")


@pytest.mark.parametrize("variant", ["old", "new"])
def test_the_user_chooses(variant: str) -> None:
    shape = (7, 3, 7)
    w = np.arange(147.0).reshape(shape)
    made = plan({**tree(shape), "layers_0/out": w}, output_layout=variant)
    assert made.choices == {"output_layout": variant}
    expected = w.reshape(7, 21) if variant == "old" else w.reshape(21, 7).T
    np.testing.assert_array_equal(run(made)["layers.0.o.weight"], expected)


def test_a_size_from_the_user_tells_them_apart() -> None:
    head = HEAD + "axes: {H: {is: width of a head}}\n"
    assert plan(tree((7, 3, 7)), head=head, H=7).choices == {"output_layout": "old"}
    assert plan(tree((7, 3, 7)), head=head, H=3).choices == {"output_layout": "new"}


def test_a_choice_that_contradicts_the_sizes() -> None:
    assert places(tree((3, 5, 7)), output_layout="old") == [
        ("size-conflict", "r.yaml:8", f"layers_{i}/out") for i in (0, 1)
    ]
    for text in findings(tree((3, 5, 7)), output_layout="old"):
        assert "float32[3,5,7] as D N H makes D = 3, but table (r.yaml:5, float32[11,7] as V D) makes it 7" in text


def test_no_variant_fits() -> None:
    assert places(tree((3, 5, 2))) == [("variant-undecided", "r.yaml:8", "")]
    (text,) = findings(tree((3, 5, 2)))
    for variant, axes, size in (("old", "D N H", 3), ("new", "N H D", 2)):
        assert (
            f"{variant}: r.yaml:8: layers_0/out: float32[3,5,2] as {axes} makes D = {size}, but table (r.yaml:5" in text
        )
    fits_no = "layers_0/out: float32[3,5] does not fit: {} has a weight with 3 axes ({})"
    (finding,) = {f for f in findings(tree((3, 5))) if "no variant" in f}
    assert finding == (
        "r.yaml:8: no variant of 'output_layout' fits the checkpoint: old: r.yaml:8: "
        f"{fits_no.format('...NH,DNH->...D', 'D N H')}; new: r.yaml:8: {fits_no.format('...NH,NHD->...D', 'N H D')}"
    )


def test_one_layer_that_disagrees_is_a_contradiction() -> None:
    """Not each layer on its own: a choice holds for all rules and layers of its name."""
    arrays = {**tree((7, 3, 5)), "layers_1/out": np.zeros((3, 5, 7), np.float32)}
    (finding,) = findings(arrays)
    assert finding.startswith("r.yaml:8: no variant of 'output_layout' fits the checkpoint: old: ")


def test_one_choice_decides_another() -> None:
    """The first follows from D, and gives N and H; the second follows from these."""
    second = '- einsum: {x: "...D,NHD->...NH", y: "...D,HND->...NH"}\n  choice: query_layout\n  from: q\n  linear: q\n'
    for shape, variant in (((3, 5, 7), "x"), ((5, 3, 7), "y")):
        arrays = {**tree((3, 5, 7)), "q": np.zeros(shape, np.float32)}
        for rules in (RULES + second, second + RULES):
            assert plan(arrays, rules).choices == {"output_layout": "new", "query_layout": variant}


def test_a_choice_shared_by_two_rules() -> None:
    """The output alone leaves both open; the query of the same checkpoint, 3 heads of 7, fits `old` alone."""
    shared = RULES + (
        '- einsum: {old: "...D,NHD->...NH", new: "...D,DNH->...NH"}\n  choice: output_layout\n  from: q\n  linear: q\n'
    )
    assert plan({**tree((7, 3, 7)), **zeros(q=(3, 7, 7))}, shared).choices == {"output_layout": "old"}


def test_an_unknown_variant() -> None:
    with pytest.raises(PlanError) as refused:
        plan(tree((7, 3, 5)), output_layout="newer")
    (finding,) = refused.value.findings
    assert (finding.code, finding.expected, finding.got) == ("setting-invalid", "one of old, new", "'newer'")


def test_a_choice_about_absent_leaves_is_no_question() -> None:
    optional = RULES.replace("choice: output_layout", "choice: output_layout\n  optional: true")
    made = plan(zeros(table=(11, 7)), optional)
    assert [step.name for step in made.steps] == ["e.weight"]
    assert made.choices == {}
    assert plan(zeros(table=(11, 7)), optional, output_layout="old").choices in ({}, {"output_layout": "old"})
    (finding,) = findings(zeros(table=(11, 7)))  # not optional: one finding, and none about the choice
    assert finding.startswith("r.yaml:8: layers_{i}/out (linear, weight): expected a leaf")


def test_a_wrong_guess_would_have_fitted() -> None:
    """Why the open choice is refused: both give the same shape and other numbers."""
    w = np.arange(147.0).reshape(7, 3, 7)
    arrays = {**tree((7, 3, 7)), "layers_0/out": w}
    old, new = (run(plan(arrays, output_layout=v))["layers.0.o.weight"] for v in ("old", "new"))
    assert old.shape == new.shape
    assert (old != new).any()
