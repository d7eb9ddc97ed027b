"""Mistakes in the tensors of a recurrent layer: gates in another order, an update gate that keeps what it should replace, a
forget bias missing or added twice, the bias inside the reset folded into the one outside."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.ops import apply
from convert.core.tensor_spec import numpy_dtype
from convert.layers.base import Step
from convert.planning.plan import Plan
from convert.verify.layers.recurrent import cell_of
from convert.writing.execute import computed

if TYPE_CHECKING:
    from convert.layers.hypothesis import Hypothesis

Array = np.ndarray[Any, np.dtype[Any]]
ORDER = "gates in another order"
POLARITY = "update gate polarity"
FOLDED = "b_hn folded into b_in"
FORGET, DOUBLED = "forget bias missing", "forget bias added twice"
EXCHANGED = "input and hidden tensors exchanged"
PARTNER = {"weight_ih": "weight_hh", "weight_hh": "weight_ih", "bias_ih": "bias_hh", "bias_hh": "bias_ih"}


def cell_hypotheses(step: Step, plan: Plan) -> Iterator[Hypothesis]:
    """What may have gone wrong with one tensor of a recurrent layer; equal keys go together in the layer's tensors."""
    from convert.layers.hypothesis import Hypothesis

    assert step.group is not None
    cell, source = cell_of(step.group), plan.source
    gates, weight = cell.order, step.role.startswith("weight")

    def made(of: Step) -> Array:
        if not of.parts:
            return computed(of)
        return np.concatenate([apply(part.ops, source.read(part.leaf)) for part in of.parts])

    def blocks(change: Callable[[list[Array]], list[Array]], of: Step = step) -> Callable[[], Array]:
        """The tensor with its gates' rows, in float32 or wider, changed."""

        def make() -> Array:
            right = made(of)
            wide = right.astype(np.float64 if right.dtype == np.float64 else np.float32)
            return np.concatenate(change(np.split(wide, len(gates)))).astype(numpy_dtype(step.spec.dtype))

        return make

    right = f"rows in the order {', '.join(gates)}"
    for order in itertools.permutations(range(len(gates))):
        if order != tuple(range(len(gates))):
            said = f"rows in the order {', '.join(gates[k] for k in order)}"
            moved = blocks(lambda rows, order=order: [rows[k] for k in order])  # type: ignore[misc]
            yield Hypothesis(ORDER, ORDER, said, right, moved, str(order))
            if added := {gates.index(gate): shift for gate, shift in cell.offsets.items()}:  # to another gate, then

                def early(rows: list[Array], order: tuple[int, ...] = order) -> list[Array]:
                    offset = added if "+" in step.arithmetic else {}
                    bare = [x - offset.get(k, 0.0) for k, x in enumerate(rows)]
                    return [bare[k] + offset.get(at, 0.0) for at, k in enumerate(order)]

                yield Hypothesis(ORDER, ORDER, said, right, blocks(early), f"{order}, as stored")
    if cell.word == "gru":
        z = gates.index("z")
        gives, instead = ("as stored", "negated") if not cell.keeps else ("negated", "as stored")
        flip = blocks(lambda rows: [-x if k == z else x for k, x in enumerate(rows)])
        yield Hypothesis(
            POLARITY, POLARITY, f"the update gate's rows {gives}", f"the update gate's rows {instead}", flip, "z"
        )
    if weight and step.spec.shape[1] == step.group.sizes["H"]:
        turned = blocks(lambda rows: [x.T for x in rows])
        yield Hypothesis(
            "transposed", "transposed", "each gate's matrix transposed", "each as torch has it", turned, "T"
        )
    if cell.word == "lstm" and step.role.startswith("bias"):
        f = gates.index("f")
        # A rule that adds 1 may have done so twice or not at all; one that adds nothing may have added 1.
        shifts = (
            {-1.0: (FORGET, DOUBLED), 1.0: (DOUBLED, FORGET)} if "+" in step.arithmetic else {1.0: (DOUBLED, FORGET)}
        )
        for shift, (name, converse) in shifts.items():
            words = f"the forget gate's bias {'without the 1' if shift < 0 else 'with 1 more'}"
            moved = blocks(lambda rows, shift=shift: [x + shift if k == f else x for k, x in enumerate(rows)])  # type: ignore[misc]
            yield Hypothesis(name, converse, words, "what the source adds", moved, "f")
    siblings = {s.role: s for s in plan.steps if s.group is not None and (s.group.module, s.group.suffix) == (step.group.module, step.group.suffix)}  # fmt: skip
    other = siblings.get(PARTNER[step.role])
    if other is None:
        return
    if cell.word == "gru" and cell.reset == "after" and not weight:
        n = gates.index("n")
        inner = step.role == "bias_hh"

        def fold(rows: list[Array]) -> list[Array]:
            theirs = np.split(made(other), len(gates))[n].astype(rows[0].dtype)
            return [(np.zeros_like(x) if inner else x + theirs) if k == n else x for k, x in enumerate(rows)]

        gives = "zeros where b_hn is" if inner else "the sum of b_in and b_hn"
        yield Hypothesis(FOLDED, FOLDED, gives, "b_hn in bias_hh, inside the reset", blocks(fold), "n")
    if other.spec == step.spec:
        yield Hypothesis(
            EXCHANGED,
            EXCHANGED,
            f"what belongs to {other.name}",
            f"what belongs to {step.name}",
            lambda: made(other),
            "x",
        )
    if not weight:
        zeros = np.zeros(step.spec.shape, numpy_dtype(step.spec.dtype))
        yield Hypothesis("bias dropped", "bias that the source does not add", "all zeros", "the bias", lambda: zeros)
