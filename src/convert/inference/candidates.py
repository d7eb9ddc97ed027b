"""The type of a proposal: which elements of the source become which elements of the target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from convert.inference.columns import Columns
from convert.inference.data_products import DataProducts
from convert.inference.derivation import Arithmetic, LowRank, Role
from convert.inference.forms.commuted import commuted
from convert.inference.forms.joined import of_all_values, of_each_value
from convert.inference.forms.masks import visible_sums
from convert.inference.forms.reordered import distributed, terms
from convert.inference.replay import Replay
from convert.inference.rows import Rows, of_each_expert, of_each_vector
from convert.inference.sites import Meeting, Product, meetings, products, role_of
from convert.programs.fingerprint import EXACT, TINY, ValueTable, fingerprint, per_size, size_of
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
SPLITS = ("slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk")
MAX_DEPTH = 5  # operations between a product and the parts that are taken of its result
MAX_BEFORE_MAP = 16  # operations between a product and the map that is made of its result, as those of a norm
MAX_BEFORE_CONVOLUTION = 32  # operations on the map
EQUAL = 1e-7  # relative: two values of parameters that are computed in different orders

COMPUTE: dict[Arithmetic, Callable[[Array], Array]] = {
    Arithmetic.SAME: lambda v: v,
    Arithmetic.ONE_PLUS: lambda v: 1 + v,
    Arithmetic.MINUS_ONE: lambda v: v - 1,
}


@dataclass(frozen=True, eq=False)
class Piece:
    """Some elements of a tensor of the target.

    Attributes:
        tensor: its name.
        elements: positions in it.
        numbers: of the source's elements, -1 where there is none.
        values: what the elements become.
        arithmetic: how they are computed.
        factor: what they are multiplied by.
        meeting: where the source uses the elements; None for a constant.
        places: of computed values: positions in the operand of `meeting`, or in the matrix of `low_rank`.
        low_rank: of values that are computed from a product of two leaves.
    """

    tensor: str
    elements: Array
    numbers: Array
    values: Array
    arithmetic: Arithmetic
    factor: float = 1.0
    meeting: Meeting | None = None
    places: Array | None = None
    low_rank: LowRank | None = None

    def only(self, here: Array) -> Piece:
        """Return the piece with some of its elements: those where a mask is true."""
        places = None if self.places is None else self.places[here]
        return replace(
            self, elements=self.elements[here], numbers=self.numbers[here], values=self.values[here], places=places
        )


@dataclass(frozen=True, eq=False)
class Candidate:
    """A proposal for one operand of one operation of the target.

    Attributes:
        pieces: what becomes known.
        by: how elements were paired, for people.
        kind: what it has in common with the candidate of the same operation in another layer.
        tied: columns of the operand's data that could not be told apart.
        rope: how pairs of rows were reordered; empty if not.
    """

    pieces: tuple[Piece, ...]
    by: str
    kind: tuple[Any, ...]
    tied: tuple[int, ...] = ()
    rope: str = ""

    @property
    def changes(self) -> list[tuple[str, Array, Array]]:
        """What `Replay.assign` takes."""
        return [(piece.tensor, piece.elements, piece.values) for piece in self.pieces]

    @property
    def constant(self) -> bool:
        """Whether it takes the parameter for a constant, such as a bias of zeros."""
        return {piece.arithmetic for piece in self.pieces} == {Arithmetic.CONSTANT}

    @property
    def key(self) -> Any:
        """Equal for candidates that give the same tensors."""
        return tuple((p.tensor, p.elements.tobytes(), p.values.tobytes()) for p in self.pieces)


@dataclass(frozen=True, eq=False)
class Choice:
    """A candidate that was chosen.

    Attributes:
        index: of the target's operation.
        side: which operand became known.
        candidate: what it became.
    """

    index: int
    side: int
    candidate: Candidate

    @cached_property
    def digest(self) -> int:
        """Equal for choices that assign the same numbers at the same operation."""
        return hash((self.index, self.side, self.candidate.key))


class Source:
    """The source's record, indexed.

    Args:
        repeated: whether a value is the same when it is repeated, as learned inputs are along the batch.

    Attributes:
        program: the record.
        theta: the elements of all parameters, by their numbers.
        table: every value of data, with the index of the operation that computes it; negative for an input.
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
        self._made_by = {result: operation for operation in program.operations for result in operation.results}
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
        for one in (*of_each_value(program), *of_all_values(program)):
            role = role_of(one.operation)
            self.meetings[role].append(Meeting(one.index, (one.operation,), one.side, role, one.data))
            self.table.add(one.result, one.index)
        for part in visible_sums(program):
            self.meetings[Role.SHIFT].append(Meeting(part.index, (part.operation,), part.side, Role.SHIFT))
            self.table.add(part.operation.results[0].array, part.index)
        self.products: list[tuple[Product, Meeting]] = []
        for meeting in (*self.meetings[Role.PRODUCT], *self.meetings[Role.CONVOLUTION]):
            self.products += [(product, meeting) for product in products(meeting.operations, meeting.side)]
        self.data_products = DataProducts(program)
        self._scaled = _Fingerprints([[array] for array in _scaled_by_numbers(program)], repeated)
        self._rows = _Fingerprints([product.rows for product, _ in self.products], repeated)
        self._columns: dict[Role, tuple[Array, Array]] = {}
        self._vectors: dict[Role, Rows] = {}
        self._data = {role: _Fingerprints([m.data for m in found], repeated) for role, found in self.meetings.items()}

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
        return found or self._some_rows.find(rows, tolerance)

    def has_rows(self, array: Array, tolerance: float) -> bool:
        """Whether the source applies a product to each row of an array."""
        return array.ndim > 0 and bool(self._some_rows.find([array], tolerance))

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

    def same_columns(self, role: Role, columns: Columns, tolerance: float) -> list[Meeting]:
        """Return the meetings of this role that may have one of these columns, in order: those of plain leaves."""
        if role not in self._columns:
            plain = [k for k, meeting in enumerate(self.meetings[role]) if len(meeting.weight.elements) == 1]
            met = [self.meetings[role][k] for k in plain]
            sums = [meeting.columns(meeting.weight.elements[0]).sums[1] for meeting in met]
            keys = np.concatenate([np.zeros(0), *sums])
            order = np.argsort(keys, kind="stable")
            self._columns[role] = keys[order], np.repeat(plain, [len(x) for x in sums]).astype(int)[order]
        keys, owners = self._columns[role]
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


