"""The axes of the two leaves of a LoRA pair, from the equation of the weight and from how each library makes pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_letters

from convert.core.einsum import Projection, parse_projection
from convert.core.tensor_spec import TensorSpec
from convert.layers.low_rank import Product
from convert.planning.adapters.names import Writer
from convert.planning.low_rank_source import Form


@dataclass(frozen=True)
class PairForm:
    """The axes of a pair, and its equation ``X,A,B->Y``."""

    product: Product
    forms: tuple[Form, Form]
    rank: int


@dataclass(frozen=True)
class _Candidate:
    """How a library makes a pair: the letters of each axis as stored, several where it flattens them into one.

    Attributes:
        alone: letter of `second` -> the letter of the weight that gives its size: an axis that only B has, over which the source sums.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    rank: str
    alone: tuple[tuple[str, str], ...] = ()

    def sizes(self, given: dict[str, int]) -> dict[str, int]:
        return {**given, **{letter: given[of] for letter, of in self.alone}}


def pair_form(
    weight: Projection, stacked: Sequence[int], base: TensorSpec, first: TensorSpec, second: TensorSpec, writer: Writer
) -> PairForm:
    """Find the axes of a pair.

    Args:
        weight: the equation of the weight, with a letter for each axis as stored.
        stacked: axes of the weight that enumerate layers.
        base, first, second: of the weight and of A and B.

    Raises:
        ValueError: the shapes are none that the library makes; the text says which they could be.
    """
    own = [n for k, n in enumerate(base.shape) if k not in stacked]
    given = dict(zip(weight.weight, own, strict=True))
    layers = [base.shape[axis] for axis in stacked]
    wanted = []
    for candidate in _candidates(weight, writer):
        sizes = candidate.sizes(given)
        for places in dict.fromkeys((tuple(stacked), tuple(range(len(stacked))))):
            shapes = [
                _shape(groups, sizes, candidate.rank, places, layers) for groups in (candidate.first, candidate.second)
            ]
            wanted.append(shapes)
            ranks = [_rank(shape, spec.shape) for shape, spec in zip(shapes, (first, second), strict=True)]
            if None in ranks or ranks[0] != ranks[1] or ranks[0] == 0:
                continue
            sizes[candidate.rank] = rank = ranks[0] or 0
            forms = [_form(groups, sizes, places, layers) for groups in (candidate.first, candidate.second)]
            return PairForm(_product(weight, candidate), (forms[0], forms[1]), rank)
    shown = (f"({_shown(a)}) and ({_shown(b)})" for a, b in wanted)
    raise ValueError(" or ".join(dict.fromkeys(shown)) + ", with one number for the rank r")


def pair_shapes(
    weight: Projection, stacked: Sequence[int], base: TensorSpec, rank: int, writer: Writer, *, flat: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the pair that a library makes for a weight.

    Args:
        flat: whether it makes it for a dot_general, whose axes it flattens.

    Raises:
        ValueError: it makes none.
    """
    own = [n for k, n in enumerate(base.shape) if k not in stacked]
    layers = [base.shape[axis] for axis in stacked]
    candidates = list(_candidates(weight, writer))
    last_two = tuple(weight.weight[-2:])
    matrix = len(last_two) == 2 and last_two[0] in weight.inputs and last_two[1] in weight.outputs
    if not candidates or (writer is Writer.OPENPI and not matrix):
        raise ValueError(f"{writer.value} makes no pair for a weight of {weight.equation}")
    chosen = candidates[-1 if flat else 0]
    sizes = chosen.sizes(dict(zip(weight.weight, own, strict=True)))
    first, second = (
        tuple(rank if n is None else n for n in _shape(groups, sizes, chosen.rank, stacked, layers))
        for groups in (chosen.first, chosen.second)
    )
    return first, second


def _candidates(weight: Projection, writer: Writer) -> Iterator[_Candidate]:
    letters = weight.weight
    rank, other = [x for x in ("R", "M", *ascii_letters) if x not in weight.equation][:2]
    outputs = tuple(x for x in letters if x in weight.outputs)
    batch = tuple(x for x in letters if x in weight.batch)
    inputs = tuple(x for x in letters if x in weight.inputs)
    if (
        writer is Writer.OPENPI and len(letters) > 1
    ):  # A has R in place of the last axis of the weight, B in place of the one before
        first = tuple(letters[:-1] + rank)
        second = [*letters[:-2], rank, letters[-1]]
        summed = [k for k, x in enumerate(letters[:-2]) if x in inputs]  # A is summed over them, and B a second time
        if len(summed) < 2:
            alone = tuple((other, letters[k]) for k in summed)
            second = [other if k in summed else x for k, x in enumerate(second)]
            yield _Candidate(first, tuple(second), rank, alone)
        return
    if writer is Writer.QWIX or not batch:  # an einsum: A has all axes that the input has, too
        yield _Candidate((*(x for x in letters if x in inputs + batch), rank), (rank, *outputs), rank)
    if (
        writer is Writer.QWIX
    ):  # dot_general: the axes that it contracts, and those that remain, are each flattened into one
        flat = [("".join(group),) if group else ("",) for group in (inputs, outputs)]
        yield _Candidate((*batch, *flat[0], rank), (*batch, rank, *flat[1]), rank)
    if writer is not Writer.QWIX and batch:
        yield _Candidate((*(x for x in letters if x in inputs + batch), rank), (rank, *outputs), rank)
        yield _Candidate((*batch, *inputs, rank), (*batch, rank, *outputs), rank)


def _shape(
    groups: Sequence[str], sizes: dict[str, int], rank: str, places: Sequence[int], layers: Sequence[int]
) -> list[int | None]:
    """Return the shape of a leaf; None for the rank."""
    shape: list[int | None] = [None if group == rank else math.prod(sizes[x] for x in group) for group in groups]
    for axis, count in zip(places, layers, strict=True):
        shape.insert(axis, count)
    return shape


def _rank(wanted: Sequence[int | None], shape: Sequence[int]) -> int | None:
    """Return the rank where the shape is the wanted one."""
    if len(wanted) != len(shape) or any(a not in (None, b) for a, b in zip(wanted, shape, strict=True)):
        return None
    return shape[list(wanted).index(None)]


def _form(groups: Sequence[str], sizes: dict[str, int], places: Sequence[int], layers: Sequence[int]) -> Form:
    letters = "".join(groups)
    if len(letters) == len(groups):
        return Form(letters, tuple(places))
    own = list(groups)
    for axis in places:
        own.insert(axis, "")
    axes: list[int] = []
    stacked = []
    for k, group in enumerate(own):
        if k in places:
            stacked.append((tuple(places).index(k), len(axes)))
            axes.append(layers[tuple(places).index(k)])
        else:
            axes += [sizes[x] for x in group]
    return Form(letters, tuple(axis for _, axis in sorted(stacked)), tuple(axes), tuple(places))


def _product(weight: Projection, candidate: _Candidate) -> Product:
    x, _, rest = weight.equation.partition(",")
    first, second = "".join(candidate.first), "".join(candidate.second)
    return Product(f"{x},{first},{second}->{rest.partition('->')[2]}", first, second, parse_projection(weight.equation))


def _shown(shape: Sequence[int | None]) -> str:
    return ", ".join("r" if n is None else str(n) for n in shape)
