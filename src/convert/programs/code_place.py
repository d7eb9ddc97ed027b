"""Where in a model's code a run is: the line, and the path of the module."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import PurePath
from types import FrameType
from typing import Any

NOT_THE_MODEL = (
    *("jax", "jaxlib", "flax", "haiku", "equinox", "keras", "torch", "numpy", "functools", "contextlib"),
    *("convert.programs", "convert.numerics", "convert.verify"),
)
RECORDERS = "convert.programs.record_"  # what calls them is not the model


def frames() -> Iterator[FrameType]:
    """Yield the frames of the stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def model_line() -> str:
    """Return ``file.py:line`` of the innermost frame of the model's code; empty where none is on the stack."""
    for frame in frames():
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(RECORDERS):
            break
        if _of_model(name):
            return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return ""


@cache
def _of_model(name: str) -> bool:
    return not any(name == package or name.startswith(f"{package}.") for package in NOT_THE_MODEL)


def running_module(paths: Mapping[int, str], call: Any) -> str:
    """Return the path of the innermost module that runs; empty where none does.

    Args:
        paths: of the modules, by `id`.
        call: the code object of the method that calls a module's forward; its first argument is the module.
    """
    for frame in frames():
        if frame.f_code is call and (path := paths.get(id(frame.f_locals["self"]))) is not None:
            return path
    return ""
