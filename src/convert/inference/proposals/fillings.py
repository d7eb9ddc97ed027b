"""The ways to fill the columns of a fused matrix with leaves: below each other, every n-th one, head by head."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.inference.meetings.sites import Meeting, Product

Array = np.ndarray[Any, np.dtype[Any]]
MAX_PARTS = 8  # rows of a fused matrix come from at most so many leaves
MAX_FILLINGS = 400  # so many orders of the leaves in a fused matrix are tried
MAX_SPACED = 128  # leaves of the same data among which every n-th is tried
MAX_TURNED = 12  # orders of leaves of which RoPE turns all but the last
MAX_STEPS = 20_000  # so many times a leaf is looked at as the next part of a fused matrix
IN_TURNS = (2, 3)  # so many leaves lie in a fused matrix head by head


@dataclass(frozen=True, eq=False)
class Atom:
    """A matrix [I, O] of the source, in the target's order of I.

    Attributes:
        product, meeting: where it is from.
        order: the order of the axes in O, and which index of another axis; equal for equal layouts.
        columns: for each column of O its position in the product's further axes.
        tied: columns of the data that could not be told apart.
        rope: how pairs were reordered.
        number: which of several equal matrices the target's is.
    """

    product: Product
    meeting: Meeting
    rows: Array
    order: tuple[Any, ...]
    columns: Array
    tied: tuple[int, ...]
    rope: str = ""
    number: int = 0

    def of(self, array: Array) -> Array:
        """Return [I, O] of an array like the product's weight."""
        flat: Array = array.reshape(len(array), -1)
        return flat[self.rows][:, self.columns]


def fillings(atoms: Sequence[Atom], out: int, level: int) -> Iterator[list[tuple[Atom, Any]]]:
    """Yield the ways to fill the columns of a fused matrix: leaves below each other."""
    whole = any(len(atom.columns) == out for atom in atoms)
    small = [atom for atom in atoms if len(atom.columns) < out and (level > 1 or atom.order[0] != "index")]
    if whole:  # only gates are reordered within
        small = [atom for atom in small if atom.order[0] in ("leaf", "block")]

    yield from _evenly_spaced(small, out)
    if level == 0 and len(small) > MAX_PARTS:
        return
    reached = _sums({len(atom.columns) for atom in small}, out)

    def fill(start: int, chosen: list[Atom]) -> Iterator[list[Atom] | None]:
        """Yield the ways to go on, and None for every leaf that is looked at."""
        if start == out:
            if {atom.order[0] for atom in chosen} != {"index"} or len({atom.product for atom in chosen}) > 1:
                yield list(chosen)
            return
        rest = reached[MAX_PARTS - len(chosen) - 1]
        for atom in small:
            yield None
            end = start + len(atom.columns)
            if out - end in rest and _goes_with(atom, chosen, again=level > 1):
                chosen.append(atom)
                yield from fill(end, chosen)
                chosen.pop()

    full = (found for found in itertools.islice(fill(0, []), MAX_STEPS) if found is not None)
    for atoms_ in itertools.islice(full, MAX_FILLINGS):
        yield _below_each_other(atoms_)


def as_taken(atoms: Sequence[Atom], parts: Sequence[Array], out: int) -> Iterator[list[tuple[Atom, Any]]]:
    """Yield the ways to fill the columns that the target takes together, where they are not below each other; one leaf may fill several of these parts."""
    if sum(map(len, parts)) != out or all((np.diff(columns) == 1).all() for columns in parts):
        return
    plain = [atom for atom in atoms if atom.order[-1] not in ("halves", "pairs")]  # of all parts, they change nothing

    def fill(chosen: list[tuple[Atom, Array]], left: Sequence[Array]) -> Iterator[list[tuple[Atom, Array]]]:
        if not left:
            yield chosen
            return
        others = range(1, min(len(left), MAX_PARTS))
        for more in itertools.chain.from_iterable(itertools.combinations(others, n) for n in range(len(others) + 1)):
            part = np.sort(np.concatenate([left[k] for k in (0, *more)])) if more else left[0]
            rest = [left[k] for k in others if k not in more] + list(left[MAX_PARTS:])
            for atom in plain if len(part) < out else ():
                if len(atom.columns) == len(part) and _goes_with(atom, [before for before, _ in chosen]):
                    yield from fill([*chosen, (atom, part)], rest)

    yield from itertools.islice(fill([], parts), MAX_FILLINGS)


