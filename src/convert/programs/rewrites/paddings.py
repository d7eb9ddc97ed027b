"""Pad the target's convolutions by other amounts, of as much in all: what the source may compute as a sum of shifted products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.naming.windows import PADDING, padded
from convert.programs.divergence.rerun import FAILS, Change, Computed, Now
from convert.programs.program import Operation, Program
from convert.programs.rewrites.rewrite import Goal, Rewrite, error_with, line

Array = np.ndarray[Any, np.dtype[Any]]
MOST_RUNS = 64
MOST = 16  # padding of an axis


@dataclass(frozen=True)
class Read:
    """A convolution of torch, and the value that it reads without padding.

    Attributes:
        at: number of the operation.
        inner: what of its operand is no padding.
        low, high: by how much at the ends of each axis along which the kernel moves, in all.
    """

    at: int
    operation: Operation
    inner: tuple[slice, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]


def paddings(target: Program, goal: Goal) -> Rewrite | None:
    """Return the padding that restores the output, of all convolutions of one line."""
    program = on_the_way(target, goal.output)
    lines: dict[str, list[Read]] = {}
    for one in _reads(program):
        lines.setdefault(line(one.operation), []).append(one)
    runs = 0
    for where, reads in lines.items():
        both = reads[0].low[0] + reads[0].high[0]
        same = all(len(set(one.low)) == len(set(one.high)) == 1 and one.low == reads[0].low for one in reads)
        if not same or not 0 < both <= MOST:
            continue
        for low in (k for k in range(both + 1) if k != reads[0].low[0]):
            if runs >= MOST_RUNS:
                return None
            runs += 1
            made = {one.at: _computed(one, low, both - low) for one in reads}
            error, _ = error_with(program, Change(computed=made), goal)
            if error <= goal.enough:
                at = f"{where}{f', in {reads[0].operation.module},' if reads[0].operation.module else ''}"
                problem = (
                    f"the convolution at {at} reads its input with ({reads[0].low[0]}, {reads[0].high[0]}) zeros at its ends; "
                    f"the outputs are equal with ({low}, {both - low})"
                )
                return Rewrite(
                    PADDING, problem, f"pad by ({low}, {both - low}) at {where}, or correct the reference", error
                )
    return None


def _computed(read: Read, low: int, high: int) -> Computed:
    def now(array: Now) -> Array:
        settings = read.operation.settings
        own, strides = settings["padding"], settings["stride"]
        x = array(read.operation.operands[0])[read.inner]
        # The operation pads by its own number: more zeros in front, by whole steps that are cut off again.
        more = [0 if low >= n else -(-(n - low) // step) for n, step in zip(own, strides, strict=True)]
        widths = [(low - n + k * step, max(high - n, 0)) for n, step, k in zip(own, strides, more, strict=True)]
        given = np.pad(x, [(0, 0)] * (x.ndim - len(widths)) + widths)
        rest = [array(v) for v in read.operation.operands[1:]]
        try:
            made = np.asarray(read.operation.again([np.require(v, requirements=["C", "W"]) for v in (given, *rest)])[0])
        except FAILS as error:
            raise ValueError("not so padded") from error
        shape = read.operation.results[0].array.shape
        for axis, k in enumerate(more, len(shape) - len(more)):
            made = made.take(range(k, k + shape[axis]), axis)
        return np.ascontiguousarray(made).reshape(shape)

    return now


def _reads(program: Program) -> Iterator[Read]:
    producer = program.made_by
    for at, one in enumerate(program.operations):
        settings = one.settings
        if kind_of(one) != "convolution" or "stride" not in settings or settings.get("transposed") or not one.data:
            continue
        axes, own = one.operands[1].array.ndim - 2, settings["padding"]
        value, zeros = one.operands[0], ((0, 0),) * axes
        around = padded(value, producer)
        if around is not None and around.mode == "constant" and not any(map(any, around.widths[:-axes])):
            zeros = around.widths[-axes:]
        ends = zip(zeros, value.array.shape[-axes:], strict=True)
        inner = (slice(None),) * (value.array.ndim - axes) + tuple(slice(a, n - b) for (a, b), n in ends)
        low = tuple(n + pair[0] for n, pair in zip(own, zeros, strict=True))
        yield Read(at, one, inner, low, tuple(n + pair[1] for n, pair in zip(own, zeros, strict=True)))
