"""List what a comparison of two models does not show, because of the inputs or the outputs of the user's reference.

Inputs that are too short for a window, of one position, or the same throughout let two different models agree. Each fact is
listed under "not verified", with the inputs that would show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.core.tensor_spec import is_float
from convert.planning.plan import Plan
from convert.references.protocol import JaxSide, Reference
from convert.verify.report.facts import JudgedFact, Status
from convert.verify.sides.evidence import Evidence

Array = np.ndarray[Any, np.dtype[Any]]
LONGER = 2  # size that an axis of size 1 is tried with
LEAST = 0.1  # share of an output that should count
# Errors of a function that does not take what it is tried with.
REFUSALS = (AttributeError, TypeError, ValueError, RuntimeError, LookupError, AssertionError)


def unseen(plan: Plan, reference: Reference, evidence: Evidence) -> Iterator[JudgedFact]:
    """Yield what the models compute, and this comparison of them does not show."""
    yield from _same_throughout(evidence.inputs)
    yield from _masked(reference, evidence)
    if reference.jax is None or not evidence.is_live:
        return
    model = _Model(plan, reference.jax_side(), evidence.inputs)
    yield from model.short_axes()
    yield from model.undecided()


def _fact(name: str, value: str, following: str, origin: str = "the inputs of the reference") -> JudgedFact:
    return JudgedFact(name, value, origin, Status.UNVERIFIED, next=following)


def _same_throughout(inputs: Mapping[str, Array]) -> Iterator[JudgedFact]:
    """Yield the inputs that are the same along an axis: what depends on the order or the place there has no effect.

    An input that is the same for all samples is usual, such as positions; all inputs are one sample then, if all are so.
    """
    arrays = {name: np.asarray(x) for name, x in inputs.items() if np.asarray(x).size > 1}
    for name, x in arrays.items():
        if _equal_along(x, None):
            value = f"{np.asarray(x).flat[0]} throughout"
            yield _fact(f"inputs:{name}", value, "what depends on its values has no effect: give others")
            continue
        for axis in range(1, x.ndim):
            if x.shape[axis] > 1 and _equal_along(x, axis):
                following = "what depends on the order or the place there has no effect: give others"
                yield _fact(f"inputs:{name}", f"the same along axis {axis}", following)
    batches = [x for x in arrays.values() if x.ndim > 1 and x.shape[0] > 1]
    varied = [x for x in batches if not _equal_along(x, None)]
    if varied and all(_equal_along(x, 0) for x in batches):
        yield _fact("inputs:batch", "one sample, repeated", "give samples that differ, so that a mixture of them shows")


def _masked(reference: Reference, evidence: Evidence) -> Iterator[JudgedFact]:
    """Yield the outputs of which masks leave only a small share."""
    for name in reference.outputs:
        value, mask = evidence.native_values.get(name), evidence.masks.get(name)
        if value is None or mask is None:
            continue
        share = float(np.mean(np.broadcast_to(mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim)), value.shape)))
        if share < LEAST:
            yield _fact(
                f"masks:{name}", f"{share:.1%} of the numbers are compared", "let more of them count", "`masks`"
            )


def _equal_along(x: Array, axis: int | None) -> bool:
    first = x.flat[0] if axis is None else np.take(x, [0], axis)
    return bool(np.all((x == first) | ((x != x) & (first != first))))


@dataclass(frozen=True)
class _Model:
    """The JAX model and its inputs."""

    plan: Plan
    side: JaxSide
    inputs: Mapping[str, Array]

    def short_axes(self) -> Iterator[JudgedFact]:
        """Yield the axes of one element which the model takes longer: a batch of one sample, a sequence of one position.

        The last axis of a floating input has the features, and their number is that of the data.
        """
        arrays = {name: np.asarray(x) for name, x in self.inputs.items()}
        for axis in range(max((x.ndim for x in arrays.values()), default=0)):
            short = [name for name, x in arrays.items() if axis < _places(x) and x.shape[axis] == 1 and x.size > 0]
            for names in (short, *([name] for name in short if len(short) > 1)):
                if names and self._takes(
                    {n: np.repeat(arrays[n], LONGER, axis) if n in names else x for n, x in arrays.items()}
                ):
                    following = f"nothing that depends on axis {axis} has an effect: give at least {LONGER} elements"
                    yield _fact(f"inputs:{names[0]}", f"one element along axis {axis}", following)
                    break

    def _takes(self, inputs: Mapping[str, Array]) -> bool:
        """Whether the JAX model can be traced with these inputs, and gives values of other shapes then."""
        import jax

        from convert.numerics.lift_jax import traced
        from convert.verify.sides.run_jax import jax_specs

        weights = jax_specs(self.plan)
        try:
            made = [
                traced(partial(jax.eval_shape, self.side, weights, _specs(given))) for given in (inputs, self.inputs)
            ]
            shapes = [{name: value.shape for name, value in outputs.items()} for outputs in made]
        except Exception:  # noqa: BLE001 - the user's code; it was asked whether it takes other inputs
            return False
        return shapes[0] != shapes[1]

    def undecided(self) -> Iterator[JudgedFact]:
        """Yield the comparisons in the code of the JAX model that have the same outcome throughout."""
        from convert.verify.sides.conditions import undecided
        from convert.verify.sides.run_jax import jax_weights

        try:
            found = undecided(self.side, jax_weights(self.plan), self.inputs)
        except (*REFUSALS, ConvertError):
            return
        for condition in found:
            name = next(
                (n for n, v in self.plan.facts.items() if v == condition.number and not isinstance(v, bool)), ""
            )
            span = f"x is from {condition.low:g} to {condition.high:g}"
            outcome = "true" if condition.holds else "false"
            value = f"x {condition.sign} {condition.number:g} is always {outcome} ({span})"
            following = f"{name or 'the number'} has no effect: give inputs that reach it"
            yield _fact(condition.where, value, following, "the JAX model")


def _places(x: Array) -> int:
    """Return the number of axes without that of the features."""
    return x.ndim - 1 if is_float(x.dtype.name) else x.ndim


def _specs(inputs: Mapping[str, Array]) -> dict[str, Any]:
    import jax

    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in ((n, np.asarray(v)) for n, v in inputs.items())}
