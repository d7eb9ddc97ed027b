"""Read from the two programs what no weight holds: epsilons, activations, factors of norms, strides and padding of convolutions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Choice, Piece, equal
from convert.inference.candidates.source import Source
from convert.inference.derivation import BY_OUTPUTS, Arithmetic, Fact, Role, Tensor
from convert.inference.forms.elements import behind_moves
from convert.inference.forms.products.commuted import run_with
from convert.inference.meetings.sites import Meeting, parameter_operands, plain, role_of
from convert.inference.search import Search
from convert.layers.activations import ACTIVATIONS, NUMPY_ACTIVATIONS, torch_activation
from convert.programs.fingerprint import TINY, ValueTable
from convert.programs.program import REFUSALS, Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
LARGEST_EPSILON = 0.02
ROUNDING = 1e-12  # relative: two functions are equal
SPACE_AND_CHANNELS = (
    "space_and_channels"  # an axis of a kernel is one of space for one program, of channels for the other
)
STEPS = 14  # so many operations lie between an epsilon and what it belongs to


def facts(search: Search) -> tuple[Fact, ...]:
    """Return the facts along the way that the search found."""
    producers = _Producers(search.source.program), _Producers(search.target)
    found: list[Fact] = []
    products: dict[int, Choice] = {}
    for segment in search.segments:
        for choice in segment.solution.choices:
            role = role_of(search.target.operations[choice.index])
            if role in (Role.PRODUCT, Role.CONVOLUTION):
                products[choice.index] = choice
            found += _of_choice(search.source, search.target, choice, role, producers)
    found += _activations(search, products, producers[1])
    return tuple(found)


def facts_by_outputs(tensors: Sequence[Tensor], source: Program, target: Program) -> tuple[Fact, ...]:
    """Return the facts of the tensors that the outputs alone have shown.

    Args:
        tensors: all of them.
        source, target: the records, as they ran, that the evidence of these tensors belongs to.
    """
    leaves = Source(source)
    producers = _Producers(source), _Producers(target)
    found: list[Fact] = []
    for tensor in tensors:
        for part in tensor.parts:
            met, own = part.evidence.source, part.evidence.target
            if part.evidence.by != BY_OUTPUTS or met is None or met.operand is None or own.operand is None:
                continue
            operation = source.operations[met.index]
            meeting = Meeting(met.index, (operation,), met.operand, role_of(operation))
            numbers = source.first_element[part.leaf] + part.positions
            values = leaves.theta[numbers]
            piece = Piece(tensor.name, part.elements, numbers, values, part.arithmetic, part.factor, meeting)
            choice = Choice(own.index, own.operand, Candidate((piece,), part.evidence.by, ()))
            found += _of_choice(leaves, target, choice, role_of(target.operations[own.index]), producers)
    return tuple(found)


class _Producers:
    """Which operation computes a value."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.index = {result: k for k, operation in enumerate(program.operations) for result in operation.results}

    def of(self, value: Value) -> Operation | None:
        """Return the operation; None for an input, a parameter or a constant."""
        return self.program.operations[self.index[value]] if value in self.index else None


def _of_choice(
    source: Source, target: Program, choice: Choice, role: Role, producers: tuple[_Producers, _Producers]
) -> Iterator[Fact]:
    pieces = choice.candidate.pieces
    tensors = tuple(dict.fromkeys(piece.tensor for piece in pieces))
    leaves = tuple(dict.fromkeys(leaf for piece in pieces for leaf in _leaves(source, piece)))
    meeting = next((piece.meeting for piece in pieces if piece.meeting is not None), None)
    fact = partial(Fact, tensors=tensors, leaves=leaves, site=None if meeting is None else meeting.site("source"))
    if choice.candidate.rope:
        yield fact("rope", choice.candidate.rope)
    factors = {piece.factor for piece in pieces if piece.arithmetic is Arithmetic.SAME}
    if factors - {1.0}:
        yield fact("carries", max(factors - {1.0}))
    if meeting is None:
        return
    if role is role_of(meeting.operation) is Role.CONVOLUTION:
        yield from _convolution(target, choice, meeting, fact, producers[0])
    if role is Role.SCALE or (role is Role.SHIFT and "sub" in target.operations[choice.index].name):
        own = target.operations[choice.index]
        found = _epsilon(meeting.operation, meeting.weight, producers[0])
        if found is None:
            found = _epsilon(own, own.operands[choice.side], producers[1])
        if found is not None:
            epsilon, moment = found
            yield fact("epsilon", epsilon)
            if moment.data and moment.array.shape[-1:] == meeting.weight.array.shape[-1:] != (1,):
                yield fact("moments", "of each feature")
        if role is Role.SCALE:
            yield from _multiplies_by(source, target, choice, pieces, fact)


