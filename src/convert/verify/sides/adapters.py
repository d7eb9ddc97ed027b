"""The JAX side of a published model for a tree with LoRA pairs, which that model does not know: it gets the weights with the products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from string import ascii_letters
from typing import Any

from convert.planning.low_rank_source import Form, Merge
from convert.planning.plan import Plan
from convert.references.protocol import Deferred, JaxSide, Reference
from convert.verify.sides.run_jax import leaf_names


def with_adapters(reference: Reference, plan: Plan) -> Reference:
    """Return the reference whose JAX side adds the products of the LoRA pairs, in the precision of the run, with `jnp.einsum`."""
    merges = [merge for merge in plan.merges.values() if isinstance(merge, Merge) and merge.adapter]
    if not merges or reference.jax is None:
        return reference

    def make() -> JaxSide:
        side = reference.jax_side()

        names = leaf_names(plan)

        def merged(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Mapping[str, Any]:
            leaves = dict(weights)
            for merge in merges:
                base, first, second = (names[leaf or ""] for leaf in (merge.base, merge.first, merge.second))
                leaves[base] = leaves[base] + merge.scale * _product(merge, leaves.pop(first), leaves.pop(second))
            return side(leaves, inputs)

        return merged

    return replace(reference, jax=Deferred(make))


def _product(merge: Merge, first: Any, second: Any) -> Any:
    import jax.numpy as jnp

    forms = merge.pair_forms
    unused = [letter for letter in ascii_letters if letter not in merge.product.equation]
    operands = ",".join(_letters(form, unused) for form in forms)
    a, b = (form.opened(leaf) for form, leaf in zip(forms, (first, second), strict=True))
    return jnp.einsum(f"{operands}->{_letters(Form(merge.letters, merge.stacked), unused)}", a, b)


def _letters(form: Form, unused: list[str]) -> str:
    return "".join(axis if isinstance(axis, str) else unused[axis] for axis in form.axes)
