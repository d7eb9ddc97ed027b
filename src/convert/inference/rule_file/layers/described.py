"""The tensors that one rule makes, in the form that it describes: leaves one below another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.inference.derivation import NOT_REACHED, Arithmetic, Grade, Tensor
from convert.inference.rule_file.layers.fused import (
    alternating,
    below_each_other,
    in_turns,
    one_below_another,
    side_by_side,
)
from convert.inference.rule_file.layers.parametrized import LowRankWords, low_rank_words, main_leaf
from convert.inference.rule_file.layers.rule import NoWordsError, computed_from
from convert.inference.rule_file.layers.sources import (
    Shapes,
)
from convert.inference.rule_file.layers.ways import ways

Facts = Mapping[str, Mapping[str, Any]]  # tensor -> what the programs say of it


@dataclass(frozen=True)
class DescribedLayer:
    """The tensors that one rule makes, in the form that it describes: leaves one below another.

    Attributes:
        tensors: role -> tensor, the weight first.
        first: the first of them as the target has it.
        product: of two leaves, which the weight is, or has added.
        computed_from: the leaves beside the main one of a weight that the source computes; None: it computes none.
        turns: the rows of each leaf in a head or group, where leaves lie in turns.
        beside: how many leaves stand side by side, and along which axis; None: they do not.
        alternate: how many leaves of a table alternate along the last axis; 0: they do not.
    """

    tensors: Mapping[str, Tensor]
    first: Tensor
    product: LowRankWords | None = None
    computed_from: tuple[str, ...] | None = None
    turns: tuple[int, ...] | None = None
    beside: tuple[int, int] | None = None
    alternate: int = 0

    @property
    def grade(self) -> Grade:
        """The weakest of its tensors."""
        return max((tensor.grade for tensor in self.tensors.values()), key=list(Grade).index)

    @property
    def factors(self) -> set[float]:
        """The factors that its elements carry."""
        return {factor for tensor in self.tensors.values() for _, factor in ways(tensor)}


def known_tensors(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that leaves are the source of, the weight first.

    Raises:
        NoWordsError: one is not known, or only in part.
    """
    if any(tensor.not_reached for tensor in group.values()):
        raise NoWordsError(NOT_REACHED)
    ordered = sorted(group, key=lambda role: role != "weight")
    tensors = {role: group[role] for role in ordered if not group[role].is_constant}
    if not tensors:
        guessed = any(tensor.grade is Grade.OPEN for tensor in group.values())
        raise NoWordsError("nothing was found that fits" if guessed else "the source has no such parameter")
    if lacking := [tensor for tensor in tensors.values() if not tensor.parts]:
        raise NoWordsError(min(lacking, key=lambda tensor: tensor.unread).lack)
    for tensor in tensors.values():
        known = sum(len(part.elements) for part in tensor.parts)
        if known + tensor.unseen < (size := int(np.prod(tensor.shape))) and tensor.grade is Grade.OPEN:
            some = f"{size - known} of its {size} elements"
            raise NoWordsError(
                f"nothing was found that fits {some}"
                if tensor.guessed
                else f"{some} met nothing but zeros, or no row, in any run, so that no output shows them"
            )
    return tensors


def as_described(known: Mapping[str, Tensor], leaves: Shapes) -> DescribedLayer:
    """Return tensors in the form that rules describe.

    Raises:
        NoWordsError: the weight is computed from leaves of which none has its elements.
    """
    tensors = dict(known)
    first = next(iter(tensors.values()))
    product = low_rank_words(first, leaves)
    if product is not None:
        if product.base is not None:
            tensors["weight"] = product.base
        return DescribedLayer(tensors, first, product, ())
    if len(first.parts) > 1 and any(part.low_rank for part in first.parts):  # each part has a rule of its own
        return DescribedLayer(tensors, first)
    if any(part.arithmetic is Arithmetic.COMPUTED for part in first.parts):
        main = main_leaf(first, leaves)
        if main is None or "weight" not in tensors:
            raise NoWordsError(computed_from(first.nearest))
        tensors["weight"], others = main
        return DescribedLayer(tensors, first, None, others)
    turns = in_turns(first)
    if turns is not None:
        tensors = {role: below_each_other(tensor, turns) for role, tensor in tensors.items()}
    beside = side_by_side(first)
    alternate = 0 if beside else alternating(first)
    if beside or alternate:
        tensors = {"weight": one_below_another(first, *(beside or (alternate,)), alternate=bool(alternate))}
    return DescribedLayer(tensors, first, None, None, turns, beside, alternate)
