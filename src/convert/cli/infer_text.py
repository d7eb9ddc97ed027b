"""A derivation of `convert infer` for a terminal: where the programs differ, what is not sure of each tensor, and what was proven."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from convert.cli import output

if TYPE_CHECKING:
    from convert.inference.derivation import Derivation, Tensor

LISTED = 8  # tensors of one grade
ASKED = ("tied", "open", "found behind the difference")  # grades of which each tensor is listed


def written(file: Path, derivation: Derivation) -> str:
    """Say what was written, and how many tensors have which grade."""
    return (
        f"wrote {file}: {counted(derivation)} of {output.count(len(derivation.leaves), 'leaf')}; "
        f"{output.count(derivation.tried, 'candidate')} tried"
    )


def counted(derivation: Derivation) -> str:
    """Say how many tensors have which grade."""
    from convert.inference.derivation import Grade

    grades = Counter(tensor.grade for tensor in derivation.tensors)
    each = ", ".join(f"{grades[grade]} {grade.value}" for grade in Grade if grades[grade])
    return f"{output.count(len(derivation.tensors), 'tensor')} ({each})"


def summary(derivation: Derivation, unwritten: Mapping[str, str]) -> Iterator[str]:
    """Say what is not sure, each tensor by its name, and what was proven."""
    from convert.inference.derivation import NOT_REACHED, Grade

    for difference in derivation.differences:
        place = difference.site.where or difference.site.module or difference.site.operation
        far = "" if difference.error is None else f"; an output differs by {difference.error:.1e} of its largest value"
        if not difference.shown:
            far = "; unless other weights make up for it, the programs differ there"
        if difference.made_up_by:
            others = ", ".join(map(str, difference.made_up_by))
            far = f"; other weights make up for it, and no rule is written for them: {others}"
        yield f"{'differs' if difference.shown else 'undecided'}: {place}: {difference.brief or difference.problem}{far}"
        if difference.brief:
            yield f"  in full: {difference.problem}"
    follows = "nothing in front of the difference tells" if derivation.differences else "what follows does not tell"
    for grade in Grade:
        of_grade = [tensor for tensor in derivation.tensors if tensor.grade is grade and not tensor.not_reached]
        yield from _listed(grade.value, of_grade, follows)
    if behind := sum(tensor.not_reached for tensor in derivation.tensors):
        yield f"not reached: {output.count(behind, 'tensor')} behind the difference; correct it first"
    said = {tensor.name: tensor.lack for tensor in derivation.tensors if tensor.grade is Grade.OPEN}
    lacking = [(name, why) for name, why in unwritten.items() if why not in (NOT_REACHED, said.get(name))]
    for name, why in lacking[:LISTED]:
        yield f"no rule: {name}: {why}"
    for note in derivation.notes:
        yield f"note: {note}"
    if derivation.proof is not None:
        drawn = "weights, with the same inputs," if derivation.proof.same_inputs else "weights and inputs"
        whole = "the values of all tensors, with a rule or without one, are " if unwritten else ""
        yield (
            f"{whole}proven with {derivation.proof.draws} further draws of {drawn} through the module as it is: "
            f"relative error {derivation.proof.error:.1e}"
        )


def confirmation(error: float | None, problem: str) -> str:
    """Say whether the rules hold at the other sizes."""
    size = "" if error is None else f"relative error {error:.1e}"
    if problem:
        return "not confirmed at the other sizes: " + ", ".join(filter(None, [problem, size]))
    return f"confirmed at the other sizes: {size}"


def _listed(grade: str, tensors: list[Tensor], follows: str) -> Iterator[str]:
    """Say what is known of tensors, those that differ in numbers together.

    Args:
        follows: how the operations behind columns that are tied do not tell them apart.
    """
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(re.sub(r"[0-9]+", "#", tensor.name), []).append(tensor)
    told = [of for of in groups.values() if grade in ASKED or of[0].unseen or of[0].alternatives]
    for first, *more in told[:LISTED]:
        name = f"{first.name} and {len(more)} more like it" if more else first.name
        if grade == "tied" and first.ties:
            tie = first.ties[0]
            columns = output.count(len(tie.columns), "column")
            said = f"the inputs make {columns} equal; {tie.told_by} would tell them apart"
            if not tie.told_by:
                said = f"the model gives {columns} the same numbers for all inputs that were drawn, and {follows} them apart; larger inputs may (a pooling window that covers the whole map makes its parts equal)"
            yield f"tied: {name}: {said}"
        elif grade == "open":
            candidates = "" if first.unread else ", ".join(first.candidates[:LISTED])
            yield f"open: {name}: {f'may be made of {candidates}' if candidates else first.lack}"
        else:
            if first.unseen:
                said = f"{first.unseen:,} of its {math.prod(first.shape):,} elements"
                yield f"{grade}: {name}: no output shows {said}; they are made as the others of this kind"
            if first.alternatives:
                same = "outputs" if grade == "interchangeable" else "values"
                yield f"{grade}: {name}: {output.count(len(first.alternatives), 'other way')} to make it give the same {same}; the stored order is written"
            if grade == "found behind the difference":
                leaves = dict.fromkeys(leaf for part in first.parts for leaf in (part.leaf, *part.leaves) if leaf)
                yield f"{grade}: {name}: made of {', '.join(leaves) or 'a constant'}"
    if len(told) > LISTED:
        yield f"{grade}: {output.count(len(told) - LISTED, 'more group')} of tensors like these"
