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
    from convert.drafting.like.target import TargetModel
    from convert.inference.derivation import Derivation, Difference, Tensor

LISTED = 8  # tensors of one grade
UNDECIDED = "infer does not know whether the programs differ there, or compute the same in two ways"
HINT = "hint: if you see no difference there, write that place, or what follows it, in one way in both, and run again; where you cannot, give "
BY_HAND = (
    "other weights (another `--seed`) or inputs; rules that you write by hand can be converted and checked as well"
)
NOT_COMPARED = "what follows is not compared"  # begins a clause of a difference
OTHER_LEAF = "would give the same"  # behind the name of a leaf
LINE = re.compile(r"[\w./-]+:[0-9]+")  # of the code
NUMBER = re.compile("[0-9]+")


def written(file: Path, derivation: Derivation, target: TargetModel, rules: str, unwritten: Mapping[str, str]) -> str:
    """Say what was written, and how many tensors have which grade; of those that are found, how many have no rule."""
    from convert.inference.derivation import Grade

    found = {tensor.name for tensor in derivation.tensors if tensor.grade is not Grade.OPEN}
    without = f", {len(found & unwritten.keys())} without a rule" if found & unwritten.keys() else ""
    return (
        f"wrote {file}: {counted(derivation)}{without} of {output.count(len(derivation.leaves), 'leaf')}; "
        f"{output.count(derivation.tried, 'candidate')} tried{beside(derivation, target, rules)}"
    )


def beside(derivation: Derivation, target: TargetModel, rules: str) -> str:
    """Say which tensors `convert` writes beside those that were derived, as a clause; empty where there are none, or a mismatch is left, as the norms behind it are not known.

    Args:
        rules: text of the file; that of a BatchNorm writes its counter, and that of one whose tensors have rules of their own is a constant.
    """
    from convert.drafting.like.target import COUNTERS
    from convert.rules.parse import parse_rules

    if derivation.differences:
        return ""
    kinds = ("batch_norm", "constant")
    norms, constants = (
        [layer.path for rule in parse_rules(rules).rules if rule.kind_name == kind for layer in rule.targets.values()]
        for kind in kinds
    )
    counted = {name: name.rpartition(".")[0] for name in target.tensors if name.endswith(COUNTERS)}
    counters = sum(
        any(path.match(module) for path in norms) or any(path.match(name) for path in constants)
        for name, module in counted.items()
    )
    seconds = sum(
        len(others)
        for first, others in target.shared.items()
        for name in target.tensors
        if name == first or name.startswith(f"{first}.")
    )
    made = [
        output.count(number, word)
        for number, word in (
            (counters, "BatchNorm counter"),
            (len(derivation.buffers), "whole-number buffer"),
            (seconds, "second name"),
        )
        if number
    ]
    return f"; `convert` also writes {' and '.join(made)}" if made else ""


def counted(derivation: Derivation) -> str:
    """Say how many tensors have which grade."""
    from convert.inference.derivation import Grade

    grades = Counter(tensor.grade for tensor in derivation.tensors)
    each = ", ".join(f"{grades[grade]} {grade.value}" for grade in Grade if grades[grade])
    return f"{output.count(len(derivation.tensors), 'tensor')} ({each})"


