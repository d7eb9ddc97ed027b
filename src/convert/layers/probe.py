"""What a probe of a layer is: both sides, ready to be run in a dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Probe:
    """A layer on both sides.

    Attributes:
        run: dtype -> the result of the target's layer with the written weight, and that of the source's with the stored one.
        reduction: how many terms are summed, for the error bound.
        name: of the measure, where a layer has several.
    """

    run: Callable[[str], tuple[Array, Array]]
    reduction: int
    name: str = ""
