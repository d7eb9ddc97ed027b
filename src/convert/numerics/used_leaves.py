"""Which leaves a JAX function computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def used_leaves(function: Callable[[dict[str, Any]], Any], leaves: Mapping[str, Any]) -> list[str]:
    """Return the names of the leaves that an output is computed from.

    Args:
        leaves: arrays, or their shapes and dtypes, by name.

    Raises:
        Exception: any of the function, which is traced.
    """
    import jax
    from jax.interpreters import partial_eval

    from convert.numerics.lift_jax import traced

    made = traced(lambda: jax.make_jaxpr(function)(dict(leaves)))
    _, used = partial_eval.dce_jaxpr(made.jaxpr, [True] * len(made.jaxpr.outvars))
    return [name for name, is_used in zip(sorted(leaves), used, strict=True) if is_used]
