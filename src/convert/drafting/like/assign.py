"""Match the layers of a draft with modules of the target: by kind and shapes, then by names and numbers.

A match is made where it is clearly better than every other one for the layer, and for the module. Everything else stays open.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from convert.drafting.like.readings import Column, Reading
from convert.drafting.like.similarity import (
    EXACT,
    Numbered,
    agree,
    differing,
    number_places,
    numbers,
    opposed,
    same_families,
    similarity,
    template,
)
from convert.drafting.like.target import COUNTERS, Place, TargetModel, fits_kind, places

MARGIN = 0.15  # by which a match is better than the next one
ENOUGH = 0.45  # score of a match for which others would fit, too
BY_NUMBER = 0.5  # what equal numbers add to a score
BY_FAMILY = 0.4  # what two layers get that occur as often


@dataclass(frozen=True)
class Series:
    """Modules for the layers of a column, in their order.

    Attributes:
        places: one for each layer.
        varying: for each index, the position of its number in the names.
        readings: numbers of the readings that make their tensors.
    """

    places: tuple[Place, ...]
    varying: tuple[int, ...]
    readings: frozenset[int]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(place.name for place in self.places)

    @property
    def makes(self) -> set[str]:
        return {tensor for place in self.places for tensor in place.makes}


@dataclass(frozen=True)
class Candidate:
    """A possible match.

    Attributes:
        series: the modules.
        names: similarity of the names.
        same: whether the numbers in the names agree; None if they say nothing.
        repeated: whether both occur as often.
        doubtful: whether the names contradict, so that the match is made only where no other is possible.
    """

    series: Series
    names: float
    same: bool | None
    repeated: bool
    doubtful: bool

    @property
    def score(self) -> float:
        return self.named + (BY_FAMILY if self.repeated else 0)

    @property
    def named(self) -> float:
        return self.names + (0 if self.same is None else BY_NUMBER if self.same else -BY_NUMBER)


@dataclass(frozen=True)
class Match:
    """A column and its modules.

    Attributes:
        series: the modules.
        why: why these; empty if their names are those of the tree.
    """

    series: Series
    why: str


@dataclass
class Unit:
    """A rule whose modules are sought.

    Attributes:
        readings: what it could mean: those of equal columns.
        candidates: of each column.
        forms: what else it could mean: readings of other columns, such as one fused tensor.
        matches: of each column, as far as they are found.
    """

    readings: Sequence[Reading]
    candidates: list[list[Candidate]]
    forms: list[tuple[list[Reading], list[list[Candidate]]]]
    matches: dict[int, Match] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.readings[0].columns

    @property
    def fitting(self) -> list[Reading]:
        """The readings that make what all matches need."""
        left = set(range(len(self.readings)))
        for match in self.matches.values():
            left &= match.series.readings
        return [self.readings[k] for k in sorted(left)]


class Assignment:
    """The places of a target, and which layers go there.

    Args:
        model: the target.
        root: of the draft; it is no part of the layers' names.
        leaves: names of the draft's leaves -> number of axes.
    """

    def __init__(self, model: TargetModel, root: str, leaves: Mapping[str, int]) -> None:
        self.places = list(places(model))
        self._root = root
        of_kind = {p.name: p.module.kind_name or str(max(map(len, p.tensors.values()), default=0)) for p in self.places}
        self._theirs = number_places(of_kind)
        self._ours = number_places({name: f"{name.rpartition('/')[2]}/{axes}" for name, axes in leaves.items()})
        self.taken: set[str] = set()

    def unit(self, readings: Sequence[Reading]) -> Unit | None:
        """Return the readings for which the target has places; None if it has none for any."""
        forms: dict[tuple[object, ...], list[Reading]] = defaultdict(list)
        for reading in readings:
            choices = tuple((column.choice, column.indices) for column in reading.columns)
            forms[reading.fused, reading.kind_name == "parameter", choices].append(reading)
        ordered = sorted(forms.items(), key=lambda item: (item[0][1], item[0][0]))  # as they are; fused; as stored
        found = [
            (form, candidates)
            for _, form in ordered
            if all(candidates := [self._candidates(form, k) for k in range(len(form[0].columns))])
        ]
        return Unit(*found[0], found[1:]) if found else None

    def _candidates(self, readings: Sequence[Reading], k: int) -> list[Candidate]:
        found: dict[tuple[str, ...], Series] = {}
        for number, reading in enumerate(readings):
            column = reading.columns[k]
            shapes = {role: shape for role, shape in column.shapes.items() if role not in COUNTERS}
            fitting = [p for p in self.places if p.tensors == shapes and fits_kind(p, reading.kind_name)]
            for modules, varying in _series(column, fitting):
                names = tuple(p.name for p in modules)
                known = found[names].readings if names in found else frozenset()
                found[names] = Series(modules, varying, known | {number})
        return [self._candidate(readings[0].columns[k], series) for series in found.values()]

    def _candidate(self, column: Column, series: Series) -> Candidate:
        one, other = numbers(column.path), numbers(column.last)
        ours = self._ours.get(column.path, Numbered(()))
        mine = ours.marked(k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        theirs = self._theirs[series.places[0].name].marked(series.varying)
        name, same = series.places[0].name, agree(mine, theirs)
        doubtful = opposed(column.name, name) or (differing(column.name, name) and not same)
        return Candidate(series, similarity(column.name, name), same, same_families(mine, theirs), doubtful)

    def solve(self, units: Sequence[Unit]) -> None:
        """Match as many columns as are certain; where no module is left for a column, as the next form of its rule."""
        self._solve(units)
        while stuck := [unit for unit in units if unit.forms and self._stuck(unit)]:
            for unit in stuck:
                for match in unit.matches.values():
                    self.taken -= match.series.makes
                unit.matches.clear()
                unit.readings, unit.candidates = unit.forms.pop(0)
            self._solve(units)

    def _stuck(self, unit: Unit) -> bool:
        """Whether there are fewer modules left than columns without one."""
        left = [k for k in range(len(unit.columns)) if k not in unit.matches]
        free = [self.live(unit, k) for k in left]
        return any(not found for found in free) or len({c.series.names for found in free for c in found}) < len(left)

    def _solve(self, units: Sequence[Unit]) -> None:
        """Match the clearest column again and again: each match leaves fewer modules for the others."""
        while True:
            open_ones = [(unit, k) for unit in units for k in range(len(unit.columns)) if k not in unit.matches]
            live = {(id(unit), k): self.live(unit, k) for unit, k in open_ones}
            rivals: dict[str, list[tuple[float, tuple[int, int]]]] = defaultdict(list)
            for key, found in live.items():
                for candidate in found:
                    for tensor in candidate.series.makes:
                        rivals[tensor].append((candidate.score, key))
            best = max(
                (
                    (advantage, candidate.score, -n, unit, k, candidate, alone)
                    for n, (unit, k) in enumerate(open_ones)
                    for advantage, candidate, alone in self._clear(live[id(unit), k], rivals, (id(unit), k))
                ),
                key=lambda found: found[:3],
                default=None,
            )
            if best is None:
                return
            _, _, _, unit, k, candidate, alone = best
            unit.matches[k] = Match(candidate.series, _why(candidate, alone))
            self.taken |= candidate.series.makes

    def live(self, unit: Unit, k: int) -> list[Candidate]:
        """Return the candidates of a column that are still free, and that suit the matches of the other columns."""
        left = {n for n, reading in enumerate(unit.readings) if reading in unit.fitting}
        return [
            candidate
            for candidate in unit.candidates[k]
            if self.taken.isdisjoint(candidate.series.makes) and not left.isdisjoint(candidate.series.readings)
        ]

    @staticmethod
    def _clear(
        found: Sequence[Candidate],
        rivals: Mapping[str, Sequence[tuple[float, tuple[int, int]]]],
        key: tuple[int, int],
    ) -> Iterator[tuple[float, Candidate, bool]]:
        """Yield the match of a column if it is clear: by how much it is the best, the match, and whether nothing else fits."""
        if not found:
            return
        best = max(found, key=lambda candidate: candidate.score)
        others = [candidate.score for candidate in found if candidate is not best]
        others += [score for tensor in best.series.makes for score, of in rivals[tensor] if of != key]
        advantage = best.score - max(others, default=float("-inf"))
        if advantage >= MARGIN and (not others or (best.named >= ENOUGH and not best.doubtful)):
            yield advantage, best, not others


BY_NAME, NUMBERED, LAST = (
    "guess: by its name",
    "guess: by its number",
    "guess: nothing else that is left has these shapes",
)


def _why(match: Candidate, alone: bool) -> str:
    if match.names >= EXACT and match.same is not False:
        return ""
    if match.names >= ENOUGH:
        return BY_NAME
    return NUMBERED if match.same and not alone else LAST


def weakest(matches: Iterable[Match]) -> str:
    """Return the weakest reason of several."""
    whys = {match.why for match in matches}
    return next((why for why in (NUMBERED, LAST, BY_NAME) if why in whys), "")


def _series(column: Column, fitting: Iterable[Place]) -> Iterator[tuple[tuple[Place, ...], tuple[int, ...]]]:
    """Yield the modules that a column could become: one, or as many as it has layers, whose names differ in numbers."""
    dims = len(column.indices[0])
    if not dims:
        for place in fitting:
            yield (place,), ()
        return
    axes = [sorted({at[d] for at in column.indices}) for d in range(dims)]
    by_template: dict[str, list[Place]] = defaultdict(list)
    for place in fitting:
        by_template[template(place.name)].append(place)
    for text, members in by_template.items():
        count = text.count("#")
        straight = [g for p in itertools.combinations(range(count), dims) for g in _grids(column, members, p, axes)]
        yield from straight or [
            grid for p in itertools.permutations(range(count), dims) for grid in _grids(column, members, p, axes)
        ]


def _grids(
    column: Column, members: Sequence[Place], positions: tuple[int, ...], axes: Sequence[Sequence[int]]
) -> Iterator[tuple[tuple[Place, ...], tuple[int, ...]]]:
    """Yield the members whose other numbers are equal, if they are as many along each position as the column has layers."""
    groups: dict[tuple[int, ...], dict[tuple[int, ...], Place]] = defaultdict(dict)
    for place in members:
        found = numbers(place.name)
        fixed = tuple(n for k, n in enumerate(found) if k not in positions)
        groups[fixed][tuple(found[k] for k in positions)] = place
    for grid in groups.values():
        values = [sorted({at[d] for at in grid}) for d in range(len(positions))]
        if [len(v) for v in values] != [len(a) for a in axes] or len(grid) != len(column.indices):
            continue
        ranked = [dict(zip(a, v, strict=True)) for a, v in zip(axes, values, strict=True)]
        wanted = [tuple(ranked[d][n] for d, n in enumerate(at)) for at in column.indices]
        if all(at in grid for at in wanted):
            yield tuple(grid[at] for at in wanted), positions


def leftover(model: TargetModel, made: Collection[str], tied: Collection[str]) -> list[str]:
    """Return the tensors of the target that no rule makes."""
    return [n for n in model.tensors if n not in made and n not in tied and n.rpartition(".")[2] not in COUNTERS]
