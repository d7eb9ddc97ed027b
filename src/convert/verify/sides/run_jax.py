"""Run the JAX model on the checkpoint's weights, in the precision that users run and in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.core.ops import is_float
from convert.planning.plan import Plan
from convert.references.protocol import Reference
from convert.verify.numerics.precision import jax_precision
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.user_reference import require_inputs, require_masks, require_outputs

Array = np.ndarray[Any, np.dtype[Any]]


def jax_weights(plan: Plan) -> dict[str, Array]:
    """The source's leaves as a reference's `jax` takes them: by name, flax nnx's ``/value`` removed."""
    prefix = f"{plan.root}/" if plan.root else ""
    dropped = {d.leaf for d in plan.dropped}
    return {
        name.removeprefix(prefix).removesuffix("/value"): plan.checkpoint.read(name)
        for name in plan.checkpoint.leaves
        if name not in dropped
    }


def live_evidence(plan: Plan, reference: Reference, *, precision: str = "float32", seed: int = 0) -> Evidence:
    """Runs the JAX model, in `precision` and lifted.

    Raises:
        ImportError: JAX or the model's package is not installed.
        UserCodeError: the reference's `inputs`, `jax` or `masks` does not give what it must.
    """
    import jax

    from convert.verify.numerics.lift_jax import lift

    side = reference.jax_side()
    inputs = reference.inputs(seed)
    require_inputs(inputs)
    weights = jax_weights(plan)
    with jax_precision(precision):
        narrow = {name: as_jax(value, precision) for name, value in weights.items()}
        drifted = side(narrow, {name: as_jax(value, precision) for name, value in inputs.items()})
        require_outputs(reference.outputs, "jax", drifted)
        lifted = lift(side)
        exact = lifted(weights, dict(inputs))
    return Evidence(  # in the order of the plain call: what passes through a jaxpr comes out with sorted keys
        inputs,
        {name: np.asarray(exact[name]) for name in drifted},
        {name: np.asarray(value, np.float64) for name, value in drifted.items()},
        dict(require_masks(reference.masks(inputs), {name: np.shape(value) for name, value in drifted.items()})),
        precision,
        lifted.unlifted,
        environment={"jax": jax.__version__},
    )


def as_jax(value: Array, dtype: str) -> Any:
    """An array of JAX; a floating one in this dtype."""
    import jax.numpy as jnp

    return jnp.asarray(value).astype(dtype) if is_float(np.asarray(value).dtype.name) else jnp.asarray(value)
