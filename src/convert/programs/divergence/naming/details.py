"""What two repaired operations differ in: parameters, heads, the bias of a choice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from convert.core.text import where_they_differ
from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.naming.functions import MOST
from convert.programs.divergence.naming.tables import off_by, shift_of
from convert.programs.divergence.naming.windows import PADS
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.rerun import again
from convert.programs.divergence.shared_values import FEW, one_of, same_numbers, visible
from convert.programs.divergence.words import Words, arithmetic, places, scalar
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
POWER = "another power"
PART, PARAMETER, FUNCTION = "another part", "another parameter", "another function of a parameter"
EPSILON = "another constant added to a parameter"
ROOTS = {"rsqrt": "sqrt"}  # one program multiplies by the reciprocal, the other one divides
BIASED, UNBIASED = "bias of a choice added to its weights", "bias of a choice not added to its weights"
MOST_CHOICES = 4096  # elements of such a bias
MOST_MOVED = 16  # indices of an axis whose order a finding writes out
MOST_PARTS = 4  # of an axis, the same
POWERS = {
    2.0: "the square",
    0.5: "the square root",
    -1.0: "the reciprocal",
    -0.5: "the reciprocal of the square root",
    3.0: "the third power",
}
MOST_RATIOS = 8  # factors that a sentence lists


def moved_indices(got: Array, want: Array) -> str:
    """Say which indices of an axis the target has in another order; empty if it is no axis alone."""
    if got.shape != want.shape:
        return ""
    for axis, size in enumerate(got.shape):
        if not 1 < size <= MOST_MOVED:
            continue
        order = []
        for k in range(size):
            here = [j for j in range(size) if same(np.take(got, j, axis), np.take(want, k, axis))]
            if len(here) != 1:
                break
            order += here
        else:
            return f"; the JAX model has the target's indices of axis {axis} in the order {', '.join(map(str, order))}"
    return moved_parts(got, want)


def moved_parts(got: Array, want: Array) -> str:
    """Say which equal parts of an axis the target has in another order; empty if it has not."""
    for axis, size in enumerate(got.shape):
        for n in range(2, min(size, MOST_PARTS + 1)):
            if size % n:
                continue
            mine, other = (np.split(x, n, axis) for x in (got, want))
            order = [[j for j in range(n) if same(mine[j], part)] for part in other]
            if all(len(found) == 1 for found in order):
                said = ", ".join(str(found[0]) for found in order)
                return f"; the JAX model has the {n} parts of axis {axis} of the target in the order {said}"
    return ""


def ratios(got: Array, want: Array) -> str:
    """Say by which few factors two values differ; empty if they differ in another way."""
    if got.shape != want.shape or got.dtype.kind != "f" or not np.all(np.abs(want) > 0):
        return ""
    found = np.unique(np.round(got / want, 9))
    if not 1 <= len(found) <= MOST_RATIOS or got.size < 3 * len(found) or (found == 1).all():
        return ""
    return f"the target's values are {', '.join(f'{x:.6g}' for x in found)} times the JAX model's"


def power_of(got: Array, want: Array) -> str:
    """Say which power of the target's values the JAX model has; empty if it has none, or values that no power moves."""
    if got.shape != want.shape or got.dtype.kind != "f" or got.size < FEW or not (got > 0).all():
        return ""
    for exponent, name in POWERS.items():
        if same(got**exponent, want):
            return name
    return ""


def other_parameters(
    target: Sequence[Operation], source: Sequence[Operation], ours: Words, theirs: Words
) -> tuple[str, str] | None:
    """Name parameters that operations of one side use in place of others, or other elements of the same ones."""
    one, two = ([v for x in ops for v in x.operands if v.of_parameters] for ops in (target, source))
    mine, other = (
        {leaf: words.parameters[leaf] for v in values for leaf in sorted(v.leaves)}
        for words, values in ((ours, one), (theirs, two))
    )
    lone = [leaf for leaf, x in mine.items() if not any(one_of(x, y) for y in other.values())]
    meant = [leaf for leaf, y in other.items() if not any(one_of(x, y) for x in mine.values())]
    if lone and meant:
        return PARAMETER, f"the target uses {' and '.join(lone)}, and the JAX model {' and '.join(meant)}"
    if lone or meant:
        return None
    layers = [any(kind_of(x) in ("product", "convolution") for x in ops) for ops in (target, source)]
    for x in one if layers[0] == layers[1] else ():  # a sum of shifted products takes a kernel apart
        if not any(same_numbers(x.array, y.array) for y in two):
            made = [_made(words, v) for words, v in ((ours, x), (theirs, two[0]))]
            leaves = " and ".join(sorted(x.leaves))
            moves = all(kind_of(one) in (LAYOUT, "pick", "part") for ops in made for one in ops)
            if by := shift_of(_rows(x.array), _rows(two[0].array)) if moves else 0:
                which = f"the target takes row k {'+' if by > 0 else '-'} {abs(by)} where the JAX model takes row k"
                return off_by(by), f"of {leaves}, {which}"
            if all(any(kind_of(one) == "pick" for one in ops) for ops in made):
                return PART, f"of {leaves}, the two pick other elements"
            said = [words.chain(ops) for words, ops in zip((ours, theirs), made, strict=True)]
            numbers = [[scalar(one) for one in ops if kind_of(one) == "add"] for ops in made]
            kinds = [[ROOTS.get(kind_of(one), kind_of(one)) for one in ops if kind_of(one) != LAYOUT] for ops in made]
            at = [places(ops) for ops in made]
            if kinds[0] == kinds[1] and numbers[0] != numbers[1]:
                return EPSILON, f"of {leaves}, the target {said[0]}{at[0]}; the JAX model {said[1]}{at[1]}"
            return FUNCTION, f"of {leaves}, the target {said[0]}{at[0]}, and the JAX model {said[1]}{at[1]}"
    return None


