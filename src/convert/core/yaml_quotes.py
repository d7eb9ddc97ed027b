"""Recognise values of YAML that need quotes, such as ``{i}/kernel``, and write the line with them."""

from __future__ import annotations

import re

_KEY = re.compile(r"(?:(?<=^)|(?<=[\s{,]))([\w-]+):[ \t]+")
SPECIAL = "{}*&%@`"  # a pattern may contain or begin with them; YAML reads them as its own


def with_quotes(line: str, column: int) -> str:
    """Return the key before a column of a line with its value in quotes; empty when quotes are not what it lacks.

    Args:
        column: from 0, of the character at which YAML fails or misreads the value.
    """
    keys = [key for key in _KEY.finditer(line) if key.end() <= column]
    if not keys:
        return ""
    start = keys[-1].end()
    behind = _KEY.search(line, start)
    value = line[start : behind.start() if behind else None].partition(" #")[0].rstrip().removesuffix(",").rstrip()
    while value.endswith("}") and value.count("}") > value.count("{"):
        value = value[:-1].rstrip()
    needed = any(mark in value for mark in "{}") or value[:1] in SPECIAL
    if not value or not needed or ":" in value or value[0] in "'\"[" or value.count("{") != value.count("}"):
        return ""
    return f'{keys[-1][1]}: "{value}"'
