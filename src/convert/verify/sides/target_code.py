"""Errors that the target's own code raises: a key of config.json can make it fail."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from convert.core.errors import ConvertError, UserCodeError
from convert.core.findings import Finding
from convert.programs.where import model_line
from convert.references.protocol import Reference


def with_target_errors(reference: Reference) -> Reference:
    """Return the reference with errors of its PyTorch side reported as findings; for references of this package."""
    return replace(reference, build=_reporting(reference.build), run=_reporting(reference.run))


def _reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (ConvertError, ImportError):
            raise
        except Exception as error:
            place = _place(traceback.extract_tb(error.__traceback__))
            raise UserCodeError(
                Finding(
                    "target-failed",
                    expected="a PyTorch model that runs",
                    got=f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({place})",
                    fix="compare config.json with the one that `convert` writes",
                )
            ) from error

    return call


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return line and function of the model's code that failed: PyTorch's own, which it called, says little."""
    inner = list(reversed(frames))
    frame = next((one for one in inner if model_line([(one.filename, one.lineno or 0)])), inner[0])
    return f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
