"""Level 2: the written tensors against the source, bit for bit, by running the plan again; and where they came from."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Any

import ml_dtypes
import numpy as np

from convert.check.damage import damage
from convert.check.hypotheses import NOT_IN_SOURCE, count_unequal, hypotheses, nearly, same_bits
from convert.check.hypothesis import Hypothesis, expected
from convert.check.report import Finding, LevelReport, Verdict
from convert.check.written import Written
from convert.ops import apply, is_float
from convert.plan import Plan
from convert.steps import Step
from convert.streaming import Work, combine, computed, digest_leaf, metadata, read_used

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 20  # values looked at together
CLAIMS = {  # of the header, and their words
    "rules_sha256": "rules",
    "target": "target",
    "dtype": "--dtype",
    "settings": "--set",
    "choices": "variants",
}
MAX_UNKNOWN = 8  # tensors without a diagnosis after which no more is tried: it is another checkpoint
MAX_DIAGNOSED = 64  # tensors for which hypotheses are computed; a conversion with more wrong ones repeats itself


def check_weights(plan: Plan, written: Written) -> LevelReport:
    """Compares every written tensor with what the plan makes of the source, leaf by leaf.

    Memory: that of `read_used`, and what is made of one leaf. Where a tensor is wrong, what one hypothesis needs comes on top.
    """
    comparison = WeightsPass(plan, written)
    with read_used(plan, comparison.see) as leaves:
        for _ in leaves:
            pass
    return comparison.report()


class WeightsPass:
    """The weights level, fed with the source's leaves one by one: other levels may look at the same leaves."""

    def __init__(self, plan: Plan, written: Written) -> None:
        self._plan, self._written = plan, written
        self._comparable = [step for step in plan.steps if written.specs.get(step.name) == step.spec]
        self._left = {step.name: len(step.parts) for step in self._comparable}
        self._digests: dict[str, str] = {}
        self._wrong: dict[str, int] = defaultdict(int)
        self._narrow: list[Finding] = []
        self._odd: list[str] = []
        self._seconds = 0.0

    def see(self, leaf: str, work: Work, array: Array) -> None:
        """Compares all that the plan makes of this leaf."""
        started = time.monotonic()
        self._digests[leaf] = digest_leaf(leaf, array)
        for step, part in work:
            if step.name not in self._left:
                continue
            got = self._written.read(step.name)
            rows = part.share(got)
            try:
                want = apply(part.ops, array)
            except OverflowError as error:
                self._narrow.append(_too_narrow(step, leaf, error))
                continue
            if not same_bits(rows, want):
                self._wrong[step.name] += count_unequal(rows, want)
            self._left[step.name] -= 1
            if not self._left[step.name] and step.name not in self._wrong:
                self._odd += _odd_values(step, got)
        self._seconds += time.monotonic() - started

    def report(self) -> LevelReport:
        """What came of it, once every leaf was seen."""
        started = time.monotonic()
        plan, written, comparable = self._plan, self._written, self._comparable
        findings = list(self._narrow)
        for step in comparable:
            if step.value is not None and not same_bits(got := written.read(step.name), want := computed(step)):
                findings.append(_unlike_computed(step, got, want))
        findings = [*_diagnose(plan, written, self._wrong), *findings]
        if comparable and len(comparable) < len(plan.steps):
            findings.append(_incomplete(plan, set(self._left)))
        equal = not findings
        claims, doubts = _provenance(plan, written, combine(self._digests), equal)
        return LevelReport(
            "weights",
            Verdict.FAILED if findings or claims else Verdict.PASSED if comparable else Verdict.SKIPPED,
            ""
            if comparable
            else "no tensor of the file has the name, shape and dtype that the rules give; see coverage",
            (*claims, *findings),
            notes=(f"{len(comparable)} of {len(plan.steps)} tensors compared bit for bit", *doubts, *self._odd),
            seconds=self._seconds + time.monotonic() - started,
        )


