"""Answer a draft's questions from a target, and list what stays open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from convert.checkpoints.source import Leaf
from convert.drafting.like.assign import Assignment, Unit, leftover
from convert.drafting.like.habits import Habits
from convert.drafting.like.module_patterns import filled, pattern_of
from convert.drafting.like.readings import Planner, Reading, target_line
from convert.drafting.like.rule_writer import RuleWriter, target_text
from convert.drafting.like.target import TargetModel
from convert.layers.draft import DraftEntry, DraftLine
from convert.rules.attention_macro import WORD as ATTENTION

LISTED = 6  # modules that a question offers


@dataclass(frozen=True)
class Answered:
    """Rules whose questions the target has answered.

    Attributes:
        rules: the rules; some were split, as their modules have no common pattern.
        missing: tensors of the target that no rule makes.
        lost: paths of attention layers and others for which the target has no module, so that they are drafted otherwise.
    """

    rules: tuple[DraftEntry, ...]
    missing: tuple[str, ...]
    lost: tuple[DraftEntry, ...]


def answer(entries: Sequence[DraftEntry], planner: Planner, model: TargetModel, leaves: Mapping[str, Leaf]) -> Answered:
    """Match the rules of a draft with the modules of a target, and answer what follows."""
    assignment = Assignment(model, planner.root, {name: len(leaf.spec.shape) for name, leaf in leaves.items()})
    entries, units = _units(entries, planner, assignment)
    assignment.solve([unit for unit in units if unit is not None])
    habits = Habits(entries, units)
    tied = {name for others in model.tied.values() for name, _ in others}
    missing = tuple(leftover(model, assignment.taken, tied))
    rules: list[DraftEntry] = []
    lost = []
    for entry, unit in zip(entries, units, strict=True):
        line = target_line(entry)
        if line is None:
            rules.append(entry)
        elif unit is None:
            lost.append(entry)
            rules.append(_without_module(entry, line, _in_another_order(planner.readings(entry), missing, model)))
        elif len(unit.matches) < len(unit.columns):
            lost += [entry] if line.key == ATTENTION else []
            rules.append(_undecided(entry, line, unit, assignment))
        else:
            rules += RuleWriter(entry, line, unit, habits, model).entries()
    return Answered(tuple(rules), missing, tuple(lost))


def _units(
    entries: Sequence[DraftEntry], planner: Planner, assignment: Assignment
) -> tuple[list[DraftEntry], list[Unit | None]]:
    """Return the rules with their units; split the rules whose layers can only be modules without a common pattern."""
    rules: list[DraftEntry] = []
    units: list[Unit | None] = []
    for entry in entries:
        readings = planner.readings(entry)
        found: list[tuple[DraftEntry, Unit | None]] = [(entry, assignment.unit(readings))]
        if found[0][1] is None and readings:
            for names in _splits(readings[0]):
                pieces = list(_split(entry, readings[0], names))
                tried = [(piece, assignment.unit(planner.readings(piece))) for piece in pieces]
                open_to = [unit.candidates[0] for _, unit in tried if unit is not None]
                modules = {candidate.series.names for each in open_to for candidate in each}
                if pieces and len(open_to) == len(pieces) <= len(modules):
                    found = tried
                    break
        rules += [rule for rule, _ in found]
        units += [unit for _, unit in found]
    return rules, units


def _splits(reading: Reading) -> Iterator[tuple[str, ...]]:
    """Yield the indices that a rule may be split by: the last one, the first one, all."""
    names = reading.module.indices
    yield from dict.fromkeys([names[-1:], names[:1], names] if names else [])


def _split(entry: DraftEntry, reading: Reading, names: Sequence[str]) -> Iterator[DraftEntry]:
    """Yield a rule for each value of these indices; none if they are stacked."""
    stacked = next((line.value for line in entry.lines if line.key == "stacked"), "")
    if any(f"{name}:" in stacked for name in names):
        return
    at = [reading.module.indices.index(name) for name in names]
    for values in dict.fromkeys(tuple(indices[d] for d in at) for c in reading.columns for indices in c.indices):
        known = dict(zip(names, values, strict=True))
        lines = [
            replace(
                line,
                value=filled(line.value, known),
                below=tuple((filled(text, known), note) for text, note in line.below),
            )
            for line in entry.lines
        ]
        yield DraftEntry(entry.first, lines)


def _without_module(entry: DraftEntry, line: DraftLine, others: Sequence[str]) -> DraftEntry:
    """Say that nothing of the target is left for a rule.

    Args:
        others: free tensors of the same sizes in another order.
    """
    moved = f" as they are stored; with its axes in another order it may be {' or '.join(others)}" if others else ""
    asked = replace(line, remark=f"{line.remark} No free module of the target has these shapes{moved}")
    return replace(entry, lines=[asked if one is line else one for one in entry.lines])


def _in_another_order(readings: Sequence[Reading], free: Sequence[str], model: TargetModel) -> list[str]:
    """Return the first of the free tensors that have the sizes of what a rule makes, where that is one tensor."""
    made = {tuple(sorted(shape)) for reading in readings for c in reading.columns[:1] for shape in c.shapes.values()}
    tensors = model.tensors
    return [name for name in free if len(made) == 1 and tuple(sorted(tensors[name])) in made][:LISTED]


def _undecided(entry: DraftEntry, line: DraftLine, unit: Unit, assignment: Assignment) -> DraftEntry:
    """List the modules that a layer could become."""
    reading = unit.fitting[0]
    if len(unit.columns) > 1:
        return entry
    ways = sorted(assignment.live(unit, 0), key=lambda candidate: -candidate.score)
    below = [(f"{reading.kind_name}: {target_text(text, reading)}", "") for one in ways[:LISTED] if (text := pattern_of(reading.module.indices, unit.columns[0].indices, one.series.places)) is not None]  # fmt: skip
    if not below:
        return entry
    more = f", and {len(ways) - LISTED} more" if len(ways) > LISTED else ""
    said = [
        DraftLine(key, value, "") for key, value in reading.said.items() if key not in {one.key for one in entry.lines}
    ]
    asked = DraftLine(reading.kind_name, line.value, f"which module of the target is it? Several have these shapes{more}", tuple(below), asks=True)  # fmt: skip
    lines = [one for old in entry.lines for one in ([*said, asked] if old is line else [old])]
    return replace(entry, lines=lines)
