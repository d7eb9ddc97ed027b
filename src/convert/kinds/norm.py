"""Layer norm and RMS norm: the factor that each side multiplies by is stated, the arithmetic follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.fields import Choice, Key, Record
from convert.kinds.base import AXES, BIAS, EPSILON, Kind, TargetLayer, module_target, named_axes
from convert.kinds.conventions import ROPE, TARGET_ROPE
from convert.ops import Add, Op

SOURCE_FACTORS = ("scale", "1+scale")
TARGET_FACTORS = ("weight", "1+weight")


FACTOR = Key(
    Choice(
        SOURCE_FACTORS,
        (("1 + scale", "write it without spaces: 1+scale"), ("weight", "in the source it is called scale")),
    ),
    "what the source multiplies by: scale, or 1+scale",
    required=True,
)
TARGET_FACTOR = Key(Choice(TARGET_FACTORS), "what the target's code multiplies by (default: weight)")


@dataclass(frozen=True)
class Norm(Kind):
    """``x * rsqrt(variance + epsilon) * factor (+ bias)``, the mean subtracted first by a layer norm.

    Attributes:
        multiplies_by: the source's factor.
        epsilon: a number, or the name of a fact.
        axes: letters of the scale's axes.
    """

    multiplies_by: str
    epsilon: float | str
    axes: str | None = None

    keys: ClassVar[Mapping[str, Key]] = {
        "multiplies_by": FACTOR,
        "epsilon": Key(EPSILON.field, EPSILON.doc, required=True),
        "bias": BIAS,
        "axes": AXES,
        "rope": ROPE,
    }
    target: ClassVar[Record] = module_target(
        multiplies_by=TARGET_FACTOR,
        rope=TARGET_ROPE,
    )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Norm:
        return cls(values["multiplies_by"], values["epsilon"], values.get("axes"))

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        return named_axes(self.axes, shape)

    def compute(self, role: str, layer: TargetLayer) -> tuple[Op, ...]:
        if role != "weight":
            return ()
        offset = SOURCE_FACTORS.index(self.multiplies_by) - TARGET_FACTORS.index(layer.multiplies_by)
        return (Add(float(offset)),) if offset else ()

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon,
            "source_multiplies_by": self.multiplies_by,
            "target_multiplies_by": layer.multiplies_by,
        }


@dataclass(frozen=True)
class LayerNorm(Norm):
    """Normalises mean and variance."""

    doc: ClassVar[str] = "layer norm: subtracts the mean, divides by the standard deviation"


@dataclass(frozen=True)
class RMSNorm(Norm):
    """Normalises the root mean square; has no bias in any library known to us, yet may have one here."""

    doc: ClassVar[str] = "RMS norm: divides by the root mean square"
