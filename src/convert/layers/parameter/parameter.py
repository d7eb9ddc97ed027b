"""Tensors that are kept as stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.core.fields import Key, Record
from convert.layers.base import LayerKind
from convert.layers.draft import DraftContext, DraftEntry, Layer
from convert.layers.parameter.draft import draft_parameter
from convert.layers.shared_keys import (
    AXES,
    TENSOR_TARGET,
    named_axes,
)
from convert.layers.target import TargetLayer


@dataclass(frozen=True)
class Stored(LayerKind):
    """A tensor that both sides store in the same layout.

    Attributes:
        axes: letters of its axes; None: they have no names.
    """

    axes: str | None = None

    keys: ClassVar[Mapping[str, Key]] = {"axes": AXES}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Stored:
        return cls(values.get("axes"))

    @property
    def weight_axes(self) -> tuple[tuple[str, str], ...]:
        return ((self.axes, self.axes),) if self.axes else ()

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        return named_axes(self.axes, shape)


@dataclass(frozen=True)
class Parameter(Stored):
    """A tensor that both sides store in the same layout and use in the same way."""

    kind_name: ClassVar[str] = "parameter"
    doc: ClassVar[str] = "A parameter that is copied as stored; the target is the full name of the tensor."
    target: ClassVar[Record] = TENSOR_TARGET

    @classmethod
    def draft(
        cls, context: DraftContext, layer: Layer, main: str | None, bias: str | None, either: bool = False
    ) -> DraftEntry:
        assert main is not None
        return draft_parameter(context, layer, main)

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        return path
