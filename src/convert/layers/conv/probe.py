"""The probe of a convolution, with the geometry that the rule declares: JAX gets the padding mode of the rule (SAME, ...), torch the derived numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.layers.base import ProbeSample
from convert.layers.conv.dimension_numbers import DimensionNumbers
from convert.layers.conv.padding import Geometry, pads, torch_transposed
from convert.layers.conv.standardization import Standardized
from convert.layers.probe import BATCH, Probe, as_float64, probe_of_sum, torch_tensor

if TYPE_CHECKING:
    import jax

Array = np.ndarray[Any, np.dtype[Any]]


def standardized(kernel: Array, numbers: DimensionNumbers, equation: Standardized) -> Array:
    """Standardise a kernel over the axes that each filter sums, in float64."""
    import jax.numpy as jnp

    w = jnp.asarray(kernel).astype("float64")
    axes = tuple(k for k, axis in enumerate(numbers.kernel) if axis != "O")
    w = w - jnp.mean(w, axes, keepdims=True)
    if equation.inside:
        w = w / jnp.sqrt(jnp.var(w, axes, keepdims=True) + equation.epsilon)
    else:
        w = w / (jnp.std(w, axes, keepdims=True) + equation.epsilon)
    return np.asarray(w)


def probe_kernel(
    sample: ProbeSample,
    kernel: Array,
    numbers: DimensionNumbers,
    groups: int,
    geometry: Geometry | None,
    *,
    transposed: bool = False,
    transpose_kernel: bool = False,
) -> Probe:
    """Probe the kernel of a convolution.

    Args:
        kernel: that the source computes with, with the axes that it is stored with.
        groups: of channels.
        transposed: whether it is a transposed convolution; transpose_kernel: as `jax.lax.conv_transpose` takes it.
    """
    sizes = dict(zip(numbers.kernel, kernel.shape, strict=True))
    inputs, outputs = ("O", "I") if transpose_kernel else ("I", numbers.outputs)
    taps = tuple(sizes[axis] for axis in numbers.spatial)
    if geometry is None:  # no padding; a transposed convolution strides, so that a kernel that is not flipped shows
        rank = len(taps)
        geometry = Geometry("VALID", (2 if transposed else 1,) * rank, (1,) * rank)
    by_axis = {"N": BATCH, "C": groups * sizes.get(inputs, 1)}
    by_axis |= dict(zip(numbers.spatial, _input_size(geometry, taps), strict=True))
    x = sample.rng.standard_normal([by_axis[axis] for axis in numbers.input])
    torch_order = "NC" + numbers.spatial
    x_torch = np.einsum(f"{numbers.input}->{torch_order}", x)
    written = _torch_kernel(sample.written, sample.layer.computes)
    words = (numbers.input, numbers.kernel + "I" * numbers.depthwise, numbers.result)
    stored_taps = tuple(sizes[axis] for axis in numbers.kernel if axis not in "OIC")  # jax.lax: the order of the kernel
    call = _Call(words, groups, geometry, stored_taps, transposed, transpose_kernel)
    weight = kernel[..., None] if numbers.depthwise else kernel
    torch_function = _torch_transposed if transposed else _torch

    def run(dtype: str) -> tuple[Array, Array]:
        jax_function = _each_channel if "C" in numbers.kernel else _compiled
        want = np.asarray(jax_function(call, dtype)(x, weight))
        got = torch_function(x_torch, written, groups, geometry, taps, dtype, sample.device)
        return got, np.einsum(f"{numbers.result}->{torch_order}", want)

    return probe_of_sum(run, kernel.size // int(np.prod([sizes[axis] for axis in outputs])))


def _torch_kernel(written: Array, target: DimensionNumbers | None) -> Array:
    """Return the written kernel as torch's functions take it: from the target's own order of axes, where it has one."""
    if target is None:
        return written
    stored = target.kernel + ("I" if target.depthwise else "")
    kernel = written[..., None] if target.depthwise else written
    kernel = np.einsum(f"{stored}->{target.outputs}I{target.spatial}", kernel)
    return np.asarray(kernel.reshape(-1, *kernel.shape[len(target.outputs) :]))


def _input_size(geometry: Geometry, taps: tuple[int, ...]) -> tuple[int, ...]:
    """Return a small input: the remainder of its size divided by the stride decides how SAME pads, so one has a remainder."""
    sizes = []
    for k, (width, stride) in enumerate(zip(geometry.widths(taps), geometry.strides, strict=True)):
        rest = geometry.input_size[k] % stride if geometry.input_size else (k + 1) % stride
        sizes.append(stride * (-(-width // stride) + 2 + k) + rest)
    return tuple(sizes)


@dataclass(frozen=True)
class _Call:
    """A convolution as `jax.lax` is called.

    Attributes:
        numbers: dimension numbers, for input, kernel and result.
        taps: spatial sizes of the kernel, in its own order.
    """

    numbers: tuple[str, str, str]
    groups: int
    geometry: Geometry
    taps: tuple[int, ...]
    transposed: bool
    transpose_kernel: bool

    @property
    def padding(self) -> Any:
        """Padding as `jax.lax` takes it; CAUSAL is flax's own word."""
        if self.geometry.padding == "CAUSAL":
            return [(width - 1, 0) for width in self.geometry.widths(self.taps)]
        return self.geometry.padding


