"""Recognises pickles, in order to refuse them: to load one is to run the code in it."""

from __future__ import annotations

import re
from pathlib import Path

from convert.checkpoints.encodings.npy_header import NO_PICKLES
from convert.checkpoints.files import children, head
from convert.checkpoints.formats.npz import member_names

_SUFFIXES = (".pkl", ".pickle", ".joblib", ".pt", ".pth", ".ckpt")
_PROTOCOL = re.compile(rb"\x80[\x02-\x05]")  # the first opcode of protocols 2 to 5; pickletools.py


def is_pickle(path: Path) -> bool:
    """Whether the file is a pickle, or PyTorch's archive with one; older pickles, which start with text, by their suffix."""
    start = head(path)
    if _PROTOCOL.match(start) or any(name.endswith("data.pkl") for name in member_names(path)):
        return True
    return path.suffix in _SUFFIXES[:3] and bool(start)


def refusal(path: Path) -> str | None:
    """What to say where the file, or a file in the directory, is a pickle; None where there is none."""
    files = [child for child in children(path) if child.name.endswith(_SUFFIXES)] if path.is_dir() else [path]
    found = next((file for file in files if is_pickle(file)), None)
    return f"{found}: {NO_PICKLES}" if found is not None else None
