"""Transposed convolutions: what ``jax.lax.conv_transpose`` computes, as ``torch.nn.ConvTranspose1d`` to ``3d``.

JAX's is a convolution of the dilated input with the kernel as stored; torch's is the gradient of a convolution, which is the
same with the kernel flipped and its channels exchanged. With `transpose_kernel` JAX does both itself, and the stored kernel
is torch's but for the order of its axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.core.fields import FLAG, Key, Record
from convert.core.ops import Flip, Op
from convert.core.path_pattern import Pattern
from convert.layers.base import PlanView, ProbeSample, Step
from convert.layers.conv.conv import AXES, DIMENSIONS, GROUP_COUNT, Array, Convolving, check_axes, check_order
from convert.layers.conv.mistakes import flipped_kernel, other_transpose_kernel
from convert.layers.conv.padding import KEYS, TARGET_PADDING, TorchPadding, read_geometry, torch_transposed_padding
from convert.layers.conv.probe import probe_kernel
from convert.layers.mistake import Mistake
from convert.layers.probe import Probe
from convert.layers.shared_keys import ACTIVATION, BIAS, module_target
from convert.layers.target import TargetLayer
from convert.layers.weight_keys import NORMALIZED, PARAMETRIZATION


@dataclass(frozen=True)
class ConvTranspose(Convolving):
    """A transposed convolution.

    Attributes:
        transpose_kernel: whether the kernel is that of the convolution whose gradient this is: flipped, I the channels
            that come out.
    """

    transpose_kernel: bool = False

    kind_name: ClassVar[str] = "conv_transpose"
    doc: ClassVar[str] = (
        "torch.nn.ConvTranspose1d, 2d or 3d; the order of the axes and whether the kernel is flipped are derived."
    )
    keys: ClassVar[Mapping[str, Key]] = {
        "dimension_numbers": Key(
            DIMENSIONS,
            "Dimension numbers of the source, as jax.lax.conv_transpose takes them: NHWC,HWIO->NHWC (flax) or NHWC,HWOI->NHWC (Haiku).",
            required=True,
            example="NHWC,HWIO->NHWC",
        ),
        "transpose_kernel": Key(
            FLAG,
            "Whether the source passes transpose_kernel=True: the letters I and O of the kernel are then those of the forward convolution (flax and Keras store H, W, channels out, channels in, and call it HWIO). Default: false.",
        ),
        "axes": AXES,
        "feature_group_count": GROUP_COUNT,
        **{key: known for key, known in KEYS.items() if key != "input_size"},
        "bias": BIAS,
        "activation": ACTIVATION,
        **NORMALIZED,
    }
    target: ClassVar[Record] = module_target(parametrization=PARAMETRIZATION, padding=TARGET_PADDING)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> ConvTranspose:
        numbers, axes = values["dimension_numbers"], values["axes"]
        check_axes(numbers, axes)
        if numbers.depthwise:
            raise ValueError(f"the kernel of {numbers.text} has no I; jax.lax.conv_transpose has no depthwise kernels")
        geometry = read_geometry(values, len(numbers.spatial))
        if geometry is not None and geometry.padding in ("SAME_LOWER", "CAUSAL"):
            raise ValueError(f"a transposed convolution has no padding {geometry.padding}: SAME, VALID or pairs")
        if geometry is not None:
            check_order(numbers)
        transposed = values.get("transpose_kernel", False)
        if transposed and values.get("feature_group_count", 1) != 1:
            raise ValueError("jax.lax.conv_transpose has no groups, so `transpose_kernel` goes with one group")
        return cls(numbers, axes, values.get("feature_group_count", 1), values.get("activation"), geometry, transposed)

    @property
    def output(self) -> str:
        return "I" if self.transpose_kernel else "O"

    @property
    def given(self) -> str:
        """The kernel's axis of input channels, in the letters of its dimension numbers."""
        return "O" if self.transpose_kernel else "I"

    def rows_of_torch(self, outputs: str) -> str:
        """The channels that come in: torch stores them first."""
        return self.letter(self.given)

    def check_normalized(self, role: str) -> None:
        if self.feature_group_count != 1:
            raise ValueError(f"`{role}` of a transposed convolution goes with one group")

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:
        if len(layer.path.groups) != len(source.groups):
            raise ValueError("a convolution's leaf becomes one tensor; it can be neither fused nor split")

    def inner_axes(
        self, role: str, letters: str, shape: tuple[int, ...], sizes: Mapping[str, int]
    ) -> tuple[str, tuple[int, ...]]:
        """With groups, O is (group, channel of the group): torch keeps the groups with the channels that come in."""
        at = letters.find(self.letter("O"))
        count = self.whole_groups(shape[at], sizes) if role == "weight" else 1
        if count == 1:
            return letters, shape
        group = next(x for x in "GKQRSTUVWXYZABCDEFHIJLMNOP" if x not in letters)
        return (
            letters[:at] + group + letters[at:],
            (*shape[:at], count, shape[at] // count, *shape[at + 1 :]),
        )

    def groups(self, role: str, letters: str, variant: str | None, layer: TargetLayer) -> tuple[str, ...]:
        if role == "bias":
            return (self.letter(self.output),)
        group = "".join(x for x in letters if x not in self.axes)
        return (group + self.letter(self.given), self.letter(self.output), *map(self.letter, self.numbers.spatial))

    def turned(self, role: str, layer: TargetLayer) -> tuple[Op, ...]:
        if role != "weight" or self.transpose_kernel:
            return ()
        return (Flip(self.spatial_axes(layer)),)

    def spatial_axes(self, layer: TargetLayer) -> tuple[int, ...]:
        """Return which axes of the target's kernel are spatial."""
        return tuple(range(2, 2 + len(self.numbers.spatial)))

    def torch_padding(self, kernel: tuple[int, ...]) -> TorchPadding:
        assert self.geometry is not None
        return torch_transposed_padding(self.geometry, kernel)

    def _probe_kernel(self, sample: ProbeSample, kernel: Array) -> Probe:
        groups, turned = self._groups(kernel), self.transpose_kernel
        return probe_kernel(
            sample, kernel, self.numbers, groups, self.geometry, transposed=True, transpose_kernel=turned
        )

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        if step.role == "weight":
            yield flipped_kernel(step, plan.source, tuple(range(2, len(step.spec.shape))))
            yield from other_transpose_kernel(step, plan.source, transpose_kernel=self.transpose_kernel)
