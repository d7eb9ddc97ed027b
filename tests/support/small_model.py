"""What a small model is, and the sizes that small models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

WIDTH, HEADS, HEAD, STEPS, BATCH = 12, 2, 6, 7, 3
Weights = Mapping[str, Any]


@dataclass(frozen=True)
class Small:
    """A model: rules without their head, shapes of the leaves, both sides, and the names of the inputs."""

    rules: str
    shapes: Mapping[str, tuple[int, ...]]
    side: Callable[[Weights, Weights], dict[str, Any]]
    module: Callable[[], nn.Module]
    given: tuple[str, ...] = ("x",)
    axes: str = ""
