"""Recognises pickles and refuses them, because loading a pickle runs the code in it."""

from __future__ import annotations

import re
from pathlib import Path

from convert.checkpoints.access import children, head
from convert.checkpoints.formats.npz import member_names

_SUFFIXES = (".pkl", ".pickle", ".joblib", ".pt", ".pth", ".ckpt")
_PROTOCOL = re.compile(rb"\x80[\x02-\x05]")  # the first opcode of protocols 2 to 5; pickletools.py


def is_pickle(path: Path) -> bool:
    """Whether the file is a pickle or PyTorch's archive with one. Protocols 0 and 1 start with text: their suffix decides."""
    start = head(path)
    if _PROTOCOL.match(start) or any(name.endswith("data.pkl") for name in member_names(path)):
        return True
    return path.suffix in _SUFFIXES[:3] and bool(start)


def find_pickle(path: Path) -> Path | None:
    """Return `path`, or the first file in this directory, that is a pickle; None where there is none."""
    files = [child for child in children(path) if child.name.endswith(_SUFFIXES)] if path.is_dir() else [path]
    return next((file for file in files if is_pickle(file)), None)
