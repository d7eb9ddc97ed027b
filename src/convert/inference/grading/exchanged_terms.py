"""Terms of a sum, or factors of a product, of one form: which parameters compute which of them changes no output.

Branches, experts and biases that are added, and gates that are multiplied, are the same in any order. Terms have one form where they are
computed by the same operations from the same data, with other parameters; each then may have the parameters of the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from convert.inference.derivation import Grade, Part, Role, Tensor
from convert.inference.forms.elements import JOINS, MOVES, before_moves, behind_moves, in_turn, joined, numbered
from convert.inference.grading.commuting import commuting
from convert.inference.grading.other_ways import numbers_of_ways, some_of
from convert.inference.meetings.sites import role_of
from convert.programs.divergence.graph import root
from convert.programs.program import Operation, Program, Value, times_used

Array = np.ndarray[Any, np.dtype[Any]]


class Chain(NamedTuple):
    """What an operation belongs to whose operands may stand in any order, and whether its second one is taken away, or divides."""

    name: str
    turns: bool = False


CHAINS = {
    **dict.fromkeys(("add", "add_any"), Chain("sum")),
    **dict.fromkeys(("max", "maximum"), Chain("maximum")),
    **dict.fromkeys(("min", "minimum"), Chain("minimum")),
    "sub": Chain("sum", turns=True),
    "mul": Chain("product"),
    "div": Chain("product", turns=True),
    "logaddexp": Chain("logaddexp"),
}
NO_CHAIN = Chain("")
REDUCED = frozenset(
    ("sum", "mean", "prod", "amax", "amin", "logsumexp", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod")
)
STACKS = frozenset((*JOINS, "stack"))


class Exchange(NamedTuple):
    """Elements of the target's parameters by their numbers, in order, and the elements whose values they may have as well."""

    numbers: Array
    others: Array


def with_exchanged_terms(tensors: Sequence[Tensor], target: Program) -> tuple[Tensor, ...]:
    """Return the tensors with the exchange of terms of one form as other ways to make them; fresh draws say which hold.

    Args:
        tensors: those of a way to the outputs.
        target: the record, as it ran.
    """
    found = {tensor.name: tensor for tensor in tensors}
    first = target.first_element
    way = max(numbers_of_ways(tensors), default=-1)
    for exchange in _exchanges(target):
        made = _exchanged(found, first, exchange)
        if made and any(found[name].grade is Grade.DERIVED for name in made):
            way += 1
            for name, parts in made.items():
                alternatives = {**found[name].alternatives, way: parts}
                found[name] = replace(found[name], grade=Grade.INTERCHANGEABLE, alternatives=alternatives)
    return tuple(found[tensor.name] for tensor in tensors)


def _exchanged(
    tensors: Mapping[str, Tensor], first: Mapping[str, int], exchange: Exchange
) -> dict[str, tuple[Part, ...]] | None:
    """Return the other parts of each tensor that an exchange changes; None where it needs parts that are not known, or not for sure, or changes none."""
    made: dict[str, tuple[Part, ...]] = {}
    changes = False
    names, starts = list(first), np.array(list(first.values()))
    moved, before = exchange
    owners, owners_before = (np.searchsorted(starts, x, "right") - 1 for x in exchange)
    for owner in np.unique(owners):
        parts: list[Part] = []
        for other in np.unique(owners_before[owners == owner]):
            here = (owners == owner) & (owners_before == other)
            tensor, like = tensors.get(names[owner]), tensors.get(names[other])
            if tensor is None or like is None or not (_is_sure(tensor) and _is_sure(like)):
                return None
            elements = moved[here] - starts[owner]
            taken = _renumbered(like.parts, before[here] - starts[other], elements)
            own = _renumbered(tensor.parts, elements, elements)
            if taken is None or own is None:
                return None
            changes = changes or len(taken) != len(own) or not all(map(_are_equal, taken, own))
            parts += taken
        made[names[owner]] = tuple(parts)
    return made if changes else None


