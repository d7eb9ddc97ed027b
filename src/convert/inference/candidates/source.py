"""The source, prepared for questions: which of its values are these, and where do parameters meet this data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.products.bilinear import of_two_values
from convert.inference.forms.products.commuted import commuted
from convert.inference.forms.products.joined import of_all_values, of_each_value
from convert.inference.forms.products.moved_factors import moved_factors
from convert.inference.forms.products.moved_signs import moved_signs
from convert.inference.forms.products.taken_columns import TakenParts
from convert.inference.forms.products.three_factors import of_all_pairs
from convert.inference.forms.sums.masks import visible_sums
from convert.inference.forms.sums.reordered import distributed, terms
from convert.inference.meetings.added_up import KnownRows, added_up
from convert.inference.meetings.columns import Columns
from convert.inference.meetings.data_products import DataProducts
from convert.inference.meetings.rows import Rows, of_each_expert, of_each_vector
from convert.inference.meetings.sites import Meeting, Product, meetings, of_one_weight, products, role_of
from convert.programs.fingerprint import EXACT, TINY, ValueTable, fingerprint, per_size, size_of
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
ROUNDING = 1e-12  # relative and absolute: a sum in another order


class Source:
    """The source's record, indexed.

    Args:
        repeated: whether a value is the same when it is repeated, as learned inputs are along the batch.

    Attributes:
        program: the record.
        theta: the elements of all parameters, by their numbers.
        table: every value of data, with the index of the operation that computes it; negative for an input.
        taken: which columns of its products it takes together.
        meetings: where data meets parameters, by role.
        products: the products among them, with their meeting.
        data_products: those of two values of data.
    """

    def __init__(self, program: Program, tolerance: float = EXACT, *, repeated: bool = False) -> None:
        self.program = program
        self.names = list(program.parameters)
        self.theta = np.concatenate(
            [np.zeros(0), *[np.asarray(v.array, np.float64).ravel() for v in program.parameters.values()]]
        )
        self.starts = np.array([program.first_element[name] for name in self.names], int)
        self.table: ValueTable[int] = ValueTable(tolerance, repeated=repeated)
        self.inputs = list(program.inputs)
        for number, value in enumerate(program.inputs.values()):
            self.table.add(value.array, number - len(self.inputs))
        for index, operation in enumerate(program.operations):
            for result in operation.results:
                if result.data:
                    self.table.add(result.array, index)
        self._made_by = program.made_by
        self.taken = TakenParts(program.users)
        for index, operation in enumerate(program.operations):
            for taken in self.taken.results(operation):
                self.table.add(taken, index)
        self.meetings: dict[Role, list[Meeting]] = {role: [] for role in Role}
        for meeting in meetings(program):
            self.meetings[meeting.role].append(meeting)
        for term in (*terms(program), *distributed(program)):
            role = role_of(term.operation)
            self.meetings[role].append(Meeting(term.index, (term.operation,), term.side, role, term.data))
            self.table.add(term.result, term.index)
        for other in commuted(program):
            self.meetings[Role.PRODUCT].append(Meeting(other.index, (other.operation,), other.side, Role.PRODUCT))
            self.table.add(other.operation.results[0].array, other.index)
            for term in other.biases:
                self.meetings[Role.SHIFT].append(
                    Meeting(term.index, (term.operation,), term.side, Role.SHIFT, term.data)
                )
                self.table.add(term.result, term.index)
        for moved in (*moved_factors(program), *moved_signs(program)):
            self.meetings[Role.SCALE].append(Meeting(moved.index, (moved.operation,), moved.side, Role.SCALE))
            self.table.add(moved.operation.results[0].array, moved.index)
        side_by_side: list[Meeting] = []
        for one in (*of_each_value(program), *of_all_values(program), *of_all_pairs(program), *of_two_values(program)):
            role = role_of(one.operation)
            side_by_side.append(Meeting(one.index, (one.operation,), one.side, role, one.data))
            self.meetings[role].append(side_by_side[-1])
            self.table.add(one.result, one.index)
        self.meetings[Role.PRODUCT] += of_one_weight([m for m in side_by_side if m.role is Role.PRODUCT])
        for part in visible_sums(program):
            self.meetings[Role.SHIFT].append(Meeting(part.index, (part.operation,), part.side, Role.SHIFT))
            self.table.add(part.operation.results[0].array, part.index)
        self.products: list[tuple[Product, Meeting]] = []
        for meeting in (*self.meetings[Role.PRODUCT], *self.meetings[Role.CONVOLUTION]):
            self.products += [(product, meeting) for product in products(meeting.operations, meeting.side)]
        self.data_products = DataProducts(program)
        self._scaled = _Fingerprints([[array] for array in _scaled_by_numbers(program)], repeated)
        self._rows = _Fingerprints([product.rows for product, _ in self.products], repeated)
        self._columns: dict[tuple[Role, bool], tuple[Array, Array]] = {}
        self._vectors: dict[Role, Rows] = {}
        self._rows_of_values = KnownRows(partial(_float_values, program))
        self._added_rows = KnownRows(partial(added_up, program))
        self._data = {role: _Fingerprints([m.data for m in found], repeated) for role, found in self.meetings.items()}

    def made_by(self, value: Value) -> Operation | None:
        """Return the operation that gives a value; None for an input."""
        return self._made_by.get(value)

    def is_scaled(self, value: Value) -> bool:
        """Whether a value of parameters is computed from one leaf and constants: what it is multiplied by is then a number."""
        while value in self._made_by:
            operands = [operand for operand in self._made_by[value].operands if operand.leaves]
            if len(operands) != 1:
                return False
            value = operands[0]
        return True

    def leaf(self, number: int) -> str:
        """Return the leaf that an element belongs to."""
        return self.names[int(np.searchsorted(self.starts, number, "right")) - 1]

    def located(self, numbers: Array) -> tuple[str, Array]:
        """Return the leaf of some elements, and their positions in it."""
        k = int(np.searchsorted(self.starts, numbers.min(), "right")) - 1
        return self.names[k], numbers - self.starts[k]

    def same_rows(self, rows: Sequence[Array], tolerance: float) -> list[tuple[Product, Meeting]]:
        """Return the products of the same rows; if there are none, those of these rows and others."""
        found = [self.products[k] for k in self._rows.find(rows, tolerance)]
        return found or self.with_rows(rows, tolerance)

    def with_rows(self, rows: Sequence[Array], tolerance: float) -> list[tuple[Product, Meeting]]:
        """Return the products of these rows, also of fewer that are repeated, or of others beside them; with these rows."""
        return self._some_rows.find(rows, tolerance)

    def summed(self, at_least: int) -> list[int]:
        """Return the sizes that its products sum over, from a size on."""
        return sorted({size for product, _ in self.products if (size := len(product.value)) >= at_least})

    def has_rows(self, array: Array, tolerance: float) -> bool:
        """Whether the source applies a product to each row of an array."""
        return array.ndim > 0 and bool(self._some_rows.find([array], tolerance))

    def has_each_row(self, array: Array, tolerance: float) -> bool:
        """Whether each row of an array is a row of a value of the source, in any order."""
        return bool(array.ndim and array.size and self._rows_of_values.have(array, tolerance).all())

    def adds_up(self, array: Array, tolerance: float) -> bool:
        """Whether each row of an array is a row of a value of the source, or one of the rows that a product of it adds up."""
        known = self._rows_of_values.have(array, tolerance)
        return bool((known | self._added_rows.have(array, tolerance)).all())

    @cached_property
    def _some_rows(self) -> Rows:
        return Rows([*self.products, *of_each_expert(self.program, self.meetings[Role.PRODUCT])])

    def some_rows_met(self, role: Role, rows: Array, tolerance: float) -> list[tuple[Product, Meeting]]:
        """Return the vectors that these rows and others meet in this role, with these rows."""
        if role not in self._vectors:
            self._vectors[role] = Rows(list(of_each_vector(self.meetings[role])))
        return self._vectors[role].find([rows], tolerance)

    def same_data(self, role: Role, data: Array, tolerance: float) -> list[Meeting]:
        """Return the meetings of this role with the same data."""
        return [self.meetings[role][k] for k in self._data[role].find([data], tolerance)]

    def is_sum(self, value: Value) -> bool:
        """Whether a value of parameters is a sum of elements of several leaves."""
        if len(value.elements) < 2 or not is_of_each_element(value):
            return False
        made = sum(self.theta[of] for of in value.elements)
        return bool(np.allclose(made, value.array, rtol=ROUNDING, atol=ROUNDING))

    def same_columns(self, role: Role, columns: Columns, tolerance: float, *, sums: bool = False) -> list[Meeting]:
        """Return the meetings of this role that may have one of these columns, in order: those of plain leaves.

        Args:
            sums: those of sums of leaves instead.
        """
        if (role, sums) not in self._columns:
            every = enumerate(meeting.weight for meeting in self.meetings[role])
            plain = [k for k, of in every if (self.is_sum(of) if sums else len(of.elements) == 1)]
            met = [self.meetings[role][k] for k in plain]
            first = [meeting.columns(meeting.names).sums[1] for meeting in met]
            keys = np.concatenate([np.zeros(0), *first])
            order = np.argsort(keys, kind="stable")
            self._columns[role, sums] = keys[order], np.repeat(plain, [len(x) for x in first]).astype(int)[order]
        keys, owners = self._columns[role, sums]
        slack = tolerance * columns.scales[1]
        with np.errstate(all="ignore"):
            low = np.searchsorted(keys, columns.sums[1] - slack, "left")
            high = np.searchsorted(keys, columns.sums[1] + slack, "right")
        found = {int(k) for start, end in zip(low, high, strict=True) for k in np.unique(owners[start:end])}
        return [self.meetings[role][k] for k in sorted(found)]

    def scales(self, array: Array, tolerance: float) -> bool:
        """Whether the source multiplies a value of data by a number."""
        return bool(self._scaled.size) and bool(len(self._scaled.find([array], tolerance)))

    def has(self, array: Array, tolerance: float) -> bool:
        """Whether an array is a value of the source, or the rows of one of its products."""
        self.table.tolerance = tolerance
        return bool(self.table.find(array)) or bool(len(self._rows.find([array], tolerance)))


def is_of_each_element(value: Value) -> bool:
    """Whether each element of a value of parameters is computed from an element of each of its factors."""
    return bool(value.elements) and all(of.shape == value.array.shape and (of >= 0).all() for of in value.elements)


def _float_values(program: Program) -> Iterator[Array]:
    values = (x for operation in program.operations for x in operation.results if x.data)
    return (x.array for x in values if x.array.dtype.kind == "f")


def _scaled_by_numbers(program: Program) -> list[Array]:
    found = []
    for operation in program.operations:
        if (
            operation.name in ("mul", "div")
            and len(operation.data) == 1
            and any(x.constant and (x.array != 1).any() for x in operation.operands)
        ):
            found.append(operation.data[0].array)
    return found


class _Fingerprints:
    """Fingerprints of lists of arrays; those of a list are added up. `repeated`: those of a list that is repeated are the same."""

    def __init__(self, lists: Sequence[Sequence[Array]], repeated: bool) -> None:
        self.size = len(lists)
        self._repeated = repeated
        self._sums = np.array([self._added_up(arrays)[0] for arrays in lists])

    def find(self, arrays: Sequence[Array], tolerance: float) -> Array:
        if not self.size:
            return np.zeros(0, int)
        with np.errstate(all="ignore"):
            size = sum(size_of(array) for array in arrays)
            if (
                not self._repeated
                and not (np.abs(self._sums[:, 0] - size) <= tolerance * (size + TINY * len(arrays))).any()
            ):
                return np.zeros(0, int)
            sums, scales = self._added_up(arrays)
            return np.flatnonzero((np.abs(self._sums - sums) <= tolerance * scales).all(1))

    def _added_up(self, arrays: Sequence[Array]) -> tuple[Array, Array]:
        found = [fingerprint(array) for array in arrays]
        with np.errstate(all="ignore"):
            sums, scales = (np.sum([f[k] for f in found], 0) for k in (0, 1))
            return per_size(sums, scales) if self._repeated else (sums, scales)
