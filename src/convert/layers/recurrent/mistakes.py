"""Mistakes with the tensors of a recurrent layer: order of gates, update gate, forget bias, the bias inside the reset.

Mistakes with equal keys belong together: one wrong rule makes all of them, each in its tensor of the layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from convert.core.tensor_spec import numpy_dtype
from convert.core.value_ops import Add
from convert.layers.base import PlanView, Step
from convert.layers.leaf_reader import LeafReader
from convert.layers.mistake import OWN_VALUES, Mistake, symmetric
from convert.layers.recurrent.equations import Cell
from convert.layers.step_tensor import expected

Array = np.ndarray[Any, np.dtype[Any]]
Gates = list[Array]
ORDER = "gates in another order"
POLARITY = "update gate polarity"
FOLDED = "b_hn folded into b_in"
FORGET, DOUBLED = "forget bias missing", "forget bias added twice"
EXCHANGED = "input and hidden tensors exchanged"
PARTNER = {"weight_ih": "weight_hh", "weight_hh": "weight_ih", "bias_ih": "bias_hh", "bias_hh": "bias_ih"}


def cell_mistakes(cell: Cell, step: Step, plan: PlanView) -> Iterator[Mistake]:
    """Yield mistakes with one tensor of a recurrent layer."""
    assert step.group is not None
    weight = step.role.startswith("weight")
    yield from _other_orders(cell, step, plan.source)
    if cell.kind_name == "gru":
        yield _update_gate(cell, step, plan.source)
    if weight and step.spec.shape[1] == step.group.sizes["H"]:
        transposed = _by_gate(cell, step, plan.source, lambda gates: [x.T for x in gates])
        yield symmetric("transposed", "each gate's matrix transposed", "each as torch has it", transposed, "T")
    if cell.kind_name == "lstm" and not weight:
        yield from _forget_bias(cell, step, plan.source)
    partner = _partner(step, plan)
    if partner is not None:
        yield from _with_partner(cell, step, partner, plan.source)


def _by_gate(cell: Cell, step: Step, source: LeafReader, change: Callable[[Gates], Gates]) -> Callable[[], Array]:
    """Return what computes the tensor with the rows of its gates changed, in float32 or wider."""

    def make() -> Array:
        right = expected(step, source)
        wide = right.astype(np.float64 if right.dtype == np.float64 else np.float32)
        return np.concatenate(change(np.split(wide, len(cell.order)))).astype(numpy_dtype(step.spec.dtype))

    return make


def _adds(step: Step) -> bool:
    return any(isinstance(op, Add) for part in step.parts for op in part.ops)


def _other_orders(cell: Cell, step: Step, source: LeafReader) -> Iterator[Mistake]:
    gates = cell.order
    right = f"rows in the order {', '.join(gates)}"
    offsets = {gates.index(gate): offset for gate, offset in cell.offsets.items()}
    for order in itertools.permutations(range(len(gates))):
        if order == tuple(range(len(gates))):
            continue
        wrong = f"rows in the order {', '.join(gates[k] for k in order)}"

        def moved(rows: Gates, order: tuple[int, ...] = order) -> Gates:
            return [rows[k] for k in order]

        def moved_before_offsets(rows: Gates, order: tuple[int, ...] = order) -> Gates:
            added = offsets if _adds(step) else {}
            stored = [x - added.get(k, 0.0) for k, x in enumerate(rows)]
            return [stored[k] + added.get(at, 0.0) for at, k in enumerate(order)]

        yield symmetric(ORDER, wrong, right, _by_gate(cell, step, source, moved), str(order))
        if offsets:  # the rule then adds to another gate
            make = _by_gate(cell, step, source, moved_before_offsets)
            yield symmetric(ORDER, wrong, right, make, f"{order}, as stored")


def _update_gate(cell: Cell, step: Step, source: LeafReader) -> Mistake:
    """Return the update gate with the other sign: it keeps what it should replace."""
    z = cell.order.index("z")
    gives, instead = ("negated", "as stored") if cell.keeps else ("as stored", "negated")
    negated = _by_gate(cell, step, source, lambda gates: [-x if k == z else x for k, x in enumerate(gates)])
    return symmetric(POLARITY, f"the update gate's rows {gives}", f"the update gate's rows {instead}", negated, "z")


def _forget_bias(cell: Cell, step: Step, source: LeafReader) -> Iterator[Mistake]:
    """Yield the forget bias with 1 more or less: a rule that adds 1 may have done so twice, or not at all."""
    f = cell.order.index("f")
    more = (1.0, DOUBLED, FORGET)
    for offset, name, converse in ((-1.0, FORGET, DOUBLED), more) if _adds(step) else (more,):

        def shifted(gates: Gates, offset: float = offset) -> Gates:
            return [x + offset if k == f else x for k, x in enumerate(gates)]

        gives = f"the forget gate's bias {'without the 1' if offset < 0 else 'with 1 more'}"
        yield Mistake(name, converse, gives, "what the source adds", _by_gate(cell, step, source, shifted), "f")


def _partner(step: Step, plan: PlanView) -> Step | None:
    """Return the tensor of the same layer for the state where this one is for the input, and the other way round."""
    group = step.group
    assert group is not None
    for other in plan.steps:
        if other.group is None or other.role != PARTNER[step.role]:
            continue
        if (other.group.module, other.group.suffix) == (group.module, group.suffix):
            return other
    return None


def _with_partner(cell: Cell, step: Step, partner: Step, source: LeafReader) -> Iterator[Mistake]:
    weight = step.role.startswith("weight")
    if cell.kind_name == "gru" and cell.reset == "after" and not weight:
        n, inner = cell.order.index("n"), step.role == "bias_hh"

        def folded(gates: Gates) -> Gates:
            theirs = np.split(expected(partner, source), len(gates))[n].astype(gates[0].dtype)
            return [(np.zeros_like(x) if inner else x + theirs) if k == n else x for k, x in enumerate(gates)]

        gives = "zeros where b_hn is" if inner else "the sum of b_in and b_hn"
        make = _by_gate(cell, step, source, folded)
        yield symmetric(FOLDED, gives, "b_hn in bias_hh, inside the reset", make, "n")
    if partner.spec == step.spec:
        gives, instead = f"what belongs to {partner.name}", OWN_VALUES
        yield symmetric(EXCHANGED, gives, instead, lambda: expected(partner, source), "x")
    if not weight:
        zeros = np.zeros(step.spec.shape, numpy_dtype(step.spec.dtype))
        yield Mistake("bias dropped", "bias that the source does not add", "all zeros", "the bias", lambda: zeros)
