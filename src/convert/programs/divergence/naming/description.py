"""Name what one repair undoes, and say it in a sentence: the first of the questions below that has an answer gives the name."""

from __future__ import annotations

from collections.abc import Callable

from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.naming.both import Both
from convert.programs.divergence.naming.details import (
    PART,
    other_pool_padding,
    other_pooling,
)
from convert.programs.divergence.naming.masks import masked_alone, masked_otherwise, other_mask
from convert.programs.divergence.naming.operands import (
    choice,
    exchanged_axes,
    first_part,
    input_of_layer,
    joined,
    joined_number,
    largest,
    made_at,
    missing_layout,
    missing_part,
    of_parameters,
    operands,
    other_index,
    other_limit,
    other_tables,
    other_value,
    smallest,
    widths,
)
from convert.programs.divergence.naming.operations import (
    Described,
    another_order,
    anything,
    constants,
    extra,
    factor,
    interpolation,
    known_functions,
    longer,
    missing,
    missing_function,
    norm_of_sum,
    other_functions,
    other_limits,
    other_norms,
    other_power,
    reduced,
    sampling,
    side_of_the_root,
    sign,
)
from convert.programs.divergence.naming.shifts import said_shift, shifted
from convert.programs.divergence.naming.windows import PADDING, other_padding, other_windows
from convert.programs.divergence.words import places


def describe(both: Both) -> Described:
    """Return the name of what a repair undoes, and the sentence."""
    repair = both.repair
    drops = both.trained is not None and any(kind_of(one) == "random" for one in repair.target)
    side = OF_THE_SOURCE if not repair.target else OF_THE_TARGET if drops or not repair.source else OF_BOTH
    return next(said for question in (*OF_ANY, *side) if (said := question(both)) is not None)


def missing_padding(both: Both) -> Described | None:
    padding = other_padding(both.repair, both.ours, both.theirs)
    at = places(made_at(both.repair, both.ours))
    return (PADDING, f"{both.only_theirs}; {padding}{at}") if padding else None


def pooling(both: Both) -> Described | None:
    return ("another pooling", both.sentence) if other_pooling(both.repair, both.ours, both.theirs) else None


def pool_padding(both: Both) -> Described | None:
    padding = other_pool_padding(both.repair, both.ours, both.theirs)
    return (PADDING, f"{both.sentence}; {padding}") if padding else None


def read_windows(both: Both) -> Described | None:
    windows = other_windows(both.repair, both.ours, both.theirs)
    if windows is None:
        return None
    by = said_shift(both.repair.got, both.repair.want) if windows[0] == PADDING else ""
    return windows[0], "; ".join(filter(None, (both.sentence, by, windows[1])))


def zeros_around(both: Both) -> Described | None:
    padding = other_padding(both.repair, both.ours, both.theirs)
    return (PADDING, f"{both.sentence}; {padding}") if padding else None


def other_steps(both: Both) -> Described | None:
    """The same value, some steps later or earlier along an axis."""
    said = shifted(both)
    return (PART, f"{both.sentence if both.repair.target else both.only_theirs}; {said}") if said else None


Question = Callable[[Both], Described | None]
OF_ANY: tuple[Question, ...] = (largest, smallest, input_of_layer, choice, other_power)
OF_THE_SOURCE: tuple[Question, ...] = (
    other_value,
    other_limit,
    missing_layout,
    other_steps,
    missing_padding,
    missing_part,
    masked_otherwise,
    missing_function,
    joined,
    missing,
)
OF_THE_TARGET: tuple[Question, ...] = (other_index, extra)
OF_BOTH: tuple[Question, ...] = (
    sampling,
    pooling,
    pool_padding,
    read_windows,
    other_steps,
    zeros_around,
    exchanged_axes,
    other_mask,
    masked_otherwise,
    masked_alone,
    joined_number,
    other_norms,
    other_functions,
    of_parameters,
    other_limits,
    constants,
    other_tables,
    operands,
    side_of_the_root,
    norm_of_sum,
    widths,
    another_order,
    factor,
    sign,
    longer,
    interpolation,
    known_functions,
    reduced,
    first_part,
    anything,
)
