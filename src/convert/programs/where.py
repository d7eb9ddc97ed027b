"""Find the line of the model's code in a stack of frames: the innermost frame that belongs neither to a library nor to the code that runs the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType

from convert.core.user_code import PACKAGES, STANDARD

LIBRARIES = {
    *("jax", "jaxlib", "flax", "haiku", "equinox", "keras", "torch", "numpy", "jaxtyping", "einops", "einshape"),
    *("diffrax", "lineax", "optimistix", "torchcde", "torchdiffeq"),
}
RUNNERS = {"programs", "numerics", "verify", "inference"}  # folders of this package
ROOT = Path(__file__).parents[1]


UNKNOWN = "an unknown line"


def model_line(frames: Iterable[tuple[str, int]]) -> str:
    """Return ``file.py:line`` of the first frame that is the model's code; empty if none is.

    Args:
        frames: file and line, the innermost first.
    """
    return next((f"{name}:{line}" for file, line in frames if (name := _name(file))), "")


def stack(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """Yield file and line of a frame and of those that called it."""
    while frame:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _name(file: str) -> str:
    """Return the name of a file of the model's code; empty for another one."""
    return Path(file).name if _of_the_model(file) else ""


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
