"""OWL-ViT and OWLv2: the golden cases, the three forms of their checkpoints, and what transformers computes from a converted file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flax import serialization
from flax.traverse_util import unflatten_dict

import convert
from convert.numerics.lift_torch import lifted
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.paths import GOLDEN

ALL = DrawnCases(GOLDEN / "scenic")
CASES = ("owlv2", "owlvit")
MEAN, STD = (  # projects/owl_vit/clip/model.py
    np.array([0.48145466, 0.4578275, 0.40821073]),
    np.array([0.26862954, 0.26130258, 0.27577711]),
)
FORMS: Mapping[str, Mapping[str, str]] = {  # parts of paths of today's code -> those of other files
    "today": {},
    "OWLv2": {"resblocks_": "resblocks."},
    "OWL-ViT": {"/ln_1/": "/ln_2/", "/ln_0/": "/ln_1/", "resblocks_": "resblocks."},
}
PUBLISHED = {"owlvit": "OWL-ViT", "owlv2": "OWLv2"}


def scaled(leaves: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Make the matrices smaller than they are drawn: behind towers of 128, every box would end at 0 or 1."""
    return {name: x * np.float32(0.3) if x.ndim > 1 else x for name, x in leaves.items()}


def leaves(case: str) -> dict[str, np.ndarray[Any, Any]]:
    return scaled(ALL.leaves(case))


def settings(case: str) -> dict[str, Any]:
    """What a user must say of images of no published size, and what silences the notes."""
    config = ALL.config(case)
    return {"image_size": config["grid"] * config["vision_patch_size"], "head_activation": "gelu", "merged_epsilon": 1e-5}  # fmt: skip


def tree(case: str, form: str) -> dict[str, Any]:
    """Return the file's tree: older files have the weights in an optimizer, as flax before optax."""
    renamed = {}
    for name, x in leaves(case).items():
        for part, other in FORMS[form].items():
            name = name.replace(part, other)
        renamed[name] = x
    params = unflatten_dict(renamed, sep="/")
    if form == "OWL-ViT":
        return {"optimizer": {"target": params, "state": {"step": np.int32(7)}}}
    return {"params": params, "global_step": np.int32(7)}


def write(case: str, folder: Path, form: str | None = None) -> Path:
    """Write the file as flax.training.checkpoints does: msgpack, in a file without an extension."""
    file = folder / f"clip_{case}_b0203fc"
    file.write_bytes(serialization.msgpack_serialize(tree(case, form or PUBLISHED[case])))
    return file


def converted(case: str, folder: Path, form: str | None = None, **options: Any) -> tuple[Path, Path]:
    source = write(case, folder, form)
    convert.convert("owl-vit", source, folder / "out", settings=settings(case), **options)
    return source, folder / "out"


def outputs(case: str, model: Any, dtype: torch.dtype) -> dict[str, np.ndarray[Any, Any]]:
    """What the model says, by scenic's names. transformers norms the texts' embeddings once more, without an epsilon: not here."""
    given = ALL.values(case, "in")
    pixels = torch.from_numpy((given["images"] - MEAN) / STD).permute(0, 3, 1, 2).to(dtype)
    tokens = torch.from_numpy(given["tokens"]).long()
    texts = {"input_ids": tokens.flatten(0, 1), "attention_mask": (tokens.flatten(0, 1) > 0).long()}
    whole = model(pixel_values=pixels, **texts)
    clip = model.owlv2 if case == "owlv2" else model.owlvit
    query = clip.get_text_features(**texts).pooler_output.unflatten(0, tokens.shape[:2])
    logits, classes = model.class_predictor(whole.image_embeds.flatten(1, 2), query, tokens[..., 0] > 0)
    found = {
        "pred_logits": logits, "pred_boxes": whole.pred_boxes, "class_embeddings": classes, "query_embeddings": query,
        "whole": whole.logits,
    }  # fmt: skip
    if case == "owlv2":
        found["objectness_logits"] = whole.objectness_logits
    return {name: x.numpy() for name, x in found.items()}


def loaded(case: str, out: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load the directory with transformers' class."""
    import transformers

    name = "Owlv2ForObjectDetection" if case == "owlv2" else "OwlViTForObjectDetection"
    model, info = getattr(transformers, name).from_pretrained(out, output_loading_info=True, dtype=dtype, attn_implementation="eager")  # fmt: skip
    assert not any(info.values()), info
    return model.requires_grad_(False).eval()


def as_scenic(model: Any) -> Any:
    """Let the heads have scenic's GELU, and the norm of the merged class token its epsilon."""
    for name in ("box_head", "objectness_head"):
        if head := getattr(model, name, None):
            head.gelu = torch.nn.GELU("tanh")
    model.layer_norm.eps = 1e-6
    return model


def largest(case: str, found: Mapping[str, Any], kind: str) -> float:
    """The largest relative error of the outputs; texts of padding alone have no logits."""
    wanted = ALL.values(case, kind)
    real = ALL.values(case, "in")["tokens"][:, None, :, 0] > 0
    hide = {name: real if name in ("pred_logits", "whole") else True for name in found}
    pairs = ((name, wanted["pred_logits" if name == "whole" else name]) for name in found)
    return max(relative_error(np.where(hide[name], found[name], 0), np.where(hide[name], x, 0)) for name, x in pairs)


def errors(case: str, out: Path) -> tuple[float, float]:
    """The largest relative error in float32; and in float64 with casts removed: of all but the logits with texts normed twice."""
    single = outputs(case, as_scenic(loaded(case, out)), torch.float32)
    with lifted():
        double = outputs(case, as_scenic(loaded(case, out, torch.float64)), torch.float64)
    del double["whole"]
    return largest(case, single, "out"), largest(case, double, "out64")
