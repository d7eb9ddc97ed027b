"""Convolutions at the layers level, with the geometry that the rule declares: JAX pads by its own words, torch by our numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.layers import Convolution, ConvTranspose
from convert.layers.conv.padding import Geometry, pads, torch_transposed
from convert.verify.numerics.torch_arrays import tensor

if TYPE_CHECKING:
    import jax

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[[str], tuple[Array, Array]]


def probe_convolution(
    kind: Convolution | ConvTranspose, own: Array, rows: Array, theirs: Any, batch: int, device: str, rng: Any
) -> tuple[Run, int]:
    """What runs both sides, and the number of summands.

    Args:
        own: the source's kernel, as the source computes with it.
        rows: the written one.
        theirs: dimension numbers of the target's code, where it is no layer of torch.
    """
    numbers = kind.numbers
    sizes = dict(zip(kind.axes, own.shape, strict=True))
    groups = kind.group_count(sizes)
    transposed = isinstance(kind, ConvTranspose)
    given = kind.given if isinstance(kind, ConvTranspose) else "I"
    channels = groups * sizes.get(kind.letter(given), 1)
    taps = kind.kernel_sizes(sizes)
    many = len(taps)
    # Without a declaration: no padding, and for a transposed convolution a stride that a kernel's turning shows with.
    plain = Geometry("VALID", (2 if transposed else 1,) * many, (1,) * many)
    geometry = kind.geometry or plain
    spatial = dict(zip(numbers.spatial, _input_size(geometry, taps), strict=True))
    x = rng.standard_normal([batch if a == "N" else channels if a == "C" else spatial[a] for a in numbers.input])
    order = "NC" + numbers.spatial  # torch's
    flat = np.einsum(f"{numbers.input}->{order}", x)
    kernel = rows
    if theirs is not None:  # from the target's own order of axes to torch's
        stored = theirs.kernel + ("I" if theirs.depthwise else "")
        kernel = np.einsum(
            f"{stored}->{theirs.outputs + 'I' + theirs.spatial}", rows[..., None] if theirs.depthwise else rows
        )
        kernel = kernel.reshape(-1, *kernel.shape[len(theirs.outputs) :])

    def run(dtype: str) -> tuple[Array, Array]:
        turned = isinstance(kind, ConvTranspose) and kind.transpose_kernel
        call = (numbers.input, numbers.kernel + "I" * numbers.depthwise, numbers.result)
        given = own[..., None] if numbers.depthwise else own
        own_taps = tuple(
            sizes[kind.letter(a)] for a in numbers.kernel if a not in "OIC"
        )  # jax.lax goes by the kernel's order
        if "C" in numbers.kernel:
            want = np.asarray(_each_channel(call, geometry, own_taps, dtype)(x, given))
        else:
            want = np.asarray(_compiled(call, groups, geometry, own_taps, transposed, turned, dtype)(x, given))
        function = _torch_transposed if transposed else _torch
        got = function(flat, kernel, groups, geometry, taps, dtype, device)
        return got, np.einsum(f"{numbers.result}->{order}", want)

    results = kind.numbers.outputs if kind.output == "O" else kind.output
    return run, int(np.prod(own.shape)) // int(np.prod([sizes[kind.letter(axis)] for axis in results]))


def _input_size(geometry: Geometry, taps: tuple[int, ...]) -> tuple[int, ...]:
    """A small input: the first axis leaves a rest when divided by its stride, which SAME pads otherwise than without one."""
    sizes = []
    for k, (width, stride) in enumerate(zip(geometry.widths(taps), geometry.strides, strict=True)):
        rest = geometry.input_size[k] % stride if geometry.input_size else (k + 1) % stride
        sizes.append(stride * (-(-width // stride) + 2 + k) + rest)
    return tuple(sizes)


@lru_cache(maxsize=256)
def _compiled(
    numbers: tuple[str, str, str],
    groups: int,
    geometry: Geometry,
    taps: tuple[int, ...],
    transposed: bool,
    turned: bool,
    dtype: str,
) -> Callable[[Array, Array], jax.Array]:
    import jax

    padding = _padding(geometry, taps)

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x, kernel = x.astype(dtype), kernel.astype(dtype)
        if transposed and groups == 1:
            y = jax.lax.conv_transpose(
                x,
                kernel,
                geometry.strides,
                padding,
                rhs_dilation=geometry.dilation,
                dimension_numbers=numbers,
                transpose_kernel=turned,
            )
            return y.astype("float64")
        if transposed:  # jax.lax.conv_transpose has no groups; this is its own body, as Equinox calls it
            from jax._src.lax.convolution import _conv_transpose_padding

            widths = geometry.widths(taps)
            pads = [
                _conv_transpose_padding(k, s, padding) for k, s in zip(widths, geometry.strides, strict=True)
            ] if isinstance(padding, str) else padding  # fmt: skip
            y = jax.lax.conv_general_dilated(
                x, kernel, [1] * len(taps), pads, lhs_dilation=geometry.strides, rhs_dilation=geometry.dilation,
                dimension_numbers=numbers, feature_group_count=groups,
            )  # fmt: skip
            return y.astype("float64")
        y = jax.lax.conv_general_dilated(
            x, kernel, geometry.strides, padding, rhs_dilation=geometry.dilation,
            dimension_numbers=numbers, feature_group_count=groups,
        )  # fmt: skip
        return y.astype("float64")

    return jax.jit(run)


def _padding(geometry: Geometry, taps: tuple[int, ...]) -> Any:
    """As jax.lax takes it; CAUSAL is flax's word for what it hands over."""
    words = {"CAUSAL": [(width - 1, 0) for width in geometry.widths(taps)]}
    return words.get(str(geometry.padding), geometry.padding)


