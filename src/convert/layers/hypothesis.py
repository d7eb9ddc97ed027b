"""A mistake that may have been made with a tensor, and the tensor that it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Hypothesis:
    """A mistake, and the tensor that it gives.

    Attributes:
        name: short and stable, such as ``transposed``; the fault catalogue refers to it.
        converse: the name when the tensor is what the source needs and the rule is what is wrong.
        gives: what the tensor is, in words.
        instead: what the rule makes of it.
        make: computes the tensor, on demand.
        key: equal in hypotheses about the weight and the bias of a layer that one mistake makes true together; empty when
            there is no telling.
    """

    name: str
    converse: str
    gives: str
    instead: str
    make: Callable[[], Array]
    key: str = ""
