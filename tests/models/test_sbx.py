"""SBX's PPO and SAC for stable-baselines3, whose own policies loaded the same tensors when the goldens were made."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import convert
from support import sbx
from support.goldens import SpecsOnly
from support.paths import ROOT
from support.rule_mistakes import assert_mistake_is_named, report_of_mistake
from support.value_mistakes import assert_mistakes_are_named

MODELS = {"ppo": "sbx-ppo-2", "ppo-choices": "sbx-ppo-3", "sac": "sbx-sac-2"}


@pytest.mark.parametrize("case", sbx.CASES)
def test_stable_baselines3_computes_what_sbx_did(case: str, tmp_path: Path) -> None:
    """It loaded these tensors strictly: names, shapes and values are compared by their checksum."""
    source, out = sbx.converted(case, tmp_path)
    assert convert.plan_conversion("sbx", source).rules.model == MODELS[case]
    assert sbx.digest(out) == sbx.loaded_by_sb3(case)
    assert sbx.error(case) < 1e-6


@pytest.mark.parametrize("layers", (1, 2, 3))
def test_the_tree_tells_the_number_of_layers(layers: int) -> None:
    def mlp(tree: str, first: int, last: int, axes: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
        sizes = [first, *(8 for _ in range(layers)), last]
        made: dict[str, tuple[int, ...]] = {}
        for i, (inputs, width) in enumerate(itertools.pairwise(sizes)):
            made |= {f"{tree}/Dense_{i}/kernel": (*axes, inputs, width), f"{tree}/Dense_{i}/bias": (*axes, width)}
        return made

    ppo = mlp("actor/params", 5, 3) | mlp("vf/params", 5, 1)
    last = f"actor/params/Dense_{layers + 1}"
    sac = mlp("actor/params", 5, 3) | {f"{last}/kernel": (8, 3), f"{last}/bias": (3,)}
    for tree in ("qf", "qf_target"):
        sac |= mlp(f"{tree}/params/VmapContinuousCritic_0", 8, 1, (2,))
    for name, tree in (("ppo", ppo), ("sac", sac)):
        source = SpecsOnly({path: (shape, "float32") for path, shape in tree.items()})
        assert convert.plan_conversion("sbx", source).rules.model == f"sbx-{name}-{layers}"


@pytest.mark.slow
@pytest.mark.parametrize("case", ("ppo", "sac"))
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = sbx.converted(case, tmp_path)
    assert assert_mistakes_are_named(out, source) >= 8


CRITIC = "{qf,qf_target}/params/VmapContinuousCritic_0"


def swapped(bias: str, models: str) -> tuple[str, str]:
    """Return the text of the rules from the bias of the first layer to that of these models' second, and the same with both exchanged."""
    text = (ROOT / "rules" / "sbx.yaml").read_text()
    first, then = (f'"{bias.replace("{}", str(k))}"' for k in range(2))
    start = text.index(first)
    end = text.index(then, text.index(f"- only_models: [{models}]", start))
    between = text[start + len(first) : end]
    return first + between + then, then + between + first


SLIPS = (  # case, a text of the rules, what stands there instead, what the check calls it
    ("ppo", "axes: A\n  parameter: log_std", "axes: A\n  prescaled_by: 2.0\n  parameter: log_std", "multiplied by a number"),
    ("ppo", *swapped("actor/params/Dense_{}/bias", "sbx-ppo-2, sbx-ppo-3"), "of another tensor"),
    ("sac", "actor.{mu,log_std}", "actor.{log_std,mu}", "of another tensor"),
    ("sac", "actor/params/{Dense_2,Dense_3}/bias", "actor/params/{Dense_3,Dense_2}/bias", "of another tensor"),
    ("sac", "{critic,critic_target}.qf{k}", "{critic_target,critic}.qf{k}", "of another tensor"),
    ("sac", *swapped(f"{CRITIC}/Dense_{{}}/bias", "sbx-sac-2, sbx-sac-3"), "of another tensor"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("case", "old", "new", "name"), SLIPS)
def test_slips_in_the_rules_are_named(case: str, old: str, new: str, name: str, tmp_path: Path) -> None:
    assert_mistake_is_named("sbx", sbx.FOLDER / f"{case}.msgpack", old, new, name, tmp_path / "out.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "old", "new", "code"),
    [
        ("ppo", "...S,SB->...B", "...B,SB->...S", "size-conflict"),
        ("ppo", "value_net.2", "policy_net.2", "tensor-made-twice"),
        ("ppo", "vf/params/Dense_1/bias", "actor/params/Dense_1/bias", "leaf-claimed-twice"),
        ("sac", "stacked: {k: 0}", "stacked: {k: 1}", "size-conflict"),
    ],
)
def test_slips_in_the_rules_that_no_tree_fits_are_refused(
    case: str, old: str, new: str, code: str, tmp_path: Path
) -> None:
    with pytest.raises(convert.PlanError) as error:
        report_of_mistake("sbx", sbx.FOLDER / f"{case}.msgpack", old, new, tmp_path / "out.safetensors")
    assert code in {found.code for found in error.value.findings}
