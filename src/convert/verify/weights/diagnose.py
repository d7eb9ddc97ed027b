"""Find the cause of each wrong tensor, and report each cause once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from convert.core.findings import Finding
from convert.layers.base import Step
from convert.layers.mistake import Mistake
from convert.layers.step_tensor import expected
from convert.planning.plan import Plan
from convert.verify.weights.causes import FIX, WrongTensor, findings_of
from convert.verify.weights.name_tensor import Known, NameTensor
from convert.verify.weights.other_values import FEW, NEAR, Distance, measure_distance, measure_part, total
from convert.writing.written import Written

MAX_UNKNOWN = 8  # tensors without a diagnosis; after them, only what was found before is tried
MAX_DIAGNOSED = 64  # tensors for which all known mistakes are tried; with more wrong tensors, mistakes repeat
NO_NAME = "no known mistake gives these values"
WHOLE_FILE = 0.9  # of the tensors of a file, that it is of other weights


def diagnose(plan: Plan, written: Written, wrong: Mapping[str, int]) -> list[Finding]:
    """Find the mistake behind each wrong tensor; tensors with one cause are one finding.

    Args:
        plan: says what is right.
        written: the file.
        wrong: tensor -> number of its values that differ.
    """
    steps = {step.name: step for step in plan.steps}
    naming, known, unknown = NameTensor(plan), Known(), 0
    named: list[WrongTensor] = []
    others: list[tuple[WrongTensor, Distance]] = []
    for k, (name, count) in enumerate(wrong.items()):
        step = steps[name]
        owner = steps[step.tied] if step.tied in wrong else step  # tied tensors share the values and the mistake
        got = written.read(owner.name)
        thorough = k < MAX_DIAGNOSED and unknown < MAX_UNKNOWN
        with np.errstate(all="ignore"):  # damaged values may be anything
            found = naming.cause(owner, got, known, thorough=thorough)
        if found is None:
            unknown += thorough
            right = expected(owner, plan.source)
            whole = measure_distance(got, right)
            part = None if whole.is_whole else measure_part(got, right)
            if part is not None and part[1].name:
                named.append(WrongTensor(step, count, part[1].name, part[0], thorough=thorough))
            else:
                tensor = WrongTensor(step, count, "", NO_NAME, thorough=thorough)
                others.append((tensor, whole))
            continue
        known.add(owner.name, found)
        if isinstance(found, Mistake):
            named.append(WrongTensor(step, count, found.name, found.name, found.instead, found.gives, found.of))
        else:
            named.append(WrongTensor(step, count, found.name, found.description, order=found.order, axis=found.axis))
    causes = [_in_files(finding, plan, written, wrong) for finding in findings_of(named, plan.steps)]
    return [*causes, *_of_other_values(plan, written, others, wrong)]


def _in_files(finding: Finding, plan: Plan, written: Written, wrong: Collection[str]) -> Finding:
    """Say where a cause concerns some files of several, and nothing else is wrong."""
    names = finding.data["tensors"]
    files = _whole_files(plan.steps, written, names, wrong) if len(names) > 1 else ""
    text = f"{finding.problem}; these are the tensors of {files}, and those of the other files are right"
    return replace(finding, problem=text) if files else finding


def _of_other_values(
    plan: Plan, written: Written, others: Sequence[tuple[WrongTensor, Distance]], wrong: Collection[str]
) -> list[Finding]:
    """Report tensors that no mistake explains: near the source's, unrelated to them, or neither."""
    every = [distance for _, distance in others if distance.is_whole]
    names = {distance.name for distance in every} - {""}
    together = names.pop() if len(names) == 1 else total(every).name if not names else ""
    groups: dict[str, list[tuple[WrongTensor, Distance]]] = defaultdict(list)
    for tensor, distance in others:
        tells = distance.name or not distance.is_whole or distance.size >= FEW
        groups[distance.name if tells else together].append((tensor, distance))
    findings = []
    for name, group in groups.items():
        if name:
            findings.append(_group_finding(plan, written, name, group, wrong))
        else:
            findings += findings_of([tensor for tensor, _ in group], plan.steps)
    return findings


def _group_finding(
    plan: Plan, written: Written, name: str, group: Sequence[tuple[WrongTensor, Distance]], wrong: Collection[str]
) -> Finding:
    """Report all tensors whose values are near, or all that are unrelated."""
    first, distance = group[0][0], total(distance for _, distance in group)
    names = [tensor.step.name for tensor, _ in group]
    rules = dict.fromkeys(tensor.rule for tensor, _ in group)
    text = distance.text or group[0][1].text
    files = _whole_files(plan.steps, written, names, wrong)
    if files:
        text = f"the tensors of {files} are of other weights, and those of the other files are right: {text}"
    more = f"; the same in {len(names) - 1} more tensors: {', '.join(names[1:4])}" if len(names) > 1 else ""
    return Finding(
        "weights-differ",
        f"{text}{more}{', ...' if len(names) > 4 else ''}",
        first.rule if len(rules) == 1 else "",
        first.step.name,
        expected="what the rules make of the source",
        got=f"{distance.differ} of {distance.size} values differ",
        fix=f"check which checkpoint the file is of; {FIX}" if name == NEAR else FIX,
        data={
            "diagnosis": name,
            "tensors": names,
            "values": distance.differ,
            "rules": list(rules),
            "relative": distance.relative,
            "correlation": distance.correlation,
            "files": files,
        },
    )


def _whole_files(steps: Sequence[Step], written: Written, names: Sequence[str], wrong: Collection[str]) -> str:
    """Return the files of which nearly all tensors are in the group, where no tensor of the other files is wrong."""
    counts = Counter(written.tensors[step.name][0].name for step in steps if step.name in written.tensors)
    found = Counter(written.tensors[name][0].name for name in names)
    whole = all(count >= WHOLE_FILE * counts[file] for file, count in found.items())
    alone = all(written.tensors[name][0].name in found for name in wrong)
    return ", ".join(sorted(found)) if whole and alone and len(found) < len(counts) else ""
