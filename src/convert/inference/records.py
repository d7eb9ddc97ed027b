"""The records of one run of both models, and the searches for the target's parameters in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convert.inference.candidates.source import Source
from convert.inference.forms.as_data import outputs_as_data
from convert.inference.forms.hidden.shown import hidden_elements, shown_alone, without_idle_operations
from convert.inference.forms.sums.masks import visible_sums_first
from convert.inference.forms.used_late import used_late
from convert.inference.search import Search
from convert.programs.program import Program


@dataclass(frozen=True, eq=False)
class Records:
    """The records of one run of both models.

    Attributes:
        source: the JAX function's.
        target: the module's, in the source's form.
        as_run: the module's, as it ran.
        learned: leaves of the source that layers are applied to before an input takes part; they are data in both.
        learned_of_target: the parameters of the module that are data.
    """

    source: Program
    target: Program
    as_run: Program
    learned: Sequence[str]
    learned_of_target: Sequence[str]

    def search(self) -> Search:
        """Return the search for the target's parameters."""
        return search_of(self.source, self.target, repeated=bool(self.learned))

    def search_used_late(self, ended: Search) -> Search | None:
        """Return the search in which each operation of the target stands directly in front of its first use.

        Args:
            ended: the search in the record's order; None is returned if where it ended lies between the same operations in both orders.
        """
        late = used_late(ended.target)
        before, after = ended.target.operations, late.operations
        begin, end = ended.segments[-1].solution.end if ended.segments else 0, ended.failure.index + 1
        first, last = after.index(before[begin]), after.index(before[min(end, len(before)) - 1])
        if set(before[begin:end]) == set(after[first : last + 1]):
            return None
        return Search(ended.source, late, _places_in(self.target, late))

    def search_what_shows(self, ended: Search, *, masks: bool) -> Search | None:
        """Return the search in which only those elements of the values count that an output takes.

        Args:
            ended: the search in which all count; None is returned if each does where it ended, and the target hides none that the source hides.
            masks: whether elements that masks and zeros hide do not count either.
        """
        source, target = ended.source.program, without_idle_operations(ended.target)
        hidden, of_source = hidden_elements(target, masks=masks), hidden_elements(source, masks=masks)
        leaves_out = bool(of_source) and not hidden  # what the source computes and hides
        tried = slice(ended.segments[-1].solution.end if ended.segments else 0, ended.failure.index + 1)
        both = zip(target.operations[tried], ended.target.operations[tried], strict=True)
        if not leaves_out and not any(
            one.name != two.name or any(x in hidden for x in one.operands) for one, two in both
        ):
            return None
        own = Source(shown_alone(source, of_source), repeated=bool(self.learned))
        return Search(own, shown_alone(target, hidden), ended.in_record)


def search_of(source: Program, target: Program, *, repeated: bool = False) -> Search:
    """Return the search for the parameters of the target in what the source computes; `repeated` as of `Source`."""
    own, searched = Source(outputs_as_data(source), repeated=repeated), visible_sums_first(outputs_as_data(target))
    return Search(own, searched, _places_in(target, searched))


def _places_in(record: Program, searched: Program) -> list[int]:
    """Return where a record has each operation of a program that was made of it: that, or the next one that it has."""
    places = {result: k for k, operation in enumerate(record.operations) for result in operation.results}
    found, place = list[int](), len(record.operations) - 1
    for operation in reversed(searched.operations):
        place = next((places[x] for x in operation.results if x in places), place)
        found.append(place)
    return found[::-1]
