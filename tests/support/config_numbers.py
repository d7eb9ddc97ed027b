"""Change each number of a config.json, and see which changes a plan accepts."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import convert


def numbers(stated: Any, before: str = "") -> Iterator[str]:
    """Yield the keys of all integers, those in parts and in lists too, and of the names of classes."""
    for key, value in stated.items() if isinstance(stated, dict) else enumerate(stated):
        if key in ("id2label", "label2id"):
            yield from [f"{before}{key}"] if key == "id2label" else []
        elif isinstance(value, dict | list):
            yield from numbers(value, f"{before}{key}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{before}{key}"


def changed(stated: Mapping[str, Any], key: str, removed: bool) -> dict[str, Any]:
    """Return a configuration with a number that is one larger, or without it."""
    made = copy.deepcopy(dict(stated))
    *parts, last = key.split(".")
    of: Any = made
    for part in parts:
        of = of[int(part)] if isinstance(of, list) else of[part]
    if isinstance(of, list):
        of[int(last)] += 1
    elif removed:
        del of[last]
    elif last == "id2label":
        of[last] = {**of[last], str(len(of[last])): "more"}
    else:
        of[last] += 1
    return made


def accepted(family: str, stated: Mapping[str, Any], source: Any) -> Iterator[tuple[str, bool]]:
    """Yield each number that may be another one, or missing.

    Args:
        source: leaves, with the folder of config.json as path.
    """
    for key in numbers(stated):
        for removed in (False,) if key.rpartition(".")[2].isdecimal() else (False, True):
            if not _refused(family, changed(stated, key, removed), source):
                yield key, removed


def _refused(family: str, stated: Mapping[str, Any], source: Any) -> tuple[convert.Finding, ...]:
    (Path(source.path) / "config.json").write_text(json.dumps(stated))
    try:
        convert.plan_conversion(family, source)
    except convert.PlanError as error:
        return error.findings
    return ()
