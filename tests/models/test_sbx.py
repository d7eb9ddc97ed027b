"""SBX's PPO and SAC for stable-baselines3, whose own policies loaded the same tensors when the goldens were made."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import convert
from support import sbx
from support.goldens import SpecsOnly
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
