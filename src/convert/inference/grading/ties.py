"""Whether fresh weights and inputs tell columns apart that the first ones made equal.

A unit that is zero for every row, behind a ReLU, is such a column: the next draw has others. Where a program repeats one number for several
elements of a parameter, as the steps of Mamba for the elements of ``A_log``, no draw makes the columns differ, and what follows tells the
elements apart.

The columns are made equal, and one of them is moved. If an order of them gave the same outputs, the outputs would be the same whichever of
those that change places is moved. Where any two of them give different outputs, in one draw or another, there is no such order. Of many
columns the derivatives are compared, which one run gives for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.inference.derivation import Grade, Part, Role, Site, Tensor, Tie
from convert.inference.grading.proof import weights
from convert.inference.grading.symmetric import in_the_other_order
from convert.inference.meetings.columns import pair
from convert.inference.meetings.patches import patches_of
from convert.inference.meetings.sites import parameter_operands, products, role_of
from convert.programs.program import Operation, Program

Array = np.ndarray[Any, np.dtype[Any]]
MAX_COLUMNS = 256  # of a tie; each of them is one run of the module. The derivatives of more are compared
SAMPLE = 8  # columns whose derivatives are compared with runs: that of a maximum of equal numbers is not unique
SMALL = 1e-4  # step of such a run, relative
AGREES = 1e-2  # difference of a derivative and a run, relative to the largest derivative
DISTINCT = 1e-9  # difference of two changes, relative to the largest
ROUNDING = 1e-13  # of the outputs: a smaller change is none


def told_apart(
    tensors: Sequence[Tensor],
    target: Program,
    fresh: Sequence[Program],
    outputs: Callable[[Mapping[str, Array], Program], Array],
    slopes: Callable[[Mapping[str, Array], Program, Array], Mapping[str, Array] | None],
) -> tuple[Tensor, ...]:
    """Return the tensors; those whose ties the fresh draws resolve are derived, and those whose tied columns are equal for all inputs interchangeable.

    Args:
        tensors: whose outputs were proven to be those of every fresh draw.
        target: the record of the first run.
        fresh: runs of the source with other weights and inputs.
        outputs: that weights of the target give for the inputs of a run (`proof.outputs`), in one row.
        slopes: their derivatives along a direction (`proof.slopes`).
    """
    known: dict[Any, bool] = {}
    found: list[Tensor] = []
    for tensor in tensors:
        for tie in tensor.ties:
            if (key := _key(tie)) not in known:
                columns = elements_of(target, tie)
                moved = _Moved(tensors, target, columns, outputs, slopes)
                as_one = _meet_one(tensor, columns[:2], target, tensors, fresh)
                known[key] = not as_one and _all_differ(moved, fresh)
        made: Tensor | None = tensor
        for tie in (tie for tie in tensor.ties if not known[_key(tie)]):
            if made is None:
                break
            way = 1 + max((way for one in (*tensors, *found, made) for way in one.alternatives), default=0)
            made = in_the_other_order(made, target, tie, elements_of(target, tie), way)
        if tensor.grade is Grade.TIED and made is not None:
            grade = Grade.INTERCHANGEABLE if made.alternatives else Grade.DERIVED
            tensor = replace(made, grade=grade, ties=())
        found.append(tensor)
    return tuple(found)


def told_by_some(tensor: Tensor, first: Program, fresh: Sequence[Program]) -> bool:
    """Whether fresh runs distinguish columns that the first one makes equal, or make others equal: another attempt is worth it."""
    for tie in tensor.ties:
        sites = {p.evidence.source.index for p in tensor.parts if p.evidence.source and _is_at(p.evidence.target, tie)}
        for index, program in itertools.product(sites, fresh):
            operation = program.operations[index]
            sides = parameter_operands(operation)
            if role_of(operation) is not Role.PRODUCT or not sides:
                return True
            if _tied(operation, sides[0]) != _tied(first.operations[index], sides[0]):
                return True
    return False


def told_by_others(tensors: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Return the tensors without the ties that derivations with other draws have not, where these found the same parts.

    Args:
        tensors: of a derivation.
        others: of further ones, proven as this is.
    """
    found = []
    for tensor in tensors:
        same = [one for more in others for one in more if one.name == tensor.name and _same_parts(one, tensor)]
        tied = set(_pairs(tensor.ties)).intersection(*(_pairs(one.ties) for one in same))
        ties = tuple(tie for tie in tensor.ties if not tied.isdisjoint(_pairs([tie])))
        resolved = tensor.grade is Grade.TIED and not ties
        grade = Grade.INTERCHANGEABLE if tensor.alternatives else Grade.DERIVED
        found.append(replace(tensor, grade=grade if resolved else tensor.grade, ties=ties))
    return tuple(found)


