"""Other weights of the target with which it computes what the source does, although the code of the two differs.

A layer in front of a difference may give another multiple of its result plus a number, and a layer behind may multiply what it is given:
``tanh(-x W)`` is ``tanh(x (-W))``, ``tanh(y / 2) W`` is ``(2 sigmoid(y) - 1) W``, and quick_gelu(y) is silu(1.702 y) / 1.702.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from convert.inference.derivation import OtherWeight, Role, Tensor
from convert.inference.forms.elements import COPIES, JOINS, MOVES
from convert.inference.grading.differences.fitted import Fit, fitted, plain
from convert.inference.meetings.sites import role_of
from convert.numerics.magnitude import relative_error
from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.rerun import FAILS, Change, Rerun
from convert.programs.divergence.search import Divergence
from convert.programs.fingerprint import EXACT
from convert.programs.program import Array, Operation, Program, Value, times_used

MOST_REPAIRS = 40  # of a difference in a loop, or in all layers
MOST_LAYERS = 6  # in front of a difference, the nearest
MOST_STARTS = (
    3  # of the places from which on they are made up for: what differs may be a function of several operations
)
WORK = 2 * 10**8  # elements that all trials may compute; an operation counts as `CALL` more
CALL = 5000
DEPTH = 24  # operations between a layer and a difference
BILINEAR = (Role.PRODUCT, Role.CONVOLUTION)
PADDING = ("padding", "output_padding")  # settings: the zeros of a padded convolution have no number added to them


@dataclass(frozen=True, eq=False)
class _Layer:
    """A value that is linear in parameters.

    Attributes:
        value: it.
        parameters: a multiple of all of these gives a multiple of the value; with the operation that each meets data in.
        bias: the parameter that is added to all elements; empty where there is none.
        partly: whether the value has only some elements of what these operations give.
    """

    value: Value
    parameters: tuple[tuple[str, Operation], ...]
    bias: str = ""
    partly: bool = False


@dataclass(frozen=True, eq=False)
class _Place:
    """A difference in the target.

    Attributes:
        value: that is replaced.
        want: what the source has there.
        users: (number of an operation, of its operand) where it is replaced; empty: everywhere.
    """

    value: Value
    want: Array
    users: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class _End:
    """A value that is given to layers alone, behind a difference.

    Attributes:
        value: it.
        change: of an array in its place.
        layers: the layers.
    """

    value: Value
    change: Callable[[Array], Change]
    layers: tuple[_Layer, ...]


@dataclass
class _Changes:
    """What the parameters would be.

    Attributes:
        in_front, behind: as parameters of layers in front of a difference, and behind one.
        met: the operations in which each was changed.
    """

    in_front: dict[str, OtherWeight] = field(default_factory=dict)
    behind: dict[str, OtherWeight] = field(default_factory=dict)
    met: dict[str, set[Operation]] = field(default_factory=dict)

    def take(self, layer: _Layer, factor: float, number: float | None, *, behind: bool) -> bool:
        """Note a change of a layer; return whether no other place needs another one."""
        found = self.behind if behind else self.in_front
        for name, operation in layer.parameters:
            other = OtherWeight(name, factor, number if name == layer.bias and not behind else 0.0, layer.partly)
            known = found.setdefault(name, other)
            self.met.setdefault(name, set()).add(operation)
            if not (layer.partly or _is_same(known, other)):
                return False
        if behind and number is None and layer.bias:
            found[layer.bias] = OtherWeight(layer.bias, 1.0, None)
        return True

    def are_everywhere(self, program: Program) -> bool:
        """Whether no parameter is used elsewhere, as it is."""
        for operation in program.operations if self.met else ():
            own = [x for x in operation.operands if operation.data and x.of_parameters]
            if any(operation not in self.met.get(name, {operation}) for x in own for name in x.leaves):
                return False
        return bool(self.met)

    def all(self) -> tuple[OtherWeight, ...]:
        """Return what each parameter would be, of those that would be other ones."""
        made = []
        for name in dict.fromkeys((*self.in_front, *self.behind)):
            one, two = (of.get(name, OtherWeight(name)) for of in (self.in_front, self.behind))
            number = None if None in (one.number, two.number) else one.number
            factor, partly = plain(one.factor * two.factor), one.partly or two.partly
            made.append(OtherWeight(name, factor, number and plain(number), partly))
        return tuple(one for one in made if (one.factor, one.number) != (1.0, 0.0))


def _is_same(one: OtherWeight, two: OtherWeight) -> bool:
    return bool(np.isclose(one.factor, two.factor, rtol=EXACT)) and _same_number(one.number, two.number)


def _same_number(one: float | None, two: float | None) -> bool:
    return one is two if one is None or two is None else bool(np.isclose(one, two, rtol=EXACT, atol=EXACT))


@np.errstate(all="ignore")
def other_weights(found: Divergence, source: Program, target: Program, output: str) -> tuple[OtherWeight, ...]:
    """Return what parameters of the target would be so that an output is the source's; none where none are found.

    Args:
        found: where the target departs from the source on the way to the output; with the source's values there it is equal.
        target: with the weights that were found or guessed.
    """

    def equal(name: str, now: Array) -> bool:
        want = source.outputs[name].array
        return want.shape == now.shape and relative_error(now, want) <= EXACT

    if not found.proven or len(found.repairs) > MOST_REPAIRS:
        return ()
    program = _Graph(target)
    places = [place for repair in found.repairs for place in program.places(repair)]
    for first, behind in itertools.product(range(min(len(places), MOST_STARTS)), (False, True)):
        rerun, changes = Rerun(target), _Changes()
        fits = all(program.make_up(place, rerun, changes, behind) is not False for place in places[first:])
        made = {name: rerun.array(value) for name, value in target.outputs.items() if name in source.outputs}
        as_before = all(equal(name, now) or not equal(name, target.outputs[name].array) for name, now in made.items())
        if fits and equal(output, made[output]) and as_before and changes.are_everywhere(target):
            return changes.all()
    return ()


def are_the_same(one: Sequence[OtherWeight], two: Sequence[OtherWeight]) -> bool:
    """Whether the same parameters have other numbers, by the same factors."""
    names = [[other.name for other in of] for of in (one, two)]
    return names[0] == names[1] and all(_is_same(x, y) for x, y in zip(one, two, strict=True))


def with_other_weights(tensors: Sequence[Tensor], others: Sequence[OtherWeight]) -> tuple[Tensor, ...] | None:
    """Return the tensors with other numbers; None where no rule would say them.

    A rule has a factor. But where a number alone is missing in one of the programs, such as the scale of attention, that is a fault of
    the code, and the weights of the source are right as they are.
    """
    by_name = {other.name: other for other in others}
    signs = all(other.factor in (1.0, -1.0) for other in others)
    both_ways = len({other.factor for other in others} - {1.0}) > 1
    if not (signs or both_ways) or any(other.number != 0 or other.partly for other in others):
        return None
    return tuple(_times(t, by_name[t.name].factor) if t.name in by_name else t for t in tensors)


def _times(tensor: Tensor, factor: float) -> Tensor:
    return replace(tensor, parts=tuple(replace(part, factor=factor * part.factor) for part in tensor.parts))


def _in_place(value: Value, array: Array) -> Change:
    return Change({value: array})


def _is_multiple(operation: Operation) -> bool:
    """Whether an operation multiplies data by a constant."""
    constants = [x for x in operation.operands if x.constant]
    kind = kind_of(operation)
    return (
        len(operation.data) == 1
        and len(constants) == 1
        and (kind == "multiply" or (kind == "divide" and operation.operands[0].data))
    )


class _Graph:
    """The operations of a target, by what they give and use."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made_by, self.users = program.made_by, program.users
        self.numbers = {operation: k for k, operation in enumerate(program.operations)}
        self.uses = times_used(program)
        self.outputs = {*program.outputs.values()}
        self.work = 0
        self._slices: dict[tuple[Value, ...], list[Operation]] = {}

    def places(self, repair: Repair) -> list[_Place]:
        """Return the values that a repair replaces: of one that joins others, those that it replaces by others."""
        whole = self._place(repair)
        if whole is None or whole.users:
            return [] if whole is None else [whole]
        found, todo = list[_Place](), [whole]
        while todo:
            place = todo.pop()
            parts = self._joined_in(place)
            todo += reversed([one for one in parts if relative_error(one.value.array, one.want) > EXACT])
            found += [] if parts else [place]
        return found

    def _joined_in(self, place: _Place) -> list[_Place]:
        """Return the values that are joined in one, or the one that it is a view of; none where it is no such value."""
        made = self.made_by.get(place.value)
        if made is None or made.name not in (JOINS.keys() | COPIES):
            return []
        if made.name in JOINS:
            axis = int(made.settings.get(JOINS[made.name], 0))
            ends = np.cumsum([x.array.shape[axis] for x in made.operands])[:-1]
            parts = zip(made.operands, np.split(place.want, ends, axis), strict=True)
        elif np.array_equal(made.operands[0].array.ravel(), place.value.array.ravel()):
            parts = zip(made.operands[:1], [place.want.reshape(made.operands[0].array.shape)], strict=True)
        else:
            return []
        return [_Place(value, want, ()) for value, want in parts]

    def _place(self, repair: Repair) -> _Place | None:
        """Return the value that a repair replaces; None where it is no such repair."""
        change = repair.change
        if change.earlier or change.computed or len(change.values) + len(change.operands) > 1:
            return None
        for value, array in change.values.items():
            return self._of_size(value, array, ())
        for (at, k), array in change.operands.items():
            operands = self.program.operations[at].operands
            return self._of_size(operands[k], array, ((at, k),)) if k < len(operands) else None  # one that is left out
        return self._of_size(repair.operands[0], repair.want, ()) if repair.operands else None

    def _of_size(self, value: Value, want: Array, users: tuple[tuple[int, int], ...]) -> _Place | None:
        if value.array.size != want.size or not value.data or value.array.dtype.kind not in "fb":
            return None
        return _Place(value, want.reshape(value.array.shape), users)

    def make_up(self, place: _Place, rerun: Rerun, changes: _Changes, behind_first: bool) -> bool | None:
        """Change a layer in front of a difference, those behind it, or both, so that what follows is the source's.

        Return whether that agrees with what was changed before; None where no such change is found: a later place may need none here.

        Args:
            behind_first: whether those behind it are tried first; one in front may be used elsewhere, too, as a table that is the head as well.
        """
        layers = self.layers(place.value)
        ways = [(layer, False) for layer in layers] + [(layer, True) for layer in (None, *layers)]
        for layer, behind in sorted(ways, key=lambda way: way[0] is not None) if behind_first else ways:
            ends = self.ends(place, layer)
            way = self._fit(place, layer, ends, behind, rerun) if ends or not behind else None
            if way is None:
                continue
            ours = layer is None or changes.take(layer, way.factor, way.number, behind=False)
            theirs = all(
                changes.take(one, factor, None if number else 0.0, behind=True)
                for end, (factor, number) in zip(ends, way.behind, strict=False)
                for one in end.layers
            )
            return ours and theirs and self._put(layer, ends, way, rerun)
        return None

    def _fit(self, place: _Place, layer: _Layer | None, ends: Sequence[_End], behind: bool, rerun: Rerun) -> Fit | None:
        """Return the factors and numbers with which what follows the difference is the source's; None if there are none.

        Args:
            layer: that may give other values; None for none.
            ends: what the layers behind are given.
            behind: whether these may have other weights.
        """
        last = [end.value for end in ends] or [place.value]
        start = place.value if layer is None else layer.value
        begin = rerun.array(start)

        def run(factor: float, number: float) -> list[Array]:
            return self._run(start, factor * begin + number, last, rerun)

        if self.work > WORK:
            return None
        try:
            want = self._run(place.value, place.want, last, rerun)
        except FAILS:
            return None
        biases = [all(x.bias for x in end.layers) for end in ends] if behind else []
        return fitted(run, want, factor=layer is not None, number=layer is not None and bool(layer.bias), behind=biases)

    def layers(self, value: Value) -> list[_Layer]:
        """Return the values in front of one that are linear in parameters, the nearest first; of a sum, the whole and its terms."""
        found: dict[Value, _Layer] = {}
        todo, seen = [value], {value}
        for _ in range(DEPTH):
            behind: list[Value] = []
            for one in todo:
                layer = self._layer(one)
                if layer is not None:
                    found[one] = layer
                made = self.made_by.get(one)
                behind += [x for x in (made.data if made else ()) if x not in seen]
                seen.update(behind)
            todo = list(dict.fromkeys(behind))
        return list(found.values())[:MOST_LAYERS]

    def _layer(self, value: Value, depth: int = DEPTH) -> _Layer | None:
        """Return a value as a layer; None where it is not linear in parameters."""
        made = self.made_by.get(value)
        if made is None or not depth:
            return None
        role, own = role_of(made), [x for x in made.operands if x.of_parameters]
        if any(len(x.leaves) != 1 for x in own):
            return None
        names = tuple((name, made) for x in own for name in x.leaves)
        if own and role in (*BILINEAR, Role.LOOKUP, Role.SCALE) and len(made.data) == 1:
            with_bias = role is Role.LOOKUP or (role is Role.CONVOLUTION and len(own) > 1)
            return _Layer(value, names, names[-1][0] if with_bias else "")
        if not (role is Role.SHIFT or made.name in MOVES or kind_of(made) == "negate" or _is_multiple(made)):
            return None
        terms = [self._layer(x, depth - 1) for x in dict.fromkeys(made.data)]
        if not terms or any(one is None for one in terms) or (made.name in MOVES and len(terms) != 1):
            return None
        if role is Role.SHIFT and any(x.constant and x.array.any() for x in made.operands):
            return None
        of_terms = [one for one in terms if one is not None]
        parameters = tuple(x for one in of_terms for x in one.parameters) + names
        bias = names[-1][0] if names else next((one.bias for one in of_terms if one.bias), "")
        bias = "" if _is_multiple(made) or kind_of(made) == "negate" else bias
        partly = value.array.size < made.data[0].array.size
        if not partly and any(self.uses[x] > 1 for x in made.data):
            return None  # other weights would change its other use as well
        partly |= any(one.partly for one in of_terms)
        return _Layer(value, parameters, bias, partly)

    def ends(self, place: _Place, layer: _Layer | None = None) -> list[_End]:
        """Return the values behind a difference that are given to layers alone; none where others are given something, too.

        Args:
            layer: in front of it; what else is computed of its value counts, as the x that quick_gelu multiplies.
        """
        if place.users:
            ((at, k),) = place.users
            given = self._given_to(self.program.operations[at], place.value)
            return [] if given is None else [_End(place.value, lambda x: Change(operands={(at, k): x}), (given,))]
        inside = [place.value, *([layer.value] if layer is not None else ())]
        in_front = {x for one in self._between(inside[-1], [place.value]) for x in one.operands}
        found: list[_End] = []
        for value in inside:  # it grows
            users = self.users.get(value, [])
            if value in self.outputs or not users or len(inside) > DEPTH:
                return []
            on_the_way = value in in_front
            layers = [] if on_the_way else self._all_given_to(value)
            if layers:
                found.append(_End(value, partial(_in_place, value), tuple(layers)))
                continue
            if not on_the_way and any(x.of_parameters for user in users for x in user.operands):
                return []
            inside += [x for user in users for x in user.results if x not in inside]
        return found

    def _all_given_to(self, value: Value) -> list[_Layer]:
        """Return the layers that a value is given to, also moved or joined with others; none where something else takes it."""
        found, todo = list[_Layer](), [value]
        for _ in range(DEPTH):
            if not todo:
                return found
            one = todo.pop()
            users = self.users.get(one, [])
            if one in self.outputs or not users:
                return []
            for user in users:
                layer = self._given_to(user, one)
                if layer is not None:
                    found.append(layer)
                elif (user.name in MOVES and user.operands[0] is one and len(user.data) == 1) or user.name in JOINS:
                    todo += user.results
                else:
                    return []
        return []

    def _given_to(self, operation: Operation, value: Value) -> _Layer | None:
        """Return the layer that an operation begins; None if it is none."""
        own = [x for x in operation.operands if x.of_parameters]
        if role_of(operation) not in BILINEAR or len(operation.data) != 1 or not own or len(own[0].leaves) != 1:
            return None
        padded = any(np.any(operation.settings.get(name, 0)) for name in PADDING)
        bias = self._bias_behind(operation) if not padded else ""
        return _Layer(value, tuple((name, operation) for name in own[0].leaves), bias)

    def _bias_behind(self, operation: Operation) -> str:
        """Return the parameter that is added to the result of an operation; empty where there is none."""
        own = [x for x in operation.operands if x.of_parameters]
        if len(own) > 1:
            return next(iter(own[-1].leaves))
        (value, *_) = operation.results
        while len(users := self.users.get(value, [])) == 1:
            (user,) = users
            names = [name for x in user.operands if x.of_parameters for name in x.leaves]
            if role_of(user) is Role.SHIFT and len(names) == 1:
                return names[0]
            if user.name not in MOVES:
                break
            value = user.results[0]
        return ""

    def _put(self, layer: _Layer | None, ends: Sequence[_End], way: Fit, rerun: Rerun) -> bool:
        try:
            if layer is not None:
                list(rerun.put(Change({layer.value: way.factor * rerun.array(layer.value) + way.number})))
            for end, (factor, number) in zip(ends, way.behind, strict=False):
                if (factor, number) != (1.0, 0.0):
                    list(rerun.put(end.change(factor * rerun.array(end.value) + number)))
        except ValueError:  # an operation does not take it
            return False
        return True

    def _run(self, start: Value, array: Array, last: Sequence[Value], rerun: Rerun) -> list[Array]:
        """Return what some values are if another one is given; what lies behind them does not run.

        Raises:
            ValueError: the trials computed too much.
        """
        now = {start: array}
        between = self._between(start, last)
        self.work += sum(CALL + x.array.size for operation in between for x in operation.results)
        if self.work > WORK:
            raise ValueError("the trials computed too much")
        for operation in between:
            operands = [np.require(now.get(x, rerun.array(x)), requirements=["C", "W"]) for x in operation.operands]
            now |= dict(zip(operation.results, map(np.asarray, operation.again(operands)), strict=False))
        return [np.asarray(now.get(x, rerun.array(x)), np.float64) for x in last]

    def _between(self, start: Value, last: Sequence[Value]) -> list[Operation]:
        """Return the operations by which some values are computed of another one, in order."""
        key = start, *last
        if key not in self._slices:
            behind, todo = set[Value](), [x for x in last if x is not start]
            found = set[Operation]()
            while todo:
                made = self.made_by.get(todo.pop())
                if made is not None and made not in found:
                    found.add(made)
                    todo += [x for x in made.data if x is not start]
            behind.add(start)
            kept = []
            for operation in sorted(found, key=self.numbers.__getitem__):
                if any(x in behind for x in operation.operands):
                    behind.update(operation.results)
                    kept.append(operation)
            self._slices[key] = kept
        return self._slices[key]
