"""Convolutions: dimension numbers in the source, ``torch.nn.Conv1d`` to ``Conv3d`` in the target."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from convert.core.einsum import Projection, parse_projection
from convert.core.fields import Key, Record, Scalar
from convert.core.ops import Op
from convert.core.path_pattern import Pattern
from convert.core.weight_norm_ops import Standardize
from convert.layers.base import CompileContext, CompiledRule, LayerKind, Matched, PlanView, ProbeSample, Step
from convert.layers.conv.dimension_numbers import DimensionNumbers, parse_dimension_numbers
from convert.layers.conv.draft import draft_conv
from convert.layers.conv.mistakes import flipped_kernel, layout_mistake, standardization_mistakes
from convert.layers.conv.padding import (
    KEYS,
    TARGET_PADDING,
    Geometry,
    TorchPadding,
    read_geometry,
    stated_padding,
    torch_padding,
)
from convert.layers.conv.probe import probe_kernel, standardized
from convert.layers.conv.standardization import STANDARDIZED, Standardized
from convert.layers.draft import DraftContext, DraftEntry, Layer
from convert.layers.leaves import shape_mismatch, unstacked
from convert.layers.mistake import Mistake
from convert.layers.probe import Probe, probe_of_values
from convert.layers.shared_keys import ACTIVATION, BIAS, TARGET_AXES, module_target, parse_axes, referenced_fact
from convert.layers.stored_axes import with_axes
from convert.layers.target import TargetLayer
from convert.layers.transforms.mistakes import normalization_mistakes
from convert.layers.transforms.probe import normalized_bias, normalized_weight, row_lengths
from convert.layers.transforms.weight_normalization import lengths_role
from convert.layers.weight_keys import NORMALIZED, PARAMETRIZATION

Array = np.ndarray[Any, np.dtype[Any]]
DIMENSIONS = Scalar(str, "dimension numbers such as NHWC,HWIO->NHWC", parse_dimension_numbers)


def _parse_group_count(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError(f"a convolution has one group or more, not {value}")
    return value if isinstance(value, int) else parse_axes(value)


# torch's, Haiku's, Equinox' and Keras' words for what jax.lax (and so a rule) calls otherwise
HINTS = (
    ("groups", "write feature_group_count, jax.lax's word for torch's and Keras' groups"),
    ("group_count", "write feature_group_count"),
    ("feature_groups", "write feature_group_count"),
    ("stride", "write strides"),
    ("window_strides", "write strides"),
    ("kernel_dilation", "write dilation"),
    ("rhs_dilation", "write dilation"),
    ("dilation_rate", "write dilation"),
    ("kernel_size", "leave it out: the kernel's leaf has its size"),
    (
        "padding_mode",
        "padding that is wrapped or reflected is not in the language: do it in the code, before the layer",
    ),
)


@dataclass(frozen=True)
class Convolving(LayerKind):
    """The base of convolutions and transposed convolutions.

    Attributes:
        numbers: the source's dimension numbers.
        axes: letters of the kernel's axes, as stored; sizes, as everywhere in the file.
        feature_group_count: a number, or the letter whose size it is.
        activation: what the source applies to the result.
        geometry: strides, dilation and padding of the source; None: the rule does not say.
    """

    numbers: DimensionNumbers
    axes: str
    feature_group_count: int | str = 1
    activation: str | None = None
    geometry: Geometry | None = None

    guide: ClassVar[str] = "convolutions"
    hints: ClassVar[tuple[tuple[str, str], ...]] = HINTS

    @property
    def output(self) -> str:
        """The kernel's axis of output channels, in the letters of its dimension numbers."""
        return "O"

    def letter(self, axis: str) -> str:
        """Return the letter of a kernel axis, or an empty string if the kernel lacks the axis."""
        at = self.numbers.kernel.find(axis)
        return self.axes[at] if at >= 0 else ""

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        out = self.letter(self.output)
        if role == "bias":
            channels = self.numbers.result.replace("N", "")
            if len(self.numbers.outputs) > 1:
                self._check_bias_of_each(shape)
                return None
            if len(shape) == 1:
                return out
            if len(shape) != len(channels) or any(n != 1 for x, n in zip(channels, shape, strict=True) if x != "C"):
                raise ValueError(f"a bias has one value for each of the output channels {out}")
            return "".join(out if x == "C" else "." for x in channels)
        if len(shape) != len(self.axes):
            raise ValueError(f"the rule gives it the axes {' '.join(self.axes)}")
        return self.axes

    def _check_bias_of_each(self, shape: tuple[int, ...]) -> None:
        """Check the shape of a bias whose channels are made by two axes of the kernel, C and O.

        Raises:
            ValueError: it has several axes; the message is the reason.
        """
        if len(shape) != 1:
            made = " times ".join(map(self.letter, self.numbers.outputs))
            raise ValueError(f"a bias has one value for each of the output channels, which are {made}")

    @property
    def weight_axes(self) -> tuple[tuple[str, str], ...]:
        return ((self.axes, self.letter("O")),)

    @property
    def letters_used(self) -> str:
        count = self.feature_group_count
        return self.axes + (count if isinstance(count, str) else "")

    @property
    def facts_used(self) -> tuple[str, ...]:
        fact = referenced_fact(self.activation)
        return (fact,) if fact else ()

    @property
    def sizes_named(self) -> tuple[str, ...]:
        return tuple(filter(None, self.geometry.named)) if self.geometry is not None else ()

    def resolved(self, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> Self:
        if not self.sizes_named or self.geometry is None:
            return self
        return replace(self, geometry=self.geometry.resolved({**facts, **sizes}))

    @property
    def weight_rank(self) -> int:
        return 2 + len(self.numbers.spatial)

    def check_normalized(self, role: str) -> None:
        if len(self.numbers.outputs) > 1:
            raise ValueError(f"`{role}` requires a kernel with I, and that of {self.numbers.text} has C")

    def kernel_sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the kernel's spatial sizes, in the order of the input's axes."""
        return tuple(sizes[self.letter(axis)] for axis in self.numbers.spatial)

    def torch_padding(self, kernel: tuple[int, ...]) -> TorchPadding:
        """Return the equivalent arguments of torch for the geometry of the rule."""
        assert self.geometry is not None
        return torch_padding(self.geometry, kernel, self.numbers.spatial)

    def group_count(self, sizes: Mapping[str, int]) -> int:
        """Groups of channels that are convolved apart."""
        if self.numbers.depthwise:
            return sizes[self.letter(self.numbers.outputs[0])]
        count = self.feature_group_count
        return sizes[count] if isinstance(count, str) else count

    def whole_groups(self, channels: int, sizes: Mapping[str, int]) -> int:
        """Return `group_count`; check that it divides the output channels.

        Raises:
            ValueError: it does not.
        """
        letter = self.feature_group_count
        if isinstance(letter, str) and letter not in sizes:
            raise ValueError(f"`feature_group_count` is {letter}, and no leaf gives {letter} a size; write the number")
        count = self.group_count(sizes)
        if channels % count:
            shown = f"{self.feature_group_count} = " if isinstance(self.feature_group_count, str) else ""
            raise ValueError(
                f"{self.letter('O')} = {channels} output channels do not make {shown}{count} groups (`feature_group_count`) of one "
                f"size; correct the number, or the axes"
            )
        return count

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        return {"activation": self.activation} if self.activation else {}

    def sized_facts(self, layer: TargetLayer, sizes: Mapping[str, int]) -> dict[str, Any]:
        if (
            self.geometry is None
            or layer.axes is not None
            or any(self.letter(axis) not in sizes for axis in self.numbers.spatial)
        ):
            return {}
        padding = self.geometry.padding
        kernel = self.kernel_sizes(sizes)
        stated = layer.padding * len(kernel) if len(layer.padding) == 1 else layer.padding
        found = stated_padding(stated) if stated else self.torch_padding(kernel)
        more = {} if found.output_padding is None else {"output_padding": list(found.output_padding)}
        return {
            "source_padding": padding if isinstance(padding, str) else [list(pair) for pair in padding],
            "strides": list(self.geometry.strides),
            "dilation": list(self.geometry.dilation),
            "target_padding": found.text,
            "allowed_padding": list(found.allowed),
            **more,
        }

    def probe(self, sample: ProbeSample) -> Probe:
        if sample.step.role == "weight":
            return self._probe_kernel(sample, normalized_weight(sample, sample.stored, self.axes))
        if sample.step.role == "bias":
            return probe_of_values(sample.written, normalized_bias(sample))
        if sample.step.role == lengths_role(sample.rule, sample.layer):
            return probe_of_values(sample.written, row_lengths(sample, self.axes, self.letter("O")))
        return super().probe(sample)

    @abstractmethod
    def _probe_kernel(self, sample: ProbeSample, kernel: Array) -> Probe:
        """Probe the kernel that the source computes with."""

    def _groups(self, kernel: Array) -> int:
        """Groups of channels of a stored kernel."""
        return self.group_count(dict(zip(self.axes, kernel.shape, strict=True)))

    def layout_mistake(self, right: tuple[str, ...], wrong: tuple[str, ...], stored: str) -> str:
        return layout_mistake(right, wrong, stored, set(map(self.letter, self.numbers.spatial)))


def check_order(numbers: DimensionNumbers) -> None:
    """Check that the kernel has its spatial axes in the input's order: jax.lax uses the kernel's order, torch the input's.

    Raises:
        ValueError: they do not.
    """
    own = "".join(x for x in numbers.kernel if x not in "OIC")
    if own != numbers.spatial:
        raise ValueError(
            f"the kernel of {numbers.text} has its spatial axes in the order {' '.join(own)}, and the input {' '.join(numbers.spatial)}; "
            "`padding`, `strides` and `dilation` are known for one order alone, so leave them out"
        )


def check_axes(numbers: DimensionNumbers, axes: str) -> None:
    """Check that a rule names as many axes as its kernel has.

    Raises:
        ValueError: it does not.
    """
    if len(axes) != len(numbers.kernel):
        raise ValueError(
            f"the kernel {' '.join(numbers.kernel)} of {numbers.text} has {len(numbers.kernel)} axes, and `axes` "
            f"gives {len(axes)} letters ({' '.join(axes)})"
        )


AXES = Key(
    Scalar(str, "axis letters such as KIO", parse_axes),
    "Letters of the kernel's axes in stored order, without stacked axes.",
    required=True,
    example="KLIO",
)
GROUP_COUNT = Key(
    Scalar((int, str), "a number or an axis letter", _parse_group_count),
    "Number of groups of channels that are convolved separately, or the letter whose size it is. Default: 1.",
)


def _form(numbers: DimensionNumbers) -> tuple[int, str]:
    """Return what must be equal on both sides: the number of spatial axes, and the channels that the kernel has axes for."""
    return len(numbers.spatial), "".join(x for x in "CIO" if x in numbers.kernel)


@dataclass(frozen=True)
class Convolution(Convolving):
    """A cross-correlation, which JAX and torch both call a convolution: neither flips the kernel.

    Attributes:
        weight_standardization: what the source does to the kernel before it convolves.
    """

    weight_standardization: Standardized | None = None

    unit_axes: ClassVar[bool] = True
    kind_name: ClassVar[str] = "conv"
    doc: ClassVar[str] = "torch.nn.Conv1d, 2d or 3d; the layout is derived from the dimension numbers of the source."
    keys: ClassVar[Mapping[str, Key]] = {
        "dimension_numbers": Key(
            DIMENSIONS,
            "Dimension numbers of the source, as jax.lax takes them: NHWC,HWIO->NHWC. A kernel without I has one filter per channel; a kernel with C instead of I has O filters per channel (Keras's depthwise kernels: NHWC,HWCO->NHWC).",
            required=True,
            example="NHWC,HWIO->NHWC",
        ),
        "axes": AXES,
        "feature_group_count": GROUP_COUNT,
        **KEYS,
        "weight_standardization": STANDARDIZED,
        "bias": BIAS,
        "activation": ACTIVATION,
        **NORMALIZED,
    }
    fuses: ClassVar[bool] = True
    target: ClassVar[Record] = module_target(
        dimension_numbers=Key(
            DIMENSIONS,
            "Dimension numbers of the target's own code, if it is not a torch.nn.Conv. Default: those of torch.nn.Conv.",
        ),
        axes=Key(
            TARGET_AXES.field,
            "Letters of the axes of the target's weight, such as OI for a Linear in place of a 1x1 convolution: axes of size 1 may be left out. Default: those of torch.nn.Conv.",
        ),
        parametrization=PARAMETRIZATION,
        padding=TARGET_PADDING,
    )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Convolution:
        numbers, axes = values["dimension_numbers"], values["axes"]
        check_axes(numbers, axes)
        if numbers.depthwise and "feature_group_count" in values:
            raise ValueError(f"the kernel of {numbers.text} has no I, so every channel is its own group; leave feature_group_count out")  # fmt: skip
        if len(numbers.outputs) > 1 and "weight_standardization" in values:
            raise ValueError(f"`weight_standardization` requires a kernel with I, and that of {numbers.text} has C")
        geometry = read_geometry(values, len(numbers.spatial))
        if geometry is not None:
            check_order(numbers)
        groups, weight_standardization = values.get("feature_group_count", 1), values.get("weight_standardization")
        return cls(numbers, axes, groups, values.get("activation"), geometry, weight_standardization)

    @classmethod
    def draft(
        cls, context: DraftContext, layer: Layer, main: str | None, bias: str | None, either: bool = False
    ) -> DraftEntry:
        assert main is not None
        return draft_conv(context, layer, main, bias)

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:
        fused = len(source.groups) > len(layer.path.groups)
        if len(layer.path.groups) > len(source.groups) or (fused and not self._has_blocks(layer)):
            raise ValueError(
                "the leaf of a convolution is not split; several leaves may be its output channels, one after the other, "
                "where it has no groups and the target no `axes` or `dimension_numbers`"
            )
        if layer.axes is not None and self.weight_standardization is not None:
            raise ValueError("a target with `axes:` takes no weight standardization; leave one of the two out")
        own = layer.computes
        if own is not None and _form(own) != _form(self.numbers):
            raise ValueError(
                f"{own.text} of the target and {self.numbers.text} of the source differ in more than the order of axes"
            )

    def _has_blocks(self, layer: TargetLayer) -> bool:
        """Whether leaves can be blocks of the target's output channels, one after the other."""
        plain = self.feature_group_count == 1 and self.numbers.outputs == "O" and not self.numbers.depthwise
        return plain and layer.axes is None and layer.computes is None and self.weight_standardization is None

    def inner_axes(
        self, role: str, letters: str, shape: tuple[int, ...], sizes: Mapping[str, int]
    ) -> tuple[str, tuple[int, ...]]:
        if role == "weight" and not self.numbers.depthwise:
            self.whole_groups(shape[letters.index(self.letter("O"))], sizes)
        return letters, shape

    def linear_map(self, variant: str | None) -> Projection | None:
        plain = self.feature_group_count == 1 and self.numbers.outputs == "O" and not self.numbers.depthwise
        if not plain or "." in self.axes or self.weight_standardization is not None:
            return None
        out = self.letter("O")
        return parse_projection(f"...{self.axes.replace(out, '')},{self.axes}->...{out}")

    def groups(self, role: str, letters: str, variant: str | None, layer: TargetLayer) -> tuple[str, ...]:
        if role == "bias":
            return (self.letter("O"),)
        if layer.computes is None:
            outputs = "".join(map(self.letter, self.numbers.outputs))
            return (outputs, self.letter("I"), *map(self.letter, self.numbers.spatial))
        same = dict(zip(layer.computes.spatial, self.numbers.spatial, strict=True))
        return tuple(self.letter(same.get(axis, axis)) for axis in layer.computes.kernel)

    def compile(
        self, context: CompileContext, matched: Matched, layer: TargetLayer, variant: str | None
    ) -> CompiledRule:
        if len(self.numbers.outputs) > 1:
            self._check_bias_sizes(context, matched)
        return super().compile(context, matched, layer, variant)

    def _check_bias_sizes(self, context: CompileContext, matched: Matched) -> None:
        """Check that a bias has one value for each pair of C and O, the two axes that make the output channels."""
        rule = matched.rule
        letters = [self.letter(axis) for axis in self.numbers.outputs]
        for key, bias in matched.leaves.get("bias", {}).items():
            kernel = matched.leaves["weight"].get(key)
            if kernel is None:
                continue  # reported by match.cover
            sizes = dict(zip(self.axes, unstacked(rule, kernel, context.spec(kernel))[1], strict=True))
            channels = math.prod(sizes[letter] for letter in letters)
            if math.prod(unstacked(rule, bias, context.spec(bias))[1]) != channels:
                shown = " x ".join(f"{letter}={sizes[letter]}" for letter in letters)
                raise shape_mismatch(
                    rule,
                    bias,
                    expected=f"a bias for {shown} = {channels} channels, which {kernel}: {context.spec(kernel)} makes",
                    got=str(context.spec(bias)),
                    fix="correct one of the two paths",
                )

    def compute(self, role: str, layer: TargetLayer) -> tuple[Op, ...]:
        if role != "weight" or self.weight_standardization is None:
            return ()
        return (
            Standardize(
                self.output_axis(layer), self.weight_standardization.epsilon, self.weight_standardization.inside
            ),
        )

    def output_axis(self, layer: TargetLayer) -> int:
        """Return which axis of the target's kernel has the output channels."""
        return 0 if layer.computes is None else layer.computes.kernel.index("O")

    def spatial_axes(self, layer: TargetLayer) -> tuple[int, ...]:
        """Return which axes of the target's kernel are spatial."""
        if layer.computes is None:
            return tuple(range(2, 2 + len(self.numbers.spatial)))
        return tuple(k for k, axis in enumerate(layer.computes.kernel) if axis not in "OIC")

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        baked = {"weight_standardization": self.weight_standardization.text} if self.weight_standardization else {}
        return {**super().facts(layer), **baked}

    def probe(self, sample: ProbeSample) -> Probe:
        of_weight = sample.step.role in ("weight", lengths_role(sample.rule, sample.layer))
        if of_weight and self.weight_standardization is not None:
            stored = standardized(sample.stored, self.numbers, self.weight_standardization)
            return super().probe(replace(sample, stored=stored))
        return super().probe(sample)

    def _probe_kernel(self, sample: ProbeSample, kernel: Array) -> Probe:
        if sample.layer.axes is not None:
            sizes = dict(zip(self.axes, kernel.shape, strict=True))
            order = self.groups("weight", self.axes, None, replace(sample.layer, axes=None, computes=None))
            sample = replace(sample, written=with_axes(sample.written, sample.layer.axes, order, sizes))
        return probe_kernel(sample, kernel, self.numbers, self._groups(kernel), self.geometry)

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        rule = step.parts[0].rule
        layer = rule.layer(plan.target) if rule is not None else None
        if rule is None or layer is None:
            return
        if step.role == "weight" and layer.axes is None:
            yield flipped_kernel(step, plan.source, self.spatial_axes(layer))
            axis = self.output_axis(layer)
            yield from standardization_mistakes(step, plan.source, self.weight_standardization, axis)
        yield from normalization_mistakes(step, rule, plan)
