"""Whether a difference is the only explanation: equal programs that are written in two ways have no values in common there either.

Where a repair makes the outputs equal, most weights are shown by that: the outputs are computed with them. What the repair overwrites is
not, and neither is a tensor of which some place changes no output, as the part of a fused matrix that only the overwritten values are made
of. Each tensor in front of it must be derived; for the others, every leaf that is left is tried in every order of its axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.candidates.candidate import COMPUTE
from convert.inference.derivation import Arithmetic, Grade, Part, Role, Tensor
from convert.inference.forms.elements import MOVES
from convert.inference.grading.differences.folded import is_folded
from convert.inference.grading.differences.other_orders import are_of_a_layer, runs_in_other_orders
from convert.inference.grading.differences.split_columns import are_split_in_another_order
from convert.inference.meetings.columns import FEW
from convert.inference.meetings.sites import role_of
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.rerun import Change, Rerun
from convert.programs.divergence.search import Divergence
from convert.programs.divergence.shared_values import confirms
from convert.programs.fingerprint import EXACT, ValueTable
from convert.programs.program import Operation, Program, Value, times_used
from convert.programs.rerun import can_rerun, rerun

Array = np.ndarray[Any, np.dtype[Any]]
_Option = tuple[str, Array]  # a leaf, and the tensor that is made of it
MOST = 2000  # ways to make the tensors that a repair overwrites
WORK = 5 * 10**8  # elements that all trials may compute; an operation counts as `CALL` more
CALL = 5000
SLACK = 10.0  # times the error with the repairs: what changes an output by no more does not show
DEPTH = 12  # operations behind a layer
FOR_VECTORS = (Arithmetic.SAME, Arithmetic.ONE_PLUS, Arithmetic.MINUS_ONE)


def is_only_explanation(
    found: Divergence,
    source: Program,
    target: Program,
    output: str,
    tensors: Sequence[Tensor],
    error: Callable[[Array], float],
) -> bool:
    """Whether no other weights of the target explain that an output differs.

    Args:
        found: where the target departs from the source.
        target: with the weights that were found or guessed.
        tensors: all of them, with their grades.
        error: of an array as the output.
    """
    if not found.proven or found.error > EXACT:
        return False
    if _are_columns_of_a_layer(found.repairs[0], target) or _takes_other_columns(found.repairs[0], target):
        return False
    if is_folded(found.repairs[0], target):
        return False
    if _is_in_a_layer(found.repairs[0], target) or all(_is_behind(repair, target) for repair in found.repairs):
        return False
    if _are_columns_for_a_layer(found.repairs[0], target):
        return False
    if are_split_in_another_order(found.repairs[0], target) or _is_better_in_another_order(source, target):
        return False
    unshown = _unshown(found, target, output, {t.name for t in tensors if t.grade is Grade.OPEN}, error)
    doubtful = [t for t in tensors if t.name in unshown and t.grade is not Grade.IN_FRONT]
    if not doubtful:
        return True
    if not all(tensor.parts for tensor in doubtful):
        return False  # another rule than those of `_options` may make it
    taken = {leaf for t in tensors if t not in doubtful for part in t.parts for leaf in (part.leaf, *part.leaves)}
    free = [name for name in source.parameters if name not in taken]
    options = [list(_options(tensor, source, free)) for tensor in doubtful]
    runs = prod(map(len, options))
    each = _work(target)
    given = {name: value.array for name, value in source.inputs.items()}
    if not 0 < runs <= MOST or runs * each > WORK or not can_rerun(target, given):
        return False
    weights = {name: value.array for name, value in target.parameters.items()}
    for made in _assignments(doubtful, options):
        try:
            again = rerun(target, {**weights, **made}, given)
        except ConvertError:  # not a number
            continue
        if error(again.outputs[output].array) <= EXACT:
            return False
    return True


def _is_better_in_another_order(source: Program, target: Program) -> bool:
    """Whether more values of the target are the source's if the columns of a layer that it splits, as gates, stand in another order."""
    given = {name: of.array for name, of in source.inputs.items()}
    weights = {name: of.array for name, of in target.parameters.items()}
    table: ValueTable[int] = ValueTable(EXACT)
    for k, operation in enumerate(source.operations):
        for value in operation.results:
            if value.data:
                table.add(value.array, k)

    def shared(program: Program) -> int:
        values = (value for operation in program.operations for value in operation.results if value.data)
        return sum(bool(table.find(value.array)) for value in values)

    own: int | None = None
    for _, run in runs_in_other_orders(target, weights, given):
        own = shared(target) if own is None else own
        if shared(run) > own:
            return True
    return False


