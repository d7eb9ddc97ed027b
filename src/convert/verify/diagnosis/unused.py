"""Search for tensors that the target's code never uses although the JAX model computes with their leaves."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from convert.numerics.compare import difference
from convert.numerics.precision import jax_precision
from convert.references.protocol import Reference
from convert.verify.diagnosis.other_operation import USER_FAILS
from convert.verify.diagnosis.site import Site
from convert.verify.diagnosis.whole_model import run_again

MOST_SHOWN = 3


def unused_tensors(site: Site, reference: Reference) -> str:
    """Return a clause that names the parameters no operation of the target reads, and whose leaves change an output of the JAX model.

    A target that forgets a first state or a bias otherwise looks like one that computes something else.
    """
    idle = _idle(site, reference)
    leaves = {name: _leaves(site, name) for name in sorted(idle)}
    if reference.jax is None or not site.evidence.is_live or not any(leaves.values()):
        return ""
    try:
        found = [name for name, used in leaves.items() if used and _changes(site, reference, used)]
    except USER_FAILS:  # the JAX model takes no such numbers
        return ""
    if not found:
        return ""
    more = f" and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
    said = f"{', '.join(found[:MOST_SHOWN])}{more}"
    return f"the target's code never uses {said}, and the JAX model's outputs depend on what the rules make it of"


def _idle(site: Site, reference: Reference) -> set[str]:
    """Return the parameters that no operation is given; none where most are not seen, as in a compiled module."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    seen: set[int] = set()

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = tree_leaves((args, kwargs))
            seen.update(x.untyped_storage().data_ptr() for x in given if isinstance(x, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with Reads():  # type: ignore[no-untyped-call]
        run_again(site, reference)
    parameters = dict(site.module.named_parameters())
    idle = {name for name, x in parameters.items() if x.untyped_storage().data_ptr() not in seen}
    return idle if 2 * len(idle) < len(parameters) else set()


def _leaves(site: Site, tensor: str) -> set[str]:
    return {part.leaf for step in site.plan.steps if step.name == tensor for part in step.parts}


def _changes(site: Site, reference: Reference, leaves: Collection[str]) -> bool:
    """Whether other values of these leaves change an output of the JAX model."""
    from convert.numerics.lift_jax import lift
    from convert.verify.sides.run_jax import jax_weights, leaf_name

    evidence, rng = site.evidence, np.random.default_rng(0)
    names = {leaf_name(site.plan, leaf) for leaf in leaves}
    weights = {
        name: np.asarray(rng.standard_normal(x.shape), x.dtype) if name in names else x
        for name, x in jax_weights(site.plan).items()
    }
    with jax_precision(evidence.precision):
        made = lift(reference.jax_outputs_side())(weights, dict(evidence.inputs))
    return any(
        difference(np.asarray(made[name]), evidence.best_values[name]).relative > site.allowed
        for name in reference.outputs
    )
