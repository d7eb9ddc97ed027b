"""Whether the files of `--tokenizer` are those of this model: the ids of the tokens, and the size of the images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from convert.planning.tokenizer.files import TokenizerFiles

# Their code takes any image that has as many whole patches; others compare the sides of an image with `image_size`.
WHOLE_PATCHES = ("siglip_vision_model",)


def misfits(config: Mapping[str, Any], given: TokenizerFiles) -> Iterator[str]:
    """Yield a note for each size that the files and the output's ``config.json`` do not agree in.

    Notes, not errors: published tokenizers have a few tokens more than the model has embeddings (Gemma 3's image token), and some models
    interpolate their positions to images of another size (DINOv2).
    """
    rows, last = _stated(config, "vocab_size"), given.last_id
    if rows is not None and last is not None and last[1] >= rows:
        yield f"{last[0]} of --tokenizer has ids up to {last[1]}, and the model has embeddings for the ids below {rows}: it fails on the others"
    trained, made = _stated(config, "image_size"), given.image_side
    if trained is not None and made is not None and trained != made[1] and not _same_patches(config, trained, made[1]):
        yield f"{made[0]} of --tokenizer makes images of {made[1]} x {made[1]}, and the model has the image_size {trained}"


def _same_patches(config: Mapping[str, Any], trained: int, made: int) -> bool:
    """Whether images of two sizes have the same patches to the model: SigLIP so400m/14 at 384 reads 27 x 27 of them, as at 378."""
    vision = config.get("vision_config")
    part = vision if isinstance(vision, Mapping) else config
    patch = part.get("patch_size")
    return (
        part.get("model_type") in WHOLE_PATCHES
        and isinstance(patch, int)
        and patch > 0
        and trained // patch == made // patch
    )


def _stated(config: Mapping[str, Any], key: str) -> int | None:
    """Return a size that a ``config.json`` states for the model or for one of its parts; None where none does, or several do."""
    parts = [config, *(config.get(part) for part in ("text_config", "vision_config", "encoder"))]
    stated = {part[key] for part in parts if isinstance(part, Mapping) and type(part.get(key)) is int}
    return stated.pop() if len(stated) == 1 else None
