"""The order of operations in which each stands directly in front of what first uses it.

A model may compute a value long before it uses it, such as a residual. What lies between is no part of the way from the one to the other.
"""

from __future__ import annotations

from dataclasses import replace

from convert.inference.meetings.sites import parameter_operands
from convert.programs.program import Operation, Program, computed_by


def used_late(program: Program) -> Program:
    """Return the program in this order; of what an operation is given, what takes most layers comes first."""
    made_by = program.made_by
    place = {operation: k for k, operation in enumerate(program.operations)}
    ordered: dict[Operation, None] = {}
    used = {x for operation in program.operations for x in operation.operands}
    for last in program.operations:
        waiting = [] if used.intersection(last.results) else [last]
        while waiting:
            operation = waiting[-1]
            before = {made_by[x] for x in operation.operands if x in made_by} - ordered.keys()
            if operation in ordered or not before:
                ordered[operation] = None
                waiting.pop()
            elif len(before) == 1:
                waiting += before
            else:
                layers = {
                    one: sum(bool(parameter_operands(x)) for x in computed_by(one, made_by, ordered)) for one in before
                }
                waiting += sorted(before, key=lambda one: (layers[one], -place[one]))  # the last one is next
    return replace(program, operations=tuple(ordered))
