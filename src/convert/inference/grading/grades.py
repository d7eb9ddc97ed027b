"""Make the result of what the search found: the parts of each tensor, its grade, and its alternatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Choice, Piece
from convert.inference.candidates.source import Source, is_of_each_element
from convert.inference.derivation import MORE_ROWS, Arithmetic, Evidence, Grade, Part, Role, Tensor, Tie
from convert.inference.grading.alternatives import Way
from convert.inference.meetings.contracted import contracted_axes, summed_axes
from convert.inference.meetings.sites import Meeting, products, role_of, site_of
from convert.inference.open_tensors import by_likeness, is_candidate, stacked_along
from convert.inference.search import Search
from convert.inference.segment.segments import Segment, Solution
from convert.programs.divergence.graph import root
from convert.programs.program import Value

Array = np.ndarray[Any, np.dtype[Any]]
DIGITS = 12  # behind the point, of a number that a sum of leaves has besides
MOST_NUMBERS = 4  # of the parts of one bias
FEWEST = 3  # elements that show each
TOLD_BY = "inputs with other numbers in these columns, such as random ones,"


@dataclass
class _Found:
    """What was found about one tensor."""

    pieces: list[tuple[Choice, Piece, int]] = field(default_factory=list)
    alternatives: dict[int, tuple[Part, ...]] = field(default_factory=dict)
    ties: list[Tie] = field(default_factory=list)


def tensors(
    search: Search, names: Mapping[str, Sequence[str]], solved: bool, interchangeable: Sequence[Way]
) -> tuple[Tensor, ...]:
    """Return every tensor of the target with its parts and grade.

    Args:
        search: after `Search.solve`.
        names: name of each parameter of the target's record -> further names in the state_dict.
        solved: whether the outputs agree.
        interchangeable: other ways that give the same outputs with these weights and inputs.
    """
    found = {name: _Found() for name in names}
    inputs_repeat = any(_has_equal_columns(value.array) for value in search.target.inputs.values())
    for number, segment in enumerate(search.segments):
        for choice in segment.solution.choices:
            for piece in choice.candidate.pieces:
                found[piece.tensor].pieces.append((choice, piece, number))
            if choice.candidate.tied:
                site = site_of("target", choice.index, search.target.operations[choice.index], choice.side)
                tie = Tie(choice.candidate.tied, site, _told_by(search, choice, inputs_repeat))
                for tensor in {piece.tensor for piece in choice.candidate.pieces}:
                    found[tensor].ties.append(tie)
    for way, solutions in enumerate(interchangeable):
        for number, other in solutions:
            segment = search.segments[number]
            chosen = _values(segment.solution)
            for tensor, values in _values(other).items():
                if tensor not in chosen or not np.array_equal(values, chosen[tensor]):
                    pieces = [(c, p) for c in other.choices for p in c.candidate.pieces if p.tensor == tensor]
                    parts = tuple(part for c, p in pieces for part in _parts(search, c, p, segment))
                    found[tensor].alternatives[way] = (*found[tensor].alternatives.get(way, ()), *parts)
    target = search.target
    read = {value for operation in target.operations for value in operation.operands} | {*target.outputs.values()}
    return tuple(_tensor(search, name, names[name], found[name], solved, read) for name in names)


def _told_by(search: Search, choice: Choice, inputs_repeat: bool) -> str:
    """Return which inputs would tell columns apart that the first draw makes equal; empty: none."""
    if _repeats(search, choice):
        return ""
    return MORE_ROWS if _is_made_zero(search, choice) else TOLD_BY if inputs_repeat else ""


def _is_made_zero(search: Search, choice: Choice) -> bool:
    """Whether the tied columns are zero in all rows, as units behind a ReLU may be, and are no columns of an input."""
    operation = search.target.operations[choice.index]
    if role_of(operation) is not Role.PRODUCT:
        return False
    given = set(search.target.inputs.values())
    (met, *_) = operation.data
    if root(met, search.target.made_by) in given:
        return False
    found = replace(met, array=search.replay.value(met))  # with what is known of the weights
    operands = tuple(found if value is met else value for value in operation.operands)
    each = [rows for product in products([replace(operation, operands=operands)], choice.side) for rows in product.rows]
    return bool(each) and not any(rows[:, list(choice.candidate.tied)].any() for rows in each)


def _repeats(search: Search, choice: Choice) -> bool:
    """Whether the target itself gives several elements of a parameter the same number to meet."""
    operation = search.target.operations[choice.index]
    elementwise = role_of(operation) in (Role.SCALE, Role.SHIFT)
    return elementwise and operation.data[0].array.size < operation.results[0].array.size


def _has_equal_columns(array: Array) -> bool:
    """Whether two columns of an input are equal, as those of a constant one are; of others no numbers would help."""
    columns = array.reshape(-1, array.shape[-1]).T if array.ndim else array.reshape(1, 1)
    return len(np.unique(columns, axis=0)) < len(columns)


def _values(solution: Solution) -> dict[str, Array]:
    """Return what a solution makes of each tensor: (element, value), by element."""
    found: dict[str, list[Array]] = {}
    for choice in solution.choices:
        for piece in choice.candidate.pieces:
            found.setdefault(piece.tensor, []).append(np.stack([piece.elements.astype(float), piece.values]))
    return {name: (joined := np.concatenate(rows, 1))[:, np.argsort(joined[0])] for name, rows in found.items()}


def _tensor(
    search: Search, name: str, also: Sequence[str], found: _Found, solved: bool, read: Collection[Value]
) -> Tensor:
    target = search.target
    shape = target.parameters[name].array.shape
    parts = [part for choice, piece, k in found.pieces for part in _parts(search, choice, piece, search.segments[k])]
    exact = all(search.segments[k].exact for _, _, k in found.pieces)
    size = int(np.prod(shape))
    parts, unseen = _completed(search.source, _joined(parts), shape, size)
    candidates: tuple[str, ...] = ()
    if not parts or sum(len(part.elements) for part in parts) < size or not exact or not solved:
        grade = Grade.OPEN
        candidates = tuple(sorted({p.leaf for p in parts if p.leaf})) or _candidates(search, shape)
    elif found.ties:
        grade = Grade.TIED
    elif found.alternatives:
        grade = Grade.INTERCHANGEABLE
    else:
        grade = Grade.DERIVED
    return Tensor(
        name,
        tuple(shape),
        grade,
        tuple(sorted(parts, key=lambda part: int(part.elements.min()))),
        found.alternatives,
        tuple(found.ties),
        candidates,
        tuple(also),
        unseen,
        target.parameters[name] not in read,
        not exact,
    )


def with_more(known: Tensor, more: Tensor, source: Source) -> Tensor:
    """Return the parts of a tensor that two runs show, each with other elements of it.

    Args:
        known: what the first run shows; it is left out where the parts may be others.
        more: what the second shows, in which the first are known.
        source: of the second.
    """
    if known.guessed or not known.parts:
        return more
    size = int(np.prod(more.shape))
    parts, unseen = _completed(source, _joined([*known.parts, *more.parts]), more.shape, size)
    whole = sum(len(part.elements) for part in parts) == size and not more.guessed
    grade = Grade.OPEN if not whole else Grade.TIED if known.ties or more.ties else Grade.DERIVED
    return replace(
        more,
        grade=grade,
        parts=tuple(sorted(parts, key=lambda part: int(part.elements.min()))),
        ties=(*known.ties, *more.ties),
        candidates=() if whole else more.candidates,
        unseen=unseen,
        unread=known.unread and more.unread,
    )


def _candidates(search: Search, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the leaves that a tensor may be made of by their size, or by that of one part of them, such as one layer of a stack."""
    tensors = sum(value.array.shape == shape for value in search.target.parameters.values())
    used = {leaf: _used(search, leaf) for leaf in search.source.program.parameters}
    sizes = {leaf: value.array.shape for leaf, value in search.source.program.parameters.items()}
    begun = {leaf for leaf, elements in used.items() if elements.any()}
    free = {
        leaf: of
        for leaf, of in sizes.items()
        if is_candidate(shape, of, tensors) and not (used[leaf].all() if stacked_along(shape, of) else leaf in begun)
    }
    return tuple(by_likeness(shape, free, begun))


