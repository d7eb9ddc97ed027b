"""Find the line of the model's code in a stack of frames: the innermost that is of no library and not of what runs the model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from convert.core.user_code import PACKAGES, STANDARD

LIBRARIES = {"jax", "jaxlib", "flax", "haiku", "equinox", "keras", "torch", "numpy", "jaxtyping", "einops", "einshape"}
RUNNERS = {"programs", "numerics", "verify", "inference"}  # folders of this package
ROOT = Path(__file__).parents[1]


def model_line(frames: Iterable[tuple[str, int]]) -> str:
    """Return ``file.py:line`` of the first frame that is the model's code; empty if none is.

    Args:
        frames: file and line, the innermost first.
    """
    return next((f"{Path(file).name}:{line}" for file, line in frames if _of_the_model(file)), "")


@lru_cache(maxsize=4096)
def _of_the_model(file: str) -> bool:
    path = Path(file)
    if file.startswith("<"):
        return False
    if path.is_relative_to(ROOT):
        return path.relative_to(ROOT).parts[0] not in RUNNERS
    installed = [k for k, part in enumerate(path.parts) if part in PACKAGES]
    if installed:
        return path.parts[installed[-1] + 1] not in LIBRARIES
    return not any(map(path.is_relative_to, STANDARD))
