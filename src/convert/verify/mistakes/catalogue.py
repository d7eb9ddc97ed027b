"""All known mistakes with a tensor, each of them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.ops import apply
from convert.core.tensor_spec import is_float, numpy_dtype
from convert.core.value_ops import Add, Cast, Multiply
from convert.core.weight_norm_ops import RowLengths
from convert.layers.base import PlanView, Step
from convert.layers.leaf_reader import LeafReader
from convert.layers.mistake import OWN_VALUES, Mistake, symmetric
from convert.layers.step_tensor import expected, maker
from convert.planning.plan import Plan
from convert.planning.target_formats.base import TranslatedTensor
from convert.verify.mistakes.index_moves import find_move, without_numbers
from convert.verify.mistakes.integers import integer_mistakes
from convert.verify.mistakes.layouts import fused_order_mistakes, layout_mistakes, stacked_axis_mistakes
from convert.verify.mistakes.low_rank import pair_mistakes
from convert.verify.mistakes.orders_of_parts import order_mistakes
from convert.verify.mistakes.sums import complex_mistakes, joined_mistakes, number_mistakes, sum_mistakes

Array = np.ndarray[Any, np.dtype[Any]]
NOT_IN_SOURCE = "bias that the source does not add"
NOT_SCALED = "scale that the source does not multiply by"
ANOTHER_CONSTANT = "another number than the rule gives"


def known_mistakes(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Yield the mistakes that give a tensor of the same shape, the most frequent first."""
    if not step.parts:
        return
    source = plan.source
    if not any(isinstance(op, RowLengths) for part in step.parts for op in part.ops):  # they have no axes to exchange
        yield from order_mistakes(step, plan)
        yield from own_mistakes(step, plan)
        yield from layout_mistakes(step, source)
        yield from fused_order_mistakes(step, source)
        yield from stacked_axis_mistakes(step, source)
    yield from _other_tensors(step, plan)
    yield from _no_bias(step)
    yield from _roundings(step, source)


def own_mistakes(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Yield the mistakes of the kind of layer, those with a low-rank pair or a sum of leaves, and those with a weight of integers."""
    yield from group_mistakes(step, plan)
    yield from pair_mistakes(step, plan)
    yield from sum_mistakes(step, plan)
    yield from number_mistakes(step, plan)
    yield from joined_mistakes(step, plan)
    yield from complex_mistakes(step, plan)
    yield from integer_mistakes(step, plan)
    if step.group is None and len(step.parts) == 1 and _gates_of(step, plan) is None:
        yield from _of_kind(step, plan)


def group_mistakes(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Yield the mistakes with a tensor of a layer whose tensors belong together; a file may hold its gates in tensors of their own."""
    if step.group is not None:
        yield from _of_kind(step, plan)
    gates = _gates_of(step, plan)
    if gates is None:
        return
    tensor, place = gates

    def share(values: Array) -> Array:
        rows = np.split(values, len(tensor.names))[place]
        return rows.T if tensor.transposed else rows

    for mistake in _of_kind(tensor.torch, plan.as_torch):
        yield replace(mistake, make=lambda make=mistake.make: share(make()))  # type: ignore[misc]


def _gates_of(step: Step, plan: Plan) -> tuple[TranslatedTensor, int] | None:
    """Return the tensor of torch's recurrent layer of which this one holds a gate, and which one; None for other tensors."""
    found = plan.torch_tensors.get(step.name)
    return found if found is not None and found[0].torch.group is not None else None


def _of_kind(step: Step, plan: PlanView) -> Iterator[Mistake]:
    rule = step.parts[0].rule if step.parts else None
    if step.group is not None:
        rule = step.group.rule
    if rule is not None and rule.layer(plan.target) is not None:
        yield from rule.kind.mistakes(step, plan)


def _other_tensors(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Yield what belongs to other names: layers shifted or exchanged, query for key, the bias of another layer."""
    others = [s for s in plan.steps if s.spec == step.spec and s.name != step.name and s.parts and s.role == step.role]
    layers = [s for s in others if s.rule == step.rule and without_numbers(s.name) == without_numbers(step.name)]
    for other in (*layers, *(s for s in others if s not in layers)):
        move = find_move(step.name, other.name)
        name = f"of another {move.word if move is not None else 'layer'}" if other in layers else "of another tensor"
        make, key = maker(other, plan.source, other.parts), other.name.rpartition(".")[0]
        mistake = symmetric(name, f"what belongs to {other.name}", OWN_VALUES, make, key)
        yield replace(mistake, of=other.name)


def _no_bias(step: Step) -> Iterator[Mistake]:
    zeros = np.zeros(step.spec.shape, numpy_dtype(step.spec.dtype))
    if step.role == "bias":
        yield Mistake("bias dropped", NOT_IN_SOURCE, "all zeros", "the bias", lambda: zeros)


def _roundings(step: Step, source: LeafReader) -> Iterator[Mistake]:
    if not is_float(step.spec.dtype):
        return
    for narrow in ("bfloat16", "float16"):
        if numpy_dtype(narrow).itemsize < numpy_dtype(step.spec.dtype).itemsize:
            name, gives = f"rounded through {narrow}", f"rounded to {narrow} on the way"
            make = _rounded(step, source, narrow)
            yield Mistake(name, name, gives, "cast once, at the end", make, rounding=True)
    if step.arithmetic:
        name, gives = "folded in bfloat16", f"'{step.arithmetic}' computed in bfloat16"
        make = _computed_in(step, source, "bfloat16")
        yield Mistake(name, name, gives, "computed in float32", make, rounding=True)


def _rounded(step: Step, source: LeafReader, narrow: str) -> Callable[[], Array]:
    def make() -> Array:
        with np.errstate(over="ignore"):
            return expected(step, source).astype(numpy_dtype(narrow)).astype(numpy_dtype(step.spec.dtype))

    return make


def _computed_in(step: Step, source: LeafReader, narrow: str) -> Callable[[], Array]:
    """Return what computes the tensor with the step's arithmetic in a narrow dtype."""
    dtype = numpy_dtype(narrow)
    ops = [op for op in step.parts[0].ops if not isinstance(op, Cast)]
    moves = tuple(op for op in ops if not isinstance(op, (Add, Multiply)))

    def make() -> Array:
        made: Array = apply(moves, source.read(step.parts[0].leaf)).astype(dtype)
        for op in ops:
            if isinstance(op, Add):
                made = made + dtype.type(op.value)
            elif isinstance(op, Multiply):
                made = made * dtype.type(op.value)
        return made.astype(numpy_dtype(step.spec.dtype))

    return make
