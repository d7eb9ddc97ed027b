"""Copies of weights that aqt quantised: they lie in the module of their weight, in the collection `aqt` (linen) or beside it (nnx)."""

from __future__ import annotations

from collections.abc import Mapping

from convert.core.path_index import keys_above
from convert.core.path_pattern import parse_pattern
from convert.layers import Rule

AQT = "Aqt"  # AqtDotGeneral_0 beside a kernel, AqtEinsum_0 where a module computes with several weights


def of_unknown_modules(claims: Mapping[str, Rule], paths: Mapping[str, Rule]) -> list[str]:
    """Return leaves of aqt in modules of which no rule has another leaf: they are weights of their own.

    Args:
        claims: leaf -> the rule that matches it.
        paths: paths of the rules, from the top of the tree.
    """
    of_aqt = {name: module for name in claims if (module := _module(name))}
    if not of_aqt:
        return []
    known = keys_above(name for name in claims if name not in of_aqt)
    written = [
        parse_pattern(module)
        for path, rule in paths.items()
        if rule.kind.drop_reason is None and (module := path.rpartition("/")[0])
    ]
    return [
        name
        for name, module in of_aqt.items()
        if module not in known and not any(pattern.match(module) for pattern in written)
    ]


def _module(leaf: str) -> str:
    """Return the path of the module of a leaf of aqt; empty: it is another leaf."""
    keys = leaf.split("/")
    at = next((k for k, key in enumerate(keys) if key.startswith(AQT)), 0)
    return "/".join("params" if key == "aqt" else key for key in keys[:at])
