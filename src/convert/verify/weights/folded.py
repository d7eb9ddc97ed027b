"""Name a tensor into which other tensors of its layer are folded: a scale, a bias, a norm, the rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from convert.core.tensor_spec import is_float
from convert.layers.base import Step
from convert.layers.step_tensor import expected
from convert.numerics.blocks import everywhere, largest
from convert.numerics.compare import epsilon
from convert.planning.plan import Plan
from convert.verify.weights.corruption.find import Corruption
from convert.verify.weights.corruption.relations import along, sample, sums_along

Array = np.ndarray[Any, np.dtype[Any]]
MAX_OTHERS = 128  # tensors that are read for one wrong tensor
MAX_SIZE = 1 << 24  # values of such a tensor, which are held in float64
SCALE, BIAS = "a scale folded in", "a bias folded in"


def find_folded(step: Step, plan: Plan, got: Array, want: Array) -> Corruption | None:
    """Return what of the same layer is folded into the tensor; None if nothing known is."""
    if not is_float(want.dtype.name) or got.ndim == 0 or not np.isfinite(largest(got)):
        return None
    slack = 4 * max(epsilon(want.dtype.name), epsilon("float32"))
    layer = layer_of(step.name)
    near = [s for s in plan.steps if s.parts and s.name != step.name and layer_of(s.name) == layer][:MAX_OTHERS]
    small = [s for s in near if is_float(s.spec.dtype) and s.spec.size <= MAX_SIZE]
    values = {s.name: expected(s, plan.source).astype(np.float64) for s in small}
    vectors = {name: v for name, v in values.items() if v.ndim == 1}
    return _scale(got, want, slack, vectors) or _bias(got, want, slack, values, vectors)


def layer_of(name: str) -> str:
    """Return the name up to its last number: the layer."""
    parts = name.split(".")
    last = max((k for k, part in enumerate(parts) if part.isdecimal()), default=-1)
    return ".".join(parts[: last + 1])


def _scale(got: Array, want: Array, slack: float, vectors: dict[str, Array]) -> Corruption | None:
    """Find the scale of a norm that is multiplied into the weight."""

    def holds(got: Array, want: Array, factor: Array) -> bool:
        x, made = got.astype(np.float64), want.astype(np.float64) * factor
        return bool(np.all(np.abs(x - made) <= slack * np.maximum(np.abs(x), np.abs(made))))

    for axis, size in enumerate(got.shape) if got.ndim > 1 else ():
        for text, factor in _factors({name: v for name, v in vectors.items() if len(v) == size}):
            factors = along(factor, axis, got.shape)
            with np.errstate(invalid="ignore"):
                if everywhere(holds, got, want, factors) and _tells(slack, *sample(got, want, factors)):
                    return Corruption(SCALE, f"axis {axis} is multiplied by {text}")
    return None


def _tells(slack: float, got: Array, want: Array, factor: Array) -> bool:
    """Whether the change is larger than a few roundings."""
    x, y = got.astype(np.float64), want.astype(np.float64)
    return bool(np.median(np.abs(x - y)) > 4 * np.median(slack * np.maximum(np.abs(x), np.abs(y * factor))))


def _factors(vectors: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    """Yield what a norm multiplies by: its scale, or 1 + scale, and either divided by the deviation; and their inverses."""
    with np.errstate(all="ignore"):
        for name, v in vectors.items():
            yield name, v
            yield f"1 + {name}", 1 + v
            yield f"1 / {name}", 1 / v
            yield f"1 / (1 + {name})", 1 / (1 + v)
        for name, var in vectors.items():
            if not name.endswith("running_var"):
                continue
            for scale, v in vectors.items():
                for eps in (1e-3, 1e-5, 1e-6):
                    if scale == name.removesuffix("running_var") + "weight":
                        yield f"{scale} / sqrt({name} + {eps:g})", v / np.sqrt(var + eps)


def _bias(
    got: Array, want: Array, slack: float, values: dict[str, Array], vectors: dict[str, Array]
) -> Corruption | None:
    """Find the vector that is added along an axis: a row of a table, or a weight times the bias of what comes before it."""
    bound = slack * max(largest(got), largest(want))
    for axis in range(got.ndim):
        _, _, means, right_means = sums_along(got, want, axis)
        vector = means - right_means

        def holds(got: Array, want: Array, added: Array) -> bool:
            return not np.abs(got.astype(np.float64) - want.astype(np.float64) - added).max() > bound

        if not np.median(np.abs(vector)) > 4 * bound or not everywhere(
            holds, got, want, along(vector, axis, got.shape)
        ):
            continue
        for text, made, size_of_terms in _vectors(vector, got.ndim, values, vectors):
            for sign in (1, -1):
                if np.abs(vector - sign * made).max() <= bound + slack * size_of_terms:
                    how, to = ("added", "to") if sign > 0 else ("subtracted", "from")
                    where = "it" if got.ndim == 1 else f"each of its vectors along axis {axis}"
                    return Corruption(BIAS, f"{text} is {how} {to} {where}")
    return None


def _vectors(
    added: Array, ndim: int, values: dict[str, Array], vectors: dict[str, Array]
) -> Iterator[tuple[str, Array, float]]:
    """Yield vectors that may have been added, made of the tensors of a layer, and the size of the terms of their sums."""
    size = len(added)
    for name, v in values.items():
        if v.ndim > 1 and v.shape[-1] == size > 1:
            rows = v.reshape(-1, size)
            nearest = {int(np.abs(rows - sign * added).max(axis=1).argmin()) for sign in (1, -1)}
            yield from ((f"row {k} of {name}", rows[k], 0.0) for k in sorted(nearest))
        elif ndim > 1 and v.shape == (size,):
            yield name, v, 0.0
    for name, matrix in values.items():
        for turned in (matrix, matrix.T) if matrix.ndim == 2 else ():
            if turned.shape[0] != size:
                continue
            for other, v in vectors.items():
                width = turned.shape[1]
                for part in range(len(v) // width if len(v) % width == 0 else 0):
                    which = f"part {part + 1} of {other}" if len(v) > width else other
                    share = v[part * width : (part + 1) * width]
                    yield f"{name} times {which}", turned @ share, float((np.abs(turned) @ np.abs(share)).max())