@lru_cache(maxsize=256)
def _each_channel(
    numbers: tuple[str, str, str], geometry: Geometry, taps: tuple[int, ...], dtype: str
) -> Callable[[Array, Array], jax.Array]:
    """Each channel convolved alone with the filters that are its own, and the results of one channel put beside each other."""
    import jax
    import jax.numpy as jnp

    given, stored, result = numbers
    of_one = stored.replace("C", "")
    padding = _padding(geometry, taps)

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        def one(channel: jax.Array, filters: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(
                jnp.expand_dims(channel, given.index("C")), filters, geometry.strides, padding,
                rhs_dilation=geometry.dilation, dimension_numbers=(given, of_one, result),
            )  # fmt: skip

        at = result.index("C")
        y = jax.vmap(one, (given.index("C"), stored.index("C")), at)(x.astype(dtype), kernel.astype(dtype))
        return y.reshape(*y.shape[:at], -1, *y.shape[at + 2 :]).astype("float64")

    return jax.jit(run)


def _torch(
    x: Array, kernel: Array, groups: int, geometry: Geometry, taps: tuple[int, ...], dtype: str, device: str
) -> Array:
    import torch

    functional = torch.nn.functional
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[x.ndim - 3]
    sides = [n for pair in reversed(pads(geometry, taps, x.shape[2:])) for n in pair]
    padded = functional.pad(tensor(x, dtype, device), sides)
    made = function(
        padded,
        tensor(kernel, dtype, device),
        stride=geometry.strides,
        dilation=geometry.dilation,
        groups=groups,
    )
    return np.asarray(made.double().cpu().numpy())


def _torch_transposed(
    x: Array, kernel: Array, groups: int, geometry: Geometry, taps: tuple[int, ...], dtype: str, device: str
) -> Array:
    import torch

    functional = torch.nn.functional
    function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[x.ndim - 3]
    said = torch_transposed(geometry, taps)
    made = function(
        tensor(x, dtype, device),
        tensor(kernel, dtype, device),
        stride=geometry.strides,
        padding=said.padding,
        output_padding=said.output_padding,
        groups=groups,
        dilation=geometry.dilation,
    )
    made = functional.pad(made, [-n for pair in reversed(said.extra) for n in pair])
    return np.asarray(made.double().cpu().numpy())
