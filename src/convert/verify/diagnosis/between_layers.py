"""Search for another function between the layers: those of the reference's `variants`, and activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.layers.activations import ACTIVATIONS, torch_activation
from convert.references.protocol import INPUT, Observed, Reference, Variant
from convert.verify.diagnosis.compare import Explanation, Search, compare_variants, replaced
from convert.verify.diagnosis.site import Site

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]


def other_function(site: Site, reference: Reference) -> Search:
    """Search among the reference's variants; where it has none for the boundary, among the activations."""
    variants = reference.variants(site.boundary)
    if not variants:
        return _activation_at_input(site) if site.boundary.endswith(INPUT) else _activation_before_layer(site)
    computed = [variant for variant in variants if not variant.undoes]
    search = compare_variants(site, computed, "", lambda torch, jax: _deviation(variants[0], torch, jax))
    if search.explanation is not None:
        return search
    undone = _undone(site, [variant for variant in variants if variant.undoes])
    return Search(undone.explanation, (*search.ruled_out, *undone.ruled_out))


def _deviation(meant: Variant, torch: Variant, jax: Variant) -> str:
    """Name the mistake by the function that is not the one that is meant."""
    if jax.name == meant.name:
        return torch.name
    return f"{jax.name}, in the JAX model" if torch.name == meant.name else replaced(torch, jax)


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


def _activation_at_input(site: Site) -> Search:
    """Search for another activation between the value before the boundary and the layer's input, which differs."""
    source = next(_values_before(site, site.seen.values[site.boundary].shape), None)
    if source is None:
        return Search()
    variants = [Variant(name, lambda seen, name=name: _activate(name, seen, source)) for name in ACTIVATIONS]  # type: ignore[misc]
    variants.append(Variant("no activation", lambda seen: seen.values[source]))
    return compare_variants(site, variants, site.rule(source), replaced)


def _activation_before_layer(site: Site) -> Search:
    """Search for another activation in front of the layer, whose output differs and whose input is no boundary."""
    given = site.seen.values.get(site.name + INPUT)
    if given is None or site.name + INPUT in site.evidence.native_values:
        return Search()
    layer = site.module.get_submodule(site.name)
    sources = list(_values_before(site, given.shape))
    for source in sources:
        variants = [
            Variant(name, lambda seen, name=name, source=source: _run(layer, _activate(name, seen, source)))  # type: ignore[misc]
            for name in ACTIVATIONS
        ]
        explanation = compare_variants(site, variants, site.rule(source), replaced).explanation
        if explanation is not None and explanation.target_known:
            return Search(explanation)
    return Search(ruled_out=tuple(ACTIVATIONS) if sources else ())


def _values_before(site: Site, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield the names of observed values of this shape before the boundary, the nearest first."""
    names = list(site.evidence.native_values)
    for name in reversed(names[: names.index(site.boundary)]):
        if name in site.seen.values and site.seen.values[name].shape == shape:
            yield name


def _run(layer: torch.nn.Module, given: Array) -> Array:
    """Run the layer in float64.

    Raises:
        ValueError: it does not map one tensor to one tensor, as attention with a mask or an LSTM.
    """
    import torch

    from convert.numerics.lift_torch import lifted

    device = next((parameter.device for parameter in layer.parameters()), None)
    with torch.no_grad(), lifted():
        try:
            result = layer(torch.as_tensor(given, device=device))
        except (TypeError, AttributeError) as error:  # code of the user's that wants other arguments
            raise ValueError(f"{type(layer).__name__} cannot be called with one tensor") from error
    if not isinstance(result, torch.Tensor):
        raise ValueError(f"{type(layer).__name__} does not return one tensor")  # noqa: TRY004 - no error of ours
    return np.asarray(result.double().cpu().numpy())


def _activate(name: str, seen: Observed, source: str) -> Array:
    """Apply an activation to an observed value."""
    import torch

    return np.asarray(torch_activation(name)(torch.tensor(seen.values[source], dtype=torch.float64)).numpy())
