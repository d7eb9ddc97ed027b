"""Rules that `convert infer` left unfinished: the place that it did not decide comes first, and what may follow from it is counted."""

from __future__ import annotations

import numpy as np
import pytest

from convert.core.errors import PlanError
from support.small_plans import HEAD, plan

LEAVES = {name: np.ones((3, 5), np.float32) for name in "abc"}
PLACE = "it does not know whether the programs differ at net.py:7"


def refused(target: str, asked: str) -> PlanError:
    made = {name: "ask" if name in asked else f"w.{name}" for name in LEAVES}
    rules = "\n".join(f"- {{from: {name}, axes: CD, parameter: {to}}}" for name, to in made.items())
    with pytest.raises(PlanError) as error:
        plan(rules, LEAVES, f"model: m\ntitle: M\ntargets: {{torch: {{loads: Net{target}}}}}\n")
    return error.value


def test_behind_an_undecided_place_the_open_values_are_counted() -> None:
    place, values = refused(f", differs: [{PLACE}]", "bc").findings
    assert str(place) == PLACE and values.code == place.code == "rule-unfinished"
    said = "open (`ask`), which may follow from that; derive the rules again first, and answer what is left then"
    assert str(values).endswith(f": 2 questions are {said}") and values.rule.split(":")[1] == "6", (
        "the line of the first"
    )
    (_, one) = refused(f", differs: [{PLACE}]", "c").findings
    assert str(one).endswith(f": 1 question is {said}")


def test_without_such_a_place_each_question_is_listed() -> None:
    made = "is open; write the module or tensor of the target that is made of it in place of `ask`"
    assert [made in str(one) for one in refused("", "bc").findings] == [True, True]


@pytest.mark.parametrize(("target", "asked"), [("", "b"), ("", "bc"), (f", differs: [{PLACE}]", "bc")])
def test_a_file_with_open_values_alone_is_not_said_not_to_fit(target: str, asked: str) -> None:
    asks = "2 questions are" if len(asked) > 1 else "1 question is"
    assert refused(target, asked).headline == f"r.yaml is not finished: {asks} open"


def test_a_file_that_does_not_fit_either_says_so() -> None:
    with pytest.raises(PlanError, match="^r.yaml does not fit /memory: 3 problems"):
        plan("- {from: a, axes: CD, parameter: ask}", LEAVES, HEAD)