def other_function(one: Operation, two: Operation, ours: Words, theirs: Words) -> str:
    """Say of which function of a parameter an operation takes another one than the source's; empty where they are not known to differ."""
    if kind_of(one) != kind_of(two):
        return ""
    name, said = other_parameters([one], [two], ours, theirs) or ("", "")
    return said if name in (FUNCTION, EPSILON) else ""


def bias_of_choice(repair: Repair, ours: Words, theirs: Words) -> tuple[str, str] | None:
    """Name the bias that is added to scores to choose by them, where one side weights what is chosen by the sum, too."""
    if repair.got.shape != repair.want.shape or repair.got.dtype.kind != "f" or len(repair.operands) != 1:
        return None
    made = ours.producer.get(root(repair.operands[0], ours.producer))
    if made is None or kind_of(made) not in ("pick", "sort") or any(x.of_parameters for x in made.operands):
        return None  # rows of a table are no choice
    more = repair.got - repair.want
    for words, sign, name in ((ours, 1, BIASED), (theirs, -1, UNBIASED)):
        for leaf, x in words.parameters.items():
            if 1 < x.size <= MOST_CHOICES and _all_among(sign * more, x):
                side, other = ("target", "JAX model") if sign > 0 else ("JAX model", "target")
                return (
                    name,
                    f"the {side} weights what it chooses with {leaf} added, and the {other} without{places([made])}",
                )
    return None


def other_beside(repair: Repair, ours: Words, theirs: Words) -> str:
    """Say what the target joins to a value where the JAX model joins something else to it, such as a time; empty if it joins nothing."""
    made, steps = ours.producer.get(root(repair.operands[0], ours.producer)), arithmetic(repair.source)
    if made is None or [kind_of(made), *map(kind_of, steps)] != ["join", "join"]:
        return ""
    mine = [x for x in made.operands if not any(same_numbers(x.array, y.array) for y in steps[0].operands)]
    meant = [y for y in steps[0].operands if not any(same_numbers(x.array, y.array) for x in made.operands)]
    if len(mine) != 1 or len(meant) != 1 or len(made.operands) == 1:
        return ""
    shared = " and ".join(dict.fromkeys(ours.value(x) for x in made.operands if x is not mine[0]))
    used, other = (_number(x) or words.value(x) for x, words in ((mine[0], ours), (meant[0], theirs)))
    return f"the target joins {shared} and {used}{places([made])}; the JAX model joins {other} to it{places(steps)}"


def _number(value: Value) -> str:
    """Write a constant that is one number throughout; empty for another value."""
    array = value.array
    if not value.constant or not array.size or not (array == array.flat[0]).all():
        return ""
    return f"{array.flat[0]:g}" if array.size == 1 or array.flat[0] else "zeros"


def _all_among(values: Array, numbers: Array) -> bool:
    """Whether each value is one of these numbers, and not all are the same."""
    known = np.sort(numbers, axis=None)
    at = np.clip(np.searchsorted(known, values), 1, known.size - 1)
    off = np.minimum(np.abs(known[at] - values), np.abs(known[at - 1] - values))
    return bool((off <= 1e-9 * np.abs(known).max()).all() and np.ptp(values) > 0)


def _rows(array: Array) -> Array:
    """Return the rows that are picked of a table, the same for each series."""
    array = array.squeeze()
    return array[0] if array.ndim == 3 and (array == array[:1]).all() else array


def _made(words: Words, value: Value) -> list[Operation]:
    """Return the operations that compute a value from its parameters."""
    found: list[Operation] = []
    waiting = [value]
    while waiting:
        operation = words.producer.get(waiting.pop())
        if operation is not None and operation not in found:
            found.append(operation)
            waiting += [v for v in operation.operands if v.of_parameters]
    return found[::-1]


def other_indices(repair: Repair) -> tuple[str, str] | None:
    """Name indices by which both sides pick elements, where those of one are larger by a number."""
    one, two = (
        [
            x
            for op in ops
            if kind_of(op) == "pick"
            for v in op.operands
            if v.array.dtype.kind in "iu"
            for x in _columns(v)
        ]
        for ops in (repair.target, repair.source)
    )
    for mine, other in itertools.product(one, two):
        if mine.size == other.size > 1 and (mine != mine[0]).any():
            by = np.unique(mine.astype(np.int64) - other.astype(np.int64))
            if len(by) == 1 and by[0]:
                one_list, two_list = where_they_differ(mine.tolist(), other.tolist(), MOST_PARTS)
                said = f"the target picks the indices {one_list}, and the JAX model {two_list}"
                return f"rows off by {'one' if abs(by[0]) == 1 else abs(by[0])}", said
    return None


