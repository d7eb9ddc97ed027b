"""Take several networks apart that a program runs at once: `jax.vmap` over stacked parameters, such as the members of an ensemble, or two encoders.

Another program runs one network after the other. Each parameter of the stack is in as many parts, and these go by themselves through each
operation that acts on each network alone (`batches_apart`).
"""

from __future__ import annotations

from dataclasses import replace

from convert.inference.derivation import Role
from convert.inference.forms.batches_apart import Parts, Rewriting, one_after_the_other, part_of
from convert.inference.forms.elements import step
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Operation, Program, Value

MAX_NETWORKS = 16


def stacked_networks(program: Program) -> int:
    """Return how many networks a program runs at once; 0 if it runs one."""
    sizes = {_networks(operation) for operation in program.operations}
    return max((size for size in sizes if 1 < size <= MAX_NETWORKS), default=0)


def networks_apart(program: Program, networks: int, *, keep: bool) -> Program:
    """Return the program with each of several networks by itself.

    Args:
        program: the record.
        networks: how many there are; 0 if there is one.
        keep: whether what is computed of all at once stays in the program as well.
    """
    stacks = [x for x in program.parameters.values() if x.array.ndim and x.array.shape[0] == networks]
    if not networks or not stacks:
        return program
    rows = one_after_the_other([1] * networks)
    first = program.operations[0]
    cuts: list[Operation] = []
    parts: dict[Value, Parts] = {}
    for stack in stacks:
        values = tuple(part_of(stack, stack.array[of], (of,)) for of in rows)
        steps = [step(first, "slice", (stack,), x, lambda a, of=of: a[of]) for x, of in zip(values, rows, strict=True)]
        parts[stack] = Parts(0, rows, values, steps[0], frozenset())
        cuts += steps
    made = Rewriting(program, keep=keep, stacks=parts).result()
    return replace(made, operations=(*cuts, *made.operations))


def _networks(operation: Operation) -> int:
    """Return how many matrices a product has, each for data of its own, or how many vectors scale or shift all data; 0 if it has one, or these are not the rows of a stack."""
    if len(operation.operands) != 2 or len(operation.data) != 1:
        return 0
    side = 1 if operation.operands[0].data else 0
    weight, role = operation.operands[side], role_of(operation)
    if len(weight.elements) != 1:
        return 0
    shape = weight.array.shape
    if role in (Role.SCALE, Role.SHIFT):
        return shape[0] if len(shape) > 2 and set(shape[1:-1]) == {1} and shape[-1] > 1 else 0
    axes = axes_of(operation, side) if role is Role.PRODUCT and operation.data[0].leaves else None
    return shape[axes[1][0][0]] if axes is not None and len(axes[1][0]) == 1 else 0
