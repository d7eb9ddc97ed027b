"""Search for the same values in another order along an axis, or multiplied by one number, at a place between layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.core.text import where_they_differ
from convert.numerics.compare import difference
from convert.references.protocol import INPUT
from convert.verify.diagnosis.compare import Explanation, Search
from convert.verify.diagnosis.site import Site

Array = np.ndarray[Any, np.dtype[Any]]
ORDER, FACTOR = "values in another order", "values multiplied by a number"
MAX_SIZE = 1 << 14  # of an axis
NEAR_ONE = 1e-6  # a factor that near is no factor of anyone's code


def other_order(site: Site) -> Search:
    """Search for an order of one axis, or a factor, that makes PyTorch's value the JAX model's."""
    got, want = site.seen.values.get(site.boundary), site.want
    if got is None or got.shape != want.shape or site.boundary in site.evidence.samples or not np.isfinite(got).all():
        return Search()
    for axis in range(1, got.ndim):
        order = _order(got, want, axis)
        if order is None or (error := site.error(np.take(got, order, axis))) > site.enough:
            continue
        layer = f"what {site.name} is given" if site.boundary.endswith(INPUT) else site.boundary
        problem = f"{layer} has the JAX model's values with axis {axis} in another order: {_text(order)}"
        if before := _nearest_equal(site):
            problem += f"; {before} is equal, so the code behind it puts them together otherwise"
        fix = f"correct the order in the code in front of {site.boundary}, or in the JAX model"
        if site.boundary.endswith(INPUT):
            fix += f"; if both are right, say both orders in the rule of {site.name} with `concatenated`"
        return Search(Explanation(ORDER, problem, "", fix, error))
    norm = float(np.vdot(want, want))
    factor = float(np.vdot(want, got)) / norm if norm else 0.0
    if factor and abs(factor - 1) > NEAR_ONE and (error := site.error(got / factor)) <= site.enough:
        problem = f"{site.boundary} is {factor:.7g} times the JAX model's"
        fix = f"look for a factor in the code in front of {site.boundary}"
        return Search(Explanation(FACTOR, problem, "", fix, error, target_known=False))
    return Search(ruled_out=(ORDER, FACTOR))


def _order(got: Array, want: Array, axis: int) -> Array | None:
    """Return the order of the slices of `got` along an axis in which they come nearest to those of `want`; None if it is theirs."""
    size = got.shape[axis]
    if not 1 < size <= MAX_SIZE:
        return None
    ours, theirs = (np.moveaxis(x, axis, 0).reshape(size, -1) for x in (got, want))
    direction = np.random.default_rng(0).standard_normal(ours.shape[1])
    order = np.empty(size, np.int64)
    order[np.argsort(theirs @ direction, kind="stable")] = np.argsort(ours @ direction, kind="stable")
    return None if np.array_equal(order, np.arange(size)) else order


def _text(order: Array) -> str:
    """Say which slice of PyTorch's comes first, second, and so on in the JAX model."""
    size = len(order)
    if np.array_equal(order, np.arange(size)[::-1]):
        return "reversed"
    if np.array_equal(order, np.roll(np.arange(size), -int(order[0]))):
        return (
            f"the JAX model begins with PyTorch's index {order[0]} of {size}, and goes on behind its end with index 0"
        )
    shown, _ = where_they_differ(order.tolist(), list(range(size)), 8)
    return f"the JAX model has PyTorch's indices in the order {shown}"


def _nearest_equal(site: Site) -> str:
    """Return the nearest boundary in front of the site that is equal; empty if there is none."""
    names = list(site.evidence.native_values)
    for name in reversed(names[: names.index(site.boundary)]):
        if name in site.seen.values and name not in site.evidence.samples:
            value = site.seen.values[name]
            mask = site.evidence.masks.get(name)
            if value.shape == site.evidence.shape(name) and (
                difference(value, site.evidence.best_values[name], mask=mask).relative <= max(site.allowed, site.enough)
            ):
                return name
    return ""
