"""Weights that qwix quantised, as QLoRA keeps them below its pairs, are refused for that reason, with any setting of the pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.planning.adapters.joined import joined
from support import tunix
from support.paths import GOLDEN

BASE, PAIRS = (GOLDEN / "adapters" / "tunix-gemma3" / part for part in ("base", "pairs"))


def quantised(leaves: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Replace each weight that has a pair by the arrays of qwix's QArray."""
    found = {}
    for name, x in leaves.items():
        stem = name.removesuffix("/value")
        if f"{stem}_lora_a/value" in leaves:
            found[f"{stem}/array/qvalue/value"] = np.clip(10 * x, -100, 100).astype(np.int8)
            found[f"{stem}/array/scale/value"] = np.ones((1,) * x.ndim, np.float32)
        else:
            found[name] = x
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qlora")
    both = joined(convert.open_source(BASE), convert.open_source(PAIRS))
    leaves = quantised({name: both.read(name) for name in both.leaves})
    (made / "stated").mkdir()
    (made / "stated" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 5, "r": 4}))
    base = {name: x for name, x in leaves.items() if "lora" not in name}
    for file, arrays in {"whole": leaves, "stated/whole": leaves, "base": base}.items():
        np.savez(made / f"{file}.npz", **arrays)
    return made


@pytest.mark.parametrize(
    ("file", "settings", "lora"),
    [
        ("whole", {}, None),
        ("whole", {"lora_alpha": 5}, None),
        ("whole", {"adapter": "base"}, None),
        ("stated/whole", {}, None),
        ("base", {}, None),
        ("base", {"lora_alpha": 5}, PAIRS),
    ],
)
def test_a_quantised_base_is_refused_as_one(file: str, settings: dict[str, Any], lora: Path | None, folder: Path) -> None:  # fmt: skip
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion("tunix", folder / f"{file}.npz", settings={**tunix.SET, **settings}, lora=lora)
    (finding,) = refused.value.findings
    assert finding.code == "leaf-without-rule" and finding.path.endswith("/array/qvalue/value")
    assert "are quantised" in finding.problem and "dequantise" in finding.fix


def test_a_pair_that_is_not_there_is_still_named() -> None:
    with pytest.raises(convert.ConvertError, match="the tree has no LoRA pair"):
        convert.plan_conversion("tunix-gemma3", BASE, settings={**tunix.SET, "lora_alpha": 5})
