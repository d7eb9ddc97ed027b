"""The search for the leaf of each tensor by the outputs alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.inference.isolated.places import HIDDEN, OTHER, cuts, layouts, places
from convert.programs.reruns import Outputs, Reruns, equal

Array = np.ndarray[Any, np.dtype[Any]]
EQUAL = 1e-9  # relative; both programs run in float64
SEEN = 1e-6  # relative; so much an output changes where a leaf takes part
MOST_RUNS = 1500  # of both


class OneByOne:
    """The tensors of the target, each of which is found by itself: no other that is sought says anything then.

    All leaves that are not known hold one number, and so do the tensors that are sought: in which order their elements lie says nothing.
    Then a part of a leaf gets its own numbers. It belongs where the target's outputs become the source's. What was found keeps its own
    numbers, so that more is seen of what follows.

    Attributes:
        of: tensor -> for each element the number of the leaf's element, or `HIDDEN`.
        runs: of both, up to now.
    """

    def __init__(
        self,
        source: Reruns,
        target: Reruns,
        leaves: Mapping[str, Array],
        guesses: Mapping[str, Array],
        values: Callable[[str, Array], Array],
        kept: Collection[str] = (),
    ) -> None:
        """Begin with both sides, in which every parameter that is not known has one number.

        Args:
            source, target: the two.
            leaves: name -> the numbers of its elements, of those that are sought.
            guesses: tensor that is sought -> for each element the number of the leaf's element that it may be, or `HIDDEN`.
            values: (leaf or tensor, numbers of its elements) -> the elements; one number where they are `HIDDEN`.
            kept: tensors that are as guessed.
        """
        self._source, self._target = source, target
        self._leaves, self._guesses, self._values = leaves, guesses, values
        self.of = {
            name: numbers if name in kept else np.full(numbers.shape, HIDDEN) for name, numbers in guesses.items()
        }
        known = np.concatenate([numbers.ravel() for numbers in self.of.values()])
        self._shown = {name: np.where(np.isin(numbers, known), numbers, HIDDEN) for name, numbers in leaves.items()}
        self._sizes = {size for numbers in (*leaves.values(), *guesses.values()) for size in numbers.shape}
        self._beside: dict[str, tuple[str, int]] = {}  # leaf -> the tensor and the order of its last part
        self._given: dict[Any, Outputs | None] = {}
        self.runs = 0

    def solve(self) -> bool:
        """Find a leaf for each tensor; False if there is none, or if it takes too long."""
        self._source.changed({leaf: self._values(leaf, shown) for leaf, shown in self._shown.items()}, keep=True)
        self._target.changed({name: self._values(name, numbers) for name, numbers in self.of.items()}, keep=True)
        left = [leaf for leaf, shown in self._shown.items() if (shown == HIDDEN).any()]
        return equal(self._target.outputs, self._source.outputs, EQUAL) and self._rest(left)

    def _rest(self, left: Sequence[str]) -> bool:
        """Find the places of these leaves, beginning with the first that the outputs show; those that none shows are the last."""
        if not any((numbers == HIDDEN).any() for numbers in self.of.values()):
            return True
        for shown in (True, False):
            for k, leaf in enumerate(left):
                if self._is_shown(leaf, self._leaves[leaf]) is not shown:
                    continue
                found = False
                for _ in self._ways(leaf):
                    found = True
                    if self._rest([*left[:k], *left[k + 1 :]]):
                        return True
                if found:
                    return False
        return False

    def _source_gives(self, leaf: str, part: Array, number: int | None = None) -> Outputs | None:
        """Return the outputs with a part of a leaf, or with another number in its place."""
        key = leaf, part.tobytes(), number
        if key not in self._given:
            self.runs += 1
            self._given[key] = self._source.changed({leaf: self._values(leaf, self._with(leaf, part, number))})
        return self._given[key]

    def _is_shown(self, leaf: str, part: Array) -> bool:
        outputs = self._source_gives(leaf, part)
        return outputs is not None and not equal(outputs, self._source.outputs, SEEN)

    def _with(self, leaf: str, part: Array, number: int | None = None) -> Array:
        """Return the numbers of a leaf's elements with those of a part, or another number in their place."""
        numbers = self._leaves[leaf]
        return np.where(np.isin(numbers, part), numbers if number is None else number, self._shown[leaf])

    def _ways(self, leaf: str) -> Iterator[None]:
        """Find the places of a leaf, one way after the other: whole, or cut along one of its axes."""
        numbers, sizes = self._leaves[leaf], [one.size for one in self.of.values()]
        for whole in (True, False):
            for parts in itertools.chain([[numbers]], cuts(numbers, sizes)):
                if self.runs >= MOST_RUNS:
                    return
                hidden = [np.isin(part, self._shown[leaf], invert=True) for part in parts]
                if all(part.all() or not part.any() for part in hidden):
                    left = [part for part, one in zip(parts, hidden, strict=True) if one.all()]
                    yield from self._placed(leaf, left, whole=whole)

    def _placed(self, leaf: str, parts: Sequence[Array], *, whole: bool) -> Iterator[None]:
        """Find the places of the parts of a leaf, beginning with the first that the outputs show: what none shows changes nothing in either."""
        if not parts:
            yield
            return
        k = next((k for k, part in enumerate(parts) if self._is_shown(leaf, part)), 0)
        want = self._source_gives(leaf, parts[k])
        for made in self._places(leaf, parts[k], whole=whole):
            if want is None or self.runs >= MOST_RUNS:
                return
            if self._in_order(leaf, parts[k], made) and self._target_gives(made, want):
                before = self._shown[leaf], {name: self.of[name] for name in made}
                self._keep(leaf, self._with(leaf, parts[k]), made)
                yield from self._placed(leaf, [*parts[:k], *parts[k + 1 :]], whole=whole)
                self._keep(leaf, *before)

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

    def _keep(self, leaf: str, shown: Array, made: Mapping[str, Array]) -> None:
        self._shown[leaf] = shown
        self.of.update(made)
        self._given.clear()
        self._source.changed({leaf: self._values(leaf, shown)}, keep=True)
        self._target.changed({name: self._values(name, numbers) for name, numbers in made.items()}, keep=True)

    def _places(self, leaf: str, part: Array, *, whole: bool) -> Iterator[Mapping[str, Array]]:
        """Yield tensors with a part of a leaf among their elements: first as guessed, then where another number fits in all of the part."""
        guessed = {
            name: np.where(here, guess, self.of[name])
            for name, guess in self._guesses.items()
            for here in [np.isin(guess, part)]
            if here.sum() == part.size and (self.of[name][here] == HIDDEN).all()
        }
        if guessed:
            yield guessed
        rank = list(self._leaves).index(leaf) / len(self._leaves)
        far = {name: abs(k / len(self.of) - rank) for k, name in enumerate(self.of)}
        beside, usual = self._beside.get(leaf, ("", 0))
        in_turn = sorted(self.of, key=lambda name: (name != beside, name not in guessed, far[name]))
        others = {name: self.of[name] for name in in_turn}
        want = self._source_gives(leaf, part, OTHER)
        for name, place in places(part.size, others, whole=whole):
            if self.runs >= MOST_RUNS:
                return
            numbers = self.of[name].copy()
            numbers[place] = OTHER
            if want is None or not self._target_gives({name: numbers}, want):
                continue
            orders = enumerate(layouts(part, self._sizes, kernel=self.of[name].ndim > 2))
            for k, order in sorted(orders, key=lambda one: one[0] != usual):
                numbers = self.of[name].copy()
                numbers[place] = order.reshape(numbers[place].shape)
                self._beside[leaf] = name, k
                yield {name: numbers}

    def _target_gives(self, made: Mapping[str, Array], want: Outputs) -> bool:
        """Whether the target gives these outputs with other numbers in some tensors."""
        self.runs += 1
        return equal(
            self._target.changed({name: self._values(name, numbers) for name, numbers in made.items()}), want, EQUAL
        )
