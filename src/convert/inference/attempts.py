"""The searches for a way to the outputs, one after the other: each takes another thing into account that may have stood in the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from convert.inference.models import Models
from convert.inference.records import Records
from convert.inference.search import Search

MOST_PATHS = 8  # along which the module is recorded: each has the choice of one more layer
MOST_NORMS = 3  # kinds of layers whose weight norms the source lacks


@dataclass(frozen=True, eq=False)
class Searched:
    """A search that has ended.

    Attributes:
        records: of both programs.
        search: in them.
        solved: whether a way to the outputs was found.
    """

    records: Records
    search: Search
    solved: bool


Attempt = Callable[[Models, int, Searched], Searched]


def searched(models: Models, seed: int) -> Searched:
    """Search with the weights and inputs of a seed."""
    found = _of(models.record(seed))
    for attempt in ATTEMPTS:
        if found.solved:
            break
        found = attempt(models, seed, found)
    return found


def _along_other_paths(models: Models, seed: int, found: Searched) -> Searched:
    """Record the module along the path that the weights found so far take, such as to other experts, as long as that leads further."""
    for _ in range(MOST_PATHS if found.records.as_run.path_taken else 0):
        search = found.search
        other = _of(models.record(seed, search.elsewhere or search.replay.known_parameters()))
        if other.solved:
            return other
        if other.search.failure.index <= search.failure.index:
            break
        found = other
    return found


def _in_other_forms(models: Models, seed: int, found: Searched) -> Searched:
    """Take networks apart that a program runs at once; take rows early, where a program takes them late; take joined rows apart.

    Then take the module's own numbers for constants, and the numbers that are added to parts of layers into the biases.
    """
    for recorded, is_better in (
        (models.record_apart, _leads_further),
        (models.record_rows_early, _leads_further),
        (models.record_joined_apart, _knows_more),
        (models.record_own_numbers, _leads_further),
        (models.record_numbers_early, _leads_further),
    ):
        forms = models.runs.forms
        records = None if found.solved else recorded(found.records, seed)
        if records is None:
            continue
        other = _of(records)
        if is_better(other, found):
            found = other
        else:
            models.runs.forms = forms
    return found


def _of_what_shows(models: Models, seed: int, found: Searched) -> Searched:
    """Leave elements out of both programs that no output takes; or that a mask hides, too."""
    best = found
    for masks in (False, True):
        shown = found.records.search_what_shows(found.search, masks=masks)
        if shown is None:
            continue
        other = Searched(found.records, shown, shown.solve())
        if other.solved:
            return other
        best = other if shown.known > best.search.known else best
    return best


def _without_weight_norms(models: Models, seed: int, found: Searched) -> Searched:
    """Take the direction in place of a weight norm that stands in the way: the first one, then all of its kind."""
    for attempt in range(MOST_NORMS):
        norms = models.runs.plain
        records = models.record_without_weight_norms(found.records, found.search, seed, alone=attempt == 0)
        other = None if records is None else _of(records)
        if other is None or not _leads_further(other, found):
            models.runs.plain = norms
            break
        found = other
        if found.solved:
            break
    return found


def _used_late(models: Models, seed: int, found: Searched) -> Searched:
    """Put each operation in front of its first use: what lies between is no part of the way."""
    late = found.records.search_used_late(found.search)
    if late is None:
        return found
    solved = late.solve()
    return replace(found, search=late, solved=solved) if solved or late.led_further(found.search) else found


def _patiently(models: Models, seed: int, found: Searched) -> Searched:
    """Search on where the patience of the search has ended; first only for such ways on which each value that is joined is the source's."""
    if not found.search.ran_out:
        return found
    for by_parts in (True, False):
        patient = found.records.search()
        patient.patient, patient.by_parts = True, by_parts
        if (not by_parts or patient.joins) and patient.solve():
            return Searched(found.records, patient, True)
    return found


def _of(records: Records) -> Searched:
    """Search in records."""
    search = records.search()
    return Searched(records, search, search.solve())


def _leads_further(other: Searched, found: Searched) -> bool:
    """Whether a search found more, or as much and ended behind more parameters."""
    ends = [(one.search.found, one.search.met) for one in (other, found)]
    return other.solved or ends[0] > ends[1]


def _knows_more(other: Searched, found: Searched) -> bool:
    """Whether a search knows something of more parameters: one that rows meet in several places counts once."""
    return other.solved or other.search.known > found.search.known


ATTEMPTS: tuple[Attempt, ...] = (
    _along_other_paths,
    _in_other_forms,
    _of_what_shows,
    _without_weight_norms,
    _used_late,
    _patiently,
)
