"""Sums of leaves as the rules say them: ``x/bias + h/bias`` is a leaf to all that writes rules, with the axes of its terms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.path_pattern import escape_path
from convert.drafting.like.module_patterns import common_pattern
from convert.inference.derivation import Arithmetic, Derivation, Part
from convert.layers.leaf_sums import PLUS, TIMES_J, is_number

Array = np.ndarray[Any, np.dtype[Any]]
EXACT = 1e-12  # relative and absolute: a leaf with a number added, and multiplied
FEWEST = 3  # elements that show a number and a factor
FACTORS = 4  # of the parts of one leaf


def with_sums(derivation: Derivation) -> Derivation:
    """Return a derivation in which a sum of leaves, or of a leaf and a number, that a rule can say is a leaf.

    A rule adds leaves of one shape, element by element, each once; one leaf that is added several times is multiplied.
    """
    sums: dict[str, tuple[int, ...]] = {}
    weights = derivation.weights
    tensors = []
    for tensor in derivation.tensors:
        parts = tuple(one for part in tensor.parts for one in _of_one_leaf(_as_leaf(part, derivation.leaves), weights))
        sums |= {part.leaf: _shape(part, derivation.leaves) for part in parts if PLUS in part.leaf}
        tensors.append(replace(tensor, parts=parts))
    return replace(derivation, tensors=tuple(tensors), leaves={**derivation.leaves, **sums})


def _as_leaf(part: Part, shapes: Mapping[str, tuple[int, ...]]) -> Part:
    names = list(dict.fromkeys(leaf for leaf, _ in part.terms))
    one_shape = len({shapes[leaf] for leaf in names}) == 1 and len(names) in (1, len(part.terms))
    if not one_shape or any(not np.array_equal(at, part.terms[0][1]) for _, at in part.terms):
        return _of_other_axes(part, shapes)
    times, positions = float(len(part.terms) // len(names)), part.terms[0][1]
    alone = replace(part, leaf=PLUS.join(names), positions=positions, values=None, terms=())
    return replace(alone, arithmetic=Arithmetic.SAME, factor=times, number=part.number / times)


def _shape(part: Part, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a sum that a part is made of."""
    sizes = {
        place: size
        for leaf, places in zip(part.leaf.split(PLUS), part.term_axes, strict=False)
        for place, size in zip(places, shapes[leaf], strict=True)
        if place >= 0
    }
    return tuple(sizes[place] for place in sorted(sizes)) or shapes[part.leaves[0]]


def _of_other_axes(part: Part, shapes: Mapping[str, tuple[int, ...]]) -> Part:
    """Return a part that adds up leaves with different axes, each whole, as one of their sum; the part itself where it is none."""
    columns: dict[bytes, Array] = {}
    axes = []
    for leaf, at in part.terms:
        digits = np.unravel_index(at, shapes[leaf]) if shapes[leaf] else ()
        wide = [size > 1 for size in shapes[leaf]]
        columns |= {one.tobytes(): one for one, several in zip(digits, wide, strict=True) if several}
        places = (
            list(columns).index(one.tobytes()) if several else -1 for one, several in zip(digits, wide, strict=True)
        )
        axes.append(tuple(places))
    sizes = [int(column.max()) + 1 for column in columns.values()]
    names = [leaf for leaf, _ in part.terms]
    if not axes or math.prod(sizes) != len(part.elements) or len(set(names)) < len(names):
        return part
    whole = all(
        sizes[place] == size
        for leaf, of in zip(names, axes, strict=True)
        for place, size in zip(of, shapes[leaf], strict=True)
        if place >= 0
    )
    positions = np.ravel_multi_index(list(columns.values()), sizes)
    if not whole or len(np.unique(positions)) < len(positions):
        return part
    alone = replace(part, leaf=PLUS.join(names), positions=positions, values=None, terms=(), term_axes=tuple(axes))
    return replace(alone, arithmetic=Arithmetic.SAME)


