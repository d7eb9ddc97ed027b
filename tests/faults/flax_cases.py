"""The golden checkpoints of the Flax families as cases of the catalogue: their files, and what the Flax classes computed.

transformers 5 has no Flax class, so that the check compares with a recording.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import convert
from convert.verify.recording.record import write_recording
from convert.verify.sides.evidence import Evidence
from support import flax_families, flax_table

FAMILY = "flax-transformers"
CASES = frozenset(flax_families.CASES)
FAMILIES = tuple(family for family in flax_table.listed() if family not in flax_families.OWN_RULES)
_KEPT: list[Any] = []


def case_of(family: str) -> str:
    """The case that faults are planted in: the first of a family."""
    return flax_table.listed()[family][0]


@cache
def _folder(case: str) -> Path:
    """Kept for as long as the process lives."""
    kept = tempfile.TemporaryDirectory(prefix="flax-families-")
    _KEPT.append(kept)
    return Path(kept.name)


@cache
def checkpoint(case: str) -> Path:
    """Its directory, with config.json."""
    return flax_families.write(case, _folder(case) / "source")


@cache
def plan(case: str) -> convert.Plan:
    """How it is converted."""
    return convert.plan_conversion(FAMILY, checkpoint(case))


@cache
def recording(case: str) -> Path:
    """What the Flax class computed."""
    path = _folder(case) / "recorded.safetensors"
    values = {name: x.astype(np.float64) for name, x in flax_families.values(case, "out").items()}
    evidence = Evidence(flax_families.values(case, "in"), None, values, {})
    write_recording(plan(case), evidence, path, outputs=tuple(values))
    return path


def rules(case: str) -> str:
    """Name of the shipped file that the plan of a case took."""
    return Path(plan(case).rules.path).stem