def _are_columns_of_a_layer(repair: Repair, target: Program) -> bool:
    """Whether a value is that of the source but for the order of a layer's results, for each of its rows: other weights give that order."""
    made_by = target.made_by
    operation = made_by.get(repair.operands[0]) if repair.operands else None
    for _ in range(DEPTH):
        if operation is None or role_of(operation) is Role.PRODUCT or len(operation.data) != 1:
            break
        operation = made_by.get(operation.data[0])
    if (
        operation is None
        or role_of(operation) is not Role.PRODUCT
        or not any(x.of_parameters for x in operation.operands)
    ):
        return False
    width = operation.results[0].array.shape[-1]
    if width < 2 or repair.got.size % width or np.array_equal(repair.got, repair.want):
        return False
    if not np.isfinite(repair.got).all():
        return False
    got = np.sort(repair.got.reshape(-1, width), 1)
    instead = repair.source[-1].results if repair.source else repair.source_operands
    theirs = [
        x.array for x in instead if x.array.size == got.size and np.isfinite(x.array).all()
    ]  # in the source's own order
    return len(got) > 1 and any(
        np.allclose(got, np.sort(x.reshape(-1, width), 1), rtol=0, atol=EXACT * np.abs(x).max()) for x in theirs
    )


def _are_columns_for_a_layer(repair: Repair, target: Program) -> bool:
    """Whether what a value is computed of has the source's columns in another order, and a layer is behind it, which takes columns in any order.

    With that order in the other layers whose values it meets, the layer behind makes up for it.
    """
    theirs = [x.array for x in repair.source_operands]
    turned = any(_has_other_columns(got, want) for got in repair.given for want in theirs)
    todo, seen = [x for one in repair.target[-1:] for x in one.results] if turned else [], set[Value]()
    while todo:
        at = todo.pop()
        for user in target.users.get(at, ()) if at not in seen else ():
            if role_of(user) is Role.PRODUCT and any(x.of_parameters for x in user.operands):
                return True
            todo += user.results
        seen.add(at)
    return False


def _has_other_columns(got: Array, want: Array) -> bool:
    """Whether the columns of an array are those of another one in another order."""
    if got.shape != want.shape or got.ndim < 2 or len(got) < 2 or got.dtype.kind != "f" or want.dtype.kind != "f":
        return False
    one, two = (x.reshape(-1, x.shape[-1]) for x in (got, want))
    slack = EXACT * np.abs(two).max(initial=0)
    if not np.isfinite(slack) or not np.isfinite(one).all() or (np.abs(one - two) <= slack).all():
        return False
    one, two = (x[:, np.argsort(x[0], kind="stable")] for x in (one, two))
    return bool((np.abs(one - two) <= slack).all())


def _takes_other_columns(repair: Repair, target: Program) -> bool:
    """Whether the programs take other columns of what a layer gives: its weights in another order give what the source takes."""
    steps = (*repair.target, *repair.source)
    if not repair.target or len(repair.operands) != 1 or not all(one.name in MOVES for one in steps):
        return False
    (value,), made_by = repair.operands, target.made_by
    shape, want = value.array.shape, repair.want
    for axis, size in enumerate(shape):
        others = want.ndim == len(shape) and np.delete(want.shape, axis).tolist() == np.delete(shape, axis).tolist()
        if not others or want.shape[axis] >= size or not are_of_a_layer(value, axis, made_by):
            continue
        columns, theirs = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (value.array, want))
        slack = EXACT * np.abs(columns).max(initial=0)
        if all((np.abs(columns - one).max(1, initial=0) <= slack).any() for one in theirs):
            return True
    return False


def _lacking(repair: Repair) -> tuple[Value, Array, float] | None:
    """Return the value that a repair replaces, what it lacks, and how much of that is rounding; None where it lacks nothing that is a number."""
    value = repair.target[-1].results[0] if repair.target else next(iter(repair.operands), None)
    if value is None or not value.data or repair.want.size != repair.got.size:
        return None
    if not (np.isfinite(repair.want).all() and np.isfinite(repair.got).all()):
        return None
    lacking = repair.want - repair.got.reshape(repair.want.shape)
    slack = EXACT * float(np.abs(repair.want).max(initial=0))
    return (value, lacking, slack) if (np.abs(lacking) > slack).any() else None


def _is_by_column(lacking: Array, slack: float) -> bool:
    axes = range(lacking.ndim)
    return any((np.ptp(lacking, tuple(j for j in axes if j != k)) <= slack).all() for k in axes)


