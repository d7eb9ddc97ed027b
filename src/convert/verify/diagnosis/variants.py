"""Search for another function among those that the reference lists in its `variants`."""

from __future__ import annotations

from collections.abc import Sequence

from convert.references.protocol import Reference, Variant
from convert.verify.diagnosis.compare import Explanation, Search, compare_variants, replaced
from convert.verify.diagnosis.site import Site
from convert.verify.diagnosis.weight_trials import wrong_rules

IN_JAX = ", in the JAX model"


def other_variant(site: Site, reference: Reference) -> Search:
    """Search among the reference's variants for the boundary."""
    variants = reference.variants(site.boundary)
    if not variants:
        return Search()
    computed = [variant for variant in variants if not variant.undoes]
    search = compare_variants(site, computed, "", lambda torch, jax: _deviation(variants[0], torch, jax))
    if search.explanation is not None:
        # The target computes what is meant: the JAX model need not be wrong where rules are that make several tensors of the layer.
        rules = wrong_rules(site) if search.explanation.name.endswith(IN_JAX) else Search()
        return rules if rules.explanation is not None else search
    undone = _undone(site, [variant for variant in variants if variant.undoes])
    return Search(undone.explanation, (*search.ruled_out, *undone.ruled_out))


def _deviation(meant: Variant, torch: Variant, jax: Variant) -> str:
    """Name the mistake by the function that is not the one that is meant."""
    if jax.name == meant.name:
        return torch.name
    return f"{jax.name}{IN_JAX}" if torch.name == meant.name else replaced(torch, jax)


def _undone(site: Site, variants: Sequence[Variant]) -> Search:
    """Search for a mistake whose inverse, applied to the target's value, gives the JAX model's value."""
    ruled_out: list[str] = []
    for variant in variants:
        error = site.error(variant.make(site.seen))
        if error <= site.enough:
            problem = f"undoing this in the target's {site.boundary} gives what the JAX model has: {variant.name}"
            fix = f"correct how the target computes {site.boundary}"
            return Search(Explanation(variant.name, problem, "", fix, error), tuple(ruled_out))
        ruled_out.append(variant.name)
    return Search(ruled_out=tuple(ruled_out))
