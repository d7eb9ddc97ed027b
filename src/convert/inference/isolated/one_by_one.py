"""The search for the leaf of each tensor by the outputs alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.inference.isolated.pieces import Piece, Use
from convert.inference.isolated.places import HIDDEN, OTHER, Fills, Place, cuts, layouts, places
from convert.programs.reruns import Outputs, Reruns, equal

Array = np.ndarray[Any, np.dtype[Any]]
EQUAL = 1e-9  # relative; both programs run in float64
SEEN = 1e-6  # relative; so much an output changes where a leaf takes part
LARGER = 10  # times the error up to which outputs are equal, if that is more, as of programs with numbers of float32
MOST_RUNS = 3000  # of both programs, of all their operations; where fewer run again, more runs are as many
WITHOUT_PROGRESS = 100  # such runs after the most tensors were found
MOST_KEPT = 2**24  # numbers of outputs that are kept until the next part of a leaf is found


@dataclass(frozen=True, eq=False)
class _Left:
    """What is left of a leaf.

    Attributes:
        leaf: its name.
        parts: the numbers of those parts of it that have no place yet; empty where it is not cut yet.
        cut: what the parts fill, and the number of the cut.
    """

    leaf: str
    parts: tuple[Array, ...] = ()
    cut: tuple[Fills, int] = (Fills.ALL, 0)


class OneByOne:
    """The tensors of the target, each of which is found by itself: no other that is sought says anything then.

    All leaves that are not known hold one number, and so do the tensors that are sought: in which order their elements lie says nothing.
    Then a part of a leaf gets its own numbers. It belongs where the target's outputs become the source's. What was found keeps its own
    numbers, so that more is seen of what follows.

    Attributes:
        of: tensor -> for each element the number of the leaf's element, or `HIDDEN`.
        most: so many tensors had all their leaves at once.
    """

    def __init__(
        self,
        source: Reruns,
        target: Reruns,
        leaves: Mapping[str, Array],
        guesses: Mapping[str, Array],
        values: Callable[[str, Array], Array],
        uses: Mapping[str, Use],
        kept: Collection[str] = (),
        *,
        allowed: float = EQUAL,
        most_runs: float = MOST_RUNS,
    ) -> None:
        """Begin with both sides, in which every parameter that is not known has one number.

        Args:
            source, target: the two.
            leaves: name -> the numbers of its elements, of those that are sought.
            guesses: tensor that is sought -> for each element the number of the leaf's element that it may be, or `HIDDEN`.
            values: (leaf or tensor, numbers of its elements) -> the elements; one number where they are `HIDDEN`.
            uses: leaf or tensor -> how its program uses it.
            kept: tensors that are as guessed.
            allowed: relative error up to which outputs are equal.
            most_runs: so many are the limit, those of other searches with the same two included.
        """
        self._source, self._target = source, target
        self._leaves, self._guesses, self._values = leaves, guesses, values
        self._uses = uses
        self.of = {
            name: numbers if name in kept else np.full(numbers.shape, HIDDEN) for name, numbers in guesses.items()
        }
        known = np.concatenate([numbers.ravel() for numbers in self.of.values()])
        self._shown = {name: np.where(np.isin(numbers, known), numbers, HIDDEN) for name, numbers in leaves.items()}
        self._sizes = {size for numbers in (*leaves.values(), *guesses.values()) for size in numbers.shape}
        self._beside: dict[str, tuple[str, int]] = {}  # leaf -> the tensor and the order of its last part
        self._given: dict[Any, Outputs | None] = {}
        self._made: dict[Any, Outputs | None] = {}
        self._usual: dict[tuple[int, ...], tuple[Fills, int]] = {}  # shape of a leaf -> how the last one was cut
        self._allowed, self._most_runs = allowed, most_runs
        self.most, self._reached = 0, self.runs

    @property
    def runs(self) -> float:
        """How often both programs have run, those of other searches with the same two included."""
        sides = self._source, self._target
        return sum(side.ran for side in sides) / max(sum(side.size for side in sides), 1)

    @property
    def ran_out(self) -> bool:
        """Whether no more runs are left, or too many led no further."""
        return self.runs >= self._most_runs or self.runs >= self._reached + WITHOUT_PROGRESS

    def solve(self) -> bool:
        """Find a leaf for each tensor; False if there is none, or if its runs do not suffice."""
        self._source.changed({leaf: self._values(leaf, shown) for leaf, shown in self._shown.items()}, keep=True)
        self._target.changed({name: self._values(name, numbers) for name, numbers in self.of.items()}, keep=True)
        left = [_Left(leaf) for leaf, shown in self._shown.items() if (shown == HIDDEN).any()]
        return equal(self._target.outputs, self._source.outputs, self._allowed) and self._rest(left)

    def _rest(self, left: Sequence[_Left]) -> bool:
        """Find the places of these leaves, part by part, beginning with the first that the outputs show; what none shows is the last."""
        found = sum(not (numbers == HIDDEN).any() for numbers in self.of.values())
        if found > self.most:
            self.most, self._reached = found, self.runs
        if found == len(self.of) or self.ran_out:
            return found == len(self.of)
        for shown in (True, False):
            for k, one in enumerate(left):
                if any(self._is_shown(one.leaf, part) for part in one.parts or [self._leaves[one.leaf]]) is not shown:
                    continue
                placed = shown  # a part that the outputs show has a place, unless what was found before is wrong
                for rest in self._ways(one):
                    placed = True
                    if self._rest([*rest, *left[:k], *left[k + 1 :]]):
                        return True
                if placed:
                    return False
        return False

    def _source_gives(self, leaf: str, part: Array, number: int | None = None) -> Outputs | None:
        """Return the outputs with a part of a leaf, or with another number in its place."""
        key = leaf, part.tobytes(), number
        if key not in self._given:
            self._given[key] = self._source.changed({leaf: self._values(leaf, self._with(leaf, part, number))})
        return self._given[key]

    def _is_shown(self, leaf: str, part: Array) -> bool:
        outputs = self._source_gives(leaf, part)
        return outputs is not None and not equal(outputs, self._source.outputs, max(SEEN, LARGER * self._allowed))

    def _with(self, leaf: str, part: Array, number: int | None = None) -> Array:
        """Return the numbers of a leaf's elements with those of a part, or another number in their place."""
        numbers = self._leaves[leaf]
        return np.where(np.isin(numbers, part), numbers if number is None else number, self._shown[leaf])

    def _ways(self, one: _Left) -> Iterator[Sequence[_Left]]:
        """Find the place of one part of a leaf, in one way after the other, and yield what is left of it.

        A leaf lies somewhere whole, or cut along one of its axes; first as the last one of its shape.
        """
        if one.parts:
            yield from self._placed(one)
            return
        numbers = self._leaves[one.leaf]
        usual = self._usual.get(numbers.shape)
        for first in (True, False):
            for fills, k, parts in self._cuts(numbers):
                if self.ran_out:
                    return
                if ((fills, k) == usual) is not first:
                    continue
                hidden = [np.isin(part, self._shown[one.leaf], invert=True) for part in parts]
                if all(part.all() or not part.any() for part in hidden):
                    left = tuple(part for part, own in zip(parts, hidden, strict=True) if own.all())
                    if self._have_room(left, fills):
                        yield from self._placed(_Left(one.leaf, left, (fills, k)))

    def _cuts(self, numbers: Array) -> Iterator[tuple[Fills, int, Sequence[Array]]]:
        """Yield what the parts of a leaf may fill, the number of the cut, and the parts."""
        sizes = [one.size for one in self.of.values()] + [
            one.size // length * (stop - start)
            for name, one in self.of.items()
            for length, start, stop in self._uses[name].pieces
            if length in one.shape
        ]
        for fills in Fills:
            for k, parts in enumerate(itertools.chain([[numbers]], cuts(numbers, sizes))):
                yield fills, k, parts

    def _have_room(self, parts: Sequence[Array], fills: Fills) -> bool:
        """Whether as many parts as these may lie in tensors, beside those that lie where they were guessed."""
        if not parts:
            return True
        free = [(numbers.size, int((numbers == HIDDEN).sum())) for numbers in self.of.values()]
        size = parts[0].size
        room = sum(n == size == left if fills is Fills.ALL else left // size for n, left in free)
        return len(parts) <= room or len(parts) <= room + sum(bool(self._guessed(part)) for part in parts)

    def _placed(self, one: _Left) -> Iterator[Sequence[_Left]]:
        """Find the place of the first of the parts of a leaf that the outputs show, and yield what is left of it.

        A part that none shows changes nothing in either: what is found later may show it.
        """
        leaf, parts, cut = one.leaf, one.parts, one.cut
        if not parts:
            yield self._left_of(leaf, parts, cut)
            return
        k = next((k for k, part in enumerate(parts) if self._is_shown(leaf, part)), 0)
        rest = (*parts[:k], *parts[k + 1 :])
        want = self._source_gives(leaf, parts[k])
        for made in self._places(leaf, parts[k], cut[0]):
            if want is None or self.ran_out:
                return
            if self._target_gives(made, want):
                before = self._shown[leaf], {name: self.of[name] for name in made}
                self._keep(leaf, self._with(leaf, parts[k]), made)
                yield self._left_of(leaf, rest, cut)
                self._keep(leaf, *before)

    def _left_of(self, leaf: str, parts: tuple[Array, ...], cut: tuple[Fills, int]) -> Sequence[_Left]:
        """Return what is left of a leaf; how it is cut is remembered when nothing is."""
        if parts:
            return (_Left(leaf, parts, cut),)
        self._usual[self._leaves[leaf].shape] = cut
        return ()

    def _in_order(self, leaf: str, part: Array, made: Mapping[str, Array]) -> bool:
        """Whether the parts of a leaf that lie in one tensor have the leaf's order: heads in another order are no layout."""
        for numbers in made.values():
            flat = numbers.ravel()
            own, of_leaf = np.isin(flat, part), np.isin(flat, self._leaves[leaf])
            first = int(np.argmax(own))
            for others, behind in (
                (of_leaf & (flat < part.min()), False),
                (of_leaf & (flat > part.max()) & ~own, True),
            ):
                if others.any() and (int(np.argmax(others)) > first) is not behind:
                    return False
        return True

    def _are_pieces(self, part: Array, made: Mapping[str, Array]) -> bool:
        """Whether a part of a leaf fills rows of each tensor that the target takes apart from the others."""
        return all(_rows(np.isin(numbers, part)) & set(self._uses[name].pieces) for name, numbers in made.items())

    def _keep(self, leaf: str, shown: Array, made: Mapping[str, Array]) -> None:
        self._shown[leaf] = shown
        self.of.update(made)
        self._given.clear()
        self._made.clear()
        self._source.changed({leaf: self._values(leaf, shown)}, keep=True)
        self._target.changed({name: self._values(name, numbers) for name, numbers in made.items()}, keep=True)

    def _places(self, leaf: str, part: Array, fills: Fills) -> Iterator[Mapping[str, Array]]:
        """Yield tensors with a part of a leaf among their elements: first as guessed, then where another number fits in all of the part."""
        guessed = self._guessed(part)
        if guessed and (self._in_order(leaf, part, guessed) or self._are_pieces(part, guessed)):
            yield guessed
        uses, first, last = self._uses, self._leaves[leaf].min(), self._leaves[leaf].max()
        used = {uses[name].code for name, x in self.of.items() if ((first <= x) & (x <= last)).any()}
        beside, usual = self._beside.get(leaf, ("", 0))

        def far(name: str) -> float:  # the same code is used in one layer after the other
            return uses[name].at if used else abs(uses[name].at - uses[leaf].at)

        in_turn = sorted(
            self.of, key=lambda name: (name != beside, name not in guessed, uses[name].code not in used, far(name))
        )
        others = {name: self.of[name] for name in in_turn}
        want = self._source_gives(leaf, part, OTHER)
        for name, found in itertools.groupby(places(part.size, others, fills), lambda one: one[0]):
            moved: list[tuple[int, Array]] = []  # the parts of the leaf in another order, behind all that have its own
            for numbers in self._fits(found, want):
                place = numbers == OTHER
                orders = enumerate(layouts(part, self._sizes, kernel=numbers.ndim > 2))
                for k, order in sorted(orders, key=lambda one: one[0] != usual):
                    made = numbers.copy()
                    made[place] = order
                    if self._in_order(leaf, part, {name: made}):
                        self._beside[leaf] = name, k
                        yield {name: made}
                    elif self._are_pieces(part, {name: made}):
                        moved.append((k, made))
            for k, made in moved:
                self._beside[leaf] = name, k
                yield {name: made}

    def _guessed(self, part: Array) -> Mapping[str, Array]:
        """Return the tensors that are guessed to have a part, with it among their elements."""
        return {
            name: np.where(here, guess, self.of[name])
            for name, guess in self._guesses.items()
            for here in [np.isin(guess, part)]
            if here.sum() == part.size and (self.of[name][here] == HIDDEN).all()
        }

    def _fits(self, found: Iterator[tuple[str, Place]], want: Outputs | None) -> Iterator[Array]:
        """Yield the numbers of a tensor's elements for each place in it that has another number as the part of the leaf has it."""
        for name, place in found:
            if want is None or self.ran_out:
                return
            numbers = self.of[name].copy()
            numbers[place] = OTHER
            key = name, numbers.tobytes()  # no other part of a leaf, nor another cut, changes what this gives
            made = self._made[key] if key in self._made else self._target.changed({name: self._values(name, numbers)})
            if (len(self._made) + 1) * sum(x.size for x in self._target.outputs) <= MOST_KEPT:
                self._made[key] = made
            if equal(made, want, self._allowed):
                yield numbers

    def _target_gives(self, made: Mapping[str, Array], want: Outputs) -> bool:
        """Whether the target gives these outputs with other numbers in some tensors."""
        changed = self._target.changed({name: self._values(name, numbers) for name, numbers in made.items()})
        return equal(changed, want, self._allowed)


def _rows(here: Array) -> set[Piece]:
    """Return the rows that elements fill, along each axis along which they fill some that follow one another, and nothing else."""
    found = set[Piece]()
    for axis, size in enumerate(here.shape):
        rows = np.flatnonzero(here.any(tuple(k for k in range(here.ndim) if k != axis)))
        if len(rows) * here.size == here.sum() * size and rows[-1] - rows[0] < len(rows):
            found.add((size, int(rows[0]), int(rows[-1]) + 1))
    return found
