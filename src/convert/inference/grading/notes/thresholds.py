"""Numbers that one program compares values with, or bends them at, where the other has another number: no run shows a value in between."""

from __future__ import annotations

from collections.abc import Iterator

from convert.programs.program import Operation, Program, Value

COMPARISONS = {"gt", "ge", "lt", "le"}
AT_ZERO = {"relu", "leaky_relu", "elu", "celu", "selu", "prelu", "abs"}
LIMITS = {"clamp", "clamp_min", "clamp_max", "max", "maximum", "min", "minimum", "threshold"} | AT_ZERO
SHRINK = {"hardshrink": 0.5, "softshrink": 0.5}  # torch's default
CLOSE = 1e-9  # relative: one number in float32 and in float64


def notes(source: Program, target: Program) -> tuple[str, ...]:
    """Return a note for each number of the module that the JAX function has not got, where that has one that the module has not got."""
    of_source, of_target = (dict(_numbers(program)) for program in (source, target))
    alone = [{x: at for x, at in one.items() if not any(_same(x, y) for y in two)} for one, two in ((of_source, of_target), (of_target, of_source))]  # fmt: skip
    found = []
    for number, operation in alone[1].items() if alone[0] else ():
        near = min(alone[0], key=lambda x: abs(x - number))
        theirs = alone[0][near]
        found.append(
            f"`{operation.name}` of the PyTorch module{_at(operation)} changes at {number:g}, and `{theirs.name}` of the JAX function{_at(theirs)} "
            f"at {near:g}; no value that was drawn lies between; compare these lines, or give inputs there"
        )
    return tuple(found)


def _numbers(program: Program) -> Iterator[tuple[float, Operation]]:
    """Yield the numbers on both sides of which an operation was given values."""
    for operation in program.operations:
        if operation.name in COMPARISONS | LIMITS | SHRINK.keys():
            values = [x for x in operation.operands if not x.constant and x.array.dtype.kind == "f"]
            numbers = (0.0,) if operation.name in AT_ZERO else operation.numbers
            numbers = numbers[:1] if operation.name == "threshold" else numbers  # the other one is what it gives below
            numbers = numbers or (SHRINK[operation.name],) if operation.name in SHRINK else numbers
            if len(values) == 1:
                yield from ((x, operation) for x in numbers if _has_both_sides(values[0], x))


def _has_both_sides(value: Value, number: float) -> bool:
    return bool((value.array < number).any() and (value.array > number).any())


def _same(one: float, two: float) -> bool:
    return abs(one - two) <= CLOSE * max(abs(one), abs(two)) or abs(one) == abs(two)


def _at(operation: Operation) -> str:
    return f" at {operation.place}" if operation.place else ""
