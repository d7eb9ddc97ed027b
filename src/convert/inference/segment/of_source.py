"""What a segment must give for its parameters to be right: values of the source, products of its values, and sums of its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Choice
from convert.inference.derivation import Role
from convert.inference.forms.elements import MOVES
from convert.inference.meetings.sites import role_of
from convert.inference.proposals.convolutions import shifted
from convert.inference.proposals.side_by_side import values_of
from convert.inference.segment.assigned import Assigned
from convert.programs.program import REFUSALS, Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
FUNCTIONS = frozenset(
    ("silu", "gelu", "relu", "leaky_relu", "elu", "softplus", "mish", "tanh", "sigmoid", "softmax", "_softmax")
)  # of a product's result
MAX_STEPS = 8  # operations between a product and the sum that it is a term of
AHEAD = 64  # operations behind one whose parameter is not known


class OfSource(Assigned):
    """Compares what the target's operations meet and give, with what is assigned, with the values of the source."""

    def is_zero(self, value: Value) -> bool:
        """Whether a value is zero with any parameters, as what is multiplied by a time of 0."""
        parameters = self.target.parameters
        return not value.array.any() and all(parameters[name].array.any() for name in value.leaves)

    def is_of_source(self, operation: Operation) -> bool:
        array = self.replay.value(operation.data[0])
        if not array.any() or self.source.has(array, self.context.tolerance):
            return True
        if role_of(operation) is Role.CONVOLUTION:  # of channels side by side
            taps = operation.operands[1].array.shape[2:]
            if self.source.same_data(Role.CONVOLUTION, array, self.context.tolerance):
                return True
            if max(taps, default=1) == 1:
                return self._joins(operation, np.moveaxis(array, 1, -1))
            return self._has_patches(operation, array)
        if role_of(operation) is not Role.PRODUCT:
            return False
        batch = array.ndim == 3 and all(self.source.has(rows, self.context.tolerance) for rows in array)
        if batch or self.source.has_rows(array, self.context.tolerance):  # one value for each expert, or some rows
            return True
        return self._joins(operation, array)

    def _has_patches(self, operation: Operation, array: Array) -> bool:
        """Whether the source multiplies the patches that a convolution meets, at once or those of each tap: it has shifted the data by them."""
        if operation.settings.get("transposed") or int(operation.settings.get("groups", 1)) > 1:
            return False
        taps, tolerance = operation.operands[1].array.shape[2:], self.context.tolerance
        of_taps = shifted(array, taps, operation)
        rows = np.moveaxis(of_taps, 1, -1 - len(taps)).reshape(-1, array.shape[1] * math.prod(taps))
        each = of_taps.reshape(*of_taps.shape[: -len(taps)], -1)
        return bool(self.source.same_rows([rows], tolerance)) or all(
            self.source.has(each[..., k], tolerance) for k in range(each.shape[-1])
        )

    def _joins(self, operation: Operation, rows: Array) -> bool:
        """Whether the rows that an operation meets are values that stand side by side, and the source multiplies the rows of each."""
        parts = [rows[..., place] for place in values_of(self.context, operation, operation.data[0])]
        return bool(parts) and all(self.source.same_rows([part], self.context.tolerance) for part in parts)

    def is_computed(self, operation: Operation, result: Array, choices: Sequence[Choice]) -> bool:
        """Whether the source has the result of a function or of a sum, or each of its rows.

        The matrix of another expert, or a part of a leaf, gives rows of the source as well; a function of them is none of its values.
        Of several gates at once, the source may compute it of each; of as many matrices as stand side by side, too. A sum is compared where
        a choice is a part of a leaf, or several: of whole leaves, others may have other sums, and give the same in the end.
        """
        several = max((len(choice.candidate.pieces) for choice in choices), default=1)
        if len(operation.data) == 1:
            compared = operation.name in FUNCTIONS
        else:
            compared = self._is_whole_sum(operation) and (
                several > 1 or any(any(c.candidate.places[0]) for c in choices)
            )
        if not compared or np.isnan(result).any():
            return True
        if self._has_rows(result, several):
            return True
        ends = np.cumsum(self.context.cuts(operation.results[0], -1))[:-1]
        return len(ends) > 0 and all(self.source.has(x, self.context.tolerance) for x in np.split(result, ends, -1))

    def up_to_a_sum(self, at: int) -> list[Operation]:
        """Return the operations behind a product that move its rows, up to the one that adds what is known to it; none if there is none."""
        value, steps = self._order[at].results[0], list[Operation]()
        for _ in range(MAX_STEPS):
            users = self.context.users(value)
            if len(users) != 1:
                break
            (user,) = users
            steps.append(user)
            if any(x is not value and x.data and self._made_by.get(x, -1) > at for x in user.operands):
                break
            if _adds(user):
                return steps if len(user.data) == 2 else []
            if user.name not in MOVES or user.operands[0] is not value:
                break
            value = user.results[0]
        return []

    def is_sum(self, operation: Operation, out: Array, steps: Sequence[Operation], side_by_side: int) -> bool:
        """Whether the steps behind an operation give a value of the source, or rows of one, if the operation gives an array.

        Args:
            side_by_side: so many matrices stand side by side in the weight: the rows are those of each.
        """
        value = operation.results[0]
        for step in steps:
            try:
                out = self.replay.run(step, {k: out for k, x in enumerate(step.operands) if x is value})[0]
            except REFUSALS:
                return False
            value = step.results[0]
        return not np.isnan(out).any() and self._has_rows(out, side_by_side)

    def _has_rows(self, array: Array, side_by_side: int) -> bool:
        """Whether the source has a value, or each of its rows, also as parts: one matrix of several gives some of the rows of all, or of the columns."""
        tolerance = self.context.tolerance
        if self.source.has(array, tolerance) or self.source.has_each_row(array, tolerance):
            return True
        if side_by_side < 2 or not array.ndim or array.shape[-1] % side_by_side:
            return False
        return self.source.has_each_row(array.reshape(*array.shape[:-1], side_by_side, -1), tolerance)

    def _is_whole_sum(self, operation: Operation) -> bool:
        """Whether an operation adds two values of data, and its result is no term of a sum, which may have other brackets."""
        users = self.context.users(operation.results[0])
        return len(operation.data) == 2 and _adds(operation) and not any(map(_adds, users))

    def is_added(self, result: Array) -> bool:
        """Whether the source has what the gates of an expert make of its results, or adds it up in one product of all experts."""
        tolerance = self.context.tolerance
        return self.source.has(result, tolerance) or self.source.adds_up(result, tolerance)

    def pairs(self, operation: Operation, result: Array) -> bool:
        """Whether the product of two values of data is one of the source, up to a factor, or a value of it; if it is one, and the source has any."""
        if role_of(operation) is not Role.PRODUCT:
            return True
        tolerance = self.context.tolerance
        return self.source.data_products.has(result, tolerance) or self.source.has(result, tolerance)

    def pairs_ahead(self, at: int) -> bool:
        """Whether the next product of two values of data that is known already pairs: the scores of queries and keys, whose values come next."""
        lacking: set[Value] = set()
        for operation in self._order[at : at + AHEAD]:
            weights = (x for x in operation.operands if x.of_parameters)
            if lacking.intersection(operation.operands) or not all(map(self.replay.known, weights)):
                lacking.update(operation.results)
            elif operation.data:
                try:
                    results = self.replay.run(operation)
                except REFUSALS:
                    return True
                self.replay.keep(operation, results)
                if role_of(operation) is Role.PRODUCT and len(operation.data) == len(operation.operands):
                    return self.pairs(operation, results[0])
        return True


def _adds(operation: Operation) -> bool:
    """Whether an operation adds; of a difference, the source may have the negative."""
    return operation.name.removesuffix("_") in ("add", "add_any") and len(operation.operands) == 2
