"""Whether the files of `--tokenizer` are those of this model: the ids of the tokens, and the size of the images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from convert.planning.tokenizer.files import TokenizerFiles


def misfits(config: Mapping[str, Any], given: TokenizerFiles) -> Iterator[str]:
    """Yield a note for each size that the files and the output's ``config.json`` do not agree in.

    Notes, not errors: published tokenizers have a few tokens more than the model has embeddings (Gemma 3's image token), and some models
    interpolate their positions to images of another size (DINOv2).
    """
    rows, last = _stated(config, "vocab_size"), given.last_id
    if rows is not None and last is not None and last[1] >= rows:
        yield f"{last[0]} of --tokenizer has ids up to {last[1]}, and the model has embeddings for the ids below {rows}: it fails on the others"
    trained, made = _stated(config, "image_size"), given.image_side
    if trained is not None and made is not None and trained != made[1]:
        yield f"{made[0]} of --tokenizer makes images of {made[1]} x {made[1]}, and the model has the image_size {trained}"


def _stated(config: Mapping[str, Any], key: str) -> int | None:
    """Return a size that a ``config.json`` states for the model or for one of its parts; None where none does, or several do."""
    parts = [config, *(config.get(part) for part in ("text_config", "vision_config", "encoder"))]
    stated = {part[key] for part in parts if isinstance(part, Mapping) and type(part.get(key)) is int}
    return stated.pop() if len(stated) == 1 else None
