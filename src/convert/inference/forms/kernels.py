"""What a kernel may compute that nothing looks into, as a kernel of Pallas: the products of its operands, and their sums with its vectors.

They stand in front of it, and nothing uses them. Where the target computes one of them, and what follows it gives the kernel's result, the
kernel computes it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np

from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
MAX_PRODUCTS = 16  # of one kernel


def kernels_opened(source: Program) -> Program:
    """Return the source with such operations in front of each kernel that parameters enter."""
    if not source.opaque:
        return source
    found = chain.from_iterable((*_within(o), o) if o.name in source.opaque else (o,) for o in source.operations)
    return replace(source, operations=tuple(found))


def _within(kernel: Operation) -> Iterator[Operation]:
    """Yield the products of data with matrices, over the last axis of the data, and their sums with vectors."""
    parameters = [operand for operand in kernel.operands if operand.of_parameters]
    products = (
        _operation(
            kernel, "dot_general", (data, weight), {"dimension_numbers": (((data.array.ndim - 1,), (axis,)), ((), ()))}
        )
        for data in kernel.data
        for weight in parameters
        if data.array.dtype.kind == "f" and data.array.ndim
        for axis, size in enumerate(weight.array.shape)
        if weight.array.ndim > 1 and size == data.array.shape[-1]
    )
    for product in islice(products, MAX_PRODUCTS):
        yield product
        (made,) = product.results
        for vector in parameters:
            if vector.array.ndim == 1 and len(vector.array) == made.array.shape[-1]:
                yield _operation(kernel, "add", (made, vector), {})


def _operation(kernel: Operation, name: str, operands: tuple[Value, Value], settings: dict[str, Any]) -> Operation:
    def again(given: Sequence[Array]) -> list[Array]:
        one, other = given
        if name == "add":
            return [one + other]
        ((axis,), (summed,)), _ = settings["dimension_numbers"]
        return [np.tensordot(one, other, (axis, summed))]

    with np.errstate(all="ignore"):
        (array,) = again([operand.array for operand in operands])
    result = Value(array, data=True, leaves=operands[0].leaves | operands[1].leaves)
    return Operation(name, operands, (result,), settings, again, kernel.where, kernel.module)
