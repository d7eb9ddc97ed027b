"""From which elements of the parameters each element of a PyTorch value is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import numpy as np
import torch

from convert.programs.program import Array, Value

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

# Operators that move elements, and leave their values as they are. What they fill in is a constant.
LAYOUT = frozenset(
    [
        "t",
        "transpose",
        "permute",
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "reshape",
        "flatten",
        "expand",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "chunk",
        "unbind",
        "cat",
        "stack",
        "clone",
        "contiguous",
        "detach",
        "alias",
        "flip",
        "roll",
        "rot90",
        "repeat",
        "repeat_interleave",
        "tile",
        "movedim",
        "index",
        "index_select",
        "index_put",
        "gather",
        "scatter",
        "take",
        "take_along_dim",
        "masked_select",
        "embedding",
        "slice_scatter",
        "select_scatter",
        "diagonal_scatter",
        "as_strided",
        "as_strided_scatter",
        "constant_pad_nd",
        "unfold",
        "diagonal",
        "diag_embed",
        "tril",
        "triu",
        "where",
        "masked_fill",
        "masked_scatter",
        "copy",
        "_to_copy",
        "index_copy",
        "index_fill",
        "pixel_shuffle",
        "pixel_unshuffle",
    ]
)


def elements_of(
    name: str, operands: Sequence[Value], results: Sequence[Array], run: Run, *, elementwise: bool, scalars: Set[int]
) -> list[tuple[Array, ...]]:
    """Return `Value.elements` for each result of an operation whose operands are parameters and constants.

    Args:
        run: the operation, on tensors.
        elementwise: whether each element of the result is computed from the elements of the operands at its place.
        scalars: which operands are numbers of the code.
    """
    if name in LAYOUT:
        return _moved(operands, len(results), run, scalars)
    if name == "_weight_norm_interface":  # v * g / |v|, and |v|
        v, g = operands
        return [_broadcast([*v.elements, *g.elements], results[0].shape), ()]
    if elementwise:
        return [_broadcast([part for operand in operands for part in operand.elements], results[0].shape)]
    return [()] * len(results)


def _moved(operands: Sequence[Value], results: int, run: Run, scalars: Set[int]) -> list[tuple[Array, ...]]:
    """Run the operation on the numbers of the elements, from 1, so that a zero is a constant."""
    factors = {len(operand.elements) for operand in operands if operand.leaves and operand.array.dtype.kind in "fc"}
    if len(factors) != 1:
        return [()] * results
    moved = [
        [
            number.numpy().real.astype(np.int64) - 1  # a cast may have made them complex
            for number in run([_numbers(x, k, j in scalars) for j, x in enumerate(operands)])
        ]
        for k in range(factors.pop())
    ]
    return list(zip(*moved, strict=True)) if moved else [()] * results


def _numbers(operand: Value, factor: int, scalar: bool) -> torch.Tensor:
    array = np.asarray(operand.array)
    if operand.leaves and array.dtype.kind in "fc":  # a condition of a parameter stays what it is
        return torch.from_numpy(np.asarray(operand.elements[factor] + 1))
    index = array.dtype.kind not in "fc" and not scalar  # or a condition; what is no index is filled in
    return torch.from_numpy(array if index else np.zeros(array.shape, np.int64))


def _broadcast(parts: Sequence[Array], shape: tuple[int, ...]) -> tuple[Array, ...]:
    kept: list[Array] = []
    for part in parts:
        part = np.broadcast_to(part, shape)
        if not any(np.array_equal(part, other) for other in kept):
            kept.append(part)
    return tuple(kept)
