"""Tensors of the target that no leaf holds, because the source's code has no such parameter: one number for all elements."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.core.fields import Key, Record, Scalar
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import CompileContext, CompiledRule, LayerKind, Matched, Step
from convert.layers.leaves import MisfitError
from convert.layers.shared_keys import KEPT_AXES, REASON, TENSOR_TARGET
from convert.layers.target import TargetLayer


@dataclass(frozen=True)
class Fixed(LayerKind):
    """A tensor with which the target computes what the source computes without it, such as scales that are all one.

    Attributes:
        value: of each element.
        axes: letters of the tensor's axes; a dot is an axis of size 1.
        because: why this value, in words.
    """

    value: float
    axes: str
    because: str

    kind_name: ClassVar[str] = "constant"
    doc: ClassVar[str] = "A tensor that no leaf holds, with one number in all elements; the target is its full name."
    keys: ClassVar[Mapping[str, Key]] = {
        "value": Key(Scalar((float, int), "a number"), "Value of all elements.", required=True, example="0"),
        "axes": Key(
            KEPT_AXES,
            "Letters of the tensor's axes, which leaves of other rules have; a dot is an axis of size 1.",
            required=True,
            example="D",
        ),
        "because": Key(
            REASON,
            "Reason why the tensor has this value, for the plan.",
            required=True,
            example="the source does not scale",
        ),
    }
    from_key: ClassVar[str] = "none"
    target: ClassVar[Record] = TENSOR_TARGET
    indexed: ClassVar[bool] = True

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Fixed:
        return cls(float(values["value"]), values["axes"], values["because"])

    @property
    def letters_used(self) -> str:
        return self.axes

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        return path

    def compile(
        self, context: CompileContext, matched: Matched, layer: TargetLayer, variant: str | None
    ) -> CompiledRule:
        rule, sizes, path = matched.rule, context.sizes, layer.path
        needed = (*self.axes.replace(".", ""), *path.indices)
        if unknown := [letter for letter in needed if letter not in sizes]:
            problem, fix = f"no leaf gives {unknown[0]} a size", "use letters and indices that leaves have"
            raise MisfitError(Finding("size-unknown", problem, rule=rule.at.line_only, path=path.text, fix=fix))
        spec = TensorSpec(tuple(1 if x == "." else sizes[x] for x in self.axes), context.usual_dtype)
        reason = f"{self.value:g}: {self.because}"
        note = f"{path} is {self.value:g} in all elements: {self.because}"
        layers = itertools.product(*(range(sizes[index]) for index in path.indices))
        names = [
            path.fill(dict(zip(path.indices, numbers, strict=True)), choices)
            for numbers in layers
            for choices in path.all_choices()
        ]
        steps = [Step(name, spec, (), rule.kind_name, rule.at, reason, value=self.value) for name in names]
        return CompiledRule(tuple(steps), (note,))
