"""What the JAX model computed: the values that the PyTorch model is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.verify.sides.sampling import Sample

Array = np.ndarray[Any, np.dtype[Any]]
Values = Mapping[str, Array]

LIVE = "from a live run of the JAX model"


@dataclass(frozen=True)
class Evidence:
    """What the JAX model computed, live or recorded.

    Attributes:
        inputs: by name.
        float64_values: values at boundaries and outputs, computed in float64 throughout, in the order of the data; None when
            unknown.
        native_values: the same values as the model computes them in `precision`.
        masks: true where a value counts, by name.
        precision: the dtype that users run in.
        unlifted: primitives that could not be computed in float64.
        origin: where the values come from, for people: a live run, or which recording.
        environment: package -> version, on the machine that ran the model.
        samples: name -> the part of a value that a recording kept, for values that it did not keep whole.
        moved: name -> the largest relative change of the float64 value when the constants that the JAX code rounded to float32 move by as
            much as rounding may have moved them; empty where it rounded none.
        rounded: the coarsest dtype of weights whose values before rounding are unknown; empty when all are known.
        notes: remarks for the report.
    """

    inputs: Values
    float64_values: Values | None
    native_values: Values
    masks: Values
    precision: str = "float32"
    unlifted: tuple[str, ...] = ()
    origin: str = LIVE
    environment: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, Sample] = field(default_factory=dict)
    rounded: str = ""
    moved: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def is_live(self) -> bool:
        """Whether the JAX model ran here and can run again."""
        return self.origin == LIVE

    @property
    def best_values(self) -> Values:
        """The float64 values, or the native ones where those are unknown."""
        return self.native_values if self.float64_values is None else self.float64_values

    def pick(self, name: str, value: Array) -> Array:
        """Return the part of a value that can be compared: all of it, or the sample that a recording kept.

        Raises:
            ValueError: the value has another shape than the recorded one.
        """
        return self.samples[name].take(value) if name in self.samples else value

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole value."""
        return self.samples[name].shape if name in self.samples else self.native_values[name].shape