def _are_equal(one: Part, two: Part) -> bool:
    """Whether two parts make the same elements of the same leaves, as where one leaf is the source of several layers."""
    same = (one.leaf, one.leaves, one.arithmetic, one.factor) == (two.leaf, two.leaves, two.arithmetic, two.factor)
    return same and np.array_equal(one.elements, two.elements) and np.array_equal(one.positions, two.positions)


def _is_sure(tensor: Tensor) -> bool:
    of_leaves = all(part.leaf or part.leaves for part in tensor.parts)
    return tensor.grade in (Grade.DERIVED, Grade.INTERCHANGEABLE) and of_leaves


def _renumbered(parts: Sequence[Part], elements: Array, numbers: Array) -> list[Part] | None:
    """Return what makes some elements of a tensor, for elements of other numbers; None where it makes several of one, as a scale's.

    Of parts that make the same element the last one counts, as in `proof.weights`.
    """
    found: list[Part] = []
    left = np.ones(len(elements), bool)
    for part in reversed(parts):
        if len(np.unique(part.elements)) < len(part.elements):
            return None
        place = np.full(1 + max(part.elements.max(initial=0), elements.max(initial=0)), -1)
        place[part.elements] = np.arange(len(part.elements))
        chosen = np.flatnonzero((place[elements] >= 0) & left)
        if len(chosen):
            left[chosen] = False
            order = chosen[np.argsort(numbers[chosen])]
            found.append(replace(some_of(part, place[elements[order]]), elements=numbers[order]))
    return None if left.any() else found


def _exchanges(target: Program) -> Iterator[Exchange]:
    """Yield what may take each other's places: of terms of one form, each may have the parameters of the next one, and the last those of the first."""
    forms = _Forms.of(target)
    for terms in _chains(target):
        groups: dict[Hashable, list[Value]] = {}
        for away, value in terms:
            if not value.constant:
                groups.setdefault((away, forms.form(value)), []).append(value)
        for group in groups.values():
            each = list(dict.fromkeys(group))
            exchange = forms.exchange(list(zip(each, [*each[1:], each[0]], strict=True)))
            if exchange:
                yield exchange
    yield from _beside_joined(target, forms)
    yield from _transposed(target, forms)
    for pair in commuting(target):
        if not (all(map(forms.is_moved, pair)) or forms.form(pair[0]) == forms.form(pair[1])):
            continue  # a scale, and the softplus of another one
        one, two = (value.elements[0].ravel() for value in pair)
        if (exchange := _joined([(one, two), (two, one)])) is not None:
            yield exchange


def _beside_joined(target: Program, forms: _Forms) -> Iterator[Exchange]:
    """Yield a parameter that is joined to data beside the rows that are added to it: of a class token and the position of a token, each may be the other."""
    for terms in _chains(target):
        whole = [(away, value) for away, value in terms if forms.is_moved(value)]
        for away, value in terms if whole else ():
            _, join, moves = before_moves(value, forms.made_by)
            for learned in filter(forms.is_moved, join.operands if join is not None and join.name in JOINS else ()):
                if join is None or (of := joined(join, learned)) is None:
                    continue
                places = of[0].reshape(join.results[0].array.shape).astype(np.float64)
                at = in_turn(moves, places).astype(int)
                own = np.where(at < 0, -1, learned.elements[0].ravel()[at])
                for others in (x.elements[0] for sign, x in whole if sign == away):
                    one, two = np.broadcast_arrays(own, np.where(at < 0, -1, others))
                    if (exchange := _joined([(one, two), (two, one)])) is not None:
                        yield exchange


def _transposed(target: Program, forms: _Forms) -> Iterator[Exchange]:
    """Yield the elements of matrices beside those of their transposes, where a value meets itself: ``x_i w_ij x_j`` is ``x_j w_ji x_i`` with the transpose."""
    made_by, users = forms.made_by, target.users
    for operation in target.operations:
        weights = [x for x in operation.operands if forms.is_moved(x)]
        if role_of(operation) is not Role.PRODUCT or len(weights) != 1 or len(operation.data) != 1:
            continue
        numbers, whole = _reduced(weights[0]), root(operation.data[0], made_by)
        behind = [x for user in behind_moves(operation.results[0], users) for x in user.operands]
        meets_itself = any(root(x, made_by) is whole for x in behind if x.data)
        square = numbers.ndim == 2 and numbers.shape[0] == numbers.shape[1]
        if meets_itself and square and (exchange := _joined([(numbers, numbers.T)])) is not None:
            yield exchange