def _of_one_leaf(part: Part, weights: Mapping[str, Array]) -> list[Part]:
    """Return a part that the source computes of one leaf, element by element, as parts with a number that it adds and one that it multiplies by, or with factors of their own."""
    if part.arithmetic is not Arithmetic.COMPUTED or len(part.leaves) != 1 or part.values is None:
        return [part]
    leaf = np.ravel(weights.get(part.leaves[0], np.zeros(0)))
    alone = replace(part, leaf=part.leaves[0], leaves=(), values=None, arithmetic=Arithmetic.SAME)
    if beside := _beside_zeros(part.values, leaf):
        zeros, at, positions = beside
        nothing = replace(part, elements=part.elements[zeros], positions=positions[:0], leaves=(), values=None)
        nothing = replace(nothing, arithmetic=Arithmetic.CONSTANT, factor=0.0)
        return [nothing, replace(alone, elements=part.elements[at], positions=positions)]
    if len(part.positions) != len(part.values) or len(part.values) < FEWEST or part.positions.max() >= leaf.size:
        return [part]
    found = leaf[part.positions]
    low, high = np.argmin(found), np.argmax(found)
    if found[low] == found[high]:
        return [part]
    factor = _rounded((part.values[high] - part.values[low]) / (found[high] - found[low]))
    number = _rounded(part.values[0] / factor - found[0]) if factor else 0.0
    if number and np.allclose((found + number) * factor, part.values, rtol=EXACT, atol=EXACT):
        return [replace(alone, factor=factor, number=number)]
    groups = _of_one_factor(part.values, found)
    return [
        replace(alone, elements=part.elements[at], positions=part.positions[at], factor=factor) for factor, at in groups
    ] or [part]


def _beside_zeros(values: Array, leaf: Array) -> tuple[Array, Array, Array] | None:
    """Return where values are zero and where they are those of a whole leaf, with the positions in it; None where they are anything else."""
    zero = values == 0
    if not zero.any() or zero.all() or np.count_nonzero(~zero) != leaf.size:
        return None
    order = np.argsort(leaf)
    at = np.flatnonzero(~zero)
    positions = order[np.searchsorted(leaf, values[at], sorter=order).clip(max=leaf.size - 1)]
    return (np.flatnonzero(zero), at, positions) if np.array_equal(leaf[positions], values[at]) else None


def _of_one_factor(values: Array, leaf: Array) -> list[tuple[float, Array]]:
    """Return the factors of the parts of a leaf, each with the places of its elements; nothing where they are many, or too few elements show one."""
    ratios = values / np.where(leaf == 0, np.nan, leaf)
    order = np.argsort(ratios)
    ends = np.flatnonzero(np.diff(ratios[order]) > EXACT * np.abs(ratios[order][1:])) + 1
    groups = [(_rounded(ratios[at[0]]), np.sort(at)) for at in np.split(order, ends)]
    shown = not np.isnan(ratios).any() and all(factor and len(at) >= FEWEST for factor, at in groups)
    return groups if shown and len(groups) <= FACTORS else []


def _rounded(number: float) -> float:
    """Return a number as people write it, where it is one up to rounding."""
    return float(f"{number:.12g}")


def terms_of(leaf: str) -> list[str]:
    """Return the leaves, or the patterns, that are added up, or have the parts of complex numbers."""
    return [term.removeprefix(TIMES_J) for term in leaf.split(PLUS)]


def _sign(leaf: str) -> str:
    """Return what stands between the leaves, or the patterns, of a sum."""
    return f"{PLUS}{TIMES_J}" if f"{PLUS}{TIMES_J}" in leaf else PLUS


def are_alike(leaves: Iterable[str]) -> bool:
    """Whether leaves are sums of as many leaves each, so that one pattern may say them."""
    return len({(len(terms_of(leaf)), _sign(leaf)) for leaf in leaves}) <= 1


def escaped(leaf: str) -> str:
    """Return a pattern that matches only this leaf, or the sum of such patterns."""
    terms = terms_of(leaf)
    return _sign(leaf).join(rf"\{term}" if len(terms) > 1 and is_number(term) else escape_path(term) for term in terms)


def common_path(paths: Sequence[str], *, nested: bool = False) -> str | None:
    """Return the pattern of several paths, term by term where they are sums; None if there is none."""
    if not are_alike(paths):
        return None
    by_term = [terms_of(path) for path in paths]
    found = [common_pattern(list(terms), nested=nested) for terms in zip(*by_term, strict=True)]
    joined = [text for text in found if text is not None]
    return _sign(paths[0]).join(joined) if len(joined) == len(found) else None
