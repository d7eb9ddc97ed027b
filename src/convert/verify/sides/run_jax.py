"""Run the JAX model on the checkpoint's weights, in the precision that users run and in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from convert.core.nnx_names import without_value
from convert.core.tensor_spec import is_float, numpy_dtype
from convert.numerics.compare import difference
from convert.numerics.precision import jax_precision
from convert.numerics.real_numbers import as_real, in_float64
from convert.planning.plan import CONFIGURED, UNUSED, Plan
from convert.references.protocol import Reference
from convert.references.user_reference import require_inputs, require_masks, require_outputs
from convert.verify.sides.evidence import Evidence

Array = np.ndarray[Any, np.dtype[Any]]


def jax_weights(plan: Plan) -> dict[str, Array]:
    """Return the checkpoint's leaves as a reference's `jax` takes them: by name, without flax nnx's ``/value``."""
    return {name: plan.checkpoint.read(leaf) for name, leaf in jax_leaves(plan).items()}


def changed_weights(plan: Plan, changed: Callable[[Array], Array]) -> dict[str, Array]:
    """Return them with each leaf changed that a tensor is made of: a size that the checkpoint holds would be another model's."""
    needed = _needed(plan)
    read = ((name, leaf, plan.checkpoint.read(leaf)) for name, leaf in jax_leaves(plan).items())
    return {name: x if leaf in needed else changed(x) for name, leaf, x in read}


def jax_specs(plan: Plan) -> dict[str, Any]:
    """Return their shapes and dtypes, for a trace."""
    import jax

    specs = {name: plan.checkpoint.leaves[leaf].spec for name, leaf in jax_leaves(plan).items()}
    return {name: jax.ShapeDtypeStruct(spec.shape, numpy_dtype(spec.dtype)) for name, spec in specs.items()}


def jax_leaves(plan: Plan) -> dict[str, str]:
    """Return the names of the leaves as a reference's `jax` takes them -> their names in the checkpoint."""
    dropped = {d.leaf for d in plan.dropped} - _needed(plan)
    return {name: leaf for leaf, name in leaf_names(plan).items() if leaf not in dropped}


def _needed(plan: Plan) -> set[str]:
    """Return the leaves that no tensor is made of, and that the JAX function is given as they are."""
    return {d.leaf for d in plan.dropped if d.reason in (UNUSED, CONFIGURED)}


def leaf_names(plan: Plan) -> dict[str, str]:
    """Return the names of the checkpoint's leaves -> those by which a reference's `jax` takes them."""
    root = f"{plan.root}/" if plan.root else ""
    return {leaf: name.removeprefix(root) for leaf, name in without_value(plan.checkpoint.leaves).items()}


def live_evidence(plan: Plan, reference: Reference, *, precision: str = "float32", seed: int = 0) -> Evidence:
    """Run the JAX model in `precision` and in float64.

    Raises:
        ImportError: JAX or the model's package is not installed.
        UserCodeError: the reference's `inputs`, `jax` or `masks` returned a wrong value.
    """
    import jax

    from convert.numerics.lift_jax import lift

    side = reference.jax_side()
    inputs = require_inputs(reference.inputs(seed))
    weights = jax_weights(plan)
    native = native_values(side, weights, inputs, precision)
    require_outputs(reference.outputs, "jax", native)
    with jax_precision(precision):
        lifted = lift(side)
        float64 = lifted(weights, dict(inputs))
        shaken = lift(side, shaken=True)(weights, dict(inputs)) if lifted.rounded else {}
    masks = dict(require_masks(reference.masks(inputs), {name: np.shape(value) for name, value in native.items()}))
    exact = _in_order_of(native, float64)
    return Evidence(  # in the order of the native run; the float64 run passes through a jaxpr, which sorts the keys
        inputs,
        exact,
        {name: in_float64(value) for name, value in native.items()},
        masks,
        precision,
        lifted.unlifted,
        environment={"jax": jax.__version__},
        moved={
            name: difference(as_real(np.asarray(value)), exact[name], mask=masks.get(name)).relative
            for name, value in shaken.items()
        },
    )


def native_values(side: Any, weights: Mapping[str, Array], inputs: Mapping[str, Array], precision: str) -> Any:
    """Run the JAX model in `precision` alone; return what it returns."""
    with jax_precision(precision):
        narrow = {name: as_jax(value, precision) for name, value in weights.items()}
        return side(narrow, {name: as_jax(value, precision) for name, value in inputs.items()})


def _in_order_of(native: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Array]:
    return {name: as_real(np.asarray(values[name])) for name in native}


def as_jax(value: Array, dtype: str) -> Any:
    """Return an array of JAX, cast to this dtype if it is floating."""
    import jax.numpy as jnp

    return jnp.asarray(value).astype(dtype) if is_float(np.asarray(value).dtype.name) else jnp.asarray(value)
