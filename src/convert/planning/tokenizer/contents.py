"""What the files of a tokenizer and of an image processor say of the model: the ids of the tokens, and the size of the images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def last_id(files: Mapping[str, bytes]) -> tuple[str, int] | None:
    """Return the largest id of a token, and the file that has it."""
    whole = _object(files, "tokenizer.json")
    model, added = whole.get("model"), whole.get("added_tokens")
    words = model.get("vocab") if isinstance(model, Mapping) else None
    if words:
        ids = list(words.values()) if isinstance(words, Mapping) else [len(words) - 1]  # Unigram's is a list
        ids += [one.get("id") for one in added if isinstance(one, Mapping)] if isinstance(added, list) else []
        return _last("tokenizer.json", ids)
    if words := _object(files, "vocab.json"):
        ids = [*words.values(), *_object(files, "added_tokens.json").values()]
        return _last("vocab.json", ids)
    if "vocab.txt" in files:
        return "vocab.txt", len(files["vocab.txt"].splitlines()) - 1
    return None


def image_side(files: Mapping[str, bytes]) -> tuple[str, int] | None:
    """Return the side of the square images that an image processor makes, and its file."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        settings = _object(files, name)
        settings = settings.get("image_processor", settings)
        if not isinstance(settings, Mapping) or settings.get("do_resize") is False:
            continue
        cropped = settings.get("do_center_crop", "crop_size" in settings)
        size = settings.get("crop_size" if cropped else "size")
        height, width = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else (size, size)
        if type(height) is int and height == width:
            return name, height
    return None


def _last(name: str, ids: Sequence[Any]) -> tuple[str, int] | None:
    numbers = [one for one in ids if type(one) is int]
    return (name, max(numbers)) if numbers else None


def _object(files: Mapping[str, bytes], name: str) -> Mapping[str, Any]:
    """Return the object of a JSON file; empty where there is none."""
    found = json.loads(files.get(name, b"{}"))
    return found if isinstance(found, dict) else {}
