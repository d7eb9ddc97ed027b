"""Leave repairs out that no output depends on: what stands in rows that are masked or padded may differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from convert.programs.divergence.repair import Repair
from convert.programs.divergence.rerun import Rerun
from convert.programs.fingerprint import EXACT
from convert.programs.program import Program

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 8  # places of repairs
UNCHANGED = 1e-9  # relative change of an error


def needed(
    target: Program, repairs: Sequence[Repair], error: Callable[[Rerun], float], enough: float
) -> tuple[Repair, ...]:
    """Return the repairs without those of places that do nothing.

    With the repairs of such a place alone a run is as wrong as without any, or they change only what a later repair sets to zero;
    and with all others it is equal.

    Args:
        error: of a run; `enough`: the error up to which it is equal.
    """
    places = [tuple((one.name, one.where) for one in (*repair.target, *repair.source)) for repair in repairs]

    def with_those(kept: Collection[Any]) -> Rerun | None:
        rerun = Rerun(target)
        try:
            for place, repair in zip(places, repairs, strict=True):
                if place in kept:
                    list(rerun.put(repair.change))
        except ValueError:
            return None
        return rerun

    kept = list(dict.fromkeys(places))
    if not 1 < len(kept) <= MOST:
        return tuple(repairs)
    before = error(Rerun(target))
    for place in tuple(kept):
        others = [other for other in kept if other != place]
        alone, rest = with_those([place]), with_those(others)
        if not others or alone is None or rest is None or error(rest) > enough:
            continue
        later = [one for at, one in zip(places, repairs, strict=True) if at in kept[kept.index(place) + 1 :]]
        if abs(error(alone) - before) <= UNCHANGED * before or any(_hides(one, alone, target) for one in later):
            kept = others
    return tuple(repair for place, repair in zip(places, repairs, strict=True) if place in kept)


def _hides(repair: Repair, run: Rerun, target: Program) -> bool:
    """Whether a repair puts nothing but zeros in, and does so wherever a run has another number than the record."""
    operands = {target.operations[at].operands[k]: x for (at, k), x in repair.change.operands.items()}
    changed = [
        x.ravel()[(_differs(run.array(v), v.array) | _differs(x.reshape(v.array.shape), v.array)).ravel()]
        for v, x in {**repair.change.values, **operands}.items()
        if x.size == v.array.size and v.array.dtype.kind == "f" and _differs(run.array(v), v.array).any()
    ]
    return bool(changed) and not any(x.any() for x in changed)


def _differs(got: Array, own: Array) -> Array:
    return np.asarray(np.abs(got - own) > EXACT * np.abs(own).max(initial=0))
