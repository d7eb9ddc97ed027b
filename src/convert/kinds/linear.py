"""Projections: an einsum in the source; ``torch.nn.Linear``, or an einsum of its own, in the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.einsum import Projection, parse_projection
from convert.fields import Either, Key, MapOf, Record, Scalar
from convert.kinds.base import ACTIVATION, BIAS, Kind, TargetLayer, module_target
from convert.kinds.conventions import CARRIES, FLATTENED, ROPE, TARGET_FLATTENED, TARGET_ROPE
from convert.kinds.normalized import NORMALIZED, PARAMETRIZATION
from convert.pattern import Pattern

EQUATION = Scalar(str, "an einsum such as ...D,DNH->...NH", parse_projection)


@dataclass(frozen=True)
class Linear(Kind):
    """``y = x @ weight.T + bias`` on flattened axes, with the layout that the source's equation implies.

    Attributes:
        equations: variant -> equation; a single equation is the variant ``""``.
        activation: what the source applies to the result.
    """

    equations: Mapping[str, Projection]
    activation: str | None = None

    doc: ClassVar[str] = "torch.nn.Linear, from the einsum of the source; the layout is derived from the equation"
    keys: ClassVar[Mapping[str, Key]] = {
        "einsum": Key(
            Either(EQUATION, MapOf(EQUATION, "variants such as {plain: ..., transposed: ...}")),
            "the source's equation, X,W->Y with the weight second; or several, named, to be told apart by sizes",
            required=True,
        ),
        "choice": Key(Scalar(str, "a word"), "the name under which --set chooses among several equations"),
        "bias": BIAS,
        "activation": ACTIVATION,
        "carries": CARRIES,
        "rope": ROPE,
        "flattened": FLATTENED,
        **NORMALIZED,
    }
    target: ClassVar[Record] = module_target(
        einsum=Key(
            EQUATION, "the target's own equation, in the letters of the source's, where it is no torch.nn.Linear"
        ),
        rope=TARGET_ROPE,
        flattened=TARGET_FLATTENED,
        parametrization=PARAMETRIZATION,
    )
    fuses: ClassVar[bool] = True

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Linear:
        equations = values["einsum"]
        named = equations if isinstance(equations, dict) else {"": equations}
        if isinstance(equations, dict) and len(equations) < 2:
            raise ValueError("named equations are at least two; a single one is written without a name")
        if isinstance(equations, dict) and not values.get("choice"):
            raise ValueError("several equations need a `choice:`, the name under which --set can choose one")
        if not isinstance(equations, dict) and "choice" in values:
            raise ValueError("`choice:` goes with several named equations")
        return cls(named, values.get("activation"))

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self.equations) if len(self.equations) > 1 else ()

    def _equation(self, variant: str | None) -> Projection:
        return self.equations[variant] if variant is not None else next(iter(self.equations.values()))

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str:
        equation = self._equation(variant)
        if role == "bias":
            return equation.bias_axes(shape)
        if len(shape) != len(equation.weight):
            raise ValueError(
                f"{equation.equation} has a weight with {len(equation.weight)} axes ({' '.join(equation.weight)})"
            )
        return equation.weight

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:
        for equation in self.equations.values():
            if layer.computes is None and equation.batch:
                raise ValueError(
                    f"{equation.batch} of {equation.equation} is an axis of all three operands: the matrices are block "
                    "diagonal, which a Linear cannot hold; give the target the `einsum:` of its own code, or keep them "
                    "as stored with `parameter:`"
                )
            if layer.computes is not None:
                _alike(equation, layer.computes)
        if layer.computes is not None and len(layer.path.groups) != len(source.groups):
            raise ValueError("a target with an `einsum:` holds one leaf in one tensor; it is neither fused nor split")

    def groups(self, role: str, letters: str, variant: str | None, layer: TargetLayer) -> tuple[str, ...]:
        if layer.computes is not None:  # its weight by its equation; its bias is added to a result of the same axes
            return tuple(layer.computes.weight) if role == "weight" else tuple(x.strip(".") for x in letters)
        equation = self._equation(variant)
        outputs = "".join(letter for letter in equation.outputs if letter in letters)  # one is gone where it was split
        return (outputs,) if role == "bias" else (outputs, equation.inputs)

    def split_axis(self, role: str, letters: str, variant: str | None) -> str:
        equation = self._equation(variant)
        if len(equation.outputs) < 2:
            raise ValueError(
                f"{equation.equation} has one output axis, so there is nothing to split among several targets"
            )
        return equation.outputs[0]

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        return {"activation": self.activation} if self.activation else {}


def _alike(source: Projection, target: Projection) -> None:
    """Two equations of one layer differ in the order of the weight's axes alone."""

    def rest(p: Projection) -> str:
        return p.equation.replace(f",{p.weight}->", ",->")

    if rest(source) != rest(target) or sorted(source.weight) != sorted(target.weight):
        raise ValueError(
            f"the target's {target.equation} is not the source's {source.equation} with the weight's axes in another order"
        )