def _too_narrow(step: Step, leaf: str, error: OverflowError) -> Finding:
    return Finding(
        f"{step.name} is {step.spec} in the file, which cannot hold what {leaf} has: {error}",
        step.name,
        step.rule.line_only,
        {"diagnosis": "overflow"},
    )


def _unlike_computed(step: Step, got: Array, want: Array) -> Finding:
    count = count_unequal(got, want)
    return Finding(
        f"{step.name} ({step.spec}): {count} of {step.spec.size} values differ from what {step.rule.line_only} computes"
        + (f"; {found.said}" if (found := damage(got, want)) else ""),
        step.name,
        step.rule.line_only,
        {"values": count, "diagnosis": NOT_IN_SOURCE if isinstance(step.value, float) else "another buffer"},
    )


def _incomplete(plan: Plan, names: set[str]) -> Finding:
    absent = [step for step in plan.steps if step.name not in names]
    return Finding(
        f"{len(absent)} of the plan's {len(plan.steps)} tensors are not in the file as the rules make them, so their values "
        f"cannot be compared, {absent[0].name} ({absent[0].spec}) for example; see the coverage level",
        data={"diagnosis": "not compared", "tensors": [step.name for step in absent]},
    )


def _odd_values(step: Step, got: Array) -> list[str]:
    """NaN, Inf, all-zero and denormal tensors: the source has them too, so they are no fault of the conversion."""
    if not is_float(step.spec.dtype) or got.size == 0:
        return []
    tiny = float(ml_dtypes.finfo(step.spec.dtype).smallest_normal)
    wide = got.dtype if got.dtype.itemsize >= 4 else np.dtype(np.float32)
    flat = got.reshape(-1)
    nans = infinite = denormal = nonzero = 0
    for start in range(0, flat.size, BLOCK):
        magnitude = np.abs(flat[start : start + BLOCK].astype(wide, copy=False))
        filled = int(np.count_nonzero(magnitude))
        nonzero += filled
        denormal += int(np.count_nonzero(magnitude < tiny)) - (magnitude.size - filled)
        if not np.isfinite(magnitude.max()):
            nans += int(np.count_nonzero(np.isnan(magnitude)))
            infinite += int(np.count_nonzero(np.isinf(magnitude)))
    said = [
        f"{step.name} has {n} {word} values, as the source has"
        for n, word in ((nans, "NaN"), (infinite, "infinite"))
        if n
    ]
    if not nonzero:
        said.append(f"{step.name} is all zeros, as in the source")
    if denormal:
        said.append(f"{step.name} has {denormal} denormal values, which some devices flush to zero")
    return said


def _diagnose(plan: Plan, written: Written, wrong: dict[str, int]) -> list[Finding]:
    """Names the mistake behind each wrong tensor; tensors of one rule with the same mistake are one finding."""
    steps = {step.name: step for step in plan.steps}
    groups: dict[tuple[str, str], dict[str, Hypothesis]] = defaultdict(dict)
    findings = []
    unknown = 0
    for k, (name, count) in enumerate(wrong.items()):
        step = steps[name]
        got = written.read(name)
        tried = k < MAX_DIAGNOSED and unknown < MAX_UNKNOWN
        match = _match(step, plan, got) if tried else None
        if match is not None:
            groups[(step.rule.line_only, match.name)][name] = match
            continue
        found = damage(got, expected(step, plan.source), step, plan) if tried else None
        unknown += found is None
        shown = (
            found.said
            if found
            else ("no known mistake gives these values" if tried else "not diagnosed: there are many like it")
        )
        findings.append(
            Finding(
                f"{name} ({step.spec}): {count} of {step.spec.size} values differ from what {step.rule.line_only} makes of "
                f"{', '.join(part.leaf for part in step.parts)}; {shown}",
                name,
                step.rule.line_only,
                {"values": count, "diagnosis": found.name if found else ""},
            )
        )
    return [*(_named(rule, name, matches, steps) for (rule, name), matches in groups.items()), *findings]


