"""Go through a record, and write its complex values in real numbers.

What an operation is made of is checked on the numbers of the run. One that is not known, such as a Fourier transform, runs as it
is, on the parts of its operands.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from convert.numerics.real_numbers import as_real
from convert.programs.complex_numbers.arithmetic import Arithmetic
from convert.programs.complex_numbers.operations import NewOperations, Run
from convert.programs.complex_numbers.parts import Parts, agree, filled, is_complex, parts_of_constant
from convert.programs.program import Array, Operation, Program, Value

_PLACE = Operation("", (), (), {}, lambda _: ())  # of what is no operation of the model's code


def in_real_numbers(program: Program, moving: Collection[str]) -> Program:
    """Return a record without complex values; the same one if it has none.

    Args:
        moving: names of the operations that only move elements.
    """
    values = [*program.parameters.values(), *program.inputs.values(), *program.outputs.values()]
    values += [x for operation in program.operations for x in (*operation.operands, *operation.results)]
    if not any(map(is_complex, values)):
        return program
    return _Rewriting(program, moving).program()


class _Rewriting:
    def __init__(self, program: Program, moving: Collection[str]) -> None:
        self._program = program
        self._known: dict[Value, Value | Parts] = {}
        self._stacks: dict[Value, Parts] = {}  # real values whose last axis has the parts
        self._new = NewOperations()
        self._arithmetic = Arithmetic(self._new, moving, self._parts, self._real)
        self._numbers = _new_numbers(program)

    def program(self) -> Program:
        parameters, first = {}, 0
        for name, value in self._program.parameters.items():
            array = as_real(value.array)
            numbers = np.arange(first, first + array.size).reshape(array.shape)
            first += array.size
            parameters[name] = self._given(value, replace(value, array=array, elements=(numbers,)))
        inputs = {name: self._given(x, replace(x, array=as_real(x.array))) for name, x in self._program.inputs.items()}
        for operation in self._program.operations:
            if any(map(is_complex, (*operation.operands, *operation.results))):
                self._rewrite(operation)
            else:
                self._keep(operation)
        outputs = {name: self._output(value) for name, value in self._program.outputs.items()}
        operations = self._new.used(list(outputs.values()))
        return replace(self._program, parameters=parameters, inputs=inputs, operations=operations, outputs=outputs)

    def _given(self, old: Value, new: Value) -> Value:
        if is_complex(old):
            new = replace(new, complex=True)
            self._known[old] = Parts(*self._new.select(_PLACE, new), old.array.shape)
            return new
        if self._numbers is None or not old.leaves:
            return old
        self._known[old] = new
        return new

    def _output(self, value: Value) -> Value:
        if not is_complex(value):
            return self._real(value)
        self._stacked(self._parts(value), _PLACE)
        last = self._new.all[-1]
        made = replace(last.results[0], complex=True)
        self._new.forget(len(self._new.all) - 1)
        self._new.append(replace(last, results=(made,)))
        return made

    # ---- values

    def _real(self, value: Value) -> Value:
        """Return what a real value is in the new record."""
        found = self._known.get(value)
        if found is None:
            found = self._known[value] = self._renumbered(value)
        assert isinstance(found, Value), "a complex value has two parts"
        return found

    def _renumbered(self, value: Value) -> Value:
        if self._numbers is None or not value.elements:
            return value
        numbers = self._numbers
        return replace(value, elements=tuple(np.where(e < 0, -1, numbers[e]) for e in value.elements))

    def _parts(self, value: Value) -> Parts:
        """Return the two parts of a value; of a real one the second is zero."""
        if not is_complex(value):
            return Parts(self._real(value), None, value.array.shape)
        found = self._known.get(value)
        if found is None:
            found = self._known[value] = parts_of_constant(value)
        assert isinstance(found, Parts), "a real value has one part"
        return found

    def _taken_apart(self, value: Value, like: Operation) -> Parts:
        """Return the parts that lie along the last axis of a real value."""
        if value in self._stacks:
            return self._stacks[value]
        return Parts(*self._new.select(like, value), value.array.shape[:-1])

    def _stacked(self, parts: Parts, like: Operation) -> Value:
        """Return the real value whose last axis has the parts."""
        real, imaginary = (filled(part, parts.shape) for part in parts.both)
        made = self._new.stack(like, real, imaginary)
        self._stacks[made] = parts
        return made

    # ---- operations

    def _keep(self, operation: Operation) -> None:
        operands = tuple(map(self._real, operation.operands))
        if operands and operands[0] in self._stacks and self._selected(operation, self._stacks[operands[0]]):
            return
        old, results = operation.results, tuple(map(self._renumbered, operation.results))
        if operands != operation.operands or results != old:
            operation = replace(operation, operands=operands, results=results)
        self._known.update(zip(old, results, strict=True))
        self._new.keep(operation)

    def _selected(self, operation: Operation, parts: Parts) -> bool:
        """Take the parts themselves where an operation takes them of the value whose last axis they are."""
        if operation.settings.get("dim", 0) not in (-1, len(parts.shape)):
            return False
        if operation.name not in ("select", "unbind"):
            return False
        taken = [int(operation.settings["index"]) % 2] if operation.name == "select" else [0, 1]
        for value, k in zip(operation.results, taken, strict=True):
            self._known[value] = filled(parts.both[k], parts.shape)
        return True

    def _rewrite(self, operation: Operation) -> None:
        before, value = len(self._new.all), operation.operands[0]
        made: list[Parts] | None
        if operation.name == "view_as_complex":
            made = [self._taken_apart(self._real(value), operation)]
        elif operation.name == "view_as_real":
            whole = self._stacked(self._parts(value), operation)
            made = [Parts(whole, None, whole.array.shape)]
        else:
            made = self._arithmetic.of(operation)
        if made is None or not agree(made, operation.results):
            self._new.forget(before)
            made = self._as_it_is(operation)
        for old, parts in zip(operation.results, made, strict=True):
            self._known[old] = parts if is_complex(old) else filled(parts.real, parts.shape)

    def _as_it_is(self, operation: Operation) -> list[Parts]:
        """Record the operation itself, on the parts of its operands."""
        operands: list[Value] = []
        places: list[tuple[int, ...]] = []  # of the parts of each operand
        for value in operation.operands:
            parts = self._parts(value)
            given = [filled(parts.real, parts.shape), *([] if parts.imaginary is None else [parts.imaginary])]
            places.append(tuple(range(len(operands), len(operands) + len(given))))
            operands += given
        kinds = [x.array.dtype for x in operation.operands]
        split = tuple(map(is_complex, operation.results))
        data, leaves = any(x.data for x in operands), frozenset[str]().union(*(x.leaves for x in operands))
        if not data and not leaves:  # of parameters that meet zeros alone
            return [parts_of_constant(x) for x in operation.results]
        made: list[Parts] = []
        results: list[Value] = []
        for value, two in zip(operation.results, split, strict=True):
            arrays = (value.array.real, value.array.imag) if two else (value.array,)
            new = [Value(np.array(x), data, leaves) for x in arrays]
            results += new
            made.append(Parts(new[0], new[1] if two else None, value.array.shape))
        again = partial(_on_parts, operation.again, places, kinds, split)
        self._new.append(replace(operation, operands=tuple(operands), results=tuple(results), again=again))
        return made


def _new_numbers(program: Program) -> Array | None:
    """Return the new number of each element of the parameters, of complex ones that of the real part; None: they keep theirs."""
    found, total = [np.zeros(0, np.int64)], 0
    for value in program.parameters.values():
        step = 2 if is_complex(value) else 1
        found.append(total + step * np.arange(value.array.size))
        total += step * value.array.size
    numbers = np.concatenate(found)
    return None if total == len(numbers) else numbers


def _on_parts(
    again: Run,
    places: Sequence[tuple[int, ...]],
    kinds: Sequence[np.dtype],
    split: Sequence[bool],
    operands: Sequence[Array],
) -> Sequence[Array]:
    """Run an operation on complex operands that are given by their parts, and return those of its results."""
    given = []
    for at, kind in zip(places, kinds, strict=True):
        whole = np.asarray(operands[at[0]])
        if kind.kind == "c":
            whole = whole.astype(kind)
            if len(at) > 1:
                whole.imag = operands[at[1]]
        given.append(whole)
    made: list[Array] = []
    for x, two in zip(again(given), split, strict=True):
        made += [np.array(np.real(x)), np.array(np.imag(x))] if two else [x]
    return made