def _leaves(source: Source, piece: Piece) -> list[str]:
    if piece.low_rank is not None:
        return list(piece.low_rank.leaves)
    if piece.arithmetic is Arithmetic.COMPUTED and piece.meeting is not None:
        return sorted(piece.meeting.weight.leaves)
    numbers = piece.numbers[piece.numbers >= 0]
    owners = np.unique(np.searchsorted(source.starts, numbers, "right") - 1)
    return [source.names[k] for k in owners]


def _convolution(
    target: Program, choice: Choice, meeting: Meeting, fact: Callable[..., Fact], source: _Producers
) -> Iterator[Fact]:
    settings = dict(meeting.operation.settings)
    if "padding" in settings:
        settings["padding"] = _with_zeros_before(meeting.operation, source)
    met = target.operations[choice.index]
    transposed = bool(met.settings.get("transposed"))
    if "dimension_numbers" in settings:
        taps = [meeting.weight.array.shape[k] for k in meeting.operation.settings["dimension_numbers"].rhs_spec[2:]]
        own = met.operands[choice.side].array.shape[2:]
        if sorted(n for n in taps if n > 1) != sorted(n for n in own if n > 1):
            yield fact(SPACE_AND_CHANNELS, True)
    for name, key in (
        ("strides", "lhs_dilation" if transposed else "window_strides"),
        ("padding", "padding"),
        ("dilation", "rhs_dilation"),
    ):
        if key in settings:
            yield fact(name, plain(settings[key]))
    yield fact("groups", int(settings.get("feature_group_count", 1)))
    yield fact("transposed", transposed)


def _with_zeros_before(operation: Operation, source: _Producers) -> Any:
    """Return the padding of a convolution, with the zeros that an operation before it pads its data with, as flax's CAUSAL does."""
    padding, spec = operation.settings["padding"], operation.settings.get("dimension_numbers")
    before = source.of(operation.data[0])
    dilated = operation.settings.get("lhs_dilation")
    if spec is None or before is None or before.name != "pad" or (dilated and set(dilated) != {1}):
        return padding
    config, filled = before.settings["padding_config"], before.operands[1].array
    spatial = spec.lhs_spec[2:]
    if filled.any() or any(inner or (k not in spatial and low | high) for k, (low, high, inner) in enumerate(config)):
        return padding
    return [
        (int(low + config[k][0]), int(high + config[k][1])) for (low, high), k in zip(padding, spatial, strict=True)
    ]


def _multiplies_by(
    source: Source, target: Program, choice: Choice, pieces: tuple[Piece, ...], fact: Callable[..., Fact]
) -> Iterator[Fact]:
    """Yield what each side multiplies by: its parameter, or one more."""
    (meeting, *others) = {piece.meeting for piece in pieces}
    if meeting is None or others or len(meeting.weight.elements) != 1:
        return
    numbers, theta = meeting.weight.elements[0], source.theta
    for plus, word in ((0, "scale"), (1, "1+scale")):
        if equal(plus + theta[numbers], meeting.weight.array):
            yield fact("multiplies_by", word)
    operand = target.operations[choice.index].operands[choice.side]
    if len(operand.elements) != 1:
        return
    values = np.concatenate([v.array.ravel() for v in target.parameters.values()])
    for plus, word in ((0, "weight"), (1, "1+weight")):
        if equal(plus + values[operand.elements[0]], operand.array):
            yield fact("weight", word)


def _epsilon(operation: Operation, weight: Value, producers: _Producers) -> tuple[float, Value] | None:
    """Return the small constant that is added on the way to what a parameter multiplies, and what it is added to."""
    todo = [*operation.data, weight]
    for _ in range(STEPS):
        if not todo:
            return None
        before = producers.of(todo.pop(0))
        if before is None or role_of(before) in (Role.PRODUCT, Role.CONVOLUTION, Role.LOOKUP):
            continue
        if parameter_operands(before) and role_of(before) is Role.SHIFT and "sub" not in before.name:
            continue  # the bias of another layer
        if before.name in ("add", "add_any"):
            for operand, other in itertools.permutations(before.operands, 2):
                if operand.constant and operand.array.size and 0 < _number(operand.array) < LARGEST_EPSILON:
                    return float(f"{_number(operand.array):.7g}"), other
        todo += [operand for operand in before.operands if not operand.constant]
    return None


def _number(array: Array) -> float:
    """Return the number that fills an array; NaN if it has several."""
    first = float(array.ravel()[0]) if array.dtype.kind in "fi" else float("nan")
    return first if (array == first).all() else float("nan")