@dataclass(eq=False)
class Context:
    """What proposals are made from.

    Attributes:
        source: the source.
        replay: the target, as far as it is known.
        used: how often each element of the source is used.
        origins: for each element of the target the source's that it is, or -1.
        level: 0: what a scale or shift gives must be a value of the source; 1: need not, but the products of attention must be;
            gates and RoPE's pairs in other orders as well; 2: none of these must be, and leaves are used again.
        near: index of the source's operation that was matched last.
        of_siblings: the operation of a layer of a list (`siblings`) that was matched last, and the index of the source's.
        tolerance: of sums.
    """

    source: Source
    replay: Replay
    used: Array
    origins: Array
    level: int = 0
    near: int = 0
    of_siblings: dict[Any, tuple[Operation, int]] = field(default_factory=dict)
    tolerance: float = EXACT
    _starts: Array = field(default_factory=lambda: np.zeros(0, int))

    def __post_init__(self) -> None:
        first = self.replay.program.first_element
        self._users: dict[Value, list[Operation]] = {}
        self._made_by = {x: operation for operation in self.replay.program.operations for x in operation.results}
        for operation in self.replay.program.operations:
            for operand in operation.operands:
                self._users.setdefault(operand, []).append(operation)
        self._names = list(first)
        self._starts = np.array(list(first.values()), int)

    def met(self, operation: Operation) -> Array:
        """Return the data that a parameter meets in an operation; only what is kept, if the target cuts the result."""
        data = self.replay.value(operation.data[0])
        users = self._users.get(operation.results[0], [])
        cuts = len(users) == 1 and users[0].name == "slice" and data.shape == operation.results[0].array.shape
        if not cuts or self.source.has(data, self.tolerance):
            return data
        return np.asarray(users[0].again([data])[0])

    def widths(self, value: Value) -> list[int]:
        """Return the widths of the target's values that stand side by side along the last axis of a value; none if it is one."""
        size = value.array.shape[-1:]
        while (made := self._made_by.get(value)) is not None and made.name in VIEWS:
            value = made.operands[0]
        last = value.array.ndim - 1
        if (
            made is None
            or made.name != "cat"
            or value.array.shape[-1:] != size
            or made.settings.get("dim", 0) not in (-1, last)
        ):
            return []
        return [x.array.shape[-1] for x in made.operands]

    def cuts(self, value: Value, axis: int) -> tuple[int, ...]:
        """Return the lengths of the parts in which the target takes an axis of a value, or of what it makes of each element; none for one.

        Args:
            axis: -1 for the last one, also where the others are joined or split.
        """
        size, bounds, level = value.array.shape[axis], {0}, [value]
        for _ in range(MAX_DEPTH):
            users = [(at, user) for at in level for user in self._users.get(at, [])]
            level = []
            for at, user in users:
                if user.name in SPLITS and user.settings.get("dim", 0) % at.array.ndim == axis % at.array.ndim:
                    start = (user.settings.get("start") or 0) % size if user.name == "slice" else 0
                    ends = accumulate(result.array.shape[axis] for result in user.results)
                    bounds |= {start, *(start + end for end in ends)}
                elif (made := user.results[0]).array.shape == at.array.shape or (
                    user.name in VIEWS and axis == -1 and made.array.shape[-1:] == (size,)
                ):
                    level.append(made)
        found = tuple(int(n) for n in np.diff(sorted({*bounds, size})))
        return found if len(found) > 1 else ()

    def map_of(self, value: Value) -> tuple[int, ...]:
        """Return the axes of the map that the target makes of the last axis of a value, or of each element, in front of a convolution; none if it makes none."""
        size, level, seen = value.array.shape[-1], [value], {value}
        for _ in range(MAX_BEFORE_MAP):
            made = []
            for at, user in ((of, user) for of in level for user in self._users.get(of, [])):
                result = user.results[0]
                axes = _split_off(at.array.shape, result.array.shape) if user.name in VIEWS else ()
                if axes and self._is_convolved(result):
                    return axes
                if result.array.shape[-1:] == (size,) and result not in seen:
                    made.append(result)
                    seen.add(result)
            level = made
        return ()

    def turns(self, value: Value) -> bool:
        """Whether the target multiplies what it makes of a value by something else that has several numbers, before the next product: as RoPE does."""
        made, level = {value}, [value]
        products: list[Operation] = []
        for _ in range(MAX_BEFORE_CONVOLUTION):
            users = [user for at in level for user in self._users.get(at, []) if role_of(user) is not Role.PRODUCT]
            products += (user for user in users if user.name.removesuffix("_") == "mul")
            level = [result for user in users for result in user.results if result not in made]
            made.update(level)
        others = (x for user in products for x in user.operands if x not in made and not x.of_parameters)
        return any(x.array.size and np.ptp(x.array) > 0 for x in others)

    def _is_convolved(self, value: Value) -> bool:
        """Whether a convolution takes a value before any product does."""
        level, seen = [value], {value}
        for _ in range(MAX_BEFORE_CONVOLUTION):
            users = [user for at in level for user in self._users.get(at, [])]
            if any(role_of(user) is Role.CONVOLUTION for user in users):
                return True
            results = (user.results[0] for user in users if user.results and role_of(user) is not Role.PRODUCT)
            level = [result for result in results if result not in seen]
            seen.update(level)
        return False

    def last_sizes(self, value: Value) -> list[int]:
        """Return the sizes of the last axis in the views that the target takes of a value, such as that of a head's features."""
        found, level = dict[int, None](), [value]
        for _ in range(MAX_DEPTH):
            users = [user for at in level for user in self._users.get(at, []) if user.name in VIEWS]
            level = [user.results[0] for user in users]
            found |= dict.fromkeys(size for made in level for size in made.array.shape[-1:])
        return list(found)

    def free(self, numbers: Array, target: Array | None = None) -> bool:
        """Whether no element is used yet, but where it is the target's element already, or all may be used again."""
        used = (numbers >= 0) & (self.used[numbers] > 0)
        if target is not None:
            used &= self.origins[target] != numbers
        return self.level > 1 or not used.any()

    def lacking(self, weight: Value) -> tuple[Array, ...]:
        """Return the factors of a value of parameters that are not known yet, as `Value.elements`; without a known one such as a mask."""
        if len(weight.elements) < 2:
            return weight.elements
        found = tuple(numbers for numbers in weight.elements if not self._is_known(numbers))
        return found or weight.elements

    def _is_known(self, numbers: Array) -> bool:
        used = np.unique(numbers[numbers >= 0])
        owners = np.searchsorted(self._starts, used, "right") - 1
        flat = self.replay.parameters
        return not any(np.isnan(flat[self._names[k]][used[owners == k] - self._starts[k]]).any() for k in set(owners))

    def pieces(
        self,
        target: Array,
        numbers: Array,
        values: Array,
        arithmetic: Arithmetic,
        meeting: Meeting | None,
        factor: float = 1.0,
        places: Array | None = None,
    ) -> tuple[Piece, ...]:
        """Return pieces by tensor: element `target` (by number) becomes element `numbers` of the source."""
        target, numbers, values = target.ravel(), numbers.ravel(), np.asarray(values, np.float64).ravel()
        places = None if places is None else places.ravel()
        owner = np.searchsorted(self._starts, target, "right") - 1
        owner[target < 0] = -1
        found = []
        for k in np.unique(owner[owner >= 0]):
            here = owner == k
            found.append(
                Piece(
                    self._names[k],
                    target[here] - self._starts[k],
                    numbers[here],
                    values[here],
                    arithmetic,
                    factor,
                    meeting,
                    None if places is None else places[here],
                )
            )
        return tuple(found)

    def fitted(
        self,
        target: Sequence[Array],
        numbers: Sequence[Array],
        operand: Array,
        read: Callable[[], Array],
        meeting: Meeting,
        places: Array,
    ) -> tuple[Piece, ...] | None:
        """Return pieces with which the target's operand equals the source's; None if there are none.

        Args:
            target: numbers of the target's elements, one array for each factor.
            numbers: numbers of the source's elements, one array for each factor, in the order of `target`.
            operand: the source's operand in this order.
            read: returns the target's operand in this order.
            meeting: where the source uses it.
            places: positions in the source's operand in this order.
        """
        theta = self.source.theta
        for chosen in itertools.permutations(numbers, len(target)):
            if any((c < 0).any() for c in chosen):
                continue
            ways = list(COMPUTE) if len(target) == 1 else [Arithmetic.SAME]
            for way in ways:
                found = tuple(
                    piece
                    for t, c in zip(target, chosen, strict=True)
                    for piece in self.pieces(t, c, COMPUTE[way](theta[c]), way, meeting)
                )
                got = self._read(found, read)
                if equal(got, operand):
                    if any(len(np.unique(t)) != len(np.unique(c)) for t, c in zip(target, chosen, strict=True)):
                        break
                    return found
                plain = way is Arithmetic.SAME and len(target) == 1 and self.source.is_scaled(meeting.weight)
                factor = ratio(got, operand) if plain else None
                if factor is not None:
                    t, c = target[0], chosen[0]
                    found = self.pieces(t, c, factor * theta[c], way, meeting, factor)
                    if equal(self._read(found, read), operand):
                        return found
        if (
            len(target) == 1
            and len(np.unique(target[0])) == target[0].size
            and not numbers_are_plain(numbers, operand, theta)
        ):
            ids = numbers[0] if len(numbers) else np.full(operand.shape, -1)
            found = self.pieces(target[0], ids, operand, Arithmetic.COMPUTED, meeting, places=places)
            if equal(self._read(found, read), operand):
                return found
        return None

    def _read(self, pieces: Sequence[Piece], read: Callable[[], Array]) -> Array:
        with self.replay.assigned([(p.tensor, p.elements, p.values) for p in pieces]):
            return np.array(read())  # it may share memory with the parameters

    def near_first(self, found: Sequence[Meeting]) -> list[Meeting]:
        """Return meetings, those nearest to the operation that was matched last first."""
        return sorted(found, key=lambda meeting: abs(meeting.index - self.near))