def _is_in_a_layer(repair: Repair, target: Program) -> bool:
    """Whether other weights of a layer in front of a value give what it lacks, or the bias of another term of the sum that it goes into.

    A bias has one number for each column, or for all. A matrix has a multiple of what it multiplies: ``x + x W`` is ``x (W + 1)``.
    """
    if (found := _lacking(repair)) is None:
        return False
    value, lacking, slack = found
    by_column, made_by = _is_by_column(lacking, slack), target.made_by
    return any(
        _is_multiple(lacking, made.data[0].array, slack) if role_of(made) is Role.PRODUCT else by_column
        for made in _layers_of_sum(value, made_by)
    ) or (by_column and _other_term_has_bias(value, target, made_by))


def _is_behind(repair: Repair, target: Program) -> bool:
    """Whether parameters behind a value may hold what it lacks."""
    if (found := _lacking(repair)) is None:
        return False
    value, lacking, slack = found
    values = tuple(repair.change.values) or (value,)  # that are put in, for all that use them
    return _is_by_column(lacking, slack) and all(_parameters_hold_it(x, target) for x in values)


def _other_term_has_bias(value: Value, target: Program, made_by: Mapping[Value, Operation]) -> bool:
    """Whether a parameter is added to another term of a sum that a value goes into, and to nothing else: ``x + (y + b)`` is ``(x + b) + y``."""
    users, uses = target.users, times_used(target)
    for _ in range(DEPTH):
        user = users[value][0] if uses[value] == 1 and users.get(value) else None
        if user is None or (role_of(user) is not Role.SHIFT and user.name not in MOVES):
            return False
        todo = [x for x in user.data if x is not value]
        while todo:
            made = made_by.get(term := todo.pop())
            if made is None or uses[term] != 1 or (role_of(made) is not Role.SHIFT and made.name not in MOVES):
                continue
            if any(operand.of_parameters for operand in made.operands):
                return True
            todo += made.data
        value = user.results[0]
    return False


def _parameters_hold_it(value: Value, target: Program) -> bool:
    """Whether a row that is added to a value is in parameters that the target adds behind it: ``(x + p) W + b`` is ``x W + (p W + b)``.

    So it is wherever the value goes: through matrices, and sums with other data.
    """
    users, outputs = target.users, {*target.outputs.values()}
    todo, seen = [value], set[Value]()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        if at in outputs or not users.get(at) or len(seen) > DEPTH:
            return False
        for user in users[at]:
            role, own = role_of(user), any(operand.of_parameters for operand in user.operands)
            if role is Role.SHIFT and own:
                continue
            if role is not Role.SHIFT and not (role is Role.PRODUCT and own) and user.name not in MOVES:
                return False
            todo += user.results
    return True


def _is_multiple(array: Array, other: Array, slack: float) -> bool:
    one, two = array.ravel(), other.ravel()
    if one.shape != two.shape or not two.any() or not np.isfinite(two).all():
        return False
    return bool((np.abs(one - (one @ two) / (two @ two) * two) <= slack).all())


def _layers_of_sum(value: Value, made_by: Mapping[Value, Operation]) -> Iterator[Operation]:
    """Yield the products with parameters in the sum that a value is, and the operations that add a parameter to it."""
    todo = [value]
    for _ in range(DEPTH):
        made = made_by.get(todo.pop()) if todo else None
        if made is None:
            continue
        own = any(operand.of_parameters for operand in made.operands)
        if role_of(made) is Role.SHIFT:
            if own:
                yield made
            todo += made.data
        elif role_of(made) is Role.PRODUCT and own and len(made.data) == 1:
            yield made
        elif made.name in MOVES:
            todo.append(made.operands[0])


def _unshown(
    found: Divergence, target: Program, output: str, open_: Collection[str], error: Callable[[Array], float]
) -> set[str]:
    """Return the parameters on which the output depends, and which it does not show with the repairs.

    Args:
        open_: those that nothing else shows, so that each place in them must change the output.
    """
    changes = [repair.change for repair in found.repairs]
    values = {value for change in changes for value in change.values}
    values |= {target.operations[at].results[0] for change in changes for at in change.computed}
    operands = {place for change in changes for place in (*change.operands, *change.earlier)}
    names = {value: name for name, value in target.parameters.items()}
    goal = target.outputs[output]
    left = _in_front(target, goal, values, operands) if confirms(goal.array) else set()
    used = [value for value in _in_front(target, goal, (), ()) if value in names]
    merged = _merged(changes)
    slack = SLACK * max(found.error, float(np.finfo(float).eps))
    work = WORK // _work(target)
    unshown = {names[value] for value in used if value not in left}
    for value in used:
        if value in left and names[value] in open_:
            work -= sum(value.array.shape)
            if work < 0 or not _shows(value, merged, target, lambda run: error(run.array(goal)) > slack):
                unshown.add(names[value])
    return unshown


