"""What the files of a tokenizer and of an image processor say of the model: the ids of the tokens, and the size of the images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def last_id(values: Mapping[str, Any], lines: bytes | None) -> tuple[str, int] | None:
    """Return the file that has the tokens, and the largest id of one; None where none has them.

    Args:
        values: name of a JSON file -> what it holds.
        lines: contents of ``vocab.txt``; None without one.
    """
    whole = _object(values, "tokenizer.json")
    model, added = whole.get("model"), whole.get("added_tokens")
    words = model.get("vocab") if isinstance(model, Mapping) else None
    if words:
        ids = list(words.values()) if isinstance(words, Mapping) else [len(words) - 1]  # Unigram's is a list
        ids += [one.get("id") for one in added if isinstance(one, Mapping)] if isinstance(added, list) else []
        return _last("tokenizer.json", ids)
    if words := _object(values, "vocab.json"):
        ids = [*words.values(), *_object(values, "added_tokens.json").values()]
        return _last("vocab.json", ids)
    return None if lines is None else ("vocab.txt", len(lines.splitlines()) - 1)


def image_side(values: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the file of the image processor, and the side of the square images that it makes; None where there is none, or they are not square.

    Args:
        values: name of a JSON file -> what it holds.
    """
    for name in ("preprocessor_config.json", "processor_config.json"):
        settings = _object(values, name)
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


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object of a JSON file; empty where it holds none."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}
