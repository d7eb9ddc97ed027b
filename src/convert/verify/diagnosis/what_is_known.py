"""Say what is known of a difference that no known mistake explains: what is equal in front of it, and whether the layer is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from convert.references.protocol import INPUT
from convert.verify.diagnosis.found_boundaries import FoundBoundaries
from convert.verify.diagnosis.site import Site

Array = np.ndarray[Any, np.dtype[Any]]
NO_DIAGNOSIS = "no known mistake explains it"


def what_is_known(site: Site, found: FoundBoundaries | None, names: Sequence[str]) -> str:
    """Return a sentence that names the two places between which the difference arises.

    Args:
        found: boundaries that the reference does not return.
        names: those that it returns, in the order of the data; all in front of the site are equal.
    """
    known = list(site.evidence.native_values) if found is not None else list(names)
    equal = [
        name
        for name in known[: known.index(site.boundary)]
        if name in site.seen.values and site.evidence.shape(name) == site.seen.values[name].shape and _equal(site, name)
    ]
    before = equal[-1] if equal else ""
    said = [NO_DIAGNOSIS]
    if before == site.name + INPUT:
        said.append(
            f"{site.name} is given what the JAX model gives it, and gives another value: its weights or its code differ"
        )
    elif before:
        said.append(f"the difference arises in the code between {before}, which is equal, and {site.boundary}")
    if right := _right_layers(site, equal):
        said.append(f"given the same input, {right} the same output, so the weights there are right")
    return "; ".join(said)


def _equal(site: Site, name: str) -> bool:
    from convert.numerics.compare import difference

    got = site.evidence.pick(name, site.seen.values[name])
    error = difference(got, site.evidence.best_values[name], mask=site.evidence.masks.get(name)).relative
    return error <= max(site.allowed, site.enough)


def _right_layers(site: Site, equal: Sequence[str]) -> str:
    """Return the last layers whose input and output are both equal, with the verb."""
    layers = [name for name in equal if not name.endswith(INPUT) and name + INPUT in equal][-3:]
    if not layers:
        return ""
    return f"{', '.join(layers)} {'give' if len(layers) > 1 else 'gives'}"
