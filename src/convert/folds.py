"""Operations that fold what the source computes on a weight at every call into the weight, once. None can be undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.ops import Op, apply
from convert.spec import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Operand:
    """A second leaf, small, that an operation on another one needs.

    Attributes:
        leaf: its name.
        ops: what is done to it first.
        size: how many numbers it then has.
        read: reads it, by name.
    """

    leaf: str
    ops: tuple[Op, ...]
    size: int
    read: Callable[[str], Array] = field(repr=False, compare=False)

    def value(self) -> Array:
        """The operand, as it is in the checkpoint after `ops`."""
        return apply(self.ops, self.read(self.leaf))


class LossyError(ValueError):
    """An operation that cannot be undone."""


@dataclass(frozen=True)
class _Fold(Op):
    """On floats of at least 32 bits; the shape stays."""

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if spec.dtype not in ("float32", "float64"):
            raise ValueError(f"'{self}' on {spec.dtype} would lose bits; cast to float32 first")
        if len(spec.shape) < 2:
            raise ValueError(f"'{self}' needs a weight with an output axis and others, not {spec}")
        for second in self.operands():
            if second.size != spec.shape[0]:
                raise ValueError(f"{second.leaf} has {second.size} numbers, and the weight {spec.shape[0]} outputs")
        return spec

    def operands(self) -> tuple[Operand, ...]:
        """Leaves that are read beside the weight's."""
        return ()

    def inverse(self, spec: TensorSpec) -> Op:
        raise LossyError(f"'{self}' cannot be undone")


def _others(x: Array, axis: int) -> tuple[int, ...]:
    return tuple(k for k in range(x.ndim) if k != axis)


@dataclass(frozen=True)
class Standardize(_Fold):
    """Mean 0 and deviation 1 over all axes but one: ``(w - mean) / (std + epsilon)``, or ``/ sqrt(var + epsilon)``.

    The deviation is that of the population, as `jnp.std` has it.

    Attributes:
        axis: that of the output channels.
        epsilon: what is added.
        inside: whether to the variance, inside of the root.
    """

    axis: int
    epsilon: float
    inside: bool

    def apply(self, x: Array) -> Array:
        wide = x.astype(np.float64)
        axes = _others(x, self.axis)
        wide -= wide.mean(axes, keepdims=True)
        variance = np.mean(np.square(wide), axes, keepdims=True)
        divisor = np.sqrt(variance + self.epsilon) if self.inside else np.sqrt(variance) + self.epsilon
        return np.asarray((wide / divisor).astype(x.dtype))

    def __str__(self) -> str:
        return f"standardised: (w - mean) / {f'sqrt(var + {self.epsilon:g})' if self.inside else f'(std + {self.epsilon:g})'}"


@dataclass(frozen=True)
class WeightNorm(_Fold):
    """``scale * w / sqrt(sum(w ** 2) + epsilon)``, the sum over all axes but the first.

    Attributes:
        scale: for each output.
        epsilon: what is added.
    """

    scale: Operand
    epsilon: float

    def operands(self) -> tuple[Operand, ...]:
        return (self.scale,)

    def apply(self, x: Array) -> Array:
        scale = self.scale.value().astype(np.float64)
        wide = x.astype(np.float64)
        norm = np.sqrt(np.sum(np.square(wide), _others(x, 0), keepdims=True) + self.epsilon)
        return np.asarray((wide / norm * scale.reshape(-1, *[1] * (x.ndim - 1))).astype(x.dtype))

    def __str__(self) -> str:
        return f"{self.scale.leaf} * w / |w|"


@dataclass(frozen=True)
class SpectralNorm(_Fold):
    """Divided by the largest singular value, as one step of the power iteration from a stored vector finds it.

    Attributes:
        u: the vector, one number for each output.
        epsilon: added to a squared norm.
    """

    u: Operand
    epsilon: float

    def operands(self) -> tuple[Operand, ...]:
        return (self.u,)

    def apply(self, x: Array) -> Array:
        u = self.u.value().astype(np.float64).reshape(-1)
        matrix = x.astype(np.float64).reshape(x.shape[0], -1)
        v = _unit(u @ matrix, self.epsilon)
        u = _unit(matrix @ v, self.epsilon)
        sigma = float(u @ matrix @ v)
        return np.asarray((matrix / (sigma or 1.0)).reshape(x.shape).astype(x.dtype))

    def __str__(self) -> str:
        return f"w / sigma(w), sigma by one step from {self.u.leaf}"


def _unit(x: Array, epsilon: float) -> Array:
    return np.asarray(x / np.sqrt(np.sum(np.square(x)) + epsilon))


def operand_leaves(ops: tuple[Op, ...]) -> tuple[str, ...]:
    """Names of the leaves that operations read beside the one that they are applied to."""
    return tuple(second.leaf for op in ops if isinstance(op, _Fold) for second in op.operands())
