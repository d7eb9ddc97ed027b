"""Operations that fold a normalization, which the source computes at every call, into the weight, and one that gives its lengths. None has an inverse."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from convert.core.ops import Op, apply
from convert.core.tensor_spec import TensorSpec, is_float

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 18  # elements of a weight that are processed at once, so that they stay in the cache


@dataclass(frozen=True)
class Operand:
    """A second, small leaf that an operation on another leaf needs.

    Attributes:
        leaf: its name.
        ops: operations that are applied to it first.
        size: number of elements after `ops`.
        read: function that reads a leaf by name.
    """

    leaf: str
    ops: tuple[Op, ...]
    size: int
    read: Callable[[str], Array] = field(repr=False, compare=False)

    def value(self) -> Array:
        """Read the leaf and apply `ops`."""
        return apply(self.ops, self.read(self.leaf))


class LossyError(ValueError):
    """The operation has no inverse."""


@dataclass(frozen=True)
class Features:
    """The axes of a weight that have one value per element in a second leaf; the others are summed over.

    Attributes:
        inner: sizes of the weight's axes before any were flattened together.
        axes: the feature axes among them.
    """

    inner: tuple[int, ...]
    axes: tuple[int, ...] = (0,)

    @property
    def count(self) -> int:
        """Number of features."""
        return math.prod(self.inner[axis] for axis in self.axes)

    @property
    def rest(self) -> int:
        """Number of elements per feature."""
        return math.prod(self.inner) // max(1, self.count)

    def blocks(self, x: Array, out: Array) -> Iterator[tuple[Array, Array]]:
        """Yield blocks of features: a float64 row for each feature, and the view of `out` that the block fills.

        A sum over a row has the same bits as a sum over the whole weight: NumPy's order of summation depends on the memory
        layout, which blocks preserve. A block never has a single feature, as its layout would be ambiguous.
        """
        extent = x.itemsize + sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True))
        if (
            extent != x.nbytes or min(x.strides, default=0) < 0
        ):  # conversion to float64 would remove the gaps between its elements
            x = x.copy("K")
        fronts = [np.moveaxis(array, self.axes, range(len(self.axes))) for array in (x.reshape(self.inner), out)]
        many = fronts[0].shape[0] if self.axes else 1
        count = max(1, many // max(2, BLOCK * many // max(1, x.size)))
        for k in range(count):
            start, stop = many * k // count, many * (k + 1) // count
            given, made = (front[start:stop] if self.axes else front for front in fronts)
            yield given.astype(np.float64).reshape(-1, self.rest), made

    def rows(self, x: Array) -> Iterator[Array]:
        """Yield only the rows of `blocks`."""
        return (given for given, _ in self.blocks(x, x.reshape(self.inner)))


@dataclass(frozen=True)
class _Fold(Op):
    """An operation on float32 or float64 that keeps the shape."""

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
        """Return the features of a weight of this shape."""

    @abstractmethod
    def fold(self, x: Array, out: Array) -> None:
        """Write the result to `out`, which has the inner axes of the features and may share the memory of `x`."""

    def apply(self, x: Array) -> Array:
        out = np.empty(self.features(x.shape).inner, x.dtype)
        self.fold(x, out)
        return out.reshape(x.shape)

    def overwrite(self, x: Array) -> Array:
        inner = x.reshape(self.features(x.shape).inner)
        if not np.shares_memory(inner, x):  # the inner axes are not a view of `x`
            return self.apply(x)
        self.fold(x, inner)
        return x

    def sizes(self) -> tuple[tuple[Operand, int, str], ...]:
        """Return each operand, the number of elements that it must have, and what they belong to."""
        return ()

    def operands(self) -> tuple[Operand, ...]:
        """Return the second leaves that the operation reads."""
        return ()

    def inverse(self, spec: TensorSpec) -> Op:
        raise LossyError(f"'{self}' has no inverse")


@dataclass(frozen=True)
class Standardize(_Fold):
    """Standardize over all axes but one: ``(w - mean) / (std + epsilon)``, or ``(w - mean) / sqrt(var + epsilon)``.

    The standard deviation is that of the population, as in `jnp.std`.

    Attributes:
        axis: axis of the output channels.
        epsilon: number that is added.
        inside: whether it is added to the variance, inside the root.
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
    """Compute ``scale * w / sqrt(sum(w ** 2) + epsilon)``, with the sum over all axes that are not features.

    Attributes:
        scale: one value per feature.
        epsilon: number that is added to the squared norm.
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
    """Divide by ``u w v``, an estimate of the largest singular value by power iteration.

    Attributes:
        u: vector with one value per feature.
        epsilon: number that is added to a squared norm.
        of: the features.
        steps: number of power iterations from u; 0 if v is stored as well.
        v: the other vector, if it is stored.
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
        """Compute ``u @ w``, with one row of w per feature."""
        total, start = np.zeros(self.of.rest), 0
        for rows in self.of.rows(x):
            total += u[start : start + len(rows)] @ rows
            start += len(rows)
        return total

    def __str__(self) -> str:
        if self.v is not None:
            return f"w / sigma(w), sigma = u w v of {self.u.leaf} and {self.v.leaf}"
        return f"w / sigma(w), sigma by {'one step' if self.steps == 1 else f'{self.steps} steps'} from {self.u.leaf}"


@dataclass(frozen=True)
class RowLengths(Op):
    """Compute ``sqrt(sum(w ** 2))`` over all axes but the first: the scale with which torch's weight norm gives w."""

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if not is_float(spec.dtype) or len(spec.shape) < 2:
            raise ValueError(f"'{self}' needs a weight of floats with two axes or more, not {spec}")
        return replace(spec, shape=(spec.shape[0], *[1] * (len(spec.shape) - 1)))

    def apply(self, x: Array) -> Array:
        out = np.empty(x.shape[:1], x.dtype)
        start = 0
        for wide in Features(x.shape).rows(x):
            out[start : start + len(wide)] = np.sqrt(np.sum(np.square(wide), 1))
            start += len(wide)
        return out.reshape(-1, *[1] * (x.ndim - 1))

    def inverse(self, spec: TensorSpec) -> Op:
        raise LossyError(f"'{self}' has no inverse")

    def __str__(self) -> str:
        return "|w| of each row"


def _unit(x: Array, epsilon: float) -> Array:
    return np.asarray(x / np.sqrt(np.sum(np.square(x)) + epsilon))


def operand_leaves(ops: tuple[Op, ...]) -> tuple[str, ...]:
    """Return the names of the second leaves that operations read."""
    return tuple(second.leaf for op in ops if isinstance(op, _Fold) for second in op.operands())


def with_operands(ops: tuple[Op, ...], values: Mapping[str, Array]) -> tuple[Op, ...]:
    """Return the operations with values for the second leaves that they read, by name."""
    return tuple(_with_values(op, values) if isinstance(op, _Fold) else op for op in ops)


def _with_values(op: _Fold, values: Mapping[str, Array]) -> Op:
    operands = {
        each.name: replace(second, read=values.__getitem__)
        for each in fields(op)
        if isinstance(second := getattr(op, each.name), Operand)
    }
    return replace(op, **operands)
