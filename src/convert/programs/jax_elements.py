"""From which elements of the parameters each element of a JAX value is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from convert.programs.program import Array, Value

Run = Callable[[Sequence[Array]], Sequence[Array]]

# Primitives that move elements, and the operands whose elements they move; the others choose (None: all are moved).
LAYOUT: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "rev", "split")),
    **dict.fromkeys(("concatenate", "pad", "tile", "copy", "copy_p", "device_put", "unstack")),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "gather": (0,),
    "scatter": (0, 2),
}
# Primitives whose result is computed, at each place, from the operands at this place.
ELEMENTWISE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "rem",
        "pow",
        "max",
        "min",
        "neg",
        "sign",
        "abs",
        "square",
        "integer_pow",
        "sqrt",
        "rsqrt",
        "cbrt",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "tanh",
        "erf",
        "erfc",
        "erf_inv",
        "lgamma",
        "digamma",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "atan2",
        "sinh",
        "cosh",
        "asinh",
        "acosh",
        "atanh",
        "floor",
        "ceil",
        "round",
        "clamp",
        "nextafter",
        "is_finite",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and",
        "or",
        "xor",
        "not",
        "select_n",
        "add_any",
        "convert_element_type",
        "real",
        "imag",
        "complex",
        "conj",
        "stop_gradient",
        "optimization_barrier",
    ]
)


def elements_of(name: str, operands: Sequence[Value], results: Sequence[Array], run: Run) -> list[tuple[Array, ...]]:
    """Return `Value.elements` for each result of an operation whose operands are parameters and constants.

    Args:
        name: of the primitive.
        run: the operation on other operands.
    """
    if name == "select_n" and operands[0].constant:
        return _moved(operands, tuple(range(1, len(operands))), len(results), run)
    if name in LAYOUT:
        return _moved(operands, LAYOUT[name] or tuple(range(len(operands))), len(results), run)
    if name in ELEMENTWISE and len(results) == 1:
        return [_joined([part for operand in operands for part in operand.elements], results[0].shape)]
    return [()] * len(results)


def _moved(operands: Sequence[Value], places: tuple[int, ...], results: int, run: Run) -> list[tuple[Array, ...]]:
    """Run the operation on the numbers of the elements, counted from 1, so that a zero is a constant.

    They have the dtype of the values, as the operation was made for it; float64 is exact for them.
    """
    moved = [operands[k] for k in places]
    if any(operand.leaves and not operand.elements for operand in moved):
        return [()] * results
    factors = []
    for k in range(max(len(operand.elements) for operand in moved)):
        arrays = [operand.array for operand in operands]
        for place in places:
            arrays[place] = _numbers(operands[place], k)
        made = run(arrays)
        factors.append([np.where(np.isnan(x), 0, x).astype(np.int64) - 1 for x in made])  # a gather fills in NaN
    return [tuple(factor[k] for factor in factors) for k in range(results)]


def _numbers(operand: Value, factor: int) -> Array:
    kind = np.float64 if operand.array.dtype.kind == "f" else np.int64
    if factor < len(operand.elements):
        return (operand.elements[factor] + 1).astype(kind)
    return np.zeros(operand.array.shape, kind)


def _joined(parts: Sequence[Array], shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Return one array for each factor, in the result's shape; equal ones once."""
    kept: list[Array] = []
    for part in parts:
        part = np.broadcast_to(part, shape)
        if not any(np.array_equal(part, other) for other in kept):
            kept.append(part)
    return tuple(kept)