def _shows(value: Value, repairs: Change, target: Program, changes: Callable[[Rerun], bool]) -> bool:
    """Whether other numbers at each single place along an axis of a parameter change the output of the target with the repairs."""
    drawn: Array = np.asarray(np.random.default_rng(0).normal(size=value.array.shape))
    for axis, size in enumerate(value.array.shape):
        for place in range(size):
            other, at = value.array.copy(), (slice(None),) * axis + (place,)
            other[at] = drawn[at]
            rerun = Rerun(target)
            try:
                list(rerun.put(replace(repairs, values={value: other, **repairs.values})))
            except ValueError:  # an operation does not take it
                continue
            if not changes(rerun):
                return False
    return True


def _merged(changes: Sequence[Change]) -> Change:
    """Return changes as one; a later one counts."""
    made = Change()
    for change in changes:
        made = Change(
            {**made.values, **change.values},
            {**made.operands, **change.operands},
            {**made.earlier, **change.earlier},
            {**made.computed, **change.computed},
        )
    return made


def _work(target: Program) -> int:
    """Return the elements that one run computes; an operation counts as `CALL` more."""
    return sum(CALL + sum(x.array.size for x in operation.results) for operation in target.operations)


def _in_front(
    program: Program, goal: Value, put_in: Collection[Value], operands: Collection[tuple[int, int]]
) -> set[Value]:
    """Return the values that an output is computed from, up to those that others take the place of."""
    made_by = {value: k for k, operation in enumerate(program.operations) for value in operation.results}
    todo, seen = [goal], set[Value]()
    while todo:
        value = todo.pop()
        if value in seen or value in put_in:
            continue
        seen.add(value)
        at = made_by.get(value)
        if at is not None:
            todo += [x for k, x in enumerate(program.operations[at].operands) if (at, k) not in operands]
    return seen


def _options(tensor: Tensor, source: Program, free: Collection[str]) -> Iterator[_Option]:
    """Yield what a tensor may be made of: a leaf in each order of its axes, and of the places along a short one, as channels that are joined.

    None where it may be made of several leaves, or of parts of one.
    """
    size = prod(tensor.shape)
    if any(not _is_whole(part, source, size) for part in tensor.parts):
        return
    guess = tensor.parts[0] if tensor.parts else None
    if guess is not None and guess.arithmetic is Arithmetic.CONSTANT:
        yield "", np.full(tensor.shape, guess.factor)
    factor = guess.factor if guess is not None and guess.leaf else 1.0
    kinds = FOR_VECTORS if len(tensor.shape) < 2 else (Arithmetic.SAME,)
    for leaf in free:
        array = source.parameters[leaf].array
        if array.size != size:
            continue
        seen: set[bytes] = set()
        for order in itertools.permutations([k for k, n in enumerate(array.shape) if n > 1]):
            whole = array.squeeze().transpose(np.argsort(np.argsort(order))).reshape(tensor.shape)
            for made in (whole, *_short_axes_reordered(whole)):
                if made.tobytes() not in seen:
                    seen.add(made.tobytes())
                    yield from ((leaf, factor * COMPUTE[kind](made)) for kind in kinds)


def _short_axes_reordered(array: Array) -> Iterator[Array]:
    for axis, size in enumerate(array.shape):
        if 1 < size <= FEW:
            orders = itertools.islice(itertools.permutations(range(size)), 1, None)
            yield from (np.take(array, order, axis) for order in orders)


def _is_whole(part: Part, source: Program, size: int) -> bool:
    """Whether a part makes a tensor of all elements of a leaf, or of one number."""
    if len(part.elements) != size:
        return False
    return part.arithmetic is Arithmetic.CONSTANT or (
        bool(part.leaf) and source.parameters[part.leaf].array.size == size
    )


def _assignments(tensors: Sequence[Tensor], options: Sequence[Sequence[_Option]]) -> Iterator[Mapping[str, Array]]:
    """Yield the ways to make all tensors, each leaf at most once."""
    for chosen in itertools.product(*options):
        leaves = [leaf for leaf, _ in chosen if leaf]
        if len(set(leaves)) == len(leaves):
            yield {tensor.name: made for tensor, (_, made) in zip(tensors, chosen, strict=True)}
