"""Measures all flax families, and writes the table of docs/models/flax-transformers.md: PYTHONPATH=tests python -m support.flax_table"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from support import flax_families
from support.goldens import relative_error
from support.paths import DOCS

PAGE = DOCS / "models" / "flax-transformers.md"
BOUND = 2e-6
START, END = "<!-- table: families -->\n", "<!-- end of table -->"


def loaded(out: Path) -> tuple[Any, dict[str, Any]]:
    """Return the PyTorch class that config.json names, loaded by `from_pretrained`, and what did not fit."""
    import transformers

    name = json.loads((out / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(
        out, output_loading_info=True, attn_implementation="eager", dtype="float32"
    )
    return model.eval(), info


def outputs(model: Any, case: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return what the PyTorch model computes, in its dtype, of the outputs that the flax class has."""
    import torch

    given = flax_families.values(case, "in")
    tensors = {
        name: torch.from_numpy(x).to(model.dtype) if x.dtype == np.float32 else torch.from_numpy(x.astype(np.int64))
        for name, x in given.items()
    }
    if "bool_masked_pos" in tensors:
        tensors["bool_masked_pos"] = tensors["bool_masked_pos"].bool()
    with torch.no_grad():
        made = model(**tensors)
    return {name: made[name].numpy() for name in flax_families.values(case, "out")}


def errors(model: Any, case: str) -> dict[str, float]:
    """Return the error of each output of the PyTorch model, relative to the flax class."""
    made = outputs(model, case)
    return {name: relative_error(made[name], x) for name, x in flax_families.values(case, "out").items()}


def error(model: Any, case: str) -> float:
    """Return the largest error; that in float64, if it is less: some processors add in an order that drifts further in float32."""
    in_float32 = max(errors(model, case).values())
    return in_float32 if in_float32 < BOUND else min(in_float32, max(errors(model.double(), case).values()))


def listed() -> dict[str, list[str]]:
    """Return family -> its cases."""
    found: dict[str, list[str]] = defaultdict(list)
    for case in flax_families.CASES:
        found[case.partition(".")[0]].append(case)
    return found


def shown(case: str) -> str:
    """Return the class of a case, and the name of a variant."""
    (name,) = flax_families.config(case)["architectures"]
    variant = case.partition(".")[2]
    return name if variant in ("", name) else f"{name} ({variant})"


def main() -> None:
    import convert

    logging.disable(logging.WARNING)
    rows = ["| family | classes | error | transformers 4's `from_flax=True` |", "|---|---|---|---|"]
    for cases in listed().values():
        worst, peers = 0.0, []
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                source = flax_families.write(case, Path(folder) / "source")
                convert.convert("flax-transformers", source, Path(folder) / "out")
                worst = max(worst, *errors(loaded(Path(folder) / "out")[0], case).values())
            peer = flax_families.DIGESTS[case]["from_flax"]
            if not isinstance(peer, float) or peer > 1e-4:
                what = peer.partition(":")[0] if isinstance(peer, str) else f"{peer:.1g}"
                peers.append(f"{shown(case)}: {what}")
        model_type = flax_families.config(cases[0])["model_type"]
        rows.append(f"| {model_type} | {', '.join(map(shown, cases))} | {worst:.1e} | {'; '.join(peers) or 'equal'} |")
    text = PAGE.read_text()
    table = "\n".join(["", *rows, "", ""])
    PAGE.write_text(re.sub(f"{START}.*{END}", lambda _: f"{START}{table}{END}", text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
