"""Sizes as users write them, and the default size of a shard."""

from __future__ import annotations

import math
import re
from pathlib import Path

from convert.core.errors import ConvertError
from convert.core.findings import Finding

DEFAULT_SHARD_BYTES = 5 * 10**9  # MAX_SHARD_SIZE of huggingface_hub is "5GB", which means 5 * 10**9
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(text: str, option: str) -> int:
    """Parse a size such as ``2GB`` (decimal) or ``2GiB`` (binary) into bytes; `option` is named in the error.

    Raises:
        ConvertError: `text` is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B?)\s*", text, re.IGNORECASE)
    unit = match[2].upper() if match else None
    if unit is not None and unit not in _UNITS:
        unit += "B"
    size = float(match[1]) * _UNITS[unit] if match is not None and unit in _UNITS else 0.0
    if not 1 <= size < math.inf:
        raise ConvertError(Finding("usage", path=option, expected="a size such as 500MB, 2GB or 2GiB", got=repr(text)))
    return int(size)


def shard_bytes(text: str | None, out: Path | None) -> int | None:
    """Return the limit that ``--max-shard-size`` sets; a single file has no limit unless the user gives one."""
    if text is not None:
        return parse_size(text, "--max-shard-size")
    return None if out is not None and out.suffix == ".safetensors" else DEFAULT_SHARD_BYTES