def _named(rule: str, diagnosis: str, matches: dict[str, Hypothesis], steps: dict[str, Step]) -> Finding:
    """Tensors of one rule with the same mistake."""
    name, first = next(iter(matches.items()))
    more = f" (and {len(matches) - 1} more like it)" if len(matches) > 1 else ""
    leaves = ", ".join(part.leaf for part in steps[name].parts)
    return Finding(
        f"{diagnosis}: {name}{more} is {first.gives}; {rule} makes of {leaves}: {first.instead}",
        name,
        rule,
        {"diagnosis": diagnosis, "tensors": list(matches)},
    )


def _match(step: Step, plan: Plan, got: Array) -> Hypothesis | None:
    """The first mistake that gives these values, bit for bit, or else within a few roundings (the right tensor excluded)."""
    near: Hypothesis | None = None
    right = expected(step, plan.source)
    for hypothesis in hypotheses(step, plan):
        try:
            made = hypothesis.make()
        except OverflowError:  # a tensor that the file's dtype cannot hold is not in it
            continue
        if same_bits(got, made):
            return hypothesis
        if near is None and nearly(got, made) and not nearly(right, made):
            near = hypothesis
    return near


def _provenance(plan: Plan, written: Written, digest: str, equal: bool) -> tuple[list[Finding], list[str]]:
    """Whether the header says that the file came from this checkpoint and these rules. Files of others say nothing.

    Rules whose text has changed, but which still make every tensor and every fact as the file has them, are a note.

    Args:
        equal: whether all tensors are as the plan makes them.

    Returns:
        What is wrong, and what a reader should know.
    """
    said, ours = written.metadata, metadata(plan)
    if "source_digest" not in said:
        return [], ["the file does not say which checkpoint it was made from"]
    findings = []
    others = {key for key in CLAIMS if key in said and said[key] != ours[key]}
    unlike = [key for key in ("sizes", "facts", "layers") if key in said and said[key] != ours[key]]
    notes = []
    if others == {"rules_sha256"} and equal and not unlike and said["source_digest"] == digest:
        others = set()
        notes.append(
            "the text of the rules has changed since the file was made; what they make of the checkpoint has not"
        )
    kept = _added(said.get("facts", "{}"), ours["facts"]) is not None
    if "settings" in others and equal and kept and (more := _added(said["settings"], ours["settings"])):
        others.discard("settings")
        notes.append(f"this check was told more than the conversion ({more}); the tensors are the same")
    for key in (key for key in CLAIMS if key in others):
        also = f", and their {', '.join(unlike)} differ" if key == "rules_sha256" and unlike else ""
        findings.append(
            Finding(
                f"the file was made with other {CLAIMS[key]} ({said[key] or 'none'}) than those of this check "
                f"({ours[key] or 'none'}){also}; check with the same, or convert again",
                data={"diagnosis": f"other {CLAIMS[key]}"},
            )
        )
    if said["source_digest"] != digest and others & {"rules_sha256", "target", "choices"} and equal:
        notes.append("whether it is the same checkpoint cannot be told: other rules may use other leaves")
    elif said["source_digest"] != digest:
        findings.insert(
            0,
            Finding(
                f"the file says it was made from a checkpoint with the digest {said['source_digest']}, and this one has "
                f"{digest}: another checkpoint, another step, or it has changed since",
                data={"diagnosis": "another checkpoint"},
            ),
        )
    return findings, notes


def _added(said: str, ours: str) -> str | None:
    """What `ours` sets beside the same values as `said`, both JSON; None when they contradict each other."""
    try:
        before, now = json.loads(said), json.loads(ours)
        same = all(now[key] == value for key, value in before.items())
    except (ValueError, KeyError, AttributeError):
        return None
    return ", ".join(f"--set {key}={json.dumps(now[key])}" for key in now if key not in before) if same else None


def facts_of(written: Written) -> dict[str, Any]:
    """The facts that the header records, for a check that has no rules at hand."""
    return {key: json.loads(written.metadata[key]) for key in ("facts", "layers", "sizes") if key in written.metadata}