def _functions() -> Mapping[str, Callable[[Array], Array]]:
    import torch

    def of_torch(name: str) -> Callable[[Array], Array]:
        function = torch_activation(name)
        return lambda x: np.asarray(function(torch.as_tensor(x)))

    known: dict[str, Callable[[Array], Array]] = {
        name: function for name, function in NUMPY_ACTIVATIONS.items() if name != "none"
    }
    return known | {name: of_torch(name) for name in ACTIVATIONS}


def _activations(search: Search, products: Mapping[int, Choice], producers: _Producers) -> Iterator[Fact]:
    """Yield the activation behind each product: the function of its result that is a value of the source, and of the target where its run has ended.

    A PReLU may be computed by a ReLU in one of them.
    """
    functions, users = _functions(), search.target.users
    target: ValueTable[Value] = ValueTable()
    ended = all(value in search.replay.values for value in search.target.outputs.values())
    for value, array in search.replay.values.items() if ended else ():
        target.add(array, value)
    biases = {
        choice.index: choice
        for segment in search.segments
        for choice in segment.solution.choices
        if role_of(search.target.operations[choice.index]) is Role.SHIFT
    }
    behind: dict[int, list[Choice]] = {index: [choice] for index, choice in products.items()}
    last = {index: index for index in products}
    for index, choice in biases.items():
        product = _product_before(search.target.operations[index].data[0], producers)
        if product in behind:
            behind[product].append(choice)
            last[product] = index
    for product, choices in behind.items():
        made = search.target.operations[last[product]].results[0]
        y = search.replay.value(made)
        pieces = [piece for choice in choices for piece in choice.candidate.pieces]
        tensors = tuple(dict.fromkeys(piece.tensor for piece in pieces))
        leaves = tuple(dict.fromkeys(leaf for piece in pieces for leaf in _leaves(search.source, piece)))
        found: dict[str, tuple[int, float]] = {}
        for name, function in functions.items():
            with np.errstate(all="ignore"):
                result = function(y)
            if np.allclose(result, result.ravel()[:1]):
                continue  # zeros, or nearly so, as a ReLU or a SiLU makes of negative numbers: many programs have zeros
            if not np.allclose(result, y) and (where := search.source.table.find(result)):
                found[name] = where[0], _error(result, search.source.program, where[0])
        fitting = _nearest(found)
        if len(fitting) > 1:  # of large numbers, relu and silu are equal
            behind_it = list(behind_moves(made, users))
            fitting = [name for name in fitting if any(_computes(user, functions[name]) for user in behind_it)]
        if len(fitting) == 1 and (not ended or target.find(functions[fitting[0]](y))):
            yield Fact("activation", fitting[0], tensors, leaves)


def _nearest(found: Mapping[str, tuple[int, float]]) -> list[str]:
    """Return the functions that were found last, as softplus computes relu, and silu computes sigmoid; of these the nearest.

    Args:
        found: name of a function -> index of the operation that gives its values, and how far off they are.
    """
    last = max((index for index, _ in found.values()), default=0)
    errors = {name: error for name, (index, error) in found.items() if index == last}
    return [name for name, error in errors.items() if error <= 2 * min(errors.values()) + ROUNDING]


def _computes(operation: Operation, function: Callable[[Array], Array]) -> bool:
    """Whether an operation computes a function, of small numbers."""
    if len(operation.data) != 1:
        return False
    (value,) = operation.data
    x = np.linspace(-8, 8, value.array.size).reshape(value.array.shape)
    try:
        return equal(run_with(operation, value, x), function(x))
    except REFUSALS:
        return False


def _error(array: Array, program: Program, index: int) -> float:
    """Return how far an array is from the result of an operation in which it was found, relative to the largest element; infinite if none has its size."""
    results = program.operations[index].results if index >= 0 else tuple(program.inputs.values())
    same = [np.sort(x.array, axis=None) for x in results if x.array.size == array.size]
    ours = np.sort(array, axis=None)
    return min((float(np.abs(ours - x).max() / np.abs(x).max(initial=TINY)) for x in same), default=math.inf)


def _product_before(value: Value, producers: _Producers) -> int:
    """Return the product that a value is the result of, but for its layout; -1 if none."""
    for _ in range(STEPS):
        operation = producers.of(value)
        if operation is None:
            return -1
        if role_of(operation) in (Role.PRODUCT, Role.CONVOLUTION):
            return producers.index[value]
        if len(operation.data) != 1 or role_of(operation) in (Role.SHIFT, Role.SCALE):
            return -1
        value = operation.data[0]
    return -1
