"""What convolutions and poolings read of a value: how it is padded, and in which steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.core.text import where_they_differ
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.naming.functions import MOST
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.words import Words, of_one_axis
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
Pairs = tuple[tuple[int, int], ...]
PADDING, ZEROS = "another padding", "zeros at other taps"
FLIPPED, TRANSPOSED = "kernel flipped", "axes of the kernel exchanged"
PADS = ("constant_pad_nd", "pad")  # in torch and in JAX
NEAR = 24  # operations that pad a value: a circular one takes four of each side
WIDEST = 16  # padding of an axis
LISTED = 3  # taps that a sentence lists
MODES = {
    "constant": "zeros",
    "reflect": "what the edges reflect",
    "edge": "the values of the edges",
    "symmetric": "what the edges reflect, themselves included",
    "wrap": "the values of the other end",
}


@dataclass(frozen=True)
class Padded:
    """A value as another one with more at its ends.

    Attributes:
        value: the other one.
        mode: of `numpy.pad`.
        widths: for each axis of the padded value.
    """

    value: Value
    mode: str
    widths: Pairs

    def __str__(self) -> str:
        used = [str(pair) for pair in self.widths if any(pair)]
        return f"{' and '.join(used)} with {MODES[self.mode]}" if used else "nothing"


def other_padding(repair: Repair, ours: Words, theirs: Words) -> str:
    """Say how two paddings of the same value differ; empty if one of the sides does not pad it, or both pad it in one way."""
    ends = (
        repair.target[-1].results[0] if repair.target else repair.operands[0],
        repair.source[-1].results[0] if repair.source else repair.source_operands[0],
    )
    found = [padded(value, words.producer) for words, value in zip((ours, theirs), ends, strict=True)]
    if found[0] is None or found[1] is None or str(found[0]) == str(found[1]):
        return ""
    if np.sort(found[0].value.array, axis=None).shape != np.sort(found[1].value.array, axis=None).shape:
        return ""
    return f"the target pads {found[0]}, and the JAX model {found[1]}"


def padded(value: Value, producer: Mapping[Value, Operation]) -> Padded | None:
    """Return of which value this one is a padded copy: of the first from which operations that move elements lead to it."""
    found = None
    for one in moved_from(value, producer):
        found = _as_padded(one, value.array) or found
    return found


def moved_from(value: Value, producer: Mapping[Value, Operation]) -> Iterator[Value]:
    """Yield the values from which operations that move elements alone lead to a value, the nearest first."""
    waiting, seen = [value], {value}
    while waiting and len(seen) < NEAR:
        one = producer.get(waiting.pop(0))
        if one is None or not (
            kind_of(one) in (LAYOUT, "part", "join") or "pad" in one.name or one.name.startswith("as_strided")
        ):
            continue
        for operand in one.data:
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
                yield operand


def _as_padded(value: Value, made: Array) -> Padded | None:
    given = value.array
    if given.ndim != made.ndim or given.size >= made.size or made.size > MOST:
        return None
    for order in itertools.permutations(range(given.ndim)):
        laid = given.transpose(order)
        more = [large - small for small, large in zip(laid.shape, made.shape, strict=True)]
        if not 0 <= min(more) <= max(more) <= WIDEST:
            continue
        for widths in itertools.product(*([(low, n - low) for low in range(n + 1)] for n in more)):
            inside = tuple(slice(low, low + n) for (low, _), n in zip(widths, laid.shape, strict=True))
            if not same(made[inside], laid):
                continue
            for mode in MODES:
                if same(np.pad(laid, widths, mode=mode), made):  # type: ignore[call-overload]
                    return Padded(value, mode, widths)
    return None


@dataclass(frozen=True, eq=False)
class Settings:
    """What a convolution was given, in one order of axes: batch (output channels), features, then those along which the kernel moves.

    Attributes:
        order: of the axes of the value that it is given.
        kernel: in this order.
        padding: with zeros, by the convolution itself.
    """

    order: tuple[int, ...]
    kernel: Array
    padding: Pairs
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class _Convolution:
    """A convolution in one order of axes: batch, features, then those along which the kernel moves."""

    given: Array
    kernel: Array
    padding: tuple[tuple[str, Pairs], ...]
    settings: Mapping[str, Any]


def other_windows(repair: Repair, ours: Words, theirs: Words) -> tuple[str, str] | None:
    """Name what differs in two convolutions of the same value with the same kernel; None if there are no such."""
    sides = []
    for words, operations in ((ours, repair.target), (theirs, repair.source)):
        found = [one for one in operations if kind_of(one) == "convolution"]
        made = _convolution(found[0], words) if len(found) == 1 else None
        if made is None:
            return None
        sides.append(made)
    one, two = sides
    if one.given.shape != two.given.shape or not same(one.given, two.given):
        return None
    if one.kernel.shape != two.kernel.shape:
        return None
    if not same(one.kernel, two.kernel):
        flipped = same(np.flip(one.kernel, tuple(range(2, one.kernel.ndim))), two.kernel)
        if one.padding != two.padding or one.settings != two.settings:
            return None
        if flipped:
            return FLIPPED, "the target reads the taps of the kernel in the reverse order"
        orders = itertools.permutations(range(one.kernel.ndim))
        if any(order != tuple(sorted(order)) and same(one.kernel.transpose(order), two.kernel) for order in orders):
            return TRANSPOSED, "the target reads the kernel with its axes in another order"
        return None
    return _otherwise(one, two, (repair.target, ours), (repair.source, theirs))


def windows_of_entry(entry: Operation, instead: Sequence[Operation], ours: Words, theirs: Words) -> str:
    """Say how a convolution of the target, whose kernel may be unknown, reads its value otherwise than one of the source reads the same.

    Args:
        entry: the convolution, or an operation that pads in front of it.
        instead: what the source computes of the value.
    """
    behind, reached = [entry], set(entry.results)
    for one in ours.operations if kind_of(entry) != "convolution" else ():
        if reached.intersection(one.operands):
            behind.append(one)
            reached.update(one.results if kind_of(one) != "convolution" else ())
    for one, two in itertools.product(behind, instead):
        if kind_of(one) != "convolution" or kind_of(two) != "convolution":
            continue
        mine, other = _convolution(one, ours), _convolution(two, theirs)
        if mine is None or other is None or mine.kernel.shape != other.kernel.shape:
            continue
        if mine.given.shape != other.given.shape or not same(mine.given, other.given):
            continue
        if said := _otherwise(mine, other, (_with_cut(one, ours), ours), (_with_cut(two, theirs), theirs)):
            return said[1]
    return ""


def _with_cut(convolution: Operation, words: Words) -> list[Operation]:
    """Return a convolution with what takes a part of its result, where nothing but a bias and another layout is between."""
    found, reached = [convolution], {*convolution.results}
    for one in words.operations:
        if reached.intersection(one.data) and len(one.data) == 1 and kind_of(one) in (LAYOUT, "add", "part"):
            reached.update(one.results)
            found += [one] if kind_of(one) == "part" else []
    return found


def _otherwise(
    one: _Convolution,
    two: _Convolution,
    target: tuple[Sequence[Operation], Words],
    source: tuple[Sequence[Operation], Words],
) -> tuple[str, str] | None:
    """Name what differs in the settings and the padding of two convolutions.

    Args:
        target, source: the operations from the convolution on, with the words for them.
    """
    names = [f"another {what}" for what in one.settings if one.settings[what] != two.settings[what]]
    said = [
        f"the target has {what} {one.settings[what]}, and the JAX model {two.settings[what]}"
        for what in one.settings
        if one.settings[what] != two.settings[what]
    ]
    if zeros := _other_zeros(one.kernel, two.kernel):
        names.append(ZEROS)
        said.append(zeros)
    cuts = _cut(*target), _cut(*source)
    used = _used(one, target[0]), _used(two, source[0])
    same = one.settings == two.settings and used[0] is not None and used[0] == used[1]
    if not same and (one.padding != two.padding or cuts[0] != cuts[1]):
        names.append(PADDING)
        said.append(f"the target pads {_said(one, cuts[0])}, and the JAX model {_said(two, cuts[1])}")
    return (" and ".join(names), "; ".join(said)) if names else None


def _cut(operations: Sequence[Operation], words: Words) -> str:
    """Say which part is taken of what a convolution gives; empty if all of it is used."""
    kinds = [kind_of(one) for one in operations]
    behind = operations[kinds.index("convolution") :]
    return " and ".join(dict.fromkeys(words.verb(one) for one in behind if kind_of(one) == "part"))


def _other_zeros(one: Array, two: Array) -> str:
    """Say at which taps the kernels of the target and the source are zero, where their code masks other ones; empty if they mask the same."""
    zeros = one == 0, two == 0
    if one.shape != two.shape or np.array_equal(*zeros) or zeros[0].all() or zeros[1].all():
        return ""
    taps = [[str(tuple(map(int, tap))) for tap in np.argwhere(of.all((0, 1)))] for of in zeros]
    if taps[0] == taps[1]:
        return "the target has zeros at other elements of the kernel than the JAX model"
    mine, other = (f"at the taps {x}" if x else "at none" for x in where_they_differ(taps[0], taps[1], LISTED))
    return f"in the kernel the target has zeros {mine}, and the JAX model {other}"


def _used(one: _Convolution, operations: Sequence[Operation]) -> list[tuple[int, int]] | None:
    """Return for each axis how much padding the first used result reads, and how many results are used; None where that is not known.

    What is cut off in front is padding that nothing reads.
    """
    begin = next(k for k, operation in enumerate(operations) if kind_of(operation) == "convolution")
    convolution, *behind = operations[begin:]
    (made,), spec = convolution.results, convolution.settings.get("dimension_numbers")
    axes = list(range(2, made.array.ndim) if spec is None else spec.out_spec[2:])
    modes = dict(one.padding)
    if modes.keys() - {"constant"}:
        return None
    before = [low for low, _ in modes.get("constant", ((0, 0),) * len(axes))]
    counts = [made.array.shape[axis] for axis in axes]
    for operation in (x for x in behind if kind_of(x) == "part"):
        at = of_one_axis(operation) if len(operation.results) == 1 else None
        if at is None or operation.operands[0].array.shape != made.array.shape or at[0] not in axes or at[1].step != 1:
            return None
        k = axes.index(at[0])
        if counts[k] != made.array.shape[at[0]]:
            return None
        before[k] -= at[1].start * one.settings["stride"][k]
        counts[k] = len(at[1])
    return list(zip(before, counts, strict=True))


def _said(one: _Convolution, cut: str) -> str:
    used = [f"{' and '.join(map(str, widths))} with {MODES[mode]}" for mode, widths in one.padding]
    return (" and ".join(used) or "nothing") + (f" and {cut}" if cut else "")


def settings_of(operation: Operation) -> Settings | None:
    """Return the settings of a convolution of torch or of JAX; None for a transposed one, or one with other settings."""
    settings, kernel = operation.settings, operation.operands[1].array
    if (spec := settings.get("dimension_numbers")) is not None:
        if any(n != 1 for n in settings["lhs_dilation"]):
            return None
        own = tuple((int(low), int(high)) for low, high in settings["padding"])
        moves = tuple(settings["window_strides"]), tuple(settings["rhs_dilation"])
        return Settings(
            tuple(spec.lhs_spec), kernel.transpose(spec.rhs_spec), own, *moves, settings["feature_group_count"]
        )
    if settings["transposed"]:
        return None
    padding, stride, dilation = (
        _of_each_axis(settings[name], kernel.ndim - 2) for name in ("padding", "stride", "dilation")
    )
    own = tuple((n, n) for n in padding)
    return Settings(tuple(range(kernel.ndim)), kernel, own, stride, dilation, settings["groups"])


def _of_each_axis(numbers: Sequence[int], axes: int) -> tuple[int, ...]:
    """Return a setting of torch for each axis of space; `padding="valid"` has one for all."""
    return tuple(map(int, numbers)) * (axes if len(numbers) == 1 else 1)


def _convolution(operation: Operation, words: Words) -> _Convolution | None:
    """Return an operation of torch or of JAX; None for a transposed one, or one with other settings."""
    own = settings_of(operation)
    if own is None:
        return None
    padding, value = {"constant": own.padding}, operation.operands[0]
    found = padded(value, words.producer)
    given = value.array
    if found is not None:
        inside = tuple(slice(low, n - high) for (low, high), n in zip(found.widths, given.shape, strict=True))
        given = given[inside]
        widths = [found.widths[axis] for axis in own.order]
        if any(map(any, widths[:2])):
            return None
        before = padding.get(found.mode, ((0, 0),) * len(own.padding))
        padding[found.mode] = tuple((a + c, b + d) for (a, b), (c, d) in zip(before, widths[2:], strict=True))
    return _Convolution(
        given.transpose(own.order),
        own.kernel,
        tuple((mode, pairs) for mode, pairs in padding.items() if any(map(any, pairs))),
        {"stride": own.stride, "dilation": own.dilation, "number of groups": own.groups},
    )