def _split_off(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return the axes longer than 1 that a view makes of the last axis; none if it makes one, or moves others."""
    rows = math.prod(before[:-1])
    heads = [k for k in range(len(after)) if math.prod(after[:k]) == rows]
    axes = tuple(size for size in after[heads[0] :] if size > 1) if heads else ()
    return axes if len(axes) > 1 and math.prod(axes) == before[-1] else ()


def siblings(operation: Operation) -> Any:
    """Return what an operation has in common with that of another layer of the same list."""
    module = tuple(word for word in operation.module.split(".") if not word.isdecimal())
    return operation.where, operation.name, module, tuple(x.array.shape for x in operation.operands)


def numbers_are_plain(numbers: Sequence[Array], operand: Array, theta: Array) -> bool:
    """Whether the operand is the leaf's elements themselves."""
    return len(numbers) == 1 and bool((numbers[0] >= 0).all()) and np.array_equal(theta[numbers[0]], operand)


def equal(one: Array, two: Array) -> bool:
    """Whether two values of parameters are equal up to the order of their arithmetic."""
    return one.shape == two.shape and bool(np.allclose(one, two, rtol=EQUAL, atol=1e-12))


def ratio(got: Array, operand: Array) -> float | None:
    """Return the number by which all elements differ."""
    if got.shape != operand.shape or got.size < 2:  # one number fits any ratio
        return None
    with np.errstate(all="ignore"):
        ratio = np.ravel(operand / got)
    good = np.isfinite(ratio)
    if not good.any() or np.ptp(ratio[good]) > EQUAL * abs(ratio[good][0]) or ratio[good][0] == 0:
        return None
    return float(np.median(ratio[good]))
