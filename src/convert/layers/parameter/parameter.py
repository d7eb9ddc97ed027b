"""Tensors that are kept as stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from convert.core.axis_groups import (
    AxisGroup,
    AxisNames,
    check_one_sum,
    parse_leaf_axes,
    take_groups,
    taken_part,
    with_part,
)
from convert.core.fields import INTEGER, Key, MapOf, Record, Scalar
from convert.core.ops import Op, Pad
from convert.core.path_pattern import Pattern
from convert.layers.base import CompileContext, CompiledRule, LayerKind, Matched, PlanView, ProbeSample, Step
from convert.layers.draft import DraftContext, DraftEntry, Layer
from convert.layers.leaf_sums import PLUS, place_of
from convert.layers.mistake import Mistake
from convert.layers.parameter.draft import draft_parameter
from convert.layers.probe import Probe, probe_of_values
from convert.layers.shared_keys import (
    AXES,
    PART,
    PART_OF_LEAF,
    TARGET_AXES,
    TARGET_CONCATENATED,
    TENSOR_TARGET,
    named_axes,
    parse_kept_axes,
)
from convert.layers.stored_axes import taken_apart, with_axes
from convert.layers.target import TargetLayer
from convert.layers.transforms.mistakes import fact_factor_mistakes
from convert.layers.weight_keys import CARRIES


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


def _parse_axes(text: str) -> AxisNames | tuple[str, ...]:
    """Parse the axes of a leaf; of a sum of leaves with different axes, ``TD + D``, the letters of each.

    Raises:
        ValueError: a letter twice, or something else.
    """
    if not text.strip():
        return AxisNames("", {})
    flat, _ = take_groups(text)
    return tuple(map(parse_kept_axes, text.split(PLUS))) if PLUS in flat else parse_leaf_axes(text)


def _of_all(terms: Sequence[str]) -> str:
    """Return the letters of several leaves, in the order in which they are first named."""
    return "".join(dict.fromkeys("".join(terms).replace(".", "")))


def _checked(terms: tuple[str, ...], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Check that `from` has a leaf for each of the axes of a sum.

    Raises:
        ValueError: it has not, or the rule takes a part.
    """
    count = len(values["from"].paths)
    if count != len(terms) or "part" in values:
        raise ValueError(
            f"`axes: {PLUS.join(terms)}` has the letters of {len(terms)} leaves that are added up, and `from` has {count}; give the letters of each, and no `part`"
        )
    return terms


