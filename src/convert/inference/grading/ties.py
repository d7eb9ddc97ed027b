"""Whether fresh weights and inputs tell columns apart that the first ones made equal: two of them are exchanged, and the outputs must differ.

A unit that is zero for every row, behind a ReLU, is such a column: the next draw has others.

Where a program repeats one number for several elements of a parameter, as the steps of Mamba for the elements of ``A_log``, no draw makes
the columns differ, and what follows tells the elements apart. If an order of them gave the same outputs, the outputs would have the same
derivative by all elements that change places, at a point where these are equal. Where all derivatives differ, there is no such order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.columns import pair
from convert.inference.derivation import Grade, Role, Site, Tensor, Tie
from convert.inference.grading.proof import weights
from convert.inference.patches import patches_of
from convert.inference.sites import parameter_operands, products, role_of
from convert.programs.program import Program

Array = np.ndarray[Any, np.dtype[Any]]
MAX_COLUMNS = 6  # of a tie; each pair of them is exchanged
DISTINCT = 1e-9  # relative difference of two derivatives


def told_apart(
    tensors: Sequence[Tensor],
    target: Program,
    fresh: Sequence[Program],
    error: Callable[[Sequence[Tensor], Program], float],
    smallest: float,
    derivatives: Callable[[Mapping[str, Array], Program], Mapping[str, Array]],
) -> tuple[Tensor, ...]:
    """Return the tensors; those whose ties the fresh draws resolve are derived.

    Args:
        tensors: whose outputs were proven to be those of every fresh draw.
        target: the record of the first run.
        fresh: runs of the source with other weights and inputs.
        error: the relative difference of the outputs that these tensors make from those of a run (`proof.error`).
        smallest: relative difference of an output that counts.
        derivatives: of the outputs by each tensor, for weights of the target and a run (`proof.derivatives`).
    """

    def differs(columns: tuple[Array, Array]) -> bool:
        return any(error(_exchanged(tensors, target, columns), source) > smallest for source in fresh)

    known: dict[Any, bool] = {}
    found = []
    for tensor in tensors:
        for tie in tensor.ties:
            if (key := _key(tie)) not in known:
                columns = _elements(target, tie)
                few = 1 < len(columns) <= MAX_COLUMNS and all(map(differs, itertools.combinations(columns, 2)))
                known[key] = few or any(_all_differ(tensors, target, columns, source, derivatives) for source in fresh)
        resolved = tensor.grade is Grade.TIED and all(known[_key(tie)] for tie in tensor.ties)
        grade = Grade.INTERCHANGEABLE if tensor.alternatives else Grade.DERIVED
        found.append(replace(tensor, grade=grade, ties=()) if resolved else tensor)
    return tuple(found)


def told_by_some(tensor: Tensor, fresh: Sequence[Program]) -> bool:
    """Whether others distinguish columns that the first weights and inputs make equal, so that another attempt is worth it."""
    for tie in tensor.ties:
        sites = {p.evidence.source.index for p in tensor.parts if p.evidence.source and _is_at(p.evidence.target, tie)}
        for index, program in itertools.product(sites, fresh):
            operation = program.operations[index]
            sides = parameter_operands(operation)
            if role_of(operation) is not Role.PRODUCT or not sides:
                return True
            columns = [product.columns for product in products([operation], sides[0])]
            if any(pairing is None or len(pairing.tied) < len(tie.columns) for pairing in map(pair, columns, columns)):
                return True
    return False


def _is_at(site: Site, tie: Tie) -> bool:
    return (site.index, site.operand) == (tie.site.index, tie.site.operand)


def _key(tie: Tie) -> Any:
    return tie.columns, tie.site.index, tie.site.operand


def _elements(target: Program, tie: Tie) -> list[Array]:
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
    if patches is not None and elements[0].size > elements[0].shape[0] * elements[0].shape[1]:
        return []  # its columns may be those of its channels, or of its patches
    if role is Role.CONVOLUTION and len(elements) == 1 and int(operation.settings.get("groups", 1)) == 1:
        axis = 0 if operation.settings.get("transposed") else 1
        return [np.take(elements[0], k, axis).ravel() for k in tie.columns]
    if role in (Role.SCALE, Role.SHIFT) and len(elements) == 1:
        numbers = np.unique(elements[0])
        return list(numbers[numbers >= 0][list(tie.columns), None])
    return []


def _all_differ(
    tensors: Sequence[Tensor],
    target: Program,
    columns: Sequence[Array],
    source: Program,
    derivatives: Callable[[Mapping[str, Array], Program], Mapping[str, Array]],
) -> bool:
    """Whether the derivatives of the outputs by columns differ where the columns are equal, each from each."""
    if len(columns) < 2 or len({len(column) for column in columns}) > 1:
        return False
    state = weights(tensors, source)
    numbers = np.stack(columns)  # [column, element]
    first = target.first_element
    flat = np.concatenate([state[name].ravel() for name in first])
    flat[numbers] = flat[numbers].mean(0)
    for name, start in first.items():
        state[name] = flat[start : start + state[name].size].reshape(state[name].shape)
    for tensor in tensors:
        state |= dict.fromkeys(tensor.also, state[tensor.name])
    by = derivatives(state, source)
    if not by:
        return False
    every = [by.get(name, np.zeros(state[name].shape)).ravel() for name in first]
    keys = np.concatenate(every)[numbers] @ np.random.default_rng(0).normal(size=numbers.shape[1])
    return bool(np.diff(np.sort(keys)).min() > DISTINCT * np.abs(keys).max())


def _exchanged(tensors: Sequence[Tensor], target: Program, columns: tuple[Array, Array]) -> list[Tensor]:
    """Return the tensors with the elements of two columns exchanged."""
    one, two = columns
    first = target.first_element
    found = []
    for tensor in tensors:
        size, start = int(np.prod(tensor.shape)), first[tensor.name]
        moved = np.arange(start, start + size)
        for here, there in ((one, two), (two, one)):
            inside = (here >= start) & (here < start + size) & (there >= start) & (there < start + size)
            moved[here[inside] - start] = there[inside]
        moved -= start
        parts = tuple(replace(part, elements=moved[part.elements]) for part in tensor.parts)
        found.append(replace(tensor, parts=parts))
    return found
