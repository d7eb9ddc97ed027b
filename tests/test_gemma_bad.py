"""Gemma checkpoints, settings and directories that are not right: each is named, and nothing is written or passed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gemma_models import settings
from memory_source import MemorySource
from test_gemma import arrays, refuse


def without(tree: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    return {name: x for name, x in tree.items() if part not in name}


# ---- the layout of the layers


@pytest.mark.parametrize("model", ["gemma", "gemma3"])
def test_a_stack_without_its_last_attention_type(model: str, tmp_path: Path) -> None:
    """Its layers must not be counted anew in units of five: the tree would convert, its layers in other places."""
    tree = without(arrays("gemma3-stacked"), "attention_type_5/")
    said = refuse(MemorySource(tree), model, tmp_path / "x", settings=settings("gemma3-stacked"))
    assert "{i} runs from 0 to 10 in the tree, without 5 (units of 6: {p} from 0 to 5); the stack of layers is" in said


def test_a_stack_with_more_attention_types_than_the_pattern(tmp_path: Path) -> None:
    tree = arrays("gemma3-stacked")
    tree |= {name.replace("type_5/", "type_6/"): x for name, x in tree.items() if "attention_type_5/" in name}
    said = refuse(MemorySource(tree), "gemma3", tmp_path / "x", settings=settings("gemma3-stacked"))
    assert "{p} runs from 0 to 6 in the tree, and {i} is counted in units of 6; the checkpoint is of another" in said
