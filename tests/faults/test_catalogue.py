"""The fault catalogue: every planted fault is caught where it is, and named; no correct conversion is."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

import pytest

from convert.verify.report.report import Verdict
from faults.applies import FAMILIES, LIST, Listed, rows
from faults.catalogue import BY_FAMILY, CASES, cells, documented, key, run, run_fault
from faults.planted import FAULTS, Fault
from faults.planted.of_others import OF_OTHERS
from faults.planted.orders import ORDERS
from faults.planted.values import VALUES
from faults.plants import InFacts, InSettings

# Models that take seconds to compile.
SLOW_CASES = (
    "cde-linear",
    "cde-cubic",
    "cde-paths",
    "conv-net",
    "rope-model",
    "recurrentgemma",
    "bert",
    "gpt2",
    "t5",
    "t5-v1.1",
    "whisper",
    "llama",
    "mistral",
    "gemma-flax",
    "dinov2",
    "timesfm-1.0",
    "timesfm-2.0",
    "timesfm-2.5",
)
MODEL_LEVEL = "positions"  # of its faults that only the model level catches, one runs by default
NAMED = 0.98  # of the faults, at least, are diagnosed by name


def once() -> Iterator[Any]:
    """The faults that run by default; all others are slow.

    Of those that a cheap level catches, each diagnosis once; of those that only the model level catches, one of one model.
    Faults of `SLOW_CASES` and of Gemma are slow, and those that unit tests name one by one: wrong facts (test_judged_facts.py)
    and changes of the values of whole tensors (test_value_changes.py, test_rounding.py, test_permutations.py, test_causes.py,
    test_made_of_others.py).
    """
    seen = set()
    for fault in FAULTS:
        found = fault.case if fault.level == "model" else (fault.diagnosis or fault.name)
        named = fault in (*VALUES, *ORDERS, *OF_OTHERS) or isinstance(fault.plant, InFacts | InSettings)
        other = fault.level == "model" and fault.case != MODEL_LEVEL
        slow = found in seen or fault.case in SLOW_CASES or fault.case.startswith("gemma") or named or other
        yield pytest.param(fault, id=fault.id, marks=[pytest.mark.slow] if slow else [])
        if not slow:
            seen.add(found)


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(once()))
def test_the_fault_is_caught_and_named(fault: Fault) -> None:
    """As expected, and as the generated table in the docs says."""
    found = run_fault(fault)
    assert list(fault.problems(found)) == []
    assert cells(fault, found) in [row[:-2] for row in documented()]


def test_names_are_unique() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)


def test_most_faults_are_diagnosed_by_name() -> None:
    assert sum(bool(fault.diagnosis) for fault in FAULTS) >= NAMED * len(FAULTS)


def test_the_documented_table_lists_every_fault() -> None:
    """Each once, in their order."""
    assert [tuple(row[:3]) for row in documented()] == [key(fault) for fault in FAULTS]


# ---- the project's list


@pytest.mark.parametrize("entry", LIST, ids=[entry.name for entry in LIST])
def test_every_fault_of_the_list_is_planted_or_does_not_apply(entry: Listed) -> None:
    planted_rows = entry.rows_of(FAULTS)
    assert planted_rows and all(any(fault.name.startswith(start) for fault in planted_rows) for start in entry.rows)
    for family, cases in FAMILIES.items():
        planted = any(fault.case in cases for fault in planted_rows)
        assert planted != (family in entry.without), f"{family}: either a row, or the reason why there is none"


def test_the_page_says_what_applies() -> None:
    with BY_FAMILY.open(newline="") as file:
        assert list(csv.reader(file))[1:] == rows(FAULTS)


# ---- no false alarm


TO_TRACE = ("cde-linear", "cde-cubic")  # takes long: one seed is enough


def seeds() -> Iterator[Any]:
    """Each correct conversion with three inputs."""
    for case in CASES:
        for seed in (0,) if case[0] in TO_TRACE else (0, 1, 2):
            yield (*case, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "to", "seed"), list(seeds()))
def test_correct_conversions_pass(case: str, to: str, seed: int) -> None:
    report = run(case, to, seed=seed)
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 4
    assert report.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("case", "to"), [case for case in CASES if case[0] != TO_TRACE[0]])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        ("bfloat16", "float32"),
        (None, "bfloat16"),
        ("bfloat16", "bfloat16"),  # in which both can go wrong
    ],
)
def test_correct_conversions_pass_in_bfloat16(case: str, to: str, dtype: str | None, precision: str) -> None:
    report = run(case, to, dtype=dtype, precision=precision)
    failed = {
        level.level: [str(f) for f in level.findings] for level in report.levels if level.verdict is Verdict.FAILED
    }
    assert failed == {}
    assert report.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma2-2b", "gemma3"])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(None, "float32"), ("bfloat16", "float32"), (None, "bfloat16"), ("bfloat16", "bfloat16")],
)
def test_correct_conversions_of_gemma_pass(case: str, dtype: str | None, precision: str) -> None:
    """With soft caps, scales, windows, and rows without a token that matter; see `SETTINGS`."""
    report = run(case, "transformers", dtype=dtype, precision=precision)
    failed = {level.level: [str(f) for f in level.findings] for level in report.levels if level.findings}
    assert failed == {}
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 4


@pytest.mark.slow
def test_a_correct_gemma_with_plain_norms_passes() -> None:
    """Its weights and layers; there is no model with plain norms to run."""
    verdicts = {level.level: level.verdict for level in run("gemma3", "plain_norms").levels}
    assert verdicts == {
        "coverage": Verdict.PASSED,
        "weights": Verdict.PASSED,
        "layers": Verdict.PASSED,
        "model": Verdict.SKIPPED,
    }
