"""What the JAX model computed: the values that the PyTorch model is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.verify.sides.sampling import Sample

Array = np.ndarray[Any, np.dtype[Any]]
Values = Mapping[str, Array]


@dataclass(frozen=True)
class Evidence:
    """What the JAX model gave.

    Attributes:
        inputs: by name.
        exact: values at boundaries and outputs in lifted float64, in the order in which data flows; None when unknown.
        drifted: the same as the model computes them in `precision`.
        masks: where values count.
        unlifted: primitives that could not be lifted.
        origin: live, or which recording.
        samples: name -> the part of a value that is known, for those that a recording did not keep whole.
        rounded: dtype to which the weights were rounded whose unrounded values are not known; empty when all are.
        notes: what a reader should know of it.
    """

    inputs: Values
    exact: Values | None
    drifted: Values
    masks: Values
    precision: str = "float32"
    unlifted: tuple[str, ...] = ()
    origin: str = "live"
    environment: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, Sample] = field(default_factory=dict)
    rounded: str = ""
    notes: tuple[str, ...] = ()

    def pick(self, name: str, value: Array) -> Array:
        """What is to be compared with the evidence: the whole value, or the sample that a recording kept.

        Raises:
            ValueError: the value is of another shape than the recorded one.
        """
        return self.samples[name].take(value) if name in self.samples else value

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole value."""
        return self.samples[name].shape if name in self.samples else self.drifted[name].shape