@lru_cache(maxsize=256)
def _compiled(call: _Call, dtype: str) -> Callable[[Array, Array], jax.Array]:
    import jax

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return _jax(call, x.astype(dtype), kernel.astype(dtype)).astype("float64")

    return jax.jit(run)


def _jax(call: _Call, x: jax.Array, kernel: jax.Array) -> jax.Array:
    import jax

    geometry, padding = call.geometry, call.padding
    if call.transposed and call.groups == 1:
        return jax.lax.conv_transpose(
            x,
            kernel,
            geometry.strides,
            padding,
            rhs_dilation=geometry.dilation,
            dimension_numbers=call.numbers,
            transpose_kernel=call.transpose_kernel,
        )
    strides, input_dilation = geometry.strides, (1,) * len(call.taps)
    if call.transposed:  # jax.lax.conv_transpose has no groups; this is its own body, as Equinox calls it
        from jax._src.lax.convolution import _conv_transpose_padding

        strides, input_dilation = input_dilation, strides
        if isinstance(padding, str):
            taps = zip(geometry.widths(call.taps), geometry.strides, strict=True)
            padding = [_conv_transpose_padding(width, stride, padding) for width, stride in taps]
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        lhs_dilation=input_dilation,
        rhs_dilation=geometry.dilation,
        dimension_numbers=call.numbers,
        feature_group_count=call.groups,
    )


@lru_cache(maxsize=256)
def _each_channel(call: _Call, dtype: str) -> Callable[[Array, Array], jax.Array]:
    """Convolve each channel with its own filters; the results of one channel are neighbours."""
    import jax
    import jax.numpy as jnp

    letters, stored, result = call.numbers
    numbers = (letters, stored.replace("C", ""), result)

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        def one(channel: jax.Array, filters: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(
                jnp.expand_dims(channel, letters.index("C")),
                filters,
                call.geometry.strides,
                call.padding,
                rhs_dilation=call.geometry.dilation,
                dimension_numbers=numbers,
            )

        at = result.index("C")
        y = jax.vmap(one, (letters.index("C"), stored.index("C")), at)(x.astype(dtype), kernel.astype(dtype))
        return y.reshape(*y.shape[:at], -1, *y.shape[at + 2 :]).astype("float64")

    return jax.jit(run)


def _torch(
    x: Array, kernel: Array, groups: int, geometry: Geometry, taps: tuple[int, ...], dtype: str, device: str
) -> Array:
    import torch

    functional = torch.nn.functional
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[x.ndim - 3]
    sides = [n for pair in reversed(pads(geometry, taps, x.shape[2:])) for n in pair]
    y = function(
        functional.pad(torch_tensor(x, dtype, device), sides),
        torch_tensor(kernel, dtype, device),
        stride=geometry.strides,
        dilation=geometry.dilation,
        groups=groups,
    )
    return as_float64(y)


def _torch_transposed(
    x: Array, kernel: Array, groups: int, geometry: Geometry, taps: tuple[int, ...], dtype: str, device: str
) -> Array:
    import torch

    functional = torch.nn.functional
    function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[x.ndim - 3]
    arguments = torch_transposed(geometry, taps)
    y = function(
        torch_tensor(x, dtype, device),
        torch_tensor(kernel, dtype, device),
        stride=geometry.strides,
        padding=arguments.padding,
        output_padding=arguments.output_padding,
        groups=groups,
        dilation=geometry.dilation,
    )
    return as_float64(functional.pad(y, [-n for pair in reversed(arguments.extra) for n in pair]))