@dataclass(frozen=True)
class Parameter(LayerKind):
    """A tensor that both sides use in the same way.

    Attributes:
        axes: its axes as stored; None: they have no names.
        term_axes: the letters of each leaf of a sum, where they differ.
    """

    axes: AxisNames | None = None
    term_axes: tuple[str, ...] = ()

    kind_name: ClassVar[str] = "parameter"
    any_dtype: ClassVar[bool] = True
    doc: ClassVar[str] = "A parameter with the values of the leaf; the target is the full name of the tensor."
    keys: ClassVar[Mapping[str, Key]] = {
        "axes": Key(
            Scalar(str, "axis letters such as ED, .ED, (N H)D or, of a sum, TD + D", _parse_axes),
            "Letters of the leaf's axes in stored order, without stacked axes; a dot is an axis of size 1, which is removed, and (N H) one axis made of two. Of a sum of leaves with different axes, those of each, such as TD + D: a leaf is repeated along the axes that it lacks. Empty: one number without axes. Default: the leaf is kept as stored.",
        ),
        "part": PART_OF_LEAF,
        "prescaled_by": CARRIES,
    }
    target: ClassVar[Record] = Record(
        {
            **TENSOR_TARGET.keys,
            "axes": TARGET_AXES,
            "part": PART,
            "concatenated": TARGET_CONCATENATED,
            "zeros_before": Key(
                MapOf(INTEGER, "a mapping of an axis letter to a number, such as {L: 1}"),
                "Elements that the target has in front of an axis of `axes` and the source has not, such as {L: 1} for the position of a class token; zeros are written. Default: none.",
            ),
        },
        TENSOR_TARGET.description,
    )
    splits: ClassVar[bool] = True
    adds: ClassVar[bool] = True

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Parameter:
        axes: AxisNames | tuple[str, ...] | None = values.get("axes")
        if isinstance(axes, tuple):
            return cls(AxisNames(_of_all(axes), {}), _checked(axes, values))
        if "part" in values:
            axes = axes or AxisNames("", {})
            axes = AxisNames(axes.letters, taken_part(axes.letters, axes.groups, values["part"]))
        if axes is not None:
            check_one_sum(axes.letters, axes.groups)
        return cls(axes)

    @classmethod
    def draft(
        cls, context: DraftContext, layer: Layer, main: str | None, bias: str | None, either: bool = False
    ) -> DraftEntry:
        assert main is not None
        return draft_parameter(context, layer, main)

    @property
    def weight_axes(self) -> tuple[tuple[str, str], ...]:
        each = [self.part(k) for k in range(self.parts)] or [self]
        letters = "".join(dict.fromkeys("".join("".join(one.axes.opened) for one in each if one.axes is not None)))
        return ((letters, letters),) if letters else ()

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        if self.axes is None:
            return None
        return named_axes(self.axes.letters, shape, self.axes.text if self.axes.groups else "")

    def groups(self, role: str, letters: str, variant: str | None, layer: TargetLayer) -> tuple[str, ...]:
        of = self.axes.opened if self.axes is not None else ()
        return tuple(filter(None, ("".join(x for x in axis if x in letters) for axis in of)))

    @property
    def merged(self) -> Parameter:
        return replace(self, term_axes=())

    def of_leaf(self, role: str) -> Parameter:
        if not self.term_axes:
            return self
        return Parameter(AxisNames(self.term_axes[place_of(role)], {}))

    def axis_groups(self, variant: str | None) -> Mapping[str, AxisGroup]:
        return self.axes.groups if self.axes is not None else {}

    @property
    def parts(self) -> int:
        return next((len(group.parts) for group in self.axis_groups(None).values() if group.letters is None), 0)

    def part(self, k: int) -> Parameter:
        assert self.axes is not None
        return Parameter(AxisNames(self.axes.letters, with_part(self.axes.groups, k)))

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:
        for letter, count in layer.zeros_before.items():
            if layer.axes is None or not any(letter in axis for axis in layer.axes):
                raise ValueError(f"`zeros_before` names {letter}, and the target's `axes` do not")
            if count < 1:
                raise ValueError(f"`zeros_before` gives {letter} {count} elements of zeros; write at least 1")

    def compile(
        self, context: CompileContext, matched: Matched, layer: TargetLayer, variant: str | None
    ) -> CompiledRule:
        compiled = super().compile(context, matched, layer, variant)
        zeros = " and ".join(f"{count} in front of {letter}" for letter, count in layer.zeros_before.items())
        note = f"{layer.path} has zeros that no leaf holds: {zeros}"
        return replace(compiled, notes=(*compiled.notes, note)) if zeros and compiled.steps else compiled

    def turned(self, role: str, layer: TargetLayer) -> tuple[Op, ...]:
        numbers = {x: axis for axis, letters in enumerate(layer.axes or ()) for x in letters}
        return tuple(Pad(numbers[letter], count, 0) for letter, count in layer.zeros_before.items())

    def probe(self, sample: ProbeSample) -> Probe:
        stored, factor = sample.stored, sample.rule.prescaled_by
        if factor is not None:
            stored = stored / factor.value(sample.plan.sizes, sample.plan.facts)
        if self.axes is None:
            return probe_of_values(sample.written, stored)
        y, letters = taken_apart(stored, self.axes.letters, self.axes.groups, sample)
        sizes = {letter: size for letter, size in zip(letters, y.shape, strict=True) if letter != "."}
        kept = "".join(sizes)
        natural = tuple("".join(x for x in axis if x in sizes) for axis in self.axes.opened)
        order = sample.layer.axes or tuple(filter(None, natural))
        wanted = with_axes(y.reshape([sizes[x] for x in kept]), tuple(kept), order, sizes)
        zeros = sample.layer.zeros_before
        in_front = [(sum(n for x, n in zeros.items() if x in axis), 0) for axis in order]
        return probe_of_values(sample.written, np.pad(wanted, in_front) if in_front else wanted)

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        rule = step.parts[0].rule
        return fact_factor_mistakes(step, rule, plan) if rule is not None else iter(())

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        return path
