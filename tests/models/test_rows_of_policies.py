"""The rows of a policy's layer are the columns of the one in front of it, and those of the first are the observation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import convert
from support import brax, sbx
from support.goldens import SpecsOnly

Specs = dict[str, tuple[tuple[int, ...], str]]


def specs(case: str) -> tuple[str, Specs]:
    """Return the family of a golden and its tree."""
    family, _, name = case.partition("/")
    path = brax.checkpoint(name) if family == "brax" else sbx.FOLDER / f"{name}.msgpack"
    leaves = convert.open_source(path).leaves
    return family, {leaf: (x.spec.shape, x.spec.dtype) for leaf, x in leaves.items()}


def longer(tree: Specs, dropped: set[str]) -> Iterator[tuple[str, int, Specs]]:
    """Yield trees in which one axis of one leaf is longer."""
    for leaf, (shape, dtype) in tree.items():
        for axis, size in enumerate(shape) if leaf not in dropped else ():
            yield leaf, axis, {**tree, leaf: ((*shape[:axis], size + 1, *shape[axis + 1 :]), dtype)}


@pytest.mark.parametrize("case", [*(f"brax/{case}" for case in brax.CASES), "sbx/ppo", "sbx/ppo-choices", "sbx/sac"])
def test_no_axis_is_of_another_size_alone(case: str) -> None:
    family, tree = specs(case)
    plan = convert.plan_conversion(family, SpecsOnly(tree))
    norms = {leaf for leaf in tree if "LayerNorm" in leaf}
    taken = []
    for leaf, axis, other in longer(tree, {one.leaf for one in plan.dropped} | norms):
        try:
            convert.plan_conversion(plan.rules.model, SpecsOnly(other))
        except convert.PlanError as error:
            assert all(one.rule and one.fix for one in error.findings), error
        else:
            taken.append((leaf, axis))
    assert taken == []


def test_the_error_names_both_layers() -> None:
    _, tree = specs("brax/ppo")
    (rows, columns), dtype = tree["1/params/hidden_1/kernel"]
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(
            "brax-ppo", SpecsOnly({**tree, "1/params/hidden_1/kernel": ((rows + 1, columns), dtype)})
        )
    (finding,) = refused.value.findings
    assert (
        finding.path == "1/params/hidden_1/kernel"
        and f"makes O[0] = {rows + 1} (width behind a layer" in finding.problem
    )
    assert "1/params/hidden_0/" in finding.problem and f"makes it {rows}" in finding.problem