def _pairs(ties: Iterable[Tie]) -> set[tuple[int, int]]:
    """Return the pairs of columns that are tied, at any site."""
    return {found for tie in ties for found in itertools.combinations(sorted(tie.columns), 2)}


def _same_parts(one: Tensor, other: Tensor) -> bool:
    """Whether two derivations make a tensor of the same elements in the same way."""
    return one.grade is not Grade.OPEN and _said(one) == _said(other)


def _said(tensor: Tensor) -> list[Any]:
    return [
        (part.leaf, part.leaves, part.arithmetic, part.factor, part.elements.tolist(), part.positions.tolist())
        for part in tensor.parts
    ]


def _tied(operation: Operation, side: int) -> list[tuple[int, ...]]:
    """Return which columns of the data are equal, for each product of an operation."""
    columns = [product.columns for product in products([operation], side)]
    return [() if pairing is None else tuple(pairing.tied.tolist()) for pairing in map(pair, columns, columns)]


def _is_at(site: Site, tie: Tie) -> bool:
    return (site.index, site.operand) == (tie.site.index, tie.site.operand)


def _key(tie: Tie) -> Any:
    return tie.columns, tie.site.index, tie.site.operand


def numbered_as_recorded(tensors: Sequence[Tensor], in_record: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the tensors with the sites of the target's record, where the search has other operations between them (`Search.in_record`)."""
    if not in_record or list(in_record) == list(range(len(in_record))):
        return tuple(tensors)

    def at(site: Site) -> Site:
        return replace(site, index=in_record[site.index])

    def part(of: Part) -> Part:
        return replace(of, evidence=replace(of.evidence, target=at(of.evidence.target)))

    return tuple(
        replace(
            tensor,
            parts=tuple(map(part, tensor.parts)),
            ties=tuple(replace(tie, site=at(tie.site)) for tie in tensor.ties),
        )
        for tensor in tensors
    )


def elements_of(target: Program, tie: Tie) -> list[Array]:
    """Return the numbers of the target's elements that meet each of the columns; none where that is not known."""
    operation, side = target.operations[tie.site.index], tie.site.operand
    if side is None:
        return []
    role, elements = role_of(operation), operation.operands[side].elements
    if role is Role.PRODUCT:
        groups = list(products([operation], side))
        if len(groups) != 1:
            return []
        return [np.concatenate([n[k].ravel() for n in groups[0].numbers]) for k in tie.columns]
    patches = patches_of(operation, side)
    if (
        patches is not None
        and not patches.transposed
        and elements[0].size > elements[0].shape[0] * elements[0].shape[1]
    ):
        return []  # its columns may be those of its channels, or of its patches
    if role is Role.CONVOLUTION and len(elements) == 1 and int(operation.settings.get("groups", 1)) == 1:
        axis = 0 if operation.settings.get("transposed") else 1
        return [np.take(elements[0], k, axis).ravel() for k in tie.columns]
    if role in (Role.SCALE, Role.SHIFT) and len(elements) == 1:
        numbers = np.unique(elements[0])
        return list(numbers[numbers >= 0][list(tie.columns), None])
    return []


def _meet_one(
    tensor: Tensor, columns: Sequence[Array], target: Program, tensors: Sequence[Tensor], fresh: Sequence[Program]
) -> bool:
    """Whether columns of a tensor meet one number, in each product of the source that takes their leaf, in every fresh run.

    The source's outputs are then the same whichever is moved, and so are the module's, which need not run to show it.
    """
    elements = np.concatenate([np.zeros(0, int), *columns]) - target.first_element[tensor.name]
    here = [(part, part.positions[np.isin(part.elements, elements)]) for part in tensor.parts if part.leaf]
    moved = {part.leaf: np.concatenate([at for other, at in here if other.leaf == part.leaf]) for part, _ in here}
    others = [part for other in tensors if other is not tensor for part in other.parts]
    if sum(map(len, moved.values())) != len(elements) or any(
        part.leaves or np.isin(part.positions, moved.get(part.leaf, [])).any() for part in others
    ):
        return False
    return all(_meets_one(leaf, at, source) for leaf, at in moved.items() if len(at) for source in fresh)


def _meets_one(leaf: str, positions: Array, source: Program) -> bool:
    """Whether the data meets elements of a leaf in products only, each with the same number in all columns that meet them."""
    numbers = source.first_element[leaf] + positions
    for operation in source.operations:
        for side in parameter_operands(operation):
            operand = operation.operands[side]
            if leaf not in operand.leaves or (operand.elements and not np.isin(operand.elements, numbers).any()):
                continue
            if role_of(operation) is not Role.PRODUCT or not operand.elements:
                return False
            for product in products([operation], side):
                rows = [np.isin(factor, numbers).reshape(len(factor), -1).any(1) for factor in product.numbers]
                met = product.rows[0][:, np.any(rows, 0)]
                if (met != met[:, :1]).any():
                    return False
    return True


def _all_differ(moved: _Moved, fresh: Sequence[Program]) -> bool:
    """Whether any two of the columns change the outputs differently in one of the runs."""
    total = len(moved.columns)
    if total < 2 or len({len(column) for column in moved.columns}) > 1:
        return False
    for count in (
        (2, total) if total <= MAX_COLUMNS else (total,)
    ):  # most that no run tells apart are all equal, and two of them show it
        together = [np.arange(count)]
        for source in fresh:
            found = [(group, moved.changes(group, source)) for group in together]
            if any(change is None for _, change in found):
                return False
            together = [part for group, change in found if change is not None for part in _equal_changes(group, change)]
        if together:
            return False
    return True


def _equal_changes(group: Array, change: Array) -> Iterator[Array]:
    """Yield the parts of a group whose members make the same change of the outputs; none for a member that has one of its own."""
    order = np.argsort(change, kind="stable")
    borders = np.flatnonzero(np.diff(change[order]) > DISTINCT * np.abs(change).max()) + 1
    yield from (part for part in np.split(group[order], borders) if len(part) > 1)


@dataclass(frozen=True)
class _Moved:
    """The columns of a tie, of which one at a time is moved where all are equal.

    Attributes:
        tensors: of the derivation.
        target: the record of the first run.
        columns: numbers of the target's elements.
        outputs, slopes: as in `told_apart`.
    """

    tensors: Sequence[Tensor]
    target: Program
    columns: Sequence[Array]
    outputs: Callable[[Mapping[str, Array], Program], Array]
    slopes: Callable[[Mapping[str, Array], Program, Array], Mapping[str, Array] | None]

    def changes(self, group: Array, source: Program) -> Array | None:
        """Return how much the outputs change, projected on one direction, for each column of a group; None where that is not known."""
        numbers = np.stack(self.columns)  # [column, element]
        flat = _flat(self.target, weights(self.tensors, source))
        flat[numbers] = flat[numbers].mean(0)
        rng = np.random.default_rng(0)
        step = rng.normal(size=numbers.shape[1]) * np.abs(flat[numbers[0]]).mean()
        before = self._made(flat, source)
        direction: Array = np.asarray(rng.normal(size=before.shape))

        def change(k: int, size: float = 1.0) -> float:
            moved = flat.copy()
            moved[numbers[k]] += size * step
            return float(direction @ (self._made(moved, source) - before))

        if len(self.columns) <= MAX_COLUMNS:
            made: Array = np.nan_to_num(np.array([change(k) for k in group]), posinf=0, neginf=0)
            made[np.abs(made) < ROUNDING * np.abs(direction) @ np.abs(before)] = 0
            return made
        slopes = self.slopes(self._state(flat), source, direction)
        if slopes is None:
            return None
        found: Array = (_flat(self.target, slopes)[numbers[group]] * step).sum(1)
        largest = np.abs(found).max()
        found[np.abs(found) < ROUNDING * largest] = 0
        some = rng.choice(len(group), min(SAMPLE, len(group)), replace=False)
        agree = all(abs(change(group[k], SMALL) / SMALL - found[k]) <= AGREES * largest for k in some)
        return found if agree and np.isfinite(found).all() else None

    def _made(self, flat: Array, source: Program) -> Array:
        return self.outputs(self._state(flat), source)

    def _state(self, flat: Array) -> dict[str, Array]:
        """Return the weights whose elements these are."""
        shapes = {name: value.array.shape for name, value in self.target.parameters.items()}
        state = {
            name: flat[start : start + int(np.prod(shapes[name]))].reshape(shapes[name])
            for name, start in self.target.first_element.items()
        }
        for tensor in self.tensors:
            state.update(dict.fromkeys(tensor.also, state[tensor.name]))
        return state


def _flat(target: Program, state: Mapping[str, Array]) -> Array:
    """Return the elements of all parameters, in the order of their numbers."""
    return np.concatenate([state[name].ravel() for name in target.first_element])
