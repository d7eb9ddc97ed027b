"""Evaluate JAX's common primitives with NumPy, which compiles nothing: XLA takes a twentieth of a second for each new shape.

Real numbers and integers only, and only where the functions are the same for all values but subnormal ones, which XLA makes zero.
Both round to float64, so that their results differ by rounding. What is not here is left to XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Params = Mapping[str, Any]
Function = Callable[[Sequence[Array], Params], Sequence[Any] | None]
ANY, FLOATS = "biuf", "f"


def evaluate(name: str, operands: Sequence[Array], params: Params) -> list[Array] | None:
    """Return the results of a primitive, one of `NAMES`; None where NumPy does not evaluate it.

    Args:
        name: of the primitive.
        operands: floating ones are float64.
        params: of the primitive, with float64 for narrower dtypes.
    """
    if not all(x.dtype.kind in ANY for x in operands):
        return None
    with np.errstate(all="ignore"):
        made = _PRIMITIVES[name](operands, params)
    return None if made is None else [np.asarray(x) for x in made]


# ---- element-wise


def _elementwise(function: Callable[..., Any], kinds: str) -> Function:
    """Return what evaluates a primitive of operands of one dtype, of one of these kinds."""

    def evaluated(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
        dtypes = {x.dtype for x in operands} | {params.get("out_dtype") or operands[0].dtype}
        return [function(*operands)] if len(dtypes) == 1 and operands[0].dtype.kind in kinds else None

    return evaluated


_ELEMENTWISE: dict[str, tuple[Callable[..., Any], str]] = {
    "neg": (np.negative, "iuf"),
    "not": (np.invert, "biu"),
    "square": (np.square, "iuf"),
    "stop_gradient": (lambda x: x, ANY),
    "copy": (lambda x: x, ANY),
    "copy_p": (lambda x: x, ANY),
    "rsqrt": (lambda x: 1 / np.sqrt(x), FLOATS),
    "logistic": (lambda x: 1 / (1 + np.exp(-x)), FLOATS),
    "is_finite": (np.isfinite, FLOATS),
    **{
        name: (getattr(np, name), FLOATS)
        for name in ["sqrt", "exp", "exp2", "expm1", "log", "log1p", "tanh", "sin", "cos", "tan", "floor", "ceil"]
    },
    "abs": (np.abs, "if"),
    "sign": (np.sign, "if"),
    "add": (np.add, "iuf"),
    "add_any": (np.add, "iuf"),
    "sub": (np.subtract, "iuf"),
    "mul": (np.multiply, "iuf"),
    "div": (np.divide, FLOATS),
    "pow": (np.power, FLOATS),
    "max": (np.maximum, ANY),
    "min": (np.minimum, ANY),
    "and": (np.bitwise_and, "biu"),
    "or": (np.bitwise_or, "biu"),
    "xor": (np.bitwise_xor, "biu"),
    "eq": (np.equal, ANY),
    "ne": (np.not_equal, ANY),
    "lt": (np.less, ANY),
    "le": (np.less_equal, ANY),
    "gt": (np.greater, ANY),
    "ge": (np.greater_equal, ANY),
}


# ---- products, sums and choices


def _dot_general(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    a, b = operands
    if a.dtype != np.float64 or b.dtype != np.float64:
        return None
    (sums_a, sums_b), (batch_a, batch_b) = params["dimension_numbers"]
    free_a, free_b = (
        [axis for axis in range(x.ndim) if axis not in (*sums, *batch)]
        for x, sums, batch in ((a, sums_a, batch_a), (b, sums_b, batch_b))
    )
    batch = [a.shape[axis] for axis in batch_a]
    length = int(np.prod([a.shape[axis] for axis in sums_a]))
    rows, columns = [a.shape[axis] for axis in free_a], [b.shape[axis] for axis in free_b]
    left = a.transpose((*batch_a, *free_a, *sums_a)).reshape((*batch, int(np.prod(rows)), length))
    right = b.transpose((*batch_b, *sums_b, *free_b)).reshape((*batch, length, int(np.prod(columns))))
    return [(left @ right).reshape((*batch, *rows, *columns))]


def _reduced(function: Any) -> Function:
    def reduce(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
        (x,) = operands
        return [function(x, axis=tuple(params["axes"]))] if x.size and x.dtype == np.float64 else None

    return reduce


def _select(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    which, *cases = operands
    return [np.where(which, cases[1], cases[0])] if which.dtype == bool and len(cases) == 2 else None


def _converted(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    (x,), dtype = operands, np.dtype(params["new_dtype"])
    if x.dtype.kind == "f" and dtype.kind in "iu":
        return None  # they differ beyond the range of the integers
    return [x.astype(dtype)]


def _integer_pow(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    (x,), power = operands, params["y"]
    if x.dtype != np.float64:
        return None
    result = np.power(x, abs(power))
    return [result if power >= 0 else 1 / result]


def _clamp(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    low, x, high = operands
    return [np.minimum(np.maximum(x, low), high)]


# ---- layout


def _broadcast(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    x, shape = operands[0], params["shape"]
    kept = dict(zip(params["broadcast_dimensions"], x.shape, strict=True))
    return [np.broadcast_to(x.reshape([kept.get(axis, 1) for axis in range(len(shape))]), shape)]


def _reshape(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    return [operands[0].reshape(params["new_sizes"])] if params.get("dimensions") is None else None


def _slice(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    strides = params["strides"] or (1,) * operands[0].ndim
    return [operands[0][tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]]


def _split(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    return np.split(operands[0], np.cumsum(params["sizes"])[:-1], params["axis"])


def _pad(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    x, value = operands
    sides = [(low, high) for low, high, inside in params["padding_config"] if inside == 0 and low >= 0 and high >= 0]
    return [np.pad(x, sides, constant_values=value)] if len(sides) == x.ndim and x.ndim else None


def _window(shape: Sequence[int], starts: Sequence[Array], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the part of an array that begins at `starts`, moved into the array where it would leave it."""
    begins = [min(max(int(k), 0), total - size) for k, total, size in zip(starts, shape, sizes, strict=True)]
    return tuple(slice(k, k + size) for k, size in zip(begins, sizes, strict=True))


def _dynamic_slice(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    x, *starts = operands
    return [x[_window(x.shape, starts, params["slice_sizes"])]]


def _dynamic_update(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    x, update, *starts = operands
    made = x.copy()
    made[_window(x.shape, starts, update.shape)] = update
    return [made]


def _iota(operands: Sequence[Array], params: Params) -> Sequence[Any] | None:
    shape, axis = params["shape"], params["dimension"]
    return [
        np.broadcast_to(
            np.arange(shape[axis], dtype=params["dtype"]).reshape((-1,) + (1,) * (len(shape) - axis - 1)), shape
        )
    ]


_PRIMITIVES: dict[str, Function] = {
    **{name: _elementwise(*of) for name, of in _ELEMENTWISE.items()},
    "dot_general": _dot_general,
    "reduce_sum": _reduced(np.sum),
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "select_n": _select,
    "convert_element_type": _converted,
    "integer_pow": _integer_pow,
    "clamp": _clamp,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "iota": _iota,
    "transpose": lambda operands, params: [operands[0].transpose(params["permutation"])],
    "squeeze": lambda operands, params: [operands[0].squeeze(tuple(params["dimensions"]))],
    "rev": lambda operands, params: [np.flip(operands[0], tuple(params["dimensions"]))],
    "concatenate": lambda operands, params: [np.concatenate(operands, params["dimension"])],
}

NAMES = frozenset(_PRIMITIVES)