def summary(derivation: Derivation, unwritten: Mapping[str, str]) -> Iterator[str]:
    """Say what is not sure, each tensor by its name, and what was proven."""
    from convert.inference.derivation import NOT_REACHED, Grade
    from convert.inference.open_tensors import NOT_PROVEN

    for difference in derivation.differences:
        place = difference.site.where or difference.site.module or difference.site.operation
        far = "" if difference.error is None else f"; an output differs by {difference.error:.1e} of its largest value"
        if not difference.shown:
            far = f"; {UNDECIDED}"
        if difference.made_up_by:
            others = ", ".join(map(str, difference.made_up_by))
            far = f"; other weights make up for it, and no rule is written for them: {others}"
        yield f"{'differs' if difference.shown else 'undecided'}: {place}: {difference.brief or difference.problem}{far}"
        if difference.brief:
            yield from _in_full(difference)
    follows = "nothing in front of the difference tells" if derivation.differences else "what follows does not tell"
    for grade in Grade:
        of_grade = [tensor for tensor in derivation.tensors if tensor.grade is grade and not tensor.not_reached]
        yield from _listed(grade.value, of_grade, derivation, follows)
    if behind := sum(tensor.not_reached for tensor in derivation.tensors):
        certain = any(difference.is_certain for difference in derivation.differences)
        place = "the difference; correct it first" if certain else "that place"
        yield f"not reached: {output.count(behind, 'tensor')} behind {place}"
    said = {tensor.name: tensor.lack for tensor in derivation.tensors if tensor.grade is Grade.OPEN}
    lacking = [(name, why) for name, why in unwritten.items() if why not in (NOT_REACHED, NOT_PROVEN, said.get(name))]
    for name, why in lacking[:LISTED]:
        yield f"no rule: {name}: {why}"
    yield from _without_leaf(derivation)
    for note in derivation.notes:
        yield f"note: {note}"
    if derivation.proof is not None:
        drawn = "weights, with the same inputs," if derivation.proof.same_inputs else "weights and inputs"
        whole = "the values of all tensors, with a rule or without one, are " if unwritten else ""
        yield (
            f"{whole}proven with {derivation.proof.draws} further draws of {drawn} through the module as it is: "
            f"relative error {derivation.proof.error:.1e}"
        )
    if any(not difference.is_certain for difference in derivation.differences):
        yield hint(derivation)


def _without_leaf(derivation: Derivation) -> Iterator[str]:
    """Name the parameters that are one number, as the JAX model has no leaf for them."""
    from convert.inference.derivation import Arithmetic, Grade

    if derivation.differences:  # then no outputs say so
        return
    groups: dict[tuple[str, float], list[str]] = {}
    for tensor in derivation.tensors:
        numbers = {part.factor if part.arithmetic is Arithmetic.CONSTANT else None for part in tensor.parts}
        if tensor.grade is not Grade.OPEN and len(numbers) == 1 and (number := numbers.pop()) is not None:
            groups.setdefault((NUMBER.sub("#", tensor.name), number), []).append(tensor.name)
    for (_, number), (first, *more) in list(groups.items())[:LISTED]:
        yield f"note: no leaf gives {_and_more(first, len(more))}: {number:g} in all elements gives the JAX model's outputs"


def _in_full(difference: Difference) -> Iterator[str]:
    """Yield what the whole sentence says beyond the short one: further clauses, and lines of the code."""
    from convert.programs.divergence.naming.brief import without_places

    clauses = difference.problem.split("; ")
    known = [
        without_places(clause) in difference.brief and {*LINE.findall(clause)} <= {difference.site.where}
        for clause in clauses
    ]
    new = [clause for clause, is_known in zip(clauses, known, strict=True) if not is_known]
    if new and all(clause.startswith(NOT_COMPARED) for clause in new):
        yield f"  also: {'; '.join(new)}"
    elif new:
        yield f"  in full: {'; '.join(clauses[: len(clauses) - known[::-1].index(False)])}"


def hint(derivation: Derivation) -> str:
    """Say what may help where it is not known whether the programs differ."""
    from convert.inference.open_tensors import equal_widths

    equal = equal_widths(derivation)
    which = "1 open leaf has" if equal == 1 else f"{equal} open leaves have"
    widths = f"the layers different widths ({which} two axes of one size), or " if equal else ""
    return f"{HINT}{widths}{BY_HAND}"


def confirmation(error: float | None, problem: str) -> str:
    """Say whether the rules hold at the other sizes."""
    size = "" if error is None else f"relative error {error:.1e}"
    if problem:
        return "not confirmed at the other sizes: " + ", ".join(filter(None, [problem, size]))
    return f"confirmed at the other sizes: {size}"


