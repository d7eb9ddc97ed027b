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


@pytest.mark.slow
@pytest.mark.parametrize("case", [*(f"brax/{case}" for case in brax.CASES), "sbx/ppo", "sbx/ppo-choices", "sbx/sac"])
def test_no_axis_is_of_another_size_alone(case: str) -> None:
    family, tree = specs(case)
    plan = convert.plan_conversion(family, SpecsOnly(tree))
    taken = []
    for leaf, axis, other in longer(tree, {one.leaf for one in plan.dropped}):
        try:
            convert.plan_conversion(plan.rules.model, SpecsOnly(other))
        except convert.PlanError as error:
            assert all(one.rule and one.fix for one in error.findings), error
        else:
            taken.append((leaf, axis))
    assert taken == []


@pytest.mark.parametrize(
    ("case", "layer", "columns", "expected", "got"),
    [
        ("ppo", "1/params/hidden", 7, "O[-1]/2 to be a whole number", "3.5 with O[-1] = 7"),
        ("sac", "1/params/hidden", 5, "O[-1]/2 to be a whole number", "2.5 with O[-1] = 5"),
        ("ppo", "2/params/hidden", 2, "B[-1] to be 1", "2 with B[-1] = 2"),
        ("ppo-asymmetric", "2/params/hidden", 3, "B[-1] to be 1", "3 with B[-1] = 3"),
    ],
)
def test_the_last_layer_has_a_mean_and_a_scale_of_each_action_or_one_value(
    case: str, layer: str, columns: int, expected: str, got: str
) -> None:
    """The kernel and the bias agree: no other leaf shows the mistake."""
    _, tree = specs(f"brax/{case}")
    plan = convert.plan_conversion("brax", SpecsOnly(tree))
    last = max(leaf for leaf in tree if leaf.startswith(layer) and leaf.endswith("kernel")).removesuffix("kernel")
    wrong = {leaf: ((*shape[:-1], columns), dtype) if leaf.startswith(last) else (shape, dtype) for leaf, (shape, dtype) in tree.items()}  # fmt: skip
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(plan.rules.model, SpecsOnly(wrong))
    (finding,) = refused.value.findings
    assert finding.code == "size-conflict" and finding.expected == expected and finding.got == got and finding.rule


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
