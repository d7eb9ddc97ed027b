"""The weights level without the checkpoint: compute every leaf back from the file and compare its checksum."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from convert.checkpoints.digest import digest_leaf
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.ops import apply
from convert.layers.base import Part, Step
from convert.layers.mistake import Mistake
from convert.layers.step_tensor import expected
from convert.numerics.bits import nearly, same_bits
from convert.planning.plan import Plan
from convert.verify.mistakes.catalogue import known_mistakes
from convert.verify.recording.source import RecordedSource
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.weights.level import compare_computed
from convert.verify.weights.provenance import false_facts
from convert.verify.weights.tied import compare_tied
from convert.writing.transfer import used_leaves
from convert.writing.written import Written

Array = np.ndarray[Any, np.dtype[Any]]


def check_recorded_weights(plan: Plan, written: Written) -> LevelReport:
    """Compute every leaf back from the file and compare its checksum with the recorded one.

    The level passes when the checksums of all leaves agree: the file then holds the recorded checkpoint bit for bit. It is
    skipped when a leaf cannot be computed back, because its tensor was rounded.
    """
    started = time.monotonic()
    source = plan.checkpoint
    assert isinstance(source, RecordedSource)
    findings: list[Finding] = []
    unknown: list[str] = []
    compared = 0
    findings += compare_tied(plan, written).values()
    for leaf, work in used_leaves(plan).items():
        work = [(step, part) for step, part in work if not step.tied]  # `compare_tied` compares tied tensors
        steps = {step.name: step for step, _ in work if step.name in written.tensors}
        if not steps or any(written.specs[name] != step.spec for name, step in steps.items()):
            continue  # the coverage level reports it
        if not source.is_exact(leaf):
            unknown.append(leaf)
            continue
        compared += 1
        wrong = list(_wrong(leaf, work, written, source))
        if wrong:
            findings.append(_finding(plan, leaf, [steps[name] for name in wrong], written))
    findings += [*compare_computed(plan, written), *false_facts(plan, written)]
    reason = ""
    if unknown:
        reason = (
            f"{len(unknown)} of {compared + len(unknown)} leaves cannot be computed back from the rounded weights, "
            f"{unknown[0]} for example; --from compares them"
        )
    elif not compared:
        reason = "none of the plan's tensors is in the file"
    return LevelReport(
        "weights",
        Verdict.FAILED if findings else Verdict.SKIPPED if reason else Verdict.PASSED,
        "" if findings else reason,
        tuple(findings),
        notes=(f"{compared} leaves computed back from the file, checksums compared with {source.path.name}",),
        seconds=time.monotonic() - started,
    )


def _finding(plan: Plan, leaf: str, wrong: list[Step], written: Written) -> Finding:
    """Describe the tensors that do not hold a leaf, and name the mistake where the leaf is recorded."""
    step, rule = wrong[0], wrong[0].rule.line_only
    tensors = f"{step.name} (and {len(wrong) - 1} more)" if len(wrong) > 1 else step.name
    source = plan.checkpoint
    recorded = isinstance(source, RecordedSource) and leaf in source.stored
    mistake = _matching_mistake(plan, step, written.read(step.name)) if recorded else None
    expected_value, got, fix = f"what {rule} makes of {leaf}", "other values, and no known mistake explains them", ""
    if mistake is not None:
        expected_value, got = f"{mistake.instead}, as {rule} makes it of {leaf}", mistake.gives
    elif not recorded:
        expected_value, got = f"the recorded checksum of {leaf}", f"another one, computed back by {rule}"
        fix = "give the checkpoint with --from to see which values differ"
    return Finding(
        "weights-differ",
        f"{mistake.name}: {tensors}" if mistake else tensors,
        rule=rule,
        path=step.name,
        expected=expected_value,
        got=got,
        fix=fix,
        data={"leaf": leaf, "tensors": [s.name for s in wrong], "diagnosis": mistake.name if mistake else ""},
    )


def _matching_mistake(plan: Plan, step: Step, got: Array) -> Mistake | None:
    """Return the first mistake that gives these values, bit for bit or within a few roundings."""
    right = expected(step, plan.source)
    for mistake in known_mistakes(step, plan):
        try:
            made = mistake.make()
        except CheckpointError:  # it needs leaves that were not recorded: the factors of a merged one
            continue
        if same_bits(got, made) or (nearly(got, made) and not nearly(right, made)):
            return mistake
    return None


def _wrong(leaf: str, work: list[tuple[Step, Part]], written: Written, source: RecordedSource) -> Iterator[str]:
    """Yield the tensors that do not hold the recorded leaf; all tensors made of it where only its checksum is recorded."""
    array = source.read(leaf)
    if leaf in source.stored:
        for step, part in work:
            if not same_bits(part.share(written.read(step.name)), apply(part.ops, array)):
                yield step.name
    elif digest_leaf(leaf, array, source.chunks(leaf)) != source.digests.get(leaf):
        yield from dict.fromkeys(step.name for step, _ in work)
