"""Operations that fold what the source computes on a weight at every call into the weight, once. None can be undone."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from convert.core.ops import Op, apply
from convert.core.tensor_spec import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 18  # numbers of a weight that are dealt with at a time: they stay in a cache


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
class Features:
    """Which axes of a weight have a number each in a second leaf, and which are summed over.

    Attributes:
        inner: sizes of the axes that the weight's are made of, the flattened ones apart.
        axes: those of them that are features.
    """

    inner: tuple[int, ...]
    axes: tuple[int, ...] = (0,)

    @property
    def count(self) -> int:
        """How many features there are."""
        return math.prod(self.inner[axis] for axis in self.axes)

    @property
    def rest(self) -> int:
        """How many numbers there are of each."""
        return math.prod(self.inner) // max(1, self.count)

    def blocks(self, x: Array, out: Array) -> Iterator[tuple[Array, Array]]:
        """Some features of a weight at a time, a row of float64 for each, and their place in an array of the inner axes, in which
        features are the axes in front.

        A sum over the other axes has the same bits as that over the whole weight: NumPy's order of summation depends on how an array
        lies in memory, which is kept. So no block is of a single feature, of which any axis would lie the same.
        """
        extent = x.itemsize + sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True))
        if (
            extent != x.nbytes or min(x.strides, default=0) < 0
        ):  # it has gaps, which a conversion to float64 would close
            x = x.copy("K")
        fronts = [np.moveaxis(array, self.axes, range(len(self.axes))) for array in (x.reshape(self.inner), out)]
        many = fronts[0].shape[0] if self.axes else 1
        count = max(1, many // max(2, BLOCK * many // max(1, x.size)))
        for k in range(count):
            start, stop = many * k // count, many * (k + 1) // count
            given, made = (front[start:stop] if self.axes else front for front in fronts)
            yield given.astype(np.float64).reshape(-1, self.rest), made

    def rows(self, x: Array) -> Iterator[Array]:
        """The first of each of `blocks`."""
        return (given for given, _ in self.blocks(x, x.reshape(self.inner)))


@dataclass(frozen=True)
class _Fold(Op):
    """On floats of at least 32 bits; the shape stays."""

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if spec.dtype not in ("float32", "float64"):
            raise ValueError(f"'{self}' on {spec.dtype} would lose bits; cast to float32 first")
        axes = self.features(spec.shape).inner
        if len(axes) < 2 or math.prod(axes) != spec.size:
            raise ValueError(f"'{self}' needs a weight with an output axis and others, not {spec}")
        for second, wanted, called in self.sizes():
            if second.size != wanted:
                raise ValueError(f"{second.leaf} has {second.size} numbers, and the weight {wanted} {called}")
        return spec

    @abstractmethod
    def features(self, shape: tuple[int, ...]) -> Features:
        """Of a weight of this shape."""

    @abstractmethod
    def fold(self, x: Array, out: Array) -> None:
        """Puts the result into an array of the features' inner axes, whose memory may be that of `x`."""

    def apply(self, x: Array) -> Array:
        out = np.empty(self.features(x.shape).inner, x.dtype)
        self.fold(x, out)
        return out.reshape(x.shape)

    def overwrite(self, x: Array) -> Array:
        inner = x.reshape(self.features(x.shape).inner)
        if not np.shares_memory(inner, x):  # axes that lie as no view has them
            return self.apply(x)
        self.fold(x, inner)
        return x

    def sizes(self) -> tuple[tuple[Operand, int, str], ...]:
        """Operands, how many numbers each must have, and of what."""
        return ()

    def operands(self) -> tuple[Operand, ...]:
        """Leaves that are read beside the weight's."""
        return ()

    def inverse(self, spec: TensorSpec) -> Op:
        raise LossyError(f"'{self}' cannot be undone")


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

    def features(self, shape: tuple[int, ...]) -> Features:
        return Features(shape, (self.axis,))

    def fold(self, x: Array, out: Array) -> None:
        for wide, made in self.features(x.shape).blocks(x, out):
            wide -= wide.mean(1, keepdims=True)
            variance = np.mean(np.square(wide), 1, keepdims=True)
            wide /= np.sqrt(variance + self.epsilon) if self.inside else np.sqrt(variance) + self.epsilon
            made[...] = wide.reshape(made.shape)

    def __str__(self) -> str:
        return f"standardised: (w - mean) / {f'sqrt(var + {self.epsilon:g})' if self.inside else f'(std + {self.epsilon:g})'}"


