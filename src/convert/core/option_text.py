"""Options of the command line, as a message suggests them: a shell takes them as they are printed."""

from __future__ import annotations

import json
import shlex
from typing import Any


def set_option(name: str, value: Any) -> str:
    """Write ``--set name=value``, quoted where a shell would divide or expand it.

    >>> set_option("eos_token_id", [1, 106])
    "--set 'eos_token_id=[1, 106]'"
    >>> set_option("activation", "relu")
    '--set activation=relu'
    """
    return f"--set {shlex.quote(f'{name}={_scalar(value)}')}"


def _scalar(value: Any) -> str:
    """Write a value as ``--set`` reads it: words without quotes, also in a list."""
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    return value if isinstance(value, str) else json.dumps(value)
