"""TabFM: what tabfm's own PyTorch class computes from the directories that `convert` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from convert.numerics.lift_torch import lifted
from support import float64
from support.goldens import golden_io, relative_error
from support.wheels import tabfm


def output(case: str, out: Path, exact: bool = False) -> np.ndarray[Any, Any]:
    """Return what `TabFM_HF.from_pretrained` computes of the golden's table, in float32, or in float64 with casts removed."""
    model = tabfm().TabFM_HF.from_pretrained(str(out)).requires_grad_(False).eval()  # strictly
    given = {name.removeprefix("in_"): torch.from_numpy(x) for name, x in golden_io(case).items() if name.startswith("in_")}  # fmt: skip
    if not exact:
        return np.asarray(model(**given).numpy())
    with lifted():
        wide = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
        return np.asarray(model.double()(**wide).numpy())


def errors(case: str, out: Path) -> tuple[float, float]:
    """The relative error in float32; and in float64 with casts removed."""
    exact = float64.error("tabfm", case, {"out": output(case, out, exact=True)})
    return relative_error(output(case, out), golden_io(case)["out"]), exact
