"""The part of a checkpoint's interface that probes and mistakes use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from convert.core.tensor_spec import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]


class StoredLeaf(Protocol):
    """A leaf that is not read yet."""

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype."""


class LeafReader(Protocol):
    """A checkpoint, as far as probes and mistakes use it."""

    @property
    def leaves(self) -> Mapping[str, StoredLeaf]:
        """The leaves by name."""

    def read(self, name: str) -> Array:
        """Read a leaf."""
