"""Tensors of the target that no leaf holds, because the source's code has no such parameter: one number for all elements, or those of a mask."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from convert.core.fields import Choice, Either, Field, Key, Record, Scalar, located
from convert.core.findings import Finding
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec
from convert.core.yaml_nodes import YamlNode
from convert.layers.base import CompileContext, CompiledRule, LayerKind, Matched, Step
from convert.layers.leaves import MisfitError
from convert.layers.shared_keys import REASON, TENSOR_TARGET, parse_kept_axes
from convert.layers.target import Numbers, TargetLayer

INFINITE = {"inf": math.inf, "-inf": -math.inf}


def parse_number(value: float | int | str | bool) -> float | int | bool:
    """Parse a number, or one of the words for infinity.

    Raises:
        ValueError: another word.
    """
    if not isinstance(value, str):
        return value
    if value not in INFINITE:
        raise ValueError(f"{value!r} is no number; infinity is inf or -inf")
    return INFINITE[value]


def parse_any_axes(text: str) -> str:
    """Parse letters and dots, or dots alone; nothing for a single number.

    Raises:
        ValueError: no letters, or one twice.
    """
    return parse_kept_axes(text) if text.strip(". ") else "".join(text.split())


NUMBER = Scalar((float, int, str, bool), "a number", parse_number)


@dataclass(frozen=True)
class _Rows(Field):
    """A number, or lists of numbers within lists, all of one length at each depth."""

    def read(self, node: YamlNode) -> Any:
        if not isinstance(node.value, tuple):
            return NUMBER.read(node)
        rows = tuple(self.read(child) for child in node.value)
        with located(node.at):
            if not rows or len({np.shape(row) for row in rows}) > 1:
                raise ValueError("the lists are empty, or not of one length")
        return rows

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [NUMBER.schema(), {"type": "array"}]}


TRIANGLE = Record(
    {
        "below": Key(NUMBER, "Number below the diagonal of the last two axes.", required=True, example="1"),
        "diagonal": Key(NUMBER, "Number on the diagonal.", required=True, example="1"),
        "above": Key(NUMBER, "Number above the diagonal.", required=True, example="0"),
    },
    "the numbers of a triangle",
)


@dataclass(frozen=True)
class Fixed(LayerKind):
    """A tensor with which the target computes what the source computes without it, such as scales that are all one, or a mask.

    Attributes:
        value: of each element, or the numbers.
        axes: letters of the tensor's axes; a dot is an axis of size 1, or as long as the lists.
        because: why this value, in words.
    """

    value: float | Numbers
    axes: str
    because: str

    kind_name: ClassVar[str] = "constant"
    doc: ClassVar[str] = (
        "A tensor that no leaf holds: one number in all elements, or the numbers of a mask; the target is its full name."
    )
    keys: ClassVar[Mapping[str, Key]] = {
        "value": Key(
            Either(_Rows(), TRIANGLE),
            "Value of all elements; or lists of the numbers, whose axes are the last of the tensor, and one of size 1 is repeated; or {below: 1, diagonal: 1, above: 0}, the numbers of a triangle.",
            required=True,
            example="0",
        ),
        "axes": Key(
            Scalar(str, "axis letters such as ED, or .ED", parse_any_axes),
            "Letters of the tensor's axes, which leaves of other rules have; a dot is an axis of size 1, or as long as the lists of `value`.",
            required=True,
            example="D",
        ),
        "dtype": Key(
            Choice(tuple(SAFETENSORS_TAGS)),
            "Dtype of the tensor, such as int64 or bool. Default: that of --dtype, or of most leaves.",
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
        value, axes = values["value"], values["axes"]
        if not isinstance(value, tuple | dict):
            return cls(float(value), axes, values["because"])
        rank = 2 if isinstance(value, dict) else np.ndim(value)
        if rank > len(axes):
            raise ValueError(f"`value` has {rank} axes, and `axes` has {len(axes)}")
        triangle = (value["below"], value["diagonal"], value["above"]) if isinstance(value, dict) else None
        return cls(Numbers((() if triangle else value), triangle), axes, values["because"])

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
        given = self._given
        shape = tuple(
            own if x == "." else sizes[x] for x, own in zip(self.axes, (1,) * (len(self.axes) - len(given)) + given, strict=True)
        )  # fmt: skip
        if any(own not in (1, size) for own, size in zip(given[::-1], shape[::-1], strict=False)):
            want, got = (str(list(of)) for of in (shape, given))
            problem, fix = "the lists of `value` do not fit the axes", "give the numbers for these sizes"
            finding = Finding("shape-mismatch", problem, rule.at.line_only, path.text, want, f"lists of {got}", fix)
            raise MisfitError(finding)
        spec = TensorSpec(shape, rule.dtype or context.usual_dtype)
        called = f"{self.value:g}" if isinstance(self.value, float) else "numbers of the rule"
        reason = f"{called}: {self.because}"
        everywhere = f"{called} in all elements" if isinstance(self.value, float) else f"made of {called}"
        note = f"{path} is {everywhere}: {self.because}"
        layers = itertools.product(*(range(sizes[index]) for index in path.indices))
        names = [
            path.fill(dict(zip(path.indices, numbers, strict=True)), choices)
            for numbers in layers
            for choices in path.all_choices()
        ]
        steps = [Step(name, spec, (), rule.kind_name, rule.at, reason, value=self.value) for name in names]
        return CompiledRule(tuple(steps), (note,))

    @property
    def _given(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        if isinstance(self.value, float) or self.value.triangle:
            return ()
        return np.shape(self.value.rows)
