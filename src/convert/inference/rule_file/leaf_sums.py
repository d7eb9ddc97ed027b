"""Sums of leaves as the rules say them: ``x/bias + h/bias`` is a leaf to all that writes rules, with the axes of its terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from convert.core.path_pattern import escape_path
from convert.drafting.like.module_patterns import common_pattern
from convert.inference.derivation import Arithmetic, Derivation, Part
from convert.layers.leaf_sums import PLUS


def with_sums(derivation: Derivation) -> Derivation:
    """Return a derivation in which a sum of leaves that a rule can say is a leaf.

    A rule adds leaves of one shape, element by element, each once.
    """
    sums: dict[str, tuple[int, ...]] = {}
    tensors = []
    for tensor in derivation.tensors:
        parts = tuple(_as_leaf(part, derivation.leaves) for part in tensor.parts)
        sums |= {part.leaf: derivation.leaves[part.leaves[0]] for part in parts if PLUS in part.leaf}
        tensors.append(replace(tensor, parts=parts))
    return replace(derivation, tensors=tuple(tensors), leaves={**derivation.leaves, **sums}) if sums else derivation


def _as_leaf(part: Part, shapes: Mapping[str, tuple[int, ...]]) -> Part:
    names = [leaf for leaf, _ in part.terms]
    one_shape = len({shapes[leaf] for leaf in names}) == 1 and len(set(names)) == len(names)
    if not one_shape or any(not np.array_equal(at, part.terms[0][1]) for _, at in part.terms):
        return part
    return replace(
        part, leaf=PLUS.join(names), positions=part.terms[0][1], arithmetic=Arithmetic.SAME, values=None, terms=()
    )


def terms_of(leaf: str) -> list[str]:
    """Return the leaves, or the patterns, that are added up."""
    return leaf.split(PLUS)


def are_alike(leaves: Iterable[str]) -> bool:
    """Whether leaves are sums of as many leaves each, so that one pattern may say them."""
    return len({len(terms_of(leaf)) for leaf in leaves}) <= 1


def escaped(leaf: str) -> str:
    """Return a pattern that matches only this leaf, or the sum of such patterns."""
    return PLUS.join(map(escape_path, terms_of(leaf)))


def common_path(paths: Sequence[str], *, nested: bool = False) -> str | None:
    """Return the pattern of several paths, term by term where they are sums; None if there is none."""
    by_term = [terms_of(path) for path in paths]
    if len({len(terms) for terms in by_term}) > 1:
        return None
    found = [common_pattern(list(terms), nested=nested) for terms in zip(*by_term, strict=True)]
    joined = [text for text in found if text is not None]
    return PLUS.join(joined) if len(joined) == len(found) else None
