"""Leaves of the source that a layer of the target may hold: a scale, or the scale and bias of a norm, that were multiplied into its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import MOVES, before_moves, behind_moves
from convert.inference.meetings.sites import role_of
from convert.programs.divergence.repair import Repair
from convert.programs.fingerprint import EXACT
from convert.programs.program import Array, Operation, Program, Value, times_used

STEPS = (Role.SCALE, Role.SHIFT)


def is_folded(repair: Repair, target: Program) -> bool:
    """Whether the source multiplies a value by leaves, or adds them, that the weights of a layer in front of the value, or behind it, may hold."""
    found = _before_what_both_do(repair)
    if found is None:
        return False
    value, want, source = found
    steps = [step for step in source if step.name not in MOVES and any(x.data for x in step.operands)]
    scales = any(role_of(step) is Role.SCALE and any(x.of_parameters for x in step.operands) for step in steps)
    if not scales or not all(role_of(step) in STEPS for step in steps):
        return False
    if value.array.size != want.size or not np.isfinite(want).all():
        return False
    want = want.reshape(value.array.shape)
    adds = any(role_of(step) is Role.SHIFT for step in steps)
    return any(
        _is_by_column(value.array, want, axis) and (has_bias or not adds)
        for axis, has_bias in _axes_of_layers(value, target)
    )


def _before_what_both_do(repair: Repair) -> tuple[Value, Array, Sequence[Operation]] | None:
    """Return the value of the target and the source's array in its place, in front of operations that both run at last, and what the source runs up to there."""
    target, source = list(repair.target), list(repair.source)
    value = target[-1].results[0] if target else next(iter(repair.operands), None)
    want = repair.want
    while (
        target and source and target[-1].name == source[-1].name and len(source[-1].data) == len(target[-1].data) == 1
    ):
        (value,), (theirs,) = target.pop().data, source.pop().data
        want = theirs.array
    return None if value is None or not value.data else (value, want, source)


def _axes_of_layers(value: Value, target: Program) -> Iterator[tuple[int, bool]]:
    """Yield the axes of a value along which a layer in front of it gives its results, and those over which each layer behind it sums; and whether they have biases."""
    made_by, users = target.made_by, target.users
    _, made, _ = before_moves(value, made_by)
    has_bias = made is not None and _adds_parameter(made)
    if made is not None and has_bias:
        _, made, _ = before_moves(made.data[0], made_by)
    if made is not None and _is_layer(made) and times_used(target)[value] == 1:
        yield _axis(value, made), has_bias
    behind = list(behind_moves(value, users))
    if behind and value not in {*target.outputs.values()} and all(map(_is_layer, behind)):
        sums = [next(behind_moves(layer.results[0], users), None) for layer in behind]
        yield _axis(value, behind[0]), all(one is not None and _adds_parameter(one) for one in sums)


def _axis(value: Value, layer: Operation) -> int:
    return value.array.ndim - 1 if role_of(layer) is Role.PRODUCT else 1


def _adds_parameter(operation: Operation) -> bool:
    own = any(x.of_parameters for x in operation.operands)
    return role_of(operation) is Role.SHIFT and own and len(operation.data) == 1


def _is_layer(operation: Operation) -> bool:
    own = [x for x in operation.operands if x.of_parameters]
    return role_of(operation) in (Role.PRODUCT, Role.CONVOLUTION) and bool(own) and len(operation.data) == 1


def _is_by_column(got: Array, want: Array, axis: int) -> bool:
    """Whether each column is the other one with a factor and a number added."""
    if axis >= got.ndim:
        return False
    one, two = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (got, want))
    slack = EXACT * np.abs(want).max(initial=0)
    centred = one - one.mean(1, keepdims=True)
    sizes = (centred**2).sum(1, keepdims=True)
    factors = (centred * two).sum(1, keepdims=True) / np.where(sizes == 0, 1.0, sizes)
    left = two - factors * one
    return one.shape[1] > 2 and bool((np.abs(left - left.mean(1, keepdims=True)) <= slack).all())