@dataclass(frozen=True)
class WeightNorm(_Fold):
    """``scale * w / sqrt(sum(w ** 2) + epsilon)``, the sum over all axes that are no features.

    Attributes:
        scale: for each feature.
        epsilon: what is added.
        of: the features.
    """

    scale: Operand
    epsilon: float
    of: Features

    def features(self, shape: tuple[int, ...]) -> Features:
        return self.of

    def operands(self) -> tuple[Operand, ...]:
        return (self.scale,)

    def sizes(self) -> tuple[tuple[Operand, int, str], ...]:
        return ((self.scale, self.of.count, "outputs"),)

    def fold(self, x: Array, out: Array) -> None:
        scale = self.scale.value().astype(np.float64)
        start = 0
        for wide, made in self.of.blocks(x, out):
            wide /= np.sqrt(np.sum(np.square(wide), 1, keepdims=True) + self.epsilon)
            wide *= scale.reshape(-1, 1)[start : start + len(wide)]
            made[...] = wide.reshape(made.shape)
            start += len(wide)

    def __str__(self) -> str:
        return f"{self.scale.leaf} * w / |w|"


@dataclass(frozen=True)
class SpectralNorm(_Fold):
    """Divided by ``u w v``: the largest singular value, as far as a power iteration has found its vectors.

    Attributes:
        u: the vector of a number for each feature.
        epsilon: added to a squared norm.
        of: the features.
        steps: of the iteration that are taken from u; none where v is stored, too.
        v: the other vector.
    """

    u: Operand
    epsilon: float
    of: Features
    steps: int = 1
    v: Operand | None = None

    def features(self, shape: tuple[int, ...]) -> Features:
        return self.of

    def operands(self) -> tuple[Operand, ...]:
        return (self.u,) if self.v is None else (self.u, self.v)

    def sizes(self) -> tuple[tuple[Operand, int, str], ...]:
        given = ((self.v, self.of.rest, "inputs"),) if self.v is not None else ()
        return ((self.u, self.of.count, "outputs"), *given)

    def fold(self, x: Array, out: Array) -> None:
        u = self.u.value().astype(np.float64).reshape(-1)
        v = self.v.value().astype(np.float64).reshape(-1) if self.v is not None else np.empty(0)
        for _ in range(self.steps):
            v = _unit(self._down(u, x), self.epsilon)
            u = _unit(np.concatenate([rows @ v for rows in self.of.rows(x)]), self.epsilon)
        sigma = float(self._down(u, x) @ v)
        for wide, made in self.of.blocks(x, out):
            wide /= sigma or 1.0
            made[...] = wide.reshape(made.shape)

    def _down(self, u: Array, x: Array) -> Array:
        """``u @ w``, with a row of w for each feature."""
        total, start = np.zeros(self.of.rest), 0
        for rows in self.of.rows(x):
            total += u[start : start + len(rows)] @ rows
            start += len(rows)
        return total

    def __str__(self) -> str:
        if self.v is not None:
            return f"w / sigma(w), sigma = u w v of {self.u.leaf} and {self.v.leaf}"
        return f"w / sigma(w), sigma by {'one step' if self.steps == 1 else f'{self.steps} steps'} from {self.u.leaf}"


def _unit(x: Array, epsilon: float) -> Array:
    return np.asarray(x / np.sqrt(np.sum(np.square(x)) + epsilon))


def operand_leaves(ops: tuple[Op, ...]) -> tuple[str, ...]:
    """Names of the leaves that operations read beside the one that they are applied to."""
    return tuple(second.leaf for op in ops if isinstance(op, _Fold) for second in op.operands())


def with_operands(ops: tuple[Op, ...], values: Mapping[str, Array]) -> tuple[Op, ...]:
    """The operations, with the leaves that they read beside the one that they are applied to: by name, as they were read."""
    return tuple(_given(op, values) if isinstance(op, _Fold) else op for op in ops)


def _given(op: _Fold, values: Mapping[str, Array]) -> Op:
    held = {
        each.name: replace(second, read=values.__getitem__)
        for each in fields(op)
        if isinstance(second := getattr(op, each.name), Operand)
    }
    return replace(op, **held)
