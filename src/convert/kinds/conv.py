"""Convolutions: dimension numbers in the source, ``torch.nn.Conv1d`` to ``Conv3d`` in the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.fields import Key, Record, Scalar
from convert.kinds.base import ACTIVATION, BIAS, Kind, TargetLayer, module_target, parse_axes
from convert.pattern import Pattern

MAX_SPATIAL = 3  # torch has Conv1d, Conv2d and Conv3d


@dataclass(frozen=True)
class DimensionNumbers:
    """What each axis of a convolution's input, kernel and result is, in the letters of ``jax.lax.conv_general_dilated``.

    Attributes:
        text: as written, spaces removed.
        input: N, C and the spatial axes.
        kernel: O, I and the spatial axes, as stored. Without I every channel is convolved on its own.
        result: N, C and the spatial axes.
    """

    text: str
    input: str
    kernel: str
    result: str

    @property
    def spatial(self) -> str:
        """The spatial axes in the input's order, which is what torch's kernel has them in."""
        return "".join(x for x in self.input if x not in "NC")

    @property
    def depthwise(self) -> bool:
        """Whether the kernel has no axis of input channels."""
        return "I" not in self.kernel


def parse_dimension_numbers(text: str) -> DimensionNumbers:
    """Reads ``NHWC,HWIO->NHWC``: what `jax.lax.conv_dimension_numbers` takes as three words.

    >>> parse_dimension_numbers("NWC,WIO->NWC").spatial
    'W'

    Raises:
        ValueError: not such words, with the reason.
    """
    bare = "".join(text.split())
    operands, arrow, result = bare.partition("->")
    given, comma, kernel = operands.partition(",")
    if not arrow or not comma or not (given + kernel + result).isalpha():
        raise ValueError(f"{text!r} is no dimension numbers of a convolution, such as NHWC,HWIO->NHWC")
    for word in (given, kernel, result):
        if len(set(word)) < len(word):
            raise ValueError(f"{word!r} in {text!r} has a letter twice")
    for word in (given, result):
        if not {"N", "C"} <= set(word):
            raise ValueError(f"{word!r} in {text!r} needs N (the batch) and C (the channels)")
    if "O" not in kernel:
        raise ValueError(f"the kernel {kernel!r} in {text!r} needs O, its output channels")
    spatial = set(given) - set("NC")
    if not 1 <= len(spatial) <= MAX_SPATIAL:
        raise ValueError(f"{text!r} has {len(spatial)} spatial axes; torch convolves along one to {MAX_SPATIAL}")
    if set(result) - set("NC") != spatial or set(kernel) - set("OI") != spatial:
        raise ValueError(f"input, kernel and result of {text!r} have different spatial axes")
    return DimensionNumbers(bare, given, kernel, result)


DIMENSIONS = Scalar(str, "dimension numbers such as NHWC,HWIO->NHWC", parse_dimension_numbers)


def _parse_group_count(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError(f"a convolution has one group or more, not {value}")
    return value if isinstance(value, int) else parse_axes(value)


@dataclass(frozen=True)
class Convolution(Kind):
    """A cross-correlation, which is what JAX and torch both call a convolution: neither turns the kernel round.

    Attributes:
        numbers: the source's dimension numbers.
        axes: letters of the kernel's axes, as stored; sizes, as everywhere in the file.
        feature_group_count: a number, or the letter whose size it is.
        activation: what the source applies to the result.
    """

    numbers: DimensionNumbers
    axes: str
    feature_group_count: int | str = 1
    activation: str | None = None

    doc: ClassVar[str] = "torch.nn.Conv1d, 2d or 3d; the layout is derived from the dimension numbers of the source"
    keys: ClassVar[Mapping[str, Key]] = {
        "dimension_numbers": Key(
            DIMENSIONS,
            "the source's, as jax.lax takes them: NHWC,HWIO->NHWC; a kernel without I has one filter for each channel",
            required=True,
        ),
        "axes": Key(
            Scalar(str, "axis letters such as KIO", parse_axes),
            "letters of the kernel's axes, in stored order, without stacked ones",
            required=True,
        ),
        "feature_group_count": Key(
            Scalar((int, str), "a number or an axis letter", _parse_group_count),
            "groups of channels that are convolved apart: a number, or the letter whose size it is (default: 1)",
        ),
        "bias": BIAS,
        "activation": ACTIVATION,
    }
    target: ClassVar[Record] = module_target(
        dimension_numbers=Key(DIMENSIONS, "those of the target's own code, where it is no torch.nn.Conv")
    )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Convolution:
        numbers, axes = values["dimension_numbers"], values["axes"]
        if len(axes) != len(numbers.kernel):
            raise ValueError(
                f"the kernel {' '.join(numbers.kernel)} of {numbers.text} has {len(numbers.kernel)} axes, and `axes` "
                f"gives {len(axes)} letters ({' '.join(axes)})"
            )
        if numbers.depthwise and "feature_group_count" in values:
            raise ValueError(f"the kernel of {numbers.text} has no I, so every channel is a group of its own; leave feature_group_count out")  # fmt: skip
        return cls(numbers, axes, values.get("feature_group_count", 1), values.get("activation"))

    def letter(self, axis: str) -> str:
        """The file's letter of an axis of the kernel; empty when it has none."""
        at = self.numbers.kernel.find(axis)
        return self.axes[at] if at >= 0 else ""

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str:
        out = self.letter("O")
        if role == "bias":
            channels = self.numbers.result.replace("N", "")
            if len(shape) == 1:
                return out
            if len(shape) != len(channels) or any(n != 1 for x, n in zip(channels, shape, strict=True) if x != "C"):
                raise ValueError(f"a bias is a number for each of the output channels {out}")
            return "".join(out if x == "C" else "." for x in channels)
        if len(shape) != len(self.axes):
            raise ValueError(f"the rule gives it the axes {' '.join(self.axes)}")
        return self.axes

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:
        if len(layer.path.groups) != len(source.groups):
            raise ValueError("a convolution's leaf becomes one tensor; it is neither fused nor split")
        own = layer.computes
        if own is not None and (len(own.spatial), own.depthwise) != (len(self.numbers.spatial), self.numbers.depthwise):
            raise ValueError(
                f"{own.text} of the target is not the convolution that {self.numbers.text} of the source is"
            )

    def groups(self, role: str, letters: str, variant: str | None, layer: TargetLayer) -> tuple[str, ...]:
        if role == "bias":
            return (self.letter("O"),)
        if layer.computes is None:
            return (self.letter("O"), self.letter("I"), *map(self.letter, self.numbers.spatial))
        same = dict(zip(layer.computes.spatial, self.numbers.spatial, strict=True))
        return tuple(self.letter(same.get(axis, axis)) for axis in layer.computes.kernel)

    def spatial_axes(self, layer: TargetLayer) -> tuple[int, ...]:
        """Which axes of the target's kernel are spatial."""
        if layer.computes is None:
            return tuple(range(2, 2 + len(self.numbers.spatial)))
        return tuple(k for k, axis in enumerate(layer.computes.kernel) if axis not in "OI")

    def group_count(self, sizes: Mapping[str, int]) -> int:
        """Groups of channels that are convolved apart."""
        if self.numbers.depthwise:
            return sizes[self.letter("O")]
        count = self.feature_group_count
        return sizes[count] if isinstance(count, str) else count

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        return {"activation": self.activation} if self.activation else {}
