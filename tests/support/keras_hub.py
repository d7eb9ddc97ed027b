"""The golden checkpoints of Keras Hub: what a user must say of them, and the errors of transformers against Keras Hub's outputs."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import convert
from support.goldens import relative_error
from support.paths import GOLDEN

ROOT = GOLDEN / "keras-hub"
CASES = tuple(sorted(path.name for path in ROOT.iterdir()))
BOUND = 2e-6
OUTPUTS = {"last_hidden_state": "sequence_output", "pooler_output": "pooled_output", "logits": "logits"}


def settings(case: str) -> dict[str, Any]:
    """Return what neither the tree nor the preset's configuration tells."""
    match case:
        case "bert":
            return {}
        case "vit":
            return {"image_size": 16}
        case "llama" | "llama3.1-tied":
            return {"context_length": 131072, "eos_token_id": 1, "bos_token_id": 2}
    return {"context_length": 64}


def load(out: Path) -> torch.nn.Module:
    """Load the class of config.json; nothing may be missing, left over or of another shape."""
    (name,) = json.loads((out / "config.json").read_text())["architectures"]
    model, report = getattr(transformers, name).from_pretrained(out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager")  # fmt: skip
    assert not any(report.values()), report
    return model.eval()


def checkpoint(case: str, folder: Path) -> Path:
    """Write the checkpoint, which the goldens keep compressed, as Keras Hub did; return what a user names."""
    stored = ROOT / case if case == "vit" else ROOT / case / "preset"
    made = folder / case
    made.mkdir()
    (made / "model.weights.h5").write_bytes(lzma.decompress((stored / "model.weights.h5.xz").read_bytes()))
    if (stored / "config.json").exists():
        shutil.copy(stored / "config.json", made)
    return made


def converted(case: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """Return checkpoint and output."""
    source = checkpoint(case, folder)
    convert.convert("keras-hub", source, folder / "out", settings=settings(case), **options)
    return source, folder / "out"


def outputs(case: str, model: Any) -> dict[str, np.ndarray]:
    """Return what the loaded class computes, by Keras Hub's names of its outputs."""
    io = dict(np.load(ROOT / case / "io.npz"))
    if case == "vit":
        given: dict[str, Any] = {"pixel_values": torch.from_numpy(io["images"]).permute(0, 3, 1, 2).to(model.dtype)}
    else:
        given = {"input_ids": torch.from_numpy(io["token_ids"]).long(), "attention_mask": torch.from_numpy(io["padding_mask"]).long()}  # fmt: skip
    if "segment_ids" in io:
        given["token_type_ids"] = torch.from_numpy(io["segment_ids"]).long()
    with torch.no_grad():
        made = model(**given)
    return {theirs: np.asarray(made[ours]) for ours, theirs in OUTPUTS.items() if theirs in io}


def seen(case: str, output: Any) -> Any:
    """Return an output where no token is padding."""
    with np.load(ROOT / case / "io.npz") as io:
        mask = io["padding_mask"].astype(bool) if "padding_mask" in io else None
    return output if mask is None or output.shape[:-1] != mask.shape else output[mask]


def errors(case: str, out: Path) -> dict[str, float]:
    """Return the relative error of each output of the loaded class, where no token is padding."""
    io, model = dict(np.load(ROOT / case / "io.npz")), load(out)
    return {name: relative_error(seen(case, x), seen(case, io[name])) for name, x in outputs(case, model).items()}