def _joined(pairs: Sequence[tuple[Array, Array]]) -> Exchange | None:
    """Return pairs of numbers as one exchange; None where an element would have two others, or the elements are not those that are taken."""
    numbers, others = (
        np.concatenate([np.zeros(0, int), *(of.ravel() for of in side)]) for side in zip(*pairs, strict=True)
    )
    if ((numbers < 0) != (others < 0)).any():  # a constant is no element
        return None
    numbers, others = (x[numbers >= 0] for x in (numbers, others))
    numbers, first, back = np.unique(numbers, return_index=True, return_inverse=True)
    if (others[first][back] != others).any() or not np.array_equal(np.sort(others[first]), numbers):
        return None
    changed = numbers != others[first]
    return Exchange(numbers[changed], others[first][changed]) if changed.any() else None


def _chains(target: Program) -> Iterator[list[tuple[bool, Value]]]:
    """Yield the terms of each sum, product, maximum and minimum, and of each stack that is summed up, each with whether it is taken away."""
    made_by, uses, users = target.made_by, times_used(target), target.users
    seen: set[Operation] = set()
    for operation in reversed(target.operations):
        if operation not in seen and _chain(operation).name:
            yield list(_terms(operation, made_by, uses, seen))
        if operation.name in STACKS and len(operation.operands) > 1:
            behind = {user.name for user in behind_moves(operation.results[0], users)}
            if behind and behind <= REDUCED:
                yield [(False, operand) for operand in operation.operands]


def _chain(operation: Operation) -> Chain:
    two = len(operation.operands) == 2  # a maximum of one operand is that of its elements
    return CHAINS.get(operation.name.removesuffix("_"), NO_CHAIN) if two else NO_CHAIN


def _terms(
    operation: Operation, made_by: Mapping[Value, Operation], uses: Mapping[Value, int], seen: set[Operation]
) -> Iterator[tuple[bool, Value]]:
    """Yield the terms, each with whether it is taken away; chains that are used for nothing else belong to it, also where their elements are moved."""
    todo = [(operation, False)]
    while todo:
        one, away = todo.pop()
        seen.add(one)
        for place, operand in enumerate(one.operands):
            own = away != (_chain(one).turns and place == 1)
            value, before, moves = before_moves(operand, made_by)
            once = all(uses[x] == 1 for x in (value, *(result for move in moves for result in move.results)))
            if before is not None and once and _chain(before).name == _chain(operation).name:
                todo.append((before, own))
            else:
                yield own, operand


