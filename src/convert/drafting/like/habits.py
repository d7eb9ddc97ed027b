"""Which axis comes first in the matrices of one name: shapes show it for most of them, and the others are assumed to be the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from convert.drafting.like.assign import Unit
from convert.drafting.like.readings import Reading, inputs_first
from convert.layers.draft import DraftEntry


class Habits:
    """How the matrices of the tree and of the target are stored, where shapes show it."""

    def __init__(self, entries: Sequence[DraftEntry], units: Sequence[Unit | None]) -> None:
        self._of: dict[str, set[tuple[bool, bool]]] = defaultdict(set)
        for entry, unit in zip(entries, units, strict=True):
            ways = (
                {orientation(reading) for reading in of_known_layout(unit)}
                if unit is not None and unit.matches
                else set()
            )
            oblong = unit is not None and any(len(set(c.shapes.get("weight", ()))) == 2 for c in unit.columns)
            if len(ways) == 1 and None not in ways and oblong:
                self._of[leaf_key(entry)] |= {way for way in ways if way is not None}

    def choose(self, entry: DraftEntry, fitting: Sequence[Reading]) -> Reading | None:
        """Return the reading that is as all other matrices of this name are; None if they differ, or if there are none."""
        ways = self._of[leaf_key(entry)]
        usual = [reading for reading in fitting if orientation(reading) in ways]
        return usual[0] if len(ways) == 1 and len(usual) == 1 else None


def of_known_layout(unit: Unit) -> list[Reading]:
    """Return the readings that fit, without those whose target is stored otherwise than its type says."""
    fitting = unit.fitting
    module = next(iter(unit.matches.values())).series.places[0].module
    if module.kind_name == "linear":
        return [r for r in fitting if r.inside.startswith("einsum") == module.stored_in_out] or fitting
    straight = [reading for reading in fitting if not reading.inside]
    shapes = [shape for c in unit.columns for shape in c.shapes.values() if len(shape) == 2]
    square = any(a == b for a, b in shapes)
    biased = any("bias" in c.shapes for c in unit.columns)
    return fitting if square or biased else straight or fitting


def orientation(reading: Reading) -> tuple[bool, bool] | None:
    """Return whether the source's matrix has its inputs first, and whether the target's has; None if it is no matrix."""
    first = inputs_first(reading.said["einsum"]) if "einsum" in reading.said else None
    return None if first is None else (first, reading.inside.startswith("einsum"))


def leaf_key(entry: DraftEntry) -> str:
    return next((line.value.rpartition("/")[2].strip('"') for line in entry.lines if line.key == "from"), "")
