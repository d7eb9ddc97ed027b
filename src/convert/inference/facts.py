"""Read off the two programs what a rule says beside sources and layouts: epsilons, factors of norms, activations, paddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.inference.derivation import Fact, Role, Site, Tensor
from convert.layers.activations import ACTIVATIONS, NUMPY_ACTIVATIONS
from convert.programs.fingerprint import ValueTable
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
ROOTS = ("rsqrt", "sqrt", "pow", "integer_pow")
FURTHEST = 24  # operations between a norm's root and its scale
LARGEST = 0.1  # of an epsilon
GEOMETRY = {
    "strides": "window_strides",
    "padding": "padding",
    "dilation": "rhs_dilation",
    "groups": "feature_group_count",
}
SAME = 1e-9  # relative


def find_facts(source: Program, target: Program, tensors: Sequence[Tensor]) -> tuple[Fact, ...]:
    """Return the facts of all tensors that have evidence on both sides."""
    reader = _Reader(source, target)
    return tuple(fact for tensor in tensors for fact in reader.of(tensor))


class _Reader:
    """Looks up operations of the two programs."""

    def __init__(self, source: Program, target: Program) -> None:
        self.source, self.target = source, target
        self.makers = {id(result): operation for operation in source.operations for result in operation.results}
        self.values: ValueTable[None] = ValueTable()
        for operation in source.operations:
            for result in operation.results:
                if result.data and result.array.size > 1 and np.issubdtype(result.array.dtype, np.floating):
                    self.values.add(result.array, None)

    def of(self, tensor: Tensor) -> Iterator[Fact]:
        """Yield the facts of one tensor."""
        if not tensor.parts or (site := tensor.parts[0].evidence.source) is None:
            return
        evidence = tensor.parts[0].evidence
        leaves = tuple(dict.fromkeys(part.leaf for part in tensor.parts if part.leaf))
        operation = self.source.operations[site.index]

        def fact(name: str, value: Any) -> Fact:
            return Fact(name, value, (tensor.name,), leaves, site)

        if evidence.role is Role.SCALE:
            if (epsilon := self._epsilon(operation)) is not None:
                yield fact("epsilon", epsilon)
                yield fact("multiplies_by", "1+scale" if _adds_one(operation, self.source.parameters) else "scale")
                meets = self.target.operations[evidence.target.index]
                yield fact("weight", "1+weight" if _adds_one(meets, self.target.parameters) else "weight")
        elif evidence.role is Role.CONVOLUTION:
            yield from (fact(name, value) for name, value in _geometry(operation, site))
        if evidence.role in (Role.PRODUCT, Role.CONVOLUTION, Role.SHIFT) and (name := self._activation(operation)):
            yield fact("activation", name)

    def _epsilon(self, operation: Operation) -> float | None:
        """Return what is added in front of the root that a scale's data was divided by; None where there is none."""
        waiting = list(operation.data)
        for _ in range(FURTHEST):
            if not waiting:
                return None
            maker = self.makers.get(id(waiting.pop(0)))
            if maker is None or any(operand.of_parameters for operand in maker.operands):
                continue
            if maker.name in ROOTS:
                added = self.makers.get(id(maker.operands[0]))
                if added is not None and added.name == "add" and (number := _scalar(added.operands)) is not None:
                    return number if 0 < number < LARGEST else None
            waiting += maker.data
        return None

    def _activation(self, operation: Operation) -> str | None:
        """Return the function of the operation's result that the source computes; None where it is none or not clear."""
        y = operation.results[0].array
        found = [
            name
            for name in ACTIVATIONS
            if self.values.find(made := NUMPY_ACTIVATIONS[name](y)) and not np.allclose(made, y, rtol=SAME, atol=0)
        ]
        return found[0] if len(found) == 1 else None


def _scalar(operands: Sequence[Value]) -> float | None:
    """Return the constant among two operands, if all its elements are one number."""
    for operand in operands:
        if operand.constant and operand.array.size and np.ptp(operand.array) == 0:
            return float(f"{float(operand.array.flat[0]):.7g}")  # a literal that was rounded to float32
    return None


def _adds_one(operation: Operation, parameters: Mapping[str, Value]) -> bool:
    """Whether the parameter that data meets here is one more than its leaf."""
    for operand in operation.operands:
        if operand.of_parameters and operand.elements:
            values = np.concatenate([np.ravel(value.array) for value in parameters.values()])
            numbers = operand.elements[0]
            stored = values[np.where(numbers < 0, 0, numbers)]
            return bool(np.allclose(operand.array, stored + 1, rtol=SAME, atol=SAME))
    return False


def _geometry(operation: Operation, site: Site) -> Iterator[tuple[str, Any]]:
    """Yield padding, strides, dilation and groups of a convolution of JAX."""
    if any(n != 1 for n in operation.settings.get("lhs_dilation") or ()):
        yield "transposed", True
        return
    for name, key in GEOMETRY.items():
        value = operation.settings.get(key)
        if value is not None:
            yield (
                name,
                [list(pair) if isinstance(pair, tuple) else pair for pair in value]
                if isinstance(value, tuple | list)
                else value,
            )
