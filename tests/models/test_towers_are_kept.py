"""A family's name never takes a model that leaves a part out because a leaf of this part has no rule, is missing, or lies elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import convert
from convert.checkpoints import open_source
from convert.core.path_index import PathIndex
from convert.planning.matching.match import cover
from convert.rules import library
from support import gemma_towers, maxtext
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly
from support.paths import GOLDEN

pytestmark = pytest.mark.slow

Specs = dict[str, tuple[tuple[int, ...], str]]


def of_files(path: Path) -> Specs:
    return {name: (leaf.spec.shape, leaf.spec.dtype) for name, leaf in open_source(path).leaves.items()}


def drawn(cases: DrawnCases, case: str) -> Specs:
    return {name: (shape, "float32") for name, shape in cases.shapes(case).items()}


def tree(family: str, case: str) -> tuple[Specs, dict[str, Any]]:
    """Return the leaves of a golden, and what a user must say of it."""
    if family == "maxtext":
        return of_files(maxtext.checkpoint(case)), maxtext.settings(case)
    if case in gemma_towers.CASES:
        return drawn(gemma_towers.ALL, case), gemma_towers.settings(case)
    if family == "gemma":
        return of_files(GOLDEN / case / "ckpt"), {"vocab_size": 40}
    if case == "naflex":
        return drawn(DrawnCases(GOLDEN / "siglip2"), case), {}
    return of_files(GOLDEN / case / "ckpt.npz"), {}


def damaged(leaves: Specs, part: set[str]) -> Iterator[tuple[str, Specs]]:
    """Give the tree with a leaf of the part more, a leaf less, and a module of it a key deeper; once for each kind of module."""
    seen = set()
    for name in part:
        module = name.rpartition("/")[0]
        if (kind := re.sub(r"\d+", "#", module)) in seen or not module:
            continue
        seen.add(kind)
        yield f"{module}: one leaf more", {**leaves, f"{module}/unknown": ((3,), "float32")}
        yield f"{name}: missing", {other: spec for other, spec in leaves.items() if other != name}
        deeper = {other: other.replace(f"{module}/", f"{module}/Wrap_0/", 1) for other in leaves if other.startswith(f"{module}/")}  # fmt: skip
        yield f"{module}: deeper", {deeper.get(other, other): spec for other, spec in leaves.items()}


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *(("gemma", case) for case in ("gemma3-vision", *gemma_towers.CASES)),
        *(("maxtext", case) for case in ("gemma3-vision", "gemma4-vision", "gemma4-moe-vision")),
        *(("siglip2", case) for case in ("siglip", "naflex")),
    ],
)
def test_a_damaged_part_is_an_error(family: str, case: str) -> None:
    leaves, said = tree(family, case)
    plan = convert.plan_conversion(family, SpecsOnly(leaves), settings=said)
    index = PathIndex(SpecsOnly(leaves).leaves)
    others = [cover(rules, SpecsOnly(leaves), index) for rules in library.find_rules(family)]
    smaller = [other for other in others if other.fits and other.converted < len(leaves) - len(plan.dropped)]
    part = {drop.leaf for other in smaller for drop in other.dropped} - {drop.leaf for drop in plan.dropped}
    assert len(part) > 10 and smaller
    taken = []
    for what, changed in damaged(leaves, part):
        try:
            taken.append((what, convert.plan_conversion(family, SpecsOnly(changed), settings=said).rules.model))
        except convert.PlanError:
            continue
    assert not taken
