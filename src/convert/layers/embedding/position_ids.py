"""Buffers of position numbers, which no leaf holds: 0, 1, ... up to the longest text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.core.fields import Key, Record, Scalar
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import CompileContext, CompiledRule, LayerKind, Matched, Step
from convert.layers.embedding.sinusoids import COMPUTED, parse_positions, positions_of
from convert.layers.shared_keys import TENSOR_TARGET
from convert.layers.target import TargetLayer


@dataclass(frozen=True)
class PositionIds(LayerKind):
    """The buffer `position_ids` of classes of transformers that save it, [1, S] of int64.

    Attributes:
        positions: letter or number: how many there are.
    """

    positions: str | int

    guide: ClassVar[str] = "attention"
    kind_name: ClassVar[str] = "position_ids"
    doc: ClassVar[str] = "A buffer that is counted, not read: the numbers of the positions, [1, S] of int64."
    keys: ClassVar[Mapping[str, Key]] = {
        "positions": Key(
            Scalar((str, int), "an axis letter or a number", parse_positions),
            "Number of positions.",
            required=True,
            example="S",
        )
    }
    from_key: ClassVar[str] = "none"
    target: ClassVar[Record] = TENSOR_TARGET

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> PositionIds:
        return cls(values["positions"])

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        return path

    def compile(
        self, context: CompileContext, matched: Matched, layer: TargetLayer, variant: str | None
    ) -> CompiledRule:
        rule, name = matched.rule, layer.path.fill({})
        count = positions_of(self.positions, context, rule.at.line_only, name)
        spec = TensorSpec((1, count), "int64")
        return CompiledRule((Step(name, spec, (), rule.kind_name, rule.at, COMPUTED, value=range(count)),))