def _used(search: Search, leaf: str) -> Array:
    """Whether each element of a leaf is used."""
    start = search.source.program.first_element[leaf]
    return search.used[start : start + search.source.program.parameters[leaf].array.size] > 0


def _parts(search: Search, choice: Choice, piece: Piece, segment: Segment) -> Iterable[Part]:
    """Yield the parts of a piece: one for each leaf, in the order of the tensor."""
    source, operation = search.source, search.target.operations[choice.index]
    meeting = None if piece.meeting is None else _as_recorded(source, piece.meeting)
    site = None if meeting is None else meeting.site("source")
    refuted = tuple((_called(search, at), count) for at, count in sorted(segment.refuted.items()) if at >= choice.index)
    evidence = Evidence(
        role_of(operation),
        site,
        site_of("target", choice.index, operation, choice.side),
        _shared(search, operation.data[0]),
        choice.candidate.by,
        segment.tried,
        refuted,
    )
    order = np.argsort(piece.elements, kind="stable")
    elements, numbers = piece.elements[order], piece.numbers[order]
    nothing = np.zeros(0, int)
    if piece.arithmetic is Arithmetic.CONSTANT:
        yield Part(elements, "", nothing, piece.arithmetic, evidence, piece.factor)
        return
    if piece.arithmetic is Arithmetic.OWN:
        yield Part(elements, "", nothing, piece.arithmetic, evidence, values=piece.values[order])
        return
    if piece.arithmetic is Arithmetic.COMPUTED:
        assert piece.meeting is not None and piece.places is not None
        if piece.low_rank is not None:
            of, at, values = piece.low_rank, piece.places[order], piece.values[order]
            yield Part(elements, "", at, piece.arithmetic, evidence, 1.0, (), of.leaves, values, of)
            return
        leaves = tuple(sorted(piece.meeting.weight.leaves))
        contracted = summed_axes(piece.meeting)
        whole = Part(
            elements, "", piece.places[order], piece.arithmetic, evidence, 1.0, contracted, leaves, piece.values[order]
        )
        added = _added_up(source, piece)
        yield from [whole] if added is None else _by_leaves(source, whole, *(of[..., order] for of in added))
        return
    owner = np.searchsorted(source.starts, numbers, "right") - 1
    # a length of a weight norm stands there for each element of its row
    once = (np.diff(elements, prepend=-1) != 0) | (np.diff(numbers, prepend=-1) != 0)
    for k in dict.fromkeys(owner.tolist()):
        here = once & (owner == k)
        leaf, positions = source.names[k], numbers[here] - source.starts[k]
        yield Part(
            elements[here],
            leaf,
            positions,
            piece.arithmetic,
            evidence,
            piece.factor,
            () if meeting is None else contracted_axes(source.program, meeting, leaf),
        )


