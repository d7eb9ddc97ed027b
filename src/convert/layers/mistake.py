"""A known wrong conversion of one tensor: its name, and the tensor that it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
OWN_VALUES = "made of its own leaf"  # what the rule makes of a tensor, where a mistake puts in another tensor


@dataclass(frozen=True)
class Mistake:
    """A known wrong conversion of one tensor.

    Attributes:
        name: short and stable, such as ``transposed``; the fault catalogue refers to it.
        converse: name of the opposite mistake: the written tensor is right, and the rule wrong.
        gives: what the mistake makes of the tensor, in words.
        instead: what the rule makes of it, in words.
        make: computes the tensor of the mistake.
        key: equal in mistakes about several tensors of a layer that one wrong rule makes together; empty: no such mistakes are known.
        rounding: whether only the last bits differ, so that no output of a model shows it.
        of: the tensor whose values the mistake puts in; empty: it does not.
    """

    name: str
    converse: str
    gives: str
    instead: str
    make: Callable[[], Array]
    key: str = ""
    rounding: bool = False
    of: str = ""


def symmetric(name: str, gives: str, instead: str, make: Callable[[], Array], key: str = "") -> Mistake:
    """Return a mistake that is its own converse."""
    return Mistake(name, name, gives, instead, make, key)