def of_one_expert(atoms: Sequence[Atom], out: int) -> Iterator[list[tuple[Atom, Any]]]:
    """Yield the ways to fill a fused matrix with the matrices that several stacks have at one place: gate and up of an expert."""
    at: dict[Any, list[Atom]] = {}
    for atom in atoms:
        if atom.order[0] == "index" and len(atom.columns) < out:
            at.setdefault((atom.order[2], layout(atom.order)), []).append(atom)
    for of in at.values():
        for count in IN_TURNS:
            for chosen in itertools.permutations(of, count):
                if {len(atom.columns) * count for atom in chosen} == {out}:
                    yield _below_each_other(chosen)
                    turns = np.arange(out).reshape(-1, count).T
                    yield list(zip(chosen, turns, strict=True))


def _evenly_spaced(atoms: Sequence[Atom], out: int) -> Iterator[list[tuple[Atom, Any]]]:
    """Yield the ways to fill a fused matrix with every n-th leaf: the queries of each head, of a list of heads with all their layers.

    One leaf may stand apart: the values that all heads share.
    """
    wide = sorted((atom for atom in atoms if atom.order[0] == "axes"), key=lambda atom: atom.meeting.index)
    for width in {len(atom.columns): None for atom in wide}:
        of_width = [atom for atom in wide if len(atom.columns) == width]
        count, rest = divmod(out, width)
        if rest or not 2 < count <= len(of_width) <= MAX_SPACED:
            continue
        others = [[*of_width[:k], *of_width[k + 1 :]] for k in range(len(of_width)) if (len(of_width) - 1) % count == 0]
        exact = [of for of in (of_width, *others) if len(of) % count == 0]
        steps = [(of, len(of) // count) for of in exact] + [(of_width, n) for n in range(1, len(of_width) // count + 1)]
        for of, step in steps:
            for start in range(len(of) - step * (count - 1)):
                chosen = of[start::step][:count]
                if all(_goes_with(atom, chosen[:k]) for k, atom in enumerate(chosen)):
                    yield _below_each_other(chosen)


def _below_each_other(atoms: Sequence[Atom]) -> list[tuple[Atom, Any]]:
    ends = np.cumsum([len(atom.columns) for atom in atoms])
    return [(atom, slice(end - len(atom.columns), end)) for atom, end in zip(atoms, ends, strict=True)]


def _sums(widths: Collection[int], limit: int) -> list[set[int]]:
    """Return what at most 0, 1, ... parts of these widths can add up to, within a limit."""
    found = [{0}]
    while len(found) < MAX_PARTS:
        more = {total + width for total in found[-1] for width in widths}
        found.append({total for total in found[-1] | more if total <= limit})
    return found


def in_turns(atoms: Sequence[Atom], out: int) -> Iterator[list[tuple[Atom, Any]]]:
    """Yield the ways to fill a fused matrix head by head: queries, keys and values of the first head, then those of the second.

    Leaves without heads alternate row by row.
    """
    headed = [atom for atom in atoms if atom.order[0] == "axes" and isinstance(atom.order[-1], int)]
    ways = itertools.chain.from_iterable(
        itertools.permutations(headed, count) for count in IN_TURNS if count <= len(headed)
    )
    for chosen in itertools.islice(ways, MAX_FILLINGS):
        size = len(chosen[0].columns)
        head = chosen[0].product.value.shape[1 + chosen[0].order[-1]] if len(chosen[0].order) > 2 else 1
        if size * len(chosen) == out and all(_goes_with(atom, chosen[:k]) for k, atom in enumerate(chosen)):
            rows = np.arange(out).reshape(-1, len(chosen), head)
            if all(atom.product.value.shape == chosen[0].product.value.shape for atom in chosen):
                yield [(atom, rows[:, k].ravel()) for k, atom in enumerate(chosen)]


def turned(atoms: Sequence[Atom], out: int, heads: Collection[int]) -> Iterator[list[tuple[Atom, Any]]]:
    """Yield the ways to fill a fused matrix with queries and keys that RoPE turns, and values that it does not, below each other or head by head.

    Args:
        atoms: the nearest first.
        heads: sizes of the axis into which the target splits the result.
    """
    for count in IN_TURNS:
        of_width = [atom for atom in atoms if len(atom.columns) * count == out]
        if not of_width:
            continue  # as where `count` does not divide the rows
        plain = [atom for atom in of_width if _is_plain(atom)]
        ways = [atom.order for atom in of_width if atom.rope]
        lies: list[list[Any]] = [
            [slice(k * out // count, (k + 1) * out // count) for k in range(count)],
            *(
                [np.arange(out).reshape(-1, count, head)[:, k].ravel() for k in range(count)]
                for head in heads
                if 1 < head < out // count and out // count % head == 0
            ),
        ]
        in_orders = itertools.islice(itertools.permutations(plain, count), MAX_STEPS)
        fitting = (x for x in in_orders if all(_goes_with(atom, x[:k]) for k, atom in enumerate(x)))
        for chosen in itertools.islice(fitting, MAX_TURNED):
            for way in dict.fromkeys(map(_turn, ways)):
                last = [
                    x for atom in chosen[:-1] for x in of_width if x.rope and _turn(x.order) == way and _same(x, atom)
                ]
                if len(last) == count - 1:
                    yield from (list(zip([*last, chosen[-1]], parts, strict=True)) for parts in lies)


def _is_plain(atom: Atom) -> bool:
    """Whether the columns of a leaf, or some of them, are laid out as they are."""
    return not atom.rope and atom.order[0] in ("axes", "block", "every") and atom.order[-1] not in ("halves", "pairs")


def _turn(order: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return how pairs were reordered, without where the columns lie."""
    return order[-3:] if "heads" in order else order[-1:]


def _same(one: Atom, other: Atom) -> bool:
    """Whether two matrices of the source are the same columns of one leaf, in any order."""
    return one.product is other.product and np.array_equal(np.sort(one.columns), np.sort(other.columns))


def _goes_with(atom: Atom, chosen: Sequence[Atom], again: bool = False) -> bool:
    """Whether a leaf may be a further part: another one (or the same again), and laid out as the others of its shape."""
    for other in chosen:
        if atom is other and again:
            continue
        if atom.product is other.product and np.intersect1d(atom.columns, other.columns).size:
            return False
        same_shape = atom.product.value.shape == other.product.value.shape
        if same_shape and layout(atom.order) != layout(other.order) and not _turned_apart(atom, other):
            return False
    return True


def _turned_apart(one: Atom, other: Atom) -> bool:
    """Whether RoPE turns one of two leaves, and the other one, as the values beside queries and keys, is laid out as it is."""
    plain, turned = sorted((one, other), key=lambda atom: bool(atom.rope))
    return _is_plain(plain) and bool(turned.rope)


def layout(order: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an order without the index at which an axis is cut."""
    if order[0] == "taken":
        return order[:1]
    if order[0] == "block":
        return order[0], *order[2:]
    if order[0] == "every":
        return *order[:3], *order[4:]
    return (*order[:2], *order[3:]) if order[0] == "index" else order


def lies(part: slice | Array) -> tuple[int, ...]:
    """Return which columns of a fused matrix a leaf fills, where others lie between them; none if its columns lie side by side."""
    return () if isinstance(part, slice) else tuple(part.tolist())


def place(order: tuple[Any, ...], number: int = 0) -> tuple[int, ...]:
    """Return the index at which axes are cut, the first one from the number of a matrix on; none if none is."""
    if order[0] == "block":
        return (order[1] - number * order[2],)
    if order[0] == "index":
        first, *rest = order[2]
        return (first - number, *rest)
    return order[1:] if order[0] == "taken" else ()
