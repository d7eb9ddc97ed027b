"""Instance norm: each channel of each sample, normalised over all positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from convert.core.fields import Key, Record
from convert.layers.base import PlanView, ProbeSample, Step
from convert.layers.mistake import Mistake
from convert.layers.norm.layer_rms import FACTOR, HAS, TARGET_FACTOR, Norm
from convert.layers.norm.mistakes import norm_mistakes
from convert.layers.norm.probe import POSITIONS, normal_input
from convert.layers.probe import BATCH, Probe, Sides, accumulator, as_float64, probe_of_sum, torch_tensor
from convert.layers.shared_keys import AXES, BIAS, EPSILON, module_target

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class InstanceNorm(Norm):
    """Normalise mean and variance over the positions of each channel.

    Sources: flax 0.12.8 ``linen/normalization.py`` and ``nnx/nn/normalization.py`` InstanceNorm, torch 2.13
    ``torch/nn/modules/instancenorm.py``, whose modules have a weight and a bias with ``affine=True``.
    """

    kind_name: ClassVar[str] = "instance_norm"
    module_names: ClassVar[str] = r"instance_?norm(alization)?$"
    doc: ClassVar[str] = (
        "torch.nn.InstanceNorm1d, 2d or 3d with affine=True: each channel of each sample, normalised over all positions"
    )
    keys: ClassVar[Mapping[str, Key]] = {
        "multiplies_by": FACTOR,
        "epsilon": Key(EPSILON.field, EPSILON.doc, required=True, example="1e-5"),
        "bias": BIAS,
        "axes": AXES,
    }
    target: ClassVar[Record] = module_target(multiplies_by=TARGET_FACTOR, parameters=HAS)
    biased: ClassVar[bool] = True
    burn_config: ClassVar[str] = "InstanceNormConfig"
    bare: ClassVar[str] = "torch.nn.InstanceNorm1d, 2d or 3d"

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        if sum(size > 1 for size in shape) > 1:
            raise ValueError("an instance norm has one scale and one bias for each channel")
        return super().letters(role, shape, variant)

    def _probe_norm(self, sample: ProbeSample, leaf: Array) -> Probe:
        x = normal_input(sample.rng, BATCH, POSITIONS, leaf.size)
        factors = (self.multiplies_by, sample.layer.multiplies_by)
        run = instance_norm(x, leaf.reshape(-1), self._affine(sample), self._epsilon(sample), factors, sample.device)
        return probe_of_sum(run, POSITIONS)

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        yield from norm_mistakes(step, plan)


def instance_norm(
    x: Array,
    leaf: Array,
    written: tuple[Array | None, Array | None],
    eps: float,
    factors: tuple[str, str],
    device: str,
) -> Sides:
    """Run flax's instance norm and torch's on x of shape (batch, positions, channels).

    Args:
        leaf: the source's scale; its bias where it has no scale.
        written: the target's weight and bias, if it has them.
        factors: what the source and the target multiply by.
    """

    def run(dtype: str) -> tuple[Array, Array]:
        import jax.numpy as jnp
        import torch

        wide = accumulator(dtype)
        y, own = jnp.asarray(x).astype(dtype).astype(wide), jnp.asarray(leaf).astype(wide)
        mean, variance = y.mean(1, keepdims=True), y.var(1, keepdims=True)
        normalized = (y - mean) / jnp.sqrt(variance + eps)
        scaled = {"1": normalized + own, "scale": normalized * own, "1+scale": normalized * (1 + own)}[factors[0]]
        weight, bias = (None if value is None else torch_tensor(value.reshape(-1), wide, device) for value in written)
        weight = 1 + weight if weight is not None and factors[1] == "1+weight" else weight
        moved = torch_tensor(np.swapaxes(x, 1, 2), dtype, device).to(getattr(torch, wide))
        got = torch.nn.functional.instance_norm(moved, weight=weight, bias=bias, eps=eps)
        want = np.asarray(scaled.astype(dtype).astype("float64"))
        return as_float64(got.to(getattr(torch, dtype))).swapaxes(1, 2), want

    return run
