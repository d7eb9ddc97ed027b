"""RecurrentGemma through `convert check`: all four levels, against upstream's PyTorch code and against transformers."""

from __future__ import annotations

import pytest

import convert
from convert.verify.comparison import load_reference
from convert.verify.report.report import Verdict
from faults.catalogue import SETTINGS, run
from support import goldens

pytestmark = pytest.mark.slow

CASE = "recurrentgemma"


@pytest.mark.parametrize("to", ["transformers", "recurrentgemma"])
def test_a_correct_conversion_passes(to: str) -> None:
    report = run(CASE, to)
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 4
    model = report.levels[-1]
    assert not any("could not be computed in float64" in note for note in model.notes)
    assert len(model.measures) > 150
    for measure in model.measures:
        assert measure.float64 is not None
        assert measure.float64.relative < 1e-13, measure.name
        assert measure.difference.relative < 5e-6, measure.name
    facts = next(note for level in report.levels for note in level.notes if "declared facts compared" in note)
    assert int(facts.split()[0]) >= 10, facts


def test_the_window_must_be_known() -> None:
    plan = convert.plan_conversion(CASE, goldens.checkpoint(CASE), settings={"logits_soft_cap": 3.0})
    reason = load_reference(plan, None)
    assert isinstance(reason, str) and "--set attention_window=..." in reason


def test_sequences_are_longer_than_the_window_and_hold_two_documents() -> None:
    plan = convert.plan_conversion(CASE, goldens.checkpoint(CASE), to=CASE, settings=SETTINGS[CASE])
    reference = load_reference(plan, None)
    assert not isinstance(reference, str)
    positions = reference.inputs(0)["positions"]
    assert positions.shape == (3, 24)
    assert [list(row).count(0) for row in positions] == [1, 0, 2]