def _as_recorded(source: Source, meeting: Meeting) -> Meeting:
    """Return where the source uses a parameter; of a convolution of one tap that is a product in another place (`commuted`), the convolution."""
    own = source.program.operations[meeting.index]
    moved = role_of(own) is Role.CONVOLUTION and meeting.role is Role.PRODUCT
    return Meeting(meeting.index, (own,), 1, Role.CONVOLUTION) if moved else meeting


def _added_up(source: Source, piece: Piece) -> tuple[Array, Array] | None:
    """Return what is added up to each computed value: the numbers of the elements, a row for each term, and a number; None where it is no such sum."""
    assert piece.meeting is not None and piece.places is not None
    weight, places = piece.meeting.weight, piece.places
    if not is_of_each_element(weight) or places.max(initial=-1) >= weight.array.size:
        return None
    if not np.array_equal(weight.array.ravel()[places], piece.values):
        return None
    elements = np.stack([of.ravel()[places] for of in weight.elements])
    rest = np.round(piece.values - source.theta[elements].sum(0), DIGITS)
    few = len(np.unique(rest)) <= min(MOST_NUMBERS, len(rest) // FEWEST)
    return (elements, rest) if few or not rest.any() else None


def _by_leaves(source: Source, whole: Part, numbers: Array, added: Array) -> Iterable[Part]:
    """Yield the parts of a sum that add elements of the same leaves and the same number, in the order of the tensor."""
    assert whole.values is not None
    owners = np.searchsorted(source.starts, numbers, "right") - 1
    for of in dict.fromkeys(zip(*owners.tolist(), added.tolist(), strict=True)):
        here = np.equal(owners.T, of[:-1]).all(1) & (added == of[-1])
        terms = tuple((source.names[k], row[here] - source.starts[k]) for k, row in zip(of[:-1], numbers, strict=True))
        yield replace(
            whole,
            elements=whole.elements[here],
            positions=whole.positions[here],
            leaves=tuple(sorted({leaf for leaf, _ in terms})),
            values=whole.values[here],
            terms=terms,
            number=of[-1],
        )


def _called(search: Search, at: int) -> str:
    if at == len(search.target.operations):
        return "the outputs"
    operation = search.target.operations[at]
    return " ".join(word for word in (operation.name, operation.where) if word)


def _shared(search: Search, data: Value) -> str:
    """Return how the source calls the value that both programs have."""
    found = search.source.table.find(search.replay.value(data))
    if not found:
        return ""
    if found[0] < 0:
        return f"input {search.source.inputs[found[0]]}"
    operation = search.source.program.operations[found[0]]
    return " ".join(word for word in (operation.name, operation.where) if word)


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join the parts that are one stretch of a leaf, as rows of a table that two operations read, or one for each expert of a stack."""
    found: dict[Any, list[Part]] = {}
    seen = Counter[Any]()
    steps = [np.unique(part.positions - part.elements) if part.leaf else np.zeros(0, int) for part in parts]
    ways = [(part.leaf, part.arithmetic, part.factor) for part in parts]
    # A row of a stack may be added by a product with a constant; it is one of the rows that are added.
    plain = {
        (way, step[0])
        for part, way, step in zip(parts, ways, steps, strict=True)
        if not part.contracted and len(step) == 1
    }
    for number, (part, way, step) in enumerate(zip(parts, ways, steps, strict=True)):
        of, site = (way, part.contracted), part.evidence.target
        seen[of, site.index] += 1  # of one operation, each is a part of its own
        each = site.where, site.operation, len(part.elements), seen[of, site.index]
        product = part.leaf and part.evidence.role is Role.PRODUCT
        if len(step) == 1:
            stretch = way, step[0]
            key: Any = stretch if stretch in plain else (of, step[0])
        else:
            key = (of, each) if product else number
        found.setdefault(key, []).append(part)
    groups = (sorted(same, key=lambda part: bool(part.contracted)) for same in found.values())
    return [_join(same) if len(same) > 1 else same[0] for same in groups]


def _join(parts: Sequence[Part]) -> Part:
    elements = np.concatenate([part.elements for part in parts])
    order = np.argsort(elements)
    return replace(
        parts[0], elements=elements[order], positions=np.concatenate([part.positions for part in parts])[order]
    )


def _completed(source: Source, parts: list[Part], shape: Sequence[int], size: int) -> tuple[list[Part], int]:
    """Extend the pattern of the only part to elements that the run did not use, if the leaf has them; return how many."""
    if len(parts) != 1 or not parts[0].leaf or len(parts[0].elements) == size:
        return parts, 0
    (part,) = parts
    seen = len(np.unique(part.elements))  # an element of a scale stands there for each that it is multiplied with
    leaf = source.program.parameters[part.leaf].array.shape
    if tuple(s for s in leaf if s > 1)[1:] != tuple(s for s in shape if s > 1)[1:] or len(part.positions) < 2:
        return parts, 0
    step = part.positions - part.elements
    total = int(np.prod(leaf))
    if (step != step[0]).any() or step[0] < 0 or step[0] + size > total:
        return parts, 0
    every = np.arange(size)
    whole = Part(
        every, part.leaf, every + step[0], part.arithmetic, part.evidence, part.factor, part.contracted, part.leaves
    )
    return [whole], size - seen
