"""The pieces of leaves that become rows or columns of one tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from convert.core.axis_groups import AxisGroup
from convert.core.findings import Finding
from convert.layers import Rule, TargetLayer
from convert.layers.leaves import MisfitError
from convert.planning.compile.named_leaf import NamedLeaf


@dataclass(frozen=True)
class Piece:
    """A leaf, or an element or a part of it, that becomes rows of a tensor.

    Attributes:
        rule: with the kind of the part, and with the target of the part where the target's axes have parts.
        elements: which element of each axis.
        rows: start and stop, where the target's axes say so; None: they follow those of the piece before.
        total: number of rows of the tensor; 0: the pieces give it.
        every: distance of two of its elements along that axis.
    """

    rule: Rule
    leaf: NamedLeaf
    elements: Mapping[str, int]
    rows: tuple[int, int] | None = None
    total: int = 0
    every: int = 1


def row_by_row(
    pieces: Sequence[Piece], rows: AxisGroup, part: tuple[int, int] | None, sizes: Mapping[str, int]
) -> list[Piece]:
    """Return a piece for each run of rows of one part: for each element of the axes around the parts, one of each part.

    Raises:
        MisfitError: a size is unknown.
    """
    numbers = [part[0] - 1] if part else range(len(pieces))
    runs = _runs(rows, numbers, sizes, pieces[0])
    counts = [sizes[letter] for letter in rows.before]
    found: list[Piece] = []
    for count, elements in enumerate(itertools.product(*map(range, counts))):
        for piece, (period, start, stop) in zip(pieces, runs, strict=True):
            own = dict(zip(rows.before, elements, strict=True))
            where = (count * period + start, count * period + stop)
            found.append(Piece(piece.rule, piece.leaf, {**piece.elements, **own}, where, math.prod(counts) * period))
    return found


def in_columns(
    pieces: Sequence[Piece], columns: AxisGroup, part: tuple[int, int] | None, sizes: Mapping[str, int]
) -> list[Piece]:
    """Return the pieces with their places along the last axis: one after the other, or element by element.

    Raises:
        MisfitError: a size is unknown.
    """
    runs = _runs(columns, [part[0] - 1] if part else range(len(pieces)), sizes, pieces[0])
    total = math.prod(sizes[letter] for letter in columns.before) * runs[0][0]
    return [
        replace(
            piece,
            rows=(start, total if columns.before else stop),
            total=total,
            every=period if columns.before else 1,
        )
        for piece, (period, start, stop) in zip(pieces, runs, strict=True)
    ]


def _runs(
    group: AxisGroup, numbers: Iterable[int], sizes: Mapping[str, int], first: Piece
) -> list[tuple[int, int, int]]:
    """Return period, start and stop of each part.

    Raises:
        MisfitError: a size is unknown.
    """
    try:
        return [group.run_of(k, sizes) for k in numbers]
    except ValueError as error:
        unknown = Finding("size-unknown", str(error), rule=first.rule.at.line_only, path=first.leaf.name)
        raise MisfitError(unknown) from None


def rule_of_part(rule: Rule, k: int) -> Rule:
    """Return the rule for one part of an axis that is a sum of parts."""
    factor = rule.prescaled_by
    has_factor = factor is None or factor.parts is None or k in factor.parts
    return replace(rule, kind=rule.kind.part(k), prescaled_by=factor if has_factor else None)


def rules_of_rows(rules: Sequence[Rule], layer: TargetLayer, rows: AxisGroup) -> list[Rule]:
    """Return a rule for each part of the rows of a tensor: of each leaf, or of each part of one."""
    numbers = [layer.part[0] - 1] if layer.part else range(len(rows.parts))
    each = rules if len(rules) > 1 else [*rules] * len(numbers)
    return [replace(rule, targets={None: layer.of_part(k)}, also={}) for rule, k in zip(each, numbers, strict=True)]
