"""Biases that are added to one sum: which of them is which changes no output, as of both branches of a residual block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from convert.inference.derivation import Arithmetic, Grade, Role, Tensor
from convert.inference.forms.elements import before_moves
from convert.inference.grading.other_ways import numbers_of_ways
from convert.inference.meetings.sites import role_of
from convert.programs.program import Operation, Program, Value, producers_of, times_used

MOST = 24  # pairs of biases, each of which is run with fresh weights


def with_exchanged_biases(tensors: Sequence[Tensor], target: Program) -> tuple[Tensor, ...]:
    """Return the tensors with the exchange of two biases of one sum as another way to make both, where each is a whole leaf.

    Args:
        tensors: those of a way to the outputs.
        target: the record, as it ran.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    way = max(numbers_of_ways(tensors), default=-1)
    pairs = (pair for names in _sums(target) for pair in itertools.combinations(names, 2))
    for one, two in itertools.islice(((a, b) for a, b in pairs if a in by_name and b in by_name), MOST):
        first, second = by_name[one], by_name[two]
        if not (_is_whole(first) and _is_whole(second)) or first.shape != second.shape:
            continue
        way += 1
        for tensor, other in ((first, second), (second, first)):
            alternatives = {**tensor.alternatives, way: other.parts}
            by_name[tensor.name] = replace(tensor, grade=Grade.INTERCHANGEABLE, alternatives=alternatives)
    return tuple(by_name[tensor.name] for tensor in tensors)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is one leaf, as it is stored, and has no other way yet."""
    plain = len(tensor.parts) == 1 and bool(tensor.parts[0].leaf) and not tensor.parts[0].number
    same = plain and (tensor.parts[0].arithmetic, tensor.parts[0].factor) == (Arithmetic.SAME, 1.0)
    return same and tensor.grade in (Grade.DERIVED, Grade.INTERCHANGEABLE) and not tensor.unseen


def _sums(target: Program) -> Iterator[tuple[str, ...]]:
    """Yield the names of the vectors that are added to one sum, if there are several of one size."""
    made_by, uses = producers_of(target.operations), times_used(target)
    seen: set[Operation] = set()
    for operation in reversed(target.operations):
        if operation in seen or not _adds(operation):
            continue
        found: dict[int, list[str]] = {}
        for name in _terms(operation, made_by, uses, seen):
            shape = target.parameters[name].array.shape
            if len(shape) == 1:
                found.setdefault(shape[0], []).append(name)
        yield from (tuple(dict.fromkeys(names)) for names in found.values() if len({*names}) > 1)


def _terms(
    operation: Operation, made_by: Mapping[Value, Operation], uses: Mapping[Value, int], seen: set[Operation]
) -> Iterator[str]:
    """Yield the parameters that a sum adds; sums that are used for nothing else belong to it, also where their elements are moved."""
    seen.add(operation)
    for operand in operation.operands:
        if operand.of_parameters and len(operand.leaves) == 1:
            yield next(iter(operand.leaves))
        value, before, moves = before_moves(operand, made_by)
        used_once = all(uses[x] == 1 for x in (value, *(result for move in moves for result in move.results)))
        if value.data and before is not None and used_once and _adds(before):
            yield from _terms(before, made_by, uses, seen)


def _adds(operation: Operation) -> bool:
    return operation.name in ("add", "add_") and role_of(operation) is Role.SHIFT and len(operation.operands) == 2
