"""The probe of a projection: `jnp.einsum` by the source's equation, and `torch.nn.functional.linear` or the target's einsum."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_letters
from typing import Any

import numpy as np

from convert.core.einsum import Projection
from convert.layers.base import ProbeSample
from convert.layers.probe import BATCH, Probe, jnp_einsum, probe_of_sum, probe_of_values, torch_einsum, torch_linear
from convert.layers.stored_axes import positions, taken, taken_apart, with_axes
from convert.layers.transforms.probe import as_target_gives, normalized_bias, normalized_weight, with_target_map

Array = np.ndarray[Any, np.dtype[Any]]


def probe_linear(sample: ProbeSample, equation: Projection) -> Probe:
    """Probe the weight or the bias of a projection."""
    if sample.step.role == "bias":
        return _probe_bias(sample, equation)
    weight = normalized_weight(sample, sample.stored, equation.weight)
    target = sample.layer.computes
    return (
        _probe_weight(sample, equation, weight) if target is None else _probe_einsum(sample, equation, target, weight)
    )


def _probe_weight(sample: ProbeSample, equation: Projection, weight: Array) -> Probe:
    stored = equation.stored  # the source multiplies with the leaf as it is; what it does with the result comes after
    operand, result = _operand_and_result(stored)
    sizes = dict(zip(stored.weight, weight.shape, strict=True))
    x = sample.rng.standard_normal([sizes.get(letter, BATCH) for letter in operand])
    elements = taken(sample)
    axes = set(equation.weight + stored.weight)
    batch = "".join(letter for letter in result if letter not in axes)
    outputs, inputs = ("".join(x for x in of if x not in elements) for of in (equation.outputs, equation.inputs))
    matrix = sample.written
    if sample.layer.axes is not None:
        matrix = with_axes(matrix, sample.layer.axes, (outputs, inputs), {**sample.plan.sizes, **sizes})
    wanted = _through_pair(sample, equation, x)
    if wanted is None:
        alone = _without_others(x, operand, equation, sample)
        wanted = jnp_einsum(f"{operand},{stored.weight}->{result}", sample.precision, alone, weight)

    def run(dtype: str) -> tuple[Array, Array]:
        given, letters = taken_apart(x, operand, equation.groups, sample)
        flat = np.einsum(f"{letters}->{batch}{inputs}", with_target_map(given, letters, sample))
        y, letters = taken_apart(wanted[dtype], result, equation.groups, sample)
        y = np.einsum(f"{letters}->{batch}{outputs}", as_target_gives(y, letters, sample))
        lead = [BATCH] * len(batch)
        return torch_linear(flat.reshape(*lead, -1), matrix, dtype, sample.device), y.reshape(*lead, -1)

    return probe_of_sum(run, matrix.shape[-1])


def _probe_einsum(sample: ProbeSample, equation: Projection, target: Projection, weight: Array) -> Probe:
    """Probe a weight that both sides multiply with by an einsum, each with its own equation."""
    operand, result = _operand_and_result(equation)
    sizes = dict(zip(equation.weight, weight.shape, strict=True))
    x = sample.rng.standard_normal([sizes.get(letter, BATCH) for letter in operand])
    wanted = jnp_einsum(f"{operand},{equation.weight}->{result}", sample.precision, x, weight)

    def run(dtype: str) -> tuple[Array, Array]:
        got = torch_einsum(f"{operand},{target.weight}->{result}", x, sample.written, dtype, sample.device)
        return got, as_target_gives(wanted[dtype], result, sample)

    return probe_of_sum(run, int(np.prod([sizes[letter] for letter in equation.inputs])))


def _probe_bias(sample: ProbeSample, equation: Projection) -> Probe:
    """Probe a bias, which is added to the result: its letters follow from how NumPy broadcasts the stored array."""
    bias = normalized_bias(sample).astype(np.float64)
    letters = equation.stored.bias_axes(bias.shape)
    if sample.layer.computes is not None:
        return probe_of_values(sample.written, as_target_gives(bias, letters, sample))
    named = "".join(letter for letter in letters if letter != ".")
    sizes = dict(zip(letters, bias.shape, strict=True))
    y, outputs = taken_apart(bias.reshape([sizes[letter] for letter in named]), named, equation.groups, sample)
    y = as_target_gives(y, outputs, sample)
    if sample.layer.axes is not None:
        y = np.einsum(f"{outputs}->{''.join(x for group in sample.layer.axes for x in group if x in outputs)}", y)
    return probe_of_values(sample.written, y.reshape(-1))


def _operand_and_result(equation: Projection) -> tuple[str, str]:
    """Return the letters of the input and the result; one letter that the equation does not use stands for the ellipsis."""
    unused = next(letter for letter in reversed(ascii_letters) if letter not in equation.equation)
    left, _, result = equation.equation.replace("...", unused).partition("->")
    return left.split(",")[0], result


def _without_others(x: Array, axes: str, equation: Projection, sample: ProbeSample) -> Array:
    """Return the input with zeros where other tensors have the weights that it is multiplied with."""
    for axis, letter in enumerate(axes):
        kept = np.zeros(x.shape[axis])
        kept[positions(letter, x.shape[axis], equation.groups, sample)[0].reshape(-1)] = 1
        x = x * kept.reshape(-1, *[1] * (x.ndim - axis - 1))
    return x


def _through_pair(sample: ProbeSample, equation: Projection, x: Array) -> Mapping[str, Array] | None:
    """Return what the source computes with a low-rank pair, one leaf after the other as they are stored; None without a pair."""
    pair = sample.pair
    if pair is None:
        return None
    unused = next(letter for letter in reversed(ascii_letters) if letter not in equation.equation + pair.equation)
    product = jnp_einsum(pair.equation.replace("...", unused), sample.precision, x, pair.first, pair.second)
    total = {dtype: pair.scale * value for dtype, value in product.items()}
    if pair.base is not None:
        direct = jnp_einsum(equation.equation.replace("...", unused), sample.precision, x, pair.base)
        total = {dtype: value + direct[dtype] for dtype, value in total.items()}
    return total
