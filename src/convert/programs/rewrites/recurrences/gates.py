"""Gates that are used otherwise: on the other side of a matrix product, or as their complement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.rerun import Change, Computed, Now, again
from convert.programs.divergence.words import Words, names_of
from convert.programs.program import Operation, Program, Value
from convert.programs.rewrites.rewrite import Goal, Rewrite, error_with, line

Array = np.ndarray[Any, np.dtype[Any]]
WRONG_SIDE, OUTSIDE = "reset gate on the wrong side of the matmul", "b_hn outside of the reset"  # in a recurrence
GATE_SIDE, GATE_OUTSIDE = "gate on the wrong side of the matmul", "bias outside of the gate"
COMPLEMENT = "a gate for one minus the gate"
LAYERS = ("product",)
LONGEST = 8  # operations between a gate and the product
MOST_RUNS = 48


@dataclass(frozen=True)
class _Reset:
    """A gate times a state, in front of a linear map of the state or behind it.

    Attributes:
        at: number of the operation that gives what the trials compute.
        gate, state: what is multiplied.
        linear: the operations from the state, or the gated state, to what they give.
        given, made: what `linear` is given, and gives.
        weights: the names of the parameters of its product.
        behind: whether the gate multiplies what the map gives.
        multiplies: the multiplication.
    """

    at: int
    gate: Value
    state: Value
    linear: tuple[Operation, ...]
    given: Value
    made: Value
    weights: str
    behind: bool
    multiplies: Operation

    def of(self, now: Now, x: Array) -> Array:
        """Return what the linear map gives for x.

        Raises:
            ValueError: it does not take x.
        """
        inside = {v for one in self.linear for v in one.results}
        outside = {v: now(v) for one in self.linear for v in one.operands if v not in inside}
        made = again(self.linear, {**outside, self.given: x}, self.made)
        if made is None:
            raise ValueError("the map does not take the gated state")
        return made


def reset_side(target: Program, goal: Goal) -> Rewrite | None:
    """Return the side of a matrix, or of its bias, on which a gate restores the output in all steps of the same line."""
    program = on_the_way(target, goal.output)
    found: dict[Any, list[_Reset]] = {}
    for one in _resets(program):
        found.setdefault((one.behind, one.multiplies.where, one.multiplies.module), []).append(one)
    runs = 0
    for steps in found.values():
        biases = [(v, sign) for v, sign in _biases(program, steps[0])]
        for name, how, compute in _ways(steps[0].behind, biases):
            if runs >= MOST_RUNS:
                return None
            runs += 1
            error, _ = error_with(program, Change(computed={one.at: compute(one) for one in steps}), goal)
            if error <= goal.enough:
                return _rewrite(steps, name, how, error)
    return None


def _rewrite(steps: Sequence[_Reset], name: str, how: str, error: float) -> Rewrite:
    step = steps[0]
    if all(one.weights != step.weights for one in steps[1:]):  # no recurrence: each layer has its own weights
        name = {WRONG_SIDE: GATE_SIDE, OUTSIDE: GATE_OUTSIDE}[name]
    gate, here = line(step.multiplies), line(next(one for one in step.linear if kind_of(one) in LAYERS))
    side = "behind" if step.behind else "in front of"
    problem = f"the target multiplies by the gate ({gate}) {side} the product with {step.weights} ({here}); the outputs are equal {how}"
    fix = f"move the gate at {gate} to where the JAX model has it; if a layer of torch computes it, give the rule the cell of the JAX model"
    return Rewrite(name, problem, fix, error)


def _ways(behind: bool, biases: Sequence[tuple[Value, str]]) -> Iterator[tuple[str, str, Callable[[_Reset], Computed]]]:
    """Yield the name, the words and the computation of each other place of the gate."""
    nothing = lambda now: np.zeros(())  # noqa: E731
    added: list[tuple[str, Callable[[Now], Array]]] = [("", nothing)]
    added += [(f" with its bias {said}", lambda now, v=v: now(v)) for v, said in biases]  # type: ignore[misc]

    def in_front(one: _Reset) -> Computed:
        return lambda now: one.of(now, now(one.gate) * now(one.state))

    def inside(bias: Callable[[Now], Array]) -> Callable[[_Reset], Computed]:
        def of_step(one: _Reset) -> Computed:
            def compute(now: Now) -> Array:
                made = one.of(now, now(one.state))
                return np.asarray(now(one.gate).reshape(made.shape) * (made + bias(now)) - bias(now))

            return compute

        return of_step

    def outside(one: _Reset) -> Computed:
        def compute(now: Now) -> Array:
            alone = one.of(now, np.zeros_like(now(one.state)))
            return np.asarray(now(one.gate).reshape(alone.shape) * (one.of(now, now(one.state)) - alone) + alone)

        return compute

    if behind:
        yield WRONG_SIDE, "when it multiplies the state in front of this product", in_front
        yield OUTSIDE, "when it does not multiply the bias of this product", outside
        for said, bias in added[1:]:
            yield OUTSIDE, f"when it multiplies what this product gives{said}", inside(bias)
        return
    for said, bias in added:
        yield WRONG_SIDE, f"when it multiplies what this product gives{said}", inside(bias)
    yield WRONG_SIDE, "when it multiplies what this product gives, without its bias", outside


def _resets(program: Program) -> Iterator[_Reset]:
    """Yield the products of gates and states that are behind a linear map, or in front of one."""
    producer = program.made_by
    number = {one: k for k, one in enumerate(program.operations)}
    users = program.users
    for at, one in enumerate(program.operations):
        if kind_of(one) != "multiply" or len(one.operands) != 2:
            continue
        for gate, other in (one.operands, one.operands[::-1]):
            if not _is_gate(gate, producer) or gate.array.size != other.array.size:
                continue
            if (found := _linear_to(other, producer)) is not None:
                given, linear = found
                if given.array.shape == gate.array.shape:
                    yield _Reset(at, gate, given, linear, given, other, _weights_of(linear, producer), True, one)
            elif ahead := _linear_from(one.results[0], users):
                made, weights = ahead[-1].results[0], _weights_of(ahead, producer)
                yield _Reset(number[ahead[-1]], gate, other, ahead, one.results[0], made, weights, False, one)


def _is_gate(value: Value, producer: Mapping[Value, Operation]) -> bool:
    """Whether a value is a sigmoid, or a part of one."""
    one = producer.get(value)
    while one is not None and kind_of(one) in (LAYOUT, "part"):
        one = producer.get(one.operands[0])
    return one is not None and kind_of(one) == "sigmoid"


def _linear_to(value: Value, producer: Mapping[Value, Operation]) -> tuple[Value, tuple[Operation, ...]] | None:
    """Return from which value operations with parameters alone lead through a product to this one, and the operations."""
    operations: list[Operation] = []
    while len(operations) < LONGEST and (one := producer.get(value)) is not None:
        operations.insert(0, one)
        kind = kind_of(one)
        if kind in LAYERS:
            if (at := _weights(one, producer)) is None:
                return None
            return one.operands[1 - at if len(one.operands) == 2 else _data(one, at)], tuple(operations)
        if kind in (LAYOUT, "part"):
            value = one.operands[0]
        elif kind == "add" and len(one.operands) == 2:
            ways = [v for v in one.operands if _is_parameter(v, producer)]
            if len(ways) != 1:
                return None
            value = next(v for v in one.operands if v is not ways[0])
        else:
            return None
    return None


def _linear_from(value: Value, users: Mapping[Value, Sequence[Operation]]) -> tuple[Operation, ...]:
    """Return the operations that lead from a value through a product with parameters, and add parameters."""
    operations: list[Operation] = []
    product = False
    while len(operations) < LONGEST and len(of := users.get(value, [])) == 1:
        (one,) = of
        others = [v for v in one.operands if v is not value]
        kind = kind_of(one)
        if (kind in LAYERS and not product) or (kind == "add" and product):
            if not others or not all(v.of_parameters or v.constant for v in others):
                break
            product |= kind in LAYERS
        elif kind not in (LAYOUT, "part"):
            break
        operations.append(one)
        value = one.results[0]
    return tuple(operations) if product else ()


def _weights(product: Operation, producer: Mapping[Value, Operation]) -> int | None:
    """Return which operand of a product is parameters; None if none is, or all are."""
    found = [k for k, v in enumerate(product.operands) if _is_parameter(v, producer) and v.array.ndim > 1]
    return found[0] if len(found) == 1 else None


def _weights_of(linear: Sequence[Operation], producer: Mapping[Value, Operation]) -> str:
    product = next(one for one in linear if kind_of(one) in LAYERS)
    leaves = {leaf for v in product.operands if _is_parameter(v, producer) and v.array.ndim > 1 for leaf in v.leaves}
    return " and ".join(sorted(leaves)) or "a matrix"


def _data(product: Operation, weights: int) -> int:
    """Return which operand the weights of a product with a bias are applied to."""
    return next(k for k, v in enumerate(product.operands) if k != weights and v.array.ndim > 1)


def _is_parameter(value: Value, producer: Mapping[Value, Operation]) -> bool:
    """Whether a value is parameters in any layout, or a part of them: at the first step, a product with zeros is of parameters alone, too."""
    while (one := producer.get(value)) is not None and kind_of(one) in (LAYOUT, "part", "join"):
        value = one.operands[0]
    return value.of_parameters and value not in producer


def _biases(program: Program, step: _Reset) -> Iterator[tuple[Value, str]]:
    """Yield the parameters that are added to what a step gives, a few operations behind it."""
    words = Words(program.operations, names_of(program))
    users = program.users
    value = program.operations[step.at].results[0]
    for _ in range(LONGEST):
        of = users.get(value, [])
        if len(of) != 1 or kind_of(of[0]) not in (LAYOUT, "add", "part"):
            return
        for v in of[0].operands:
            if v is not value and v.of_parameters:
                yield v, words.value(v)
        value = of[0].results[0]


# ---- one minus a gate


def complement(target: Program, goal: Goal, own: Callable[[Operation], bool]) -> Rewrite | None:
    """Return the gates that restore the output as one minus them: where one of two values has the gate's weight, and the other the rest.

    Args:
        own: whether an operation is of the model's own code; a layer of torch has its gates right.
    """
    program = on_the_way(target, goal.output)
    producer = program.made_by
    users = program.users
    number = {one: k for k, one in enumerate(program.operations)}
    found: dict[Any, list[tuple[Value, dict[int, Computed], Operation]]] = {}
    for one in program.operations:
        if kind_of(one) != "multiply" or not own(one):
            continue
        for gate in (v for v in one.operands if _is_gate(v, producer)):
            rest = [u for u in users.get(gate, []) if _is_rest(u, gate)]
            others = [v for v in one.operands if v is not gate]
            difference = [v for v in others if v in producer and kind_of(producer[v]) == "subtract"]
            if not rest and not difference:
                continue
            uses = [u for u in users[gate] if u in rest or kind_of(u) == "multiply"]
            here = [u for u in uses if u.where == one.where]  # one parameter may be the gate of several places
            for chosen in (uses, here) if len(here) < len(uses) else (uses,):
                computed = {number[u]: _with_gate(gate) if u in rest else _with_rest(u, gate) for u in chosen}
                found.setdefault((one.where, one.module, bool(rest), chosen is here), []).append((gate, computed, one))
    for steps in list(found.values())[:MOST_RUNS]:
        change = Change(computed={at: how for _, computed, _ in steps for at, how in computed.items()})
        error, _ = error_with(program, change, goal)
        if error <= goal.enough:
            gate, _, use = steps[min(1, len(steps) - 1)]  # the first step may begin from zeros
            words = Words(program.operations, names_of(program))
            weighted = next((words.value(v) for v in use.operands if v is not gate), "a value")
            problem = (
                f"the target multiplies {weighted} by a gate ({line(use)}); the outputs are equal when it multiplies it by one minus the gate, "
                "and by the gate what has one minus it now"
            )
            fix = (
                f"exchange the gate and one minus the gate at {line(use)}, or in the JAX model; a rule that negates what the gate is "
                "computed of would make the outputs equal, too"
            )
            return Rewrite(COMPLEMENT, problem, fix, error)
    return None


def _is_rest(one: Operation, gate: Value) -> bool:
    """Whether an operation computes one minus a gate."""
    if kind_of(one) != "subtract" or gate not in one.operands or len(one.data) > 1:
        return False
    return bool(np.allclose(one.results[0].array, 1 - gate.array, rtol=0, atol=1e-12))


def _with_gate(gate: Value) -> Computed:
    return lambda now: now(gate)


def _with_rest(operation: Operation, gate: Value) -> Computed:
    """Return what an operation gives for one minus a gate in the place of the gate."""

    def compute(now: Now) -> Array:
        operands = [np.ascontiguousarray(1 - now(v) if v is gate else now(v)) for v in operation.operands]
        return np.asarray(operation.again(operands)[0])

    return compute