def _columns(value: Value) -> list[Array]:
    """Return indices of one axis; JAX keeps those of several side by side."""
    array = value.array
    whole = [array.ravel()]
    return whole + ([array[..., k].ravel() for k in range(array.shape[-1])] if array.ndim > 1 else [])


def copies(words: Words, values: Sequence[Value]) -> list[Operation]:
    """Return the operations that made these values larger by repeating elements."""
    found = []
    for value in values:
        operation = words.producer.get(value)
        while operation is not None and len(operation.data) == 1 and kind_of(operation) in (LAYOUT, "join", "pick"):
            if operation.data[0].array.size < operation.results[0].array.size:
                found.append(operation)
                break
            operation = words.producer.get(operation.data[0])
    return found


def contracted(operations: Sequence[Operation]) -> int:
    """Return over how many features the first product of two values sums; 0 if there is none."""
    for one in operations:
        if kind_of(one) != "product" or len(one.data) < 2:
            continue
        if (numbers := one.settings.get("dimension_numbers")) is not None:
            (axes, _), _ = numbers
            return int(np.prod([one.data[0].array.shape[axis] for axis in axes]))
        return int(one.data[-2].array.shape[-1])
    return 0


def axes_exchanged(repair: Repair, ours: Words) -> str:
    """Say which two axes of what the target's operations are given they would need the other way round, such as queries and keys."""
    if max(repair.got.size, *(x.size for x in repair.given)) > MOST:
        return ""
    for value, given in zip(repair.operands, repair.given, strict=True):
        for one, two in itertools.combinations(range(given.ndim), 2):
            if given.shape[one] != given.shape[two] or given.shape[one] == 1:
                continue
            moved = np.ascontiguousarray(given.swapaxes(one, two))
            made = again(repair.target, {value: moved})
            if made is None:
                continue
            right = same(visible(made), visible(repair.want))
            if not right and made.ndim == given.ndim and any(same(x.array, moved) for x in repair.source_operands):
                right = same(visible(made.swapaxes(one, two)), visible(repair.want))  # laid out as the target's
            if right:
                return f"the target gives the same with the axes {one} and {two} of {ours.value(value)} exchanged"
    return ""


def other_pooling(repair: Repair, ours: Words, theirs: Words) -> bool:
    """Whether both pool, and one of them otherwise than the other, such as by the mean."""
    sides = [
        [words.verb(one) for one in operations if kind_of(one) == "pooling"]
        for words, operations in ((ours, repair.target), (theirs, repair.source))
    ]
    return all(len(verbs) == 1 for verbs in sides) and sides[0] != sides[1]


def padding_counts(pooling: Repair, division: Repair) -> bool:
    """Whether the target's mean over windows counts the padding: the JAX model divides by the number of values within each window."""
    steps = [one for one in division.source if kind_of(one) != LAYOUT]
    if len(steps) != 1 or kind_of(steps[0]) != "divide" or not any("avg" in one.name for one in pooling.target):
        return False
    table = steps[0].operands[1]
    counts = table.array
    return (
        table.constant
        and counts.size > 1
        and bool((counts == counts.round()).all() and (counts != counts.flat[0]).any())
    )


def other_pool_padding(repair: Repair, ours: Words, theirs: Words) -> str:
    """Say how the paddings of two poolings differ; empty if the two are no poolings, or pad the same."""
    sides = []
    for words, operations in ((ours, repair.target), (theirs, repair.source)):
        pools = [one for one in operations if kind_of(one) == "pooling"]
        if len(pools) != 1:
            return ""
        sides.append(_pool_padding(words, pools[0]))
    return f"the target pads {sides[0]}, and the JAX model {sides[1]}" if sides[0] != sides[1] else ""


def _pool_padding(words: Words, pool: Operation) -> str:
    """Say by how much a pooling and the operation in front of it pad, and with which number."""
    given = pool.settings.get("padding") or ()
    own = [tuple(pair) if isinstance(pair, list | tuple) else (pair, pair) for pair in given]
    said = [f"({low}, {high}) that do not count" for low, high in own if low or high]
    before = words.producer.get(pool.operands[0])
    while before is not None and before.name not in PADS and len(before.data) == 1 and kind_of(before) == LAYOUT:
        before = words.producer.get(before.data[0])
    if before is not None and before.name in PADS:
        flat = before.settings.get("pad", ())
        pairs = list(zip(flat[::2], flat[1::2], strict=False)) or before.settings.get("padding_config", ())
        number = float(before.operands[1].array) if len(before.operands) > 1 else 0.0
        said += [f"({pair[0]}, {pair[1]}) with {number:g}" for pair in pairs if pair[0] or pair[1]]
    return " and ".join(said) or "nothing"
