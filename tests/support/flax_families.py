"""The golden cases of all flax models of transformers 4 (`tests/golden/make_flax_families.py`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import serialization
from flax.traverse_util import unflatten_dict

from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly
from support.paths import GOLDEN

FOLDER = GOLDEN / "flax-families"
ALL = DrawnCases(FOLDER)
CASES, values, config, leaves = ALL.names, ALL.values, ALL.config, ALL.leaves
OWN_RULES = ("dinov2", "gemma", "llama", "mistral")  # families with a rule file of their own, and goldens for it
GENERIC = tuple(case for case in CASES if case.partition(".")[0] not in OWN_RULES)  # that the rules of all others take
DIGESTS: dict[str, dict[str, Any]] = json.loads((FOLDER / "DIGEST.json").read_text())
FROM_FLAX: dict[str, dict[str, Any]] = json.loads((FOLDER / "FROM_FLAX.json").read_text())


def digest(tensors: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return one checksum of names, shapes and bytes."""
    every = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        every.update(f"{name} {x.dtype} {x.shape} ".encode() + x.tobytes())
    return every.hexdigest()[:16]


def write(case: str, folder: Path, changed: dict[str, np.ndarray[Any, Any]] | None = None, **keys: Any) -> Path:
    """Write the checkpoint of a case: the bytes that `save_pretrained` wrote, unless something is changed."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = unflatten_dict(leaves(case) if changed is None else changed, sep="/")
    (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(tree))
    (folder / "config.json").write_text(json.dumps(config(case) | keys))
    return folder


def specs(case: str, folder: Path, without: Collection[str] = (), **keys: Any) -> SpecsOnly:
    """Write `config.json` of a case, and return the leaves beside it without their values, and without some leaves: enough to plan."""
    folder.mkdir(parents=True, exist_ok=True)
    stated = config(case) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in stated.items() if value is not None}))
    found = SpecsOnly({name: (shape, "float32") for name, shape in ALL.shapes(case).items() if name not in without})
    found.path = folder
    return found
