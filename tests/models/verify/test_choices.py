"""What a choice is made by is compared where outputs show the choice alone; other numbers that choose the same are no difference."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch

from convert.verify.model import choices
from convert.verify.report.report import Report, Verdict
from convert.verify.sides import records
from faults.catalogue import run
from faults.plants import InTarget
from support.choice_models import Quantised

NOT_COMPARED = "chosen by numbers that are not compared"


def checked(case: str, **methods: Callable[..., Any]) -> Report:
    def edit(module: Any) -> None:
        for name, method in methods.items():
            assert hasattr(module, name)
            setattr(module, name, MethodType(method, module))

    return run(case, "torch", InTarget(edit))


def not_compared(report: Report) -> list[str]:
    return [fact.name for fact in report.facts if fact.value == NOT_COMPARED]


def inner(module: Any, z: torch.Tensor) -> torch.Tensor:
    return Quantised.distances(module, z) - (z * z).sum(-1, keepdim=True)


TWINS: dict[str, tuple[str, dict[str, Callable[..., Any]]]] = {
    "as they are": ("quantised", {}),
    "the distance": ("quantised", {"distances": lambda m, z: Quantised.distances(m, z).clamp_min(0).sqrt()}),
    "the distance by its function": ("quantised", {"distances": lambda m, z: torch.cdist(z, m.codes)}),
    "without what is the same for all": ("quantised", {"distances": inner}),
    "the largest": ("quantised", {"chosen": lambda m, z: (-m.distances(z)).argmax(-1)}),
    "the largest of several": ("quantised", {"chosen": lambda m, z: (-m.distances(z)).topk(1).indices[..., 0]}),
    "the first in order": ("quantised", {"chosen": lambda m, z: m.distances(z).argsort(-1)[..., 0]}),
    "probabilities": ("quantised", {"chosen": lambda m, z: (-m.distances(z)).softmax(-1).argmax(-1)}),
    "other axes": ("quantised", {"chosen": lambda m, z: m.distances(z).transpose(1, 2).argmin(1)}),
    "one axis of rows": (
        "quantised",
        {"chosen": lambda m, z: m.distances(z.flatten(0, 1)).argmin(-1).unflatten(0, z.shape[:2])},
    ),
    "a limit": (
        "stepped",
        {"opened": lambda m, x: 4 * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) - 1 > 0},
    ),
    "experts in order": ("experts", {"chosen": lambda m, s: (s + m.balance).argsort(-1, descending=True)[..., :2]}),
}
UNKNOWN: dict[str, tuple[str, str, dict[str, Callable[..., Any]]]] = {
    "a sigmoid": ("argmax", "quantised", {"chosen": lambda m, z: (-m.distances(z)).sigmoid().argmax(-1)}),
    "another way to round": ("floor", "stepped", {"whole": lambda m, x: (x + 0.5).floor()}),
}


@pytest.mark.parametrize(("case", "methods"), TWINS.values(), ids=TWINS)
def test_the_same_is_chosen_by_other_numbers(case: str, methods: dict[str, Any]) -> None:
    report = checked(case, **methods)
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 4
    assert not_compared(report) == []


@pytest.mark.parametrize(("name", "case", "methods"), UNKNOWN.values(), ids=UNKNOWN)
def test_numbers_that_cannot_be_compared_are_not_verified(name: str, case: str, methods: dict[str, Any]) -> None:
    report = checked(case, **methods)
    assert report.exit_code == 0
    assert not_compared(report) == [name]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.005])
def test_too_large_to_be_recorded(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No record is made: the operators are seen in a run that is not kept."""
    monkeypatch.setattr(records, "LARGEST", 1)
    report = checked("quantised", distances=lambda m, z: factor * Quantised.distances(m, z))
    assert report.exit_code == 0 and not_compared(report) == ["argmin"]
    assert not_compared(checked("states")) == []


def test_a_function_of_numbers_is_told_from_a_mistake() -> None:
    """Both keep the order of these numbers."""
    x = np.sort(np.random.default_rng(0).uniform(-0.1, 0.1, 200)).reshape(10, 20)
    scattered = x + 1e-7 * np.random.default_rng(1).normal(size=x.shape)
    for y, same in ((1 / (1 + np.exp(-x)), True), (scattered, False)):
        assert choices._may_choose_the_same(choices.Kind.PLACE, y, x, 1e-9) is same


@pytest.mark.parametrize(("at", "differs"), [("everywhere", True), ("padding", False)])
def test_numbers_at_padding_do_not_count(at: str, differs: bool) -> None:
    mask = np.ones((3, 7), bool)
    mask[:, 5:] = False
    made = choices._counted((3, 7, 16), 21, [mask])
    assert made.tolist() == mask.reshape(-1).tolist()
    assert choices._counted((3, 16), 3, [mask]).all()  # of another shape: everything counts
    wrong = np.ones((21, 16)) if at == "everywhere" else np.where(mask.reshape(-1, 1), 0.0, 1.0) * np.ones((21, 16))
    assert bool(wrong[made].any()) is differs
