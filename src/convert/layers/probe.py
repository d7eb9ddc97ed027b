"""What a probe of a layer is, and the JAX and torch functions that the probes of several kinds share.

A probe runs one layer on random inputs, twice: the JAX operation that the rule declares, with the leaves of the checkpoint, and
torch's layer, with the written tensors. JAX and torch are imported when a probe runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
Sides = Callable[[str], tuple[Array, Array]]
SHARED = ("float16", "bfloat16", "float32", "float64")  # dtypes whose memory torch can use without a copy
BATCH = 3  # size of each batch or time axis of an input: small, and unlike the sizes of layers
TORCH_BLOCK = 1 << 18  # values of a weight that torch multiplies with at a time: they fit into a cache
JAX_BLOCK = 1 << 22  # the same for JAX, where each call costs more


@dataclass(frozen=True)
class Probe:
    """A layer, ready to be run by both frameworks.

    Attributes:
        run: dtype -> (torch's result with the written tensors, JAX's result with the leaves), both of float64.
        factor: by how many epsilons of the dtype the two may differ, relative to the largest value.
        terms: how `factor` is computed, such as ``8 x sqrt(64 summands)``.
        reason: why both sides may differ by that.
        cast_factor: by how many epsilons of the written dtype they may differ, where the weights were rounded to it.
    """

    run: Sides
    factor: float
    terms: str
    reason: str = "two orders of the same sum"
    cast_factor: float = 2.0


@dataclass(frozen=True)
class LowRankPair:
    """Leaves that the source multiplies with one after the other, and the plan merges into one weight.

    Attributes:
        equation: ``X,A,B->Y``.
        first, second: A and B, without stacked axes.
        scale: what the source multiplies the product by.
        base: the weight that the product is added to; None: nothing.
    """

    equation: str
    first: Array
    second: Array
    scale: float
    base: Array | None


def probe_of_sum(run: Sides, summands: int) -> Probe:
    """Return the probe of a layer whose results are sums of so many terms."""
    return Probe(run, 8 * float(np.sqrt(max(summands, 1))), f"8 x sqrt({summands} summands)")


def probe_of_values(written: Array, stored: Array) -> Probe:
    """Return the probe of a tensor that both sides use as it is: its values are compared."""
    return probe_of_sum(lambda dtype: (written.astype(np.float64), stored.astype(np.float64).reshape(written.shape)), 1)


def without_unit_axes(leaf: Array, axes: str | None) -> Array:
    """Return a leaf without the axes of size 1 that the target does not have, for which a dot stands in the letters `axes`."""
    if "." not in (axes or ""):
        return leaf
    return leaf.reshape([size for letter, size in zip(axes or "", leaf.shape, strict=True) if letter != "."])


def torch_tensor(x: Array, dtype: str, device: str) -> torch.Tensor:
    """Return a NumPy array as a tensor that is only read: it shares the array's memory where it can."""
    import torch

    as_bits = x.dtype.name == "bfloat16"  # torch reads no bfloat16 from NumPy
    known = x if x.dtype.name in SHARED else x.astype(np.float32)  # float32 holds every value of the narrower dtypes
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        dense = np.ascontiguousarray(known)
        made = torch.from_numpy(dense.view(np.int16)).view(torch.bfloat16) if as_bits else torch.from_numpy(dense)
    return made.to(device=device, dtype=getattr(torch, dtype))


def as_float64(y: torch.Tensor) -> Array:
    """Return a tensor as a NumPy array of float64."""
    return np.asarray(y.double().cpu().numpy())


def accumulator(dtype: str) -> str:
    """Return the dtype in which norms compute their statistics: float32, or float64 where the input is."""
    return "float64" if dtype == "float64" else "float32"


def jnp_einsum(equation: str, precision: str, *operands: Array) -> dict[str, Array]:
    """Run `jnp.einsum`, of an equation without an ellipsis, in float64 and in `precision`; return both results as float64.

    The last operand is the weight. A large one is multiplied by some of its output features at a time. NumPy casts the operands:
    XLA compiles a product alone in a tenth of the time that a product with casts takes.
    """
    import jax.numpy as jnp

    *inputs, weight = operands
    left, _, result = equation.partition("->")
    letters = left.split(",")[-1]
    outputs = [letter for letter in letters if letter in result and left.count(letter) == 1]
    split = max(outputs, key=lambda letter: weight.shape[letters.index(letter)], default="")
    axis, joined = letters.index(split), result.find(split)  # 0, 0 where nothing is split
    count = min(-(-weight.size // JAX_BLOCK), weight.shape[axis]) if split else 1
    run = _compiled_einsum(_canonical(equation))
    results: dict[str, list[Array]] = {dtype: [] for dtype in ("float64", precision)}
    for block in np.array_split(weight, count, axis):
        for dtype, blocks in results.items():
            cast = (value.astype(jnp.dtype(dtype), copy=False) for value in (*inputs, block))
            blocks.append(np.asarray(run(*cast), np.float64))
    return {dtype: blocks[0] if count == 1 else np.concatenate(blocks, joined) for dtype, blocks in results.items()}


def _canonical(equation: str) -> str:
    """Rename the letters to a, b, ... in the order in which they occur, so that layers of one shape are compiled once."""
    letters = dict.fromkeys(filter(str.isalpha, equation))
    return equation.translate(str.maketrans("".join(letters), ascii_letters[: len(letters)]))


@lru_cache(maxsize=256)
def _compiled_einsum(equation: str) -> Callable[..., jax.Array]:
    import jax
    import jax.numpy as jnp

    return jax.jit(partial(jnp.einsum, equation))


def torch_linear(x: Array, weight: Array, dtype: str, device: str) -> Array:
    """Run `torch.nn.functional.linear`, some output features at a time."""
    import torch

    x_tensor = torch_tensor(x, dtype, device)
    rows = max(1, TORCH_BLOCK // weight.shape[1])
    blocks = [weight[k : k + rows] for k in range(0, weight.shape[0], rows)]
    results = [torch.nn.functional.linear(x_tensor, torch_tensor(block, dtype, device)) for block in blocks]
    return as_float64(torch.cat(results, dim=-1))


def torch_einsum(equation: str, x: Array, weight: Array, dtype: str, device: str) -> Array:
    """Run `torch.einsum`."""
    import torch

    return as_float64(torch.einsum(equation, torch_tensor(x, dtype, device), torch_tensor(weight, dtype, device)))
