"""Tied columns in the order that fresh draws show.

Columns that one draw makes equal, as those of units that are zero for every row behind a ReLU, are paired in the order in which they stand. Where
the programs have them in another order, as behind values that they concatenate differently, the next draw tells which is which.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.inference.derivation import Arithmetic, Part, Role, Site, Tensor, Tie
from convert.inference.forms.products.commuted import commuted
from convert.inference.grading.other_ways import in_ways
from convert.inference.grading.proof import weights
from convert.inference.grading.ties import elements_of
from convert.inference.meetings.columns import Columns, columns_along, matches
from convert.inference.meetings.sites import columns_met, products, role_of
from convert.programs.program import Operation, Program

Array = np.ndarray[Any, np.dtype[Any]]


def reordered(
    tensors: Sequence[Tensor],
    target: Program,
    fresh: Sequence[Program],
    run: Callable[[Sequence[Tensor], Program], Program],
    tolerance: float,
) -> tuple[Tensor, ...]:
    """Return the tensors; columns of a tie are made of the source's columns that are equal in every draw.

    Args:
        tensors: whose first draw made the columns equal.
        target: the record of that draw.
        fresh: runs of the source with other weights and inputs.
        run: (tensors, a run of the source) -> the run of the target with its weights and inputs.
        tolerance: relative error up to which two columns are equal.
    """
    found = list(tensors)
    ties = {(tie.site.index, tie.site.operand, tie.columns): tie for tensor in tensors for tie in tensor.ties}
    runs: list[Program] = []
    for tie in sorted(ties.values(), key=lambda tie: tie.site.index):  # what is in front of a tie decides what it meets
        runs = runs or [run(found, source) for source in fresh]
        for k, tensor in enumerate(found):
            if tie in tensor.ties:
                parts = [_reordered(part, tensor, tie, target, runs, fresh, tolerance) for part in tensor.parts]
                if any(new is not old for new, old in zip(parts, tensor.parts, strict=True)):
                    found[k], runs = _without_itself(replace(tensor, parts=tuple(parts)), fresh[0]), []
    return tuple(found)


def _reordered(
    part: Part,
    tensor: Tensor,
    tie: Tie,
    target: Program,
    runs: Sequence[Program],
    fresh: Sequence[Program],
    tolerance: float,
) -> Part:
    """Return the part of a tensor with the columns of a tie as the draws show them; as it is where they show nothing else."""
    at, source = part.evidence.target, part.evidence.source
    if source is None or (at.index, at.operand) != (tie.site.index, tie.site.operand):
        return part
    if not part.leaf or part.arithmetic is Arithmetic.COMPUTED or part.low_rank is not None:
        return part
    first = target.first_element[tensor.name]
    places = [_places(part, numbers - first) for numbers in elements_of(target, tie)]
    size = len(places[0]) if places else 0
    if not size or any(len(place) != size for place in places):
        return part
    equal = np.ones(
        (len(places), len(places)), bool
    )  # [column of the target, column of the source that another one has now]
    for ours, theirs in zip(runs, fresh, strict=True):
        of_target = _met(ours.operations[tie.site.index], tie.site.operand)
        if of_target is None:
            return part
        numbers = theirs.first_element[part.leaf] + part.positions
        for of_source in _met_by_source(theirs, source):
            own = [of_source.column(numbers[place]) for place in places]
            one, two = matches(of_target.columns, of_source.columns, tolerance)
            pairs = set(zip(one.tolist(), two.tolist(), strict=True))
            found = np.array([[(column, other) in pairs for other in own] for column in tie.columns])
            if found.any(1).all():
                equal &= found
                break
        else:
            return part
    order = _order(equal)
    if order is None or order == list(range(len(order))):
        return part
    positions = part.positions.copy()
    for place, taken in zip(places, order, strict=True):
        positions[place] = part.positions[places[taken]]
    return replace(part, positions=positions)


def _without_itself(tensor: Tensor, source: Program) -> Tensor:
    """Return a tensor without alternatives that are no other: some have the columns in the order that it now has."""
    own = weights([tensor], source)[tensor.name]
    others = {
        way: parts
        for way, parts in tensor.alternatives.items()
        if not np.array_equal(weights(in_ways([tensor], [way]), source)[tensor.name], own)
    }
    return replace(tensor, alternatives=others)


def _places(part: Part, elements: Array) -> Array:
    """Return where in a part the elements stand, in their order."""
    order = np.argsort(part.elements)
    found: Array = order[np.isin(part.elements[order], elements)]
    return found


def _order(equal: Array) -> list[int] | None:
    """Return a column for each row of equal pairs, another one for each: its own if they are equal; None if there is no such order."""
    chosen = [k if row[k] else -1 for k, row in enumerate(equal)]
    for k in np.argsort(equal.sum(1), kind="stable"):
        if chosen[k] < 0:
            chosen[k] = next((int(j) for j in np.flatnonzero(equal[k]) if j not in chosen), -1)
            if chosen[k] < 0:
                return None
    return chosen


@dataclass(frozen=True, eq=False)
class _Met:
    """The columns of data that a parameter meets.

    Attributes:
        columns: of the data.
        elements: numbers of the elements that meet each of them.
    """

    columns: Columns
    elements: Sequence[Array]

    def column(self, numbers: Array) -> int:
        """Return the column that all of some elements meet; -1 if they meet several."""
        return next((k for k, own in enumerate(self.elements) if np.isin(numbers, own).all()), -1)


def _met_by_source(program: Program, site: Site) -> Iterator[_Met]:
    """Yield the columns that the parameter of a site of the source meets, as they are, and where linear operations have another place."""
    elsewhere = ((other.operation, other.side) for other in commuted(program, only=site.index))
    for operation, side in itertools.chain([(program.operations[site.index], site.operand)], elsewhere):
        if (met := _met(operation, side)) is not None:
            yield met


def _met(operation: Operation, side: int | None) -> _Met | None:
    """Return the columns that the parameter in an operand meets; None where they are not known."""
    if side is None:
        return None
    role, elements = role_of(operation), operation.operands[side].elements
    groups = list(products([operation], side)) if role in (Role.PRODUCT, Role.CONVOLUTION) else []
    if len(groups) == 1:
        group = groups[0]
        numbers = [np.concatenate([n[k].ravel() for n in group.numbers]) for k in range(len(group.value))]
        return _Met(group.columns, numbers)
    if role is Role.CONVOLUTION and len(elements) == 1:
        return _channels(operation, side)
    if role in (Role.SCALE, Role.SHIFT) and len(elements) == 1:
        columns = columns_met([operation.data[0].array], elements[0])
        return _Met(columns, list(columns.numbers[:, None]))
    return None


def _channels(operation: Operation, side: int) -> _Met | None:
    """Return the channels that a kernel of one group meets."""
    elements, data = operation.operands[side].elements[0], operation.data[0].array
    layout = operation.settings.get("dimension_numbers")
    groups = operation.settings.get("groups", operation.settings.get("feature_group_count", 1))
    if int(groups) != 1:
        return None
    of_data, of_kernel = (1, 0 if operation.settings.get("transposed") else 1)
    if layout is not None:
        of_data, of_kernel = layout.lhs_spec[1], layout.rhs_spec[1]
    numbers = [np.take(elements, k, of_kernel).ravel() for k in range(data.shape[of_data])]
    return _Met(columns_along(data, of_data), numbers)