@dataclass(frozen=True, eq=False)
class _Forms:
    """Compares how values are computed, but for the parameters that they are computed from."""

    made_by: Mapping[Value, Operation]
    weights: Array  # every element of the parameters, by its number
    known: dict[Value, bytes] = field(default_factory=dict)
    moved: dict[Value, bool] = field(default_factory=dict)

    @staticmethod
    def of(target: Program) -> _Forms:
        """Return those of a program."""
        flat = [np.zeros(0), *(value.array.ravel() for value in target.parameters.values())]
        return _Forms(target.made_by, np.concatenate(flat))

    def is_moved(self, value: Value) -> bool:
        """Whether a value has elements of parameters as they are, in any layout."""
        if value not in self.moved:
            one = value.of_parameters and len(value.elements) == 1
            same = one and np.array_equal(
                np.where(value.elements[0] < 0, value.array, self.weights[value.elements[0]]), value.array
            )
            self.moved[value] = bool(same)
        return self.moved[value]

    def form(self, value: Value) -> bytes:
        """Return the same for values that the same operations compute from the same data, with parameters of the same shapes."""
        todo = [value]
        while todo:
            one = todo[-1]
            if one in self.known:
                todo.pop()
            elif left := [x for x in self._operands(one) if x not in self.known]:
                todo += left
            else:
                self.known[one] = self._form(one)
                todo.pop()
        return self.known[value]

    def _operands(self, value: Value) -> tuple[Value, ...]:
        operation = self.made_by.get(value)
        return () if operation is None or value.constant or self.is_moved(value) else operation.operands

    def _form(self, value: Value) -> bytes:
        operation = self.made_by.get(value)
        if self.is_moved(value):
            return _hashed("parameter", _reduced(value).shape)
        if value.constant:
            return _hashed("constant", value.array.shape, str(value.array.dtype), value.array.tobytes())
        if operation is None:
            return _hashed("given", id(value))
        of = [self.known[x] for x in operation.operands]
        if _chain(operation).name and not _chain(operation).turns:
            of = sorted(of)
        place = operation.results.index(value)
        return _hashed("computed", operation.name, place, value.array.shape, *of)

    def exchange(self, pairs: Sequence[tuple[Value, Value]]) -> Exchange | None:
        """Return which element of a parameter each has in the place of which, so that each value becomes the one beside it; None where there is no such exchange."""
        found: list[tuple[Array, Array]] = []
        todo, seen = list(pairs), set[tuple[Value, Value]]()
        while todo:
            one, two = todo.pop()
            if (one, two) in seen or (one is two and not self.is_moved(one)):
                continue
            seen.add((one, two))
            if self.is_moved(one):
                found.append((_reduced(one), _reduced(two)))
            elif (columns := self._columns_of_one(one, two)) is not None:
                found += columns
            else:
                todo += self._beside(one, two)
        return _joined(found) if found else None

    def _columns_of_one(self, one: Value, two: Value) -> list[tuple[Array, Array]] | None:
        """Return the elements of parameters that give a column of a value beside those that give another column, as those of a gate for each expert.

        None where two values are no columns of one; the columns of a softmax are those of what it is given.
        """
        (whole, _, moves), (other, _, others) = (before_moves(x, self.made_by, MOVES) for x in (one, two))
        if whole is not other or not (moves and others) or not whole.data or not whole.array.ndim:
            return None
        width = whole.array.shape[-1]
        columns = [np.unique(in_turn(of, numbered(whole)).astype(int) % width) for of in (moves, others)]
        if any(len(of) != 1 for of in columns) or columns[0] == columns[1]:
            return None
        i, j = (int(of[0]) for of in columns)
        found: list[tuple[Array, Array]] = []
        value: Value | None = whole
        while value is not None and (operation := self.made_by.get(value)) is not None:
            weights = [
                x for x in operation.operands if self.is_moved(x) and x.array.ndim and x.array.shape[-1] == width
            ]
            found += [(x.elements[0][..., i], x.elements[0][..., j]) for x in weights]
            same = [x for x in operation.data if x.array.ndim and x.array.shape[-1] == width]
            one_by_one = role_of(operation) is not Role.PRODUCT and len(same) == len(operation.data) == 1
            value = same[0] if one_by_one else None
        return found or None

    def _beside(self, one: Value, two: Value) -> list[tuple[Value, Value]]:
        """Return the operands of two values of one form, each beside that of its form; where two have it, one that both values have is beside itself."""
        operands, others = self._operands(one), list(self._operands(two))
        found: list[tuple[Value, Value]] = []
        for operand in sorted(operands, key=lambda x: x not in others):
            other = operand if operand in others else next(x for x in others if self.form(x) == self.form(operand))
            others.remove(other)
            found.append((operand, other))
        return found


def _reduced(value: Value) -> Array:
    """Return the numbers of the elements that a value has, without the axes along which they are repeated."""
    (numbers,) = value.elements
    for axis in reversed(range(numbers.ndim)):
        once = numbers.take([0], axis) if numbers.shape[axis] else numbers
        if (numbers == once).all():
            numbers = once.reshape((*numbers.shape[:axis], *numbers.shape[axis + 1 :]))
    return numbers


def _hashed(*of: Any) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for x in of:
        made.update(x if isinstance(x, bytes) else repr(x).encode())
        made.update(b"|")
    return made.digest()
