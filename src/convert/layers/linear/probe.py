"""The probe of a projection: `jnp.einsum` by the source's equation, and `torch.nn.functional.linear` or the target's einsum."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_letters
from typing import Any

import numpy as np

from convert.core.einsum import Projection
from convert.core.ops import Take
from convert.layers.base import ProbeSample
from convert.layers.probe import BATCH, Probe, jnp_einsum, probe_of_sum, probe_of_values, torch_einsum, torch_linear
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
    operand, result = _operand_and_result(equation)
    sizes = dict(zip(equation.weight, weight.shape, strict=True))
    x = sample.rng.standard_normal([sizes.get(letter, BATCH) for letter in operand])
    batch = "".join(letter for letter in result if letter not in equation.outputs)
    split, member = _member(sample, equation)
    kept = result.replace(split, "") if split else result
    outputs = equation.outputs.replace(split, "") if split else equation.outputs
    wanted = _through_pair(sample, equation, x)
    if wanted is None:
        wanted = jnp_einsum(f"{operand},{equation.weight}->{result}", sample.precision, x, weight)

    def run(dtype: str) -> tuple[Array, Array]:
        inputs = with_target_map(x, operand, sample)
        flat = np.einsum(f"{operand}->{batch}{equation.inputs}", inputs).reshape(*[BATCH] * len(batch), -1)
        y = as_target_gives(wanted[dtype], result, sample)
        y = np.take(y, member, result.index(split)) if split else y
        y = np.einsum(f"{kept}->{batch}{outputs}", y).reshape(*[BATCH] * len(batch), -1)
        return torch_linear(flat, sample.written, dtype, sample.device), y

    return probe_of_sum(run, sample.written.shape[-1])


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
    letters = equation.bias_axes(bias.shape)
    if sample.layer.computes is not None:
        return probe_of_values(sample.written, as_target_gives(bias, letters, sample))
    outputs = "".join(letter for letter in letters if letter in equation.outputs)
    sizes = dict(zip(letters, bias.shape, strict=True))
    y = as_target_gives(bias.reshape([sizes[letter] for letter in outputs]), outputs, sample)
    split, member = _member(sample, equation)
    y = np.take(y, member, outputs.index(split)) if split else y
    return probe_of_values(sample.written, y.reshape(-1))


def _operand_and_result(equation: Projection) -> tuple[str, str]:
    """Return the letters of the input and the result; one letter that the equation does not use stands for the ellipsis."""
    unused = next(letter for letter in reversed(ascii_letters) if letter not in equation.equation)
    left, _, result = equation.equation.replace("...", unused).partition("->")
    return left.split(",")[0], result


def _member(sample: ProbeSample, equation: Projection) -> tuple[str, int]:
    """Return the output axis whose elements go to different targets, and the element of this one; ("", 0) where there is none."""
    ops = sample.part.ops[len(sample.rule.stacked) :]
    member = next((op.index for op in ops if isinstance(op, Take)), None)
    if member is None or len(sample.part.groups[0]) >= len(equation.outputs):
        return "", 0
    return equation.outputs[0], member


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
