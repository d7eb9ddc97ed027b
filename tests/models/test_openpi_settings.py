"""What a training run of openpi may have chosen: pairs in some layers alone, and a state that is no part of the prompt."""

from __future__ import annotations

import numpy as np
import pytest

import convert
from support.memory_source import MemorySource, run
from support.openpi import ALPHA, GOLD, source_of

RULES = {"lora_alpha": ALPHA}


def only(part: str) -> MemorySource:
    """Return π0 with the pairs of one part: `attn`, `mlp`, or one weight of it."""
    leaves = GOLD.leaves("pi0-lora")
    return MemorySource({f"params/{n}": x for n, x in leaves.items() if "lora_" not in n or f"/{part}" in n})


@pytest.mark.parametrize("part", ["attn", "mlp", "mlp/gating_einsum", "mlp/linear", "mlp_1"])
def test_pairs_in_one_part_are_those_of_openpi(part: str) -> None:
    """Feed-forward pairs are added without a factor, as openpi does; attention has alpha / rank."""
    made = run(convert.plan_conversion("openpi", only(part), to="openpi", settings=RULES if part == "attn" else {}))
    every = run(convert.plan_conversion("openpi", source_of("pi0-lora"), to="openpi", settings=RULES))
    none = run(convert.plan_conversion("openpi", source_of("pi0-lora"), to="openpi", settings={"adapter": "base"}))
    merged = {name for name in made if not np.array_equal(made[name], none[name])}
    assert merged and all(np.array_equal(made[name], every[name]) for name in merged)
    assert all(("self_attn" in name) == (part == "attn") for name in merged)


def test_a_note_says_what_lerobots_processor_does_with_the_state() -> None:
    def notes(case: str, to: str | None) -> str:
        settings = {} if to == "openpi" else {"action_horizon": 3}
        return str(convert.plan_conversion("openpi", source_of(case), to=to, settings=settings).config_notes)

    assert "discrete_state_input=False" in notes("pi05", "lerobot")
    assert "discrete_state_input" not in notes("pi05", "openpi") + notes("pi0", "lerobot")