def _listed(grade: str, tensors: list[Tensor], derivation: Derivation, follows: str) -> Iterator[str]:
    """Say what is known of tensors, in one line of those that differ in nothing but the numbers in names.

    Args:
        follows: how the operations behind columns that are tied do not tell them apart.
    """
    groups: dict[tuple[str, ...], list[tuple[Tensor, list[str]]]] = {}
    for tensor in tensors:
        if said := list(_said(grade, tensor, derivation, follows)):
            named = grade in ("open", "found behind the mismatch") or any(OTHER_LEAF in text for text in said)
            key = tuple(NUMBER.sub("#", text) for text in said) if named else tuple(said)
            groups.setdefault((NUMBER.sub("#", tensor.name), *key), []).append((tensor, said))
    for (first, said), *more in list(groups.values())[:LISTED]:
        name = _and_more(first.name, len(more))
        yield from (f"{grade}: {name}: {text}" for text in said)
    if len(groups) > LISTED:
        yield f"{grade}: {output.count(len(groups) - LISTED, 'more group')} of tensors like these"


def _and_more(name: str, more: int) -> str:
    return f"{name} and {more} more like it" if more else name


def _said(grade: str, tensor: Tensor, derivation: Derivation, follows: str) -> Iterator[str]:
    """Say what is not sure of a tensor; nothing where all is."""
    from convert.inference.derivation import MORE_ROWS

    if grade == "tied" and tensor.ties:
        tie = tensor.ties[0]
        columns = output.count(len(tie.columns), "column")
        if tie.told_by == MORE_ROWS:
            yield f"{columns} are 0 in all rows that were drawn, as units behind a ReLU can be; {MORE_ROWS} may tell them apart"
        elif tie.told_by:
            yield f"the inputs make {columns} equal; {tie.told_by} would tell them apart"
        else:
            yield f"the model gives {columns} the same numbers for all inputs that were drawn, and {follows} them apart; larger inputs may (a pooling window that covers the whole map makes its parts equal)"
    elif grade == "open":
        from convert.inference.open_tensors import may_be_made_of

        yield may_be_made_of(tensor, derivation)
    else:
        if tensor.unseen:
            yield f"with inputs of these sizes no output shows {_unseen(tensor)}; they are made as the others of this kind"
        if tensor.alternatives:
            yield _other_ways(tensor, "outputs" if grade == "interchangeable" else "values")
        if grade == "found behind the mismatch":
            yield f"made of {', '.join(tensor.nearest) or 'a constant'}"


def _unseen(tensor: Tensor) -> str:
    """Say how many elements of a tensor no output shows; of a table that is longer than what these inputs take, how many rows."""
    from convert.inference.derivation import Role

    elements = f"{tensor.unseen:,} of its {math.prod(tensor.shape):,} elements"
    rows, row = tensor.shape[:1], math.prod(tensor.shape[1:])
    is_table = all(part.evidence.role is Role.LOOKUP for part in tensor.parts)
    if not is_table or not rows or tensor.unseen % row:
        return elements
    return f"{tensor.unseen // row:,} of its {rows[0]:,} rows"


def _other_ways(tensor: Tensor, same: str) -> str:
    """Say what else a tensor may be made of: other leaves, as either of two biases that are added up, or the same ones in another order."""
    own = {part.leaf for part in tensor.parts if part.leaf}
    parts = [part for parts in tensor.alternatives.values() for part in parts if part.leaf and part.leaf not in own]
    others = {part.leaf for part in parts}
    if own and others:
        count, size = len(set().union(*(part.elements.tolist() for part in parts))), math.prod(tensor.shape)
        some = f" for {count:,} of its {size:,} elements" if count < size else ""
        named = ", ".join(sorted(others)[:2]) + (" and others" if len(others) > 2 else "")
        return f"{named} {OTHER_LEAF} {same}{some}; {', '.join(sorted(own))} is written"
    from convert.numerics.roots import factor_text

    own_factors = {part.factor for part in tensor.parts}
    factors = {part.factor for parts in tensor.alternatives.values() for part in parts} - own_factors
    if len(factors) == len(tensor.alternatives) == 1:
        return f"its leaf times {factor_text(*factors)} gives the same {same}, with another number for another tensor; one way is written"
    count = len(tensor.alternatives)
    return f"{output.count(count, 'other order')} of its elements {'gives' if count == 1 else 'give'} the same {same}; one of them is written"
