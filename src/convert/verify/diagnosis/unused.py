"""Search for tensors and inputs that the target never uses for an output although the JAX model computes with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.numerics.compare import difference
from convert.numerics.precision import jax_precision
from convert.references.protocol import Reference
from convert.verify.diagnosis.compare import Explanation, Search
from convert.verify.diagnosis.site import Site
from convert.verify.diagnosis.whole_model import run_again, values_again
from convert.verify.sides.records import USER_FAILS

Array = np.ndarray[Any, np.dtype[Any]]
Fill = Callable[[tuple[int, ...]], Array]
NEVER_USED, INPUT_UNUSED = "tensor that the target never uses", "input that the target does not use"
MOST_SHOWN = 3


@dataclass(frozen=True)
class Unused:
    """What was found.

    Attributes:
        clause: names the tensors; empty if there are none.
        explanation: where it is proven that they are all that is missing.
    """

    clause: str = ""
    explanation: Explanation | None = None


def unused_tensors(site: Site, reference: Reference, idle: Collection[str] | None = None) -> Unused:
    """Find the parameters that no output of the target uses, and whose leaves change an output of the JAX model.

    A target that forgets a first state, a bias or a layer otherwise looks like one that computes something else. It is proven where
    the JAX model without them, with zeros or ones in their place, gives the target's outputs.

    Args:
        idle: the parameters that no output of the target is computed from, where that is known.
    """
    idle = _idle(site, reference) if idle is None else idle
    leaves = {name: _leaves(site, name) for name in sorted(idle)}
    if reference.jax is None or not site.evidence.is_live or not any(leaves.values()):
        return Unused()
    rng = np.random.default_rng(0)
    try:
        found = [name for name, used in leaves.items() if used and _changes(site, reference, used, rng.standard_normal)]
        used = {leaf for name in found for leaf in leaves[name]}
        errors = [_error(site, reference, used, fill) for fill in (np.zeros, np.ones)] if found else []
    except USER_FAILS:  # the JAX model takes no such numbers
        return Unused()
    if not found:
        return Unused()
    listed = list(_modules(found, [step.name for step in site.plan.steps]))
    said = ", ".join(listed[:MOST_SHOWN]) + (
        f" and {len(listed) - MOST_SHOWN} more" if len(listed) > MOST_SHOWN else ""
    )
    clause = (
        f"the target never uses {said} for an output, and the JAX model's outputs depend on what the rules make it of"
    )
    if (error := min(errors)) > site.enough:
        return Unused(clause)
    fix = f"use {said} in the target's code, or correct the reference"
    return Unused(clause, Explanation(NEVER_USED, clause, site.rule(found[0].rpartition(".")[0]), fix, error))


def _modules(tensors: Collection[str], every: Sequence[str]) -> Iterator[str]:
    """Yield the largest modules that hold no other tensors than these, and the tensors of no such module."""
    left = sorted(tensors)
    while left:
        parts = left[0].split(".")
        around = (".".join(parts[:n]) + "." for n in range(1, len(parts)))
        whole = next((m for m in around if all(x in tensors for x in every if x.startswith(m))), "")
        held = [x for x in left if whole and x.startswith(whole)] or left[:1]
        yield f"{whole[:-1]} ({len(held)} tensors)" if len(held) > 1 else held[0]
        left = [x for x in left if x not in held]


def _idle(site: Site, reference: Reference) -> set[str]:
    """Return the parameters that no operation is given; none where most are not seen, as in a compiled module."""
    from convert.numerics.lift_torch import DispatchMode, tensors_in

    seen: set[int] = set()

    class Reads(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = tensors_in((*args, *(kwargs or {}).values()))
            seen.update(x.untyped_storage().data_ptr() for x in given)
            return func(*args, **(kwargs or {}))

    with Reads():  # type: ignore[no-untyped-call]
        run_again(site, reference)
    parameters = dict(site.module.named_parameters())
    idle = {name for name, x in parameters.items() if x.untyped_storage().data_ptr() not in seen}
    return idle if 2 * len(idle) < len(parameters) else set()


def _leaves(site: Site, tensor: str) -> set[str]:
    return {part.leaf for step in site.plan.steps if step.name == tensor for part in step.parts}


def _changes(site: Site, reference: Reference, leaves: Collection[str], fill: Fill) -> bool:
    """Whether other values of these leaves change an output of the JAX model."""
    made = _run(site, reference, leaves, fill)
    return any(
        difference(made[name], site.evidence.best_values[name]).relative > site.allowed for name in reference.outputs
    )


def _error(site: Site, reference: Reference, leaves: Collection[str], fill: Fill) -> float:
    """Return how far the JAX model's outputs with other values of these leaves are from the target's."""
    made = _run(site, reference, leaves, fill)
    got = values_again(site, reference, reference.outputs)
    return max(
        difference(got[name], made[name], mask=site.evidence.masks.get(name)).relative for name in reference.outputs
    )


def _run(site: Site, reference: Reference, leaves: Collection[str], fill: Fill) -> Mapping[str, Array]:
    from convert.numerics.lift_jax import lift
    from convert.verify.sides.run_jax import jax_weights, leaf_names

    evidence = site.evidence
    called = leaf_names(site.plan)
    names = {called[leaf] for leaf in leaves}
    weights = {
        name: np.asarray(fill(x.shape), x.dtype) if name in names else x for name, x in jax_weights(site.plan).items()
    }
    with jax_precision(evidence.precision):
        made = lift(reference.jax_outputs_side())(weights, dict(evidence.inputs))
    return {name: np.asarray(made[name]) for name in reference.outputs}


# ---- inputs


def unused_inputs(site: Site, reference: Reference) -> Search:
    """Search for an input on which the target's value at the boundary does not depend, although the JAX model's does.

    It is proven where the JAX model gives the target's value when the input is one number throughout.
    """
    if reference.jax is None or not site.evidence.is_live:
        return Search()
    inputs, got = site.evidence.inputs, site.seen.values[site.boundary]
    for name, array in inputs.items():
        others = [(said, other) for said, other in _plain(array) if not np.array_equal(other, array)]
        try:
            if any(not np.array_equal(_target(site, reference, {**inputs, name: x}), got) for _, x in others):
                continue
            for said, other in others:
                error = site.error(got, _source(site, reference, {**inputs, name: other}))
                if error <= site.enough:
                    problem = f"{site.boundary} does not depend on the input {name}: it is what the JAX model gives with {said} for it"
                    fix = f"use the input {name} in the target's code in front of {site.boundary}, or correct the reference"
                    return Search(Explanation(INPUT_UNUSED, problem, "", fix, error))
        except (*USER_FAILS, ConvertError):  # code that takes no such numbers
            continue
    return Search(ruled_out=(INPUT_UNUSED,))


def _plain(array: Array) -> Iterator[tuple[str, Array]]:
    """Yield what code has in place of an input that it does not use, with words for it."""
    if array.dtype.kind not in "iub" or not array.size:
        return
    yield "zeros", np.zeros_like(array)
    yield "ones", np.ones_like(array)
    yield f"{array.max()} throughout", np.full_like(array, array.max())
    if array.dtype.kind != "b" and array.ndim:
        yield "0, 1, 2, ...", np.broadcast_to(np.arange(array.shape[-1], dtype=array.dtype), array.shape).copy()


def _target(site: Site, reference: Reference, inputs: Mapping[str, Array]) -> Array:
    return values_again(site, reference, [site.boundary], inputs)[site.boundary]


def _source(site: Site, reference: Reference, inputs: Mapping[str, Array]) -> Array:
    from convert.numerics.lift_jax import lift
    from convert.verify.sides.run_jax import jax_weights

    with jax_precision(site.evidence.precision):
        return np.asarray(lift(reference.jax_side())(jax_weights(site.plan), dict(inputs))[site.boundary])
