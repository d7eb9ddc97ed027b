"""Level 2: the written tensors against the source, bit for bit, by running the plan again; and where they came from."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from threading import Lock
from types import TracebackType
from typing import Any, Self

import numpy as np

from convert.checkpoints.digest import combine
from convert.core.findings import Finding
from convert.core.ops import Slice, is_float
from convert.layers.base import Part, Step, expected
from convert.layers.mistake import Mistake
from convert.planning.plan import Plan
from convert.verify.mistakes.catalogue import NOT_IN_SOURCE, NOT_SCALED, known_mistakes
from convert.verify.numerics.bits import count_unequal, nearly, same_bits
from convert.verify.numerics.special_values import odd_values
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.weights.corruption import damage
from convert.verify.weights.tied import compare_tied
from convert.verify.written import Written
from convert.writing.execute import computed, metadata
from convert.writing.transfer import default_jobs, move

Array = np.ndarray[Any, np.dtype[Any]]
Rows = tuple[int, int] | None  # of a tensor that several leaves make; None is the whole
CLAIMS = {  # of the header, and their words
    "rules_sha256": "rules",
    "target": "target",
    "dtype": "--dtype",
    "settings": "--set",
    "choices": "variants",
}
REPAIR = "convert again with these rules; correct a rule only where the JAX model computes what the file holds, which the model level tells"
MAX_UNKNOWN = 8  # tensors without a diagnosis after which no more is tried: it is another checkpoint
MAX_DIAGNOSED = 64  # tensors for which mistakes are tried; a conversion with more wrong ones repeats itself


def check_weights(plan: Plan, written: Written) -> LevelReport:
    """Compares every written tensor with what the plan makes of the source, piece by piece.

    Memory: that of `move`. Where a tensor is wrong, what one known mistake needs comes on top.
    """
    with WeightsPass(plan, written) as comparison:
        return comparison.report()


class WeightsPass:
    """The weights level. On entering its context it starts in threads of its own; other levels import their frameworks meanwhile."""

    def __init__(self, plan: Plan, written: Written) -> None:
        self._plan, self._written = plan, written
        comparable = [step for step in plan.steps if written.specs.get(step.name) == step.spec]
        self._tensors = {step.name: _Tensor(step) for step in comparable}
        self._digests: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="convert-weights")
        self._stopped = False
        self._done: Future[None] | None = None
        self._seconds = 0.0

    def __enter__(self) -> Self:
        self._done = self._pool.submit(self._compare)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped = True
        self._pool.shutdown(wait=True)

    def _compare(self) -> None:
        started = time.monotonic()
        with closing(move(self._plan, self, jobs=default_jobs())) as moved:
            for leaf, digest in moved:
                self._digests[leaf] = digest
                if self._stopped:
                    return
        self._seconds = time.monotonic() - started

    def region(self, step: Step) -> Array | None:
        return self._written.read(step.name) if step.name in self._tensors else None

    def piece(self, step: Step, part: Part, region: Array, values: Callable[[], Array]) -> None:
        tensor = self._tensors[step.name]
        try:
            want = values()
        except OverflowError as error:
            tensor.narrow = _too_narrow(step, part.leaf, error)
            return
        if region.size:
            tensor.see(part, want, 0 if same_bits(region, want) else count_unequal(region, want))

    def whole(self, step: Step) -> None:
        pass

    def wait(self) -> None:
        """Waits until all tensors were compared.

        Raises:
            CheckpointError: a leaf could not be read.
        """
        assert self._done is not None
        self._done.result()

    def same(self, step: Step, part: Part) -> bool:
        """Whether this part of a tensor is, bit for bit, what the plan makes of its leaf; waits for it."""
        self.wait()
        tensor = self._tensors.get(step.name)
        return tensor is not None and tensor.narrow is None and not tensor.wrong.get(part.rows)

    def equal(self, name: str) -> bool:
        """Whether a tensor is, bit for bit, what the plan makes; waits for it."""
        self.wait()
        tensor = self._tensors.get(name)
        return tensor is not None and tensor.narrow is None and not any(tensor.wrong.values())

    def report(self) -> LevelReport:
        """What came of it."""
        self.wait()
        started = time.monotonic()
        plan, written = self._plan, self._written
        tensors = list(self._tensors.values())
        wrong = {t.step.name: count for t in tensors if (count := sum(t.wrong.values()))}
        odd = [said for t in tensors if t.step.name not in wrong for said in t.odd_values()]
        findings = [t.narrow for t in tensors if t.narrow is not None]
        findings += unlike_computed(plan, written)
        loose = compare_tied(plan, written)
        wrong = {name: count for name, count in wrong.items() if name not in loose}
        findings = [*loose.values(), *_diagnose(plan, written, wrong), *findings]
        if tensors and len(tensors) < len(plan.steps):
            findings.append(_incomplete(plan, set(self._tensors)))
        equal = not findings
        repair = [f"repair: {REPAIR}"] if findings else []
        claims, doubts = _provenance(plan, written, combine(self._digests), equal)
        return LevelReport(
            "weights",
            Verdict.FAILED if findings or claims else Verdict.PASSED if tensors else Verdict.SKIPPED,
            "" if tensors else "no tensor of the file has the name, shape and dtype that the rules give; see coverage",
            (*claims, *findings),
            notes=(f"{len(tensors)} of {len(plan.steps)} tensors compared bit for bit", *repair, *doubts, *odd),
            seconds=self._seconds + time.monotonic() - started,
        )


class _Tensor:
    """What was seen of a written tensor so far.

    Attributes:
        step: it.
        wrong: rows of a part -> values that differ there.
        narrow: a finding, when its dtype cannot hold what the source has.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.wrong: dict[Rows, int] = {}
        self.narrow: Finding | None = None
        self._is_float = is_float(step.spec.dtype)
        self._odd: dict[str, int] = {}
        self._lock = Lock()

    def see(self, part: Part, want: Array, wrong: int) -> None:
        """Counts what is odd about some of its values, as they should be. Called from several threads."""
        odd = odd_values(want) if self._is_float else {}
        with self._lock:
            self.wrong[part.rows] = self.wrong.get(part.rows, 0) + wrong
            for word, count in odd.items():
                self._odd[word] = self._odd.get(word, 0) + count

    def odd_values(self) -> list[str]:
        """NaN, Inf, all-zero and denormal tensors: the source has them too, so they are no fault of the conversion."""
        name = self.step.name
        if not self._is_float or not self.step.spec.size or not self.step.parts:
            return []
        said = [
            f"{name} has {n} {word} values, as the source has"
            for word in ("NaN", "infinite")
            if (n := self._odd.get(word))
        ]
        if self._odd.get("zero") == self.step.spec.size:
            said.append(f"{name} is all zeros, as in the source")
        if denormal := self._odd.get("denormal"):
            said.append(f"{name} has {denormal} denormal values, which some devices flush to zero")
        return said


def _too_narrow(step: Step, leaf: str, error: OverflowError) -> Finding:
    return Finding(
        "weights-overflow",
        f"{step.name} is {step.spec} in the file, which cannot hold what {leaf} has: {error}",
        rule=step.rule.line_only,
        path=step.name,
        data={"diagnosis": "overflow"},
    )


def unlike_computed(plan: Plan, written: Written) -> Iterator[Finding]:
    """The tensors that no leaf goes into, and that are others than the plan has."""
    for step in plan.steps:
        if step.value is None or written.specs.get(step.name) != step.spec:
            continue
        if not same_bits(got := written.read(step.name), want := computed(step)):
            yield _unlike_computed(step, got, want)


def _unlike_computed(step: Step, got: Array, want: Array) -> Finding:
    count = count_unequal(got, want)
    differ = f"differ from what {step.rule.line_only} computes"
    if isinstance(step.value, float):
        differ = f"are not {step.value:g}, which {step.rule.line_only} has them be ({step.arithmetic})"
    return Finding(
        "weights-differ",
        f"{step.name} ({step.spec}): {count} of {step.spec.size} values {differ}"
        + (f"; {found.said}" if (found := damage(got, want)) else ""),
        rule=step.rule.line_only,
        path=step.name,
        data={"values": count, "diagnosis": _from_nothing(step) if isinstance(step.value, float) else "another buffer"},
    )


def _from_nothing(step: Step) -> str:
    """What a tensor does that is another one than what is written where the source does nothing."""
    return NOT_SCALED if step.role == "weight" else NOT_IN_SOURCE


def _incomplete(plan: Plan, names: set[str]) -> Finding:
    absent = [step for step in plan.steps if step.name not in names]
    return Finding(
        "weights-not-compared",
        f"{len(absent)} of the plan's {len(plan.steps)} tensors are not in the file as the rules make them, so their values "
        f"cannot be compared, {absent[0].name} ({absent[0].spec}) for example; see the coverage level",
        data={"diagnosis": "not compared", "tensors": [step.name for step in absent]},
    )


def _diagnose(plan: Plan, written: Written, wrong: dict[str, int]) -> list[Finding]:
    """Names the mistake behind each wrong tensor; tensors of one rule with the same mistake are one finding."""
    steps = {step.name: step for step in plan.steps}
    groups: dict[tuple[str, str], dict[str, Mistake]] = defaultdict(dict)
    findings = []
    unknown = 0
    for k, (name, count) in enumerate(wrong.items()):
        step = steps[name]
        seen = steps[step.tied] if step.tied in wrong else step  # the same values, and the same mistake
        got = written.read(seen.name)
        tried = k < MAX_DIAGNOSED and unknown < MAX_UNKNOWN
        match = _match(seen, plan, got) if tried else None
        if match is not None:
            groups[(step.rule.line_only, match.name)][name] = match
            continue
        found = damage(got, expected(seen, plan.source), seen, plan) if tried else None
        unknown += found is None
        shown = (
            found.said
            if found
            else ("no known mistake gives these values" if tried else "not diagnosed: there are many like it")
        )
        findings.append(
            Finding(
                "weights-differ",
                f"{name} ({step.spec}): {count} of {step.spec.size} values differ from what {step.rule.line_only} makes of "
                f"{', '.join(part.leaf for part in step.parts)}; {shown}",
                rule=step.rule.line_only,
                path=name,
                data={"values": count, "diagnosis": found.name if found else "", "repair": REPAIR},
            )
        )
    return [*(_named(rule, name, matches, steps) for (rule, name), matches in groups.items()), *findings]


def _named(rule: str, diagnosis: str, matches: dict[str, Mistake], steps: dict[str, Step]) -> Finding:
    """Tensors of one rule with the same mistake."""
    name, first = next(iter(matches.items()))
    more = f" (and {len(matches) - 1} more like it)" if len(matches) > 1 else ""
    leaves = ", ".join(part.leaf for part in steps[name].parts)
    return Finding(
        "weights-differ",
        f"{diagnosis}: {name}{more} is {first.gives}; {rule} makes of {leaves}: {first.instead}",
        rule=rule,
        path=name,
        data={"diagnosis": diagnosis, "tensors": list(matches), "repair": REPAIR},
    )


def _match(step: Step, plan: Plan, got: Array) -> Mistake | None:
    """The first mistake that gives these values, bit for bit, or else within a few roundings (the right tensor excluded)."""
    near: Mistake | None = None
    right = expected(step, plan.source)
    for mistake in known_mistakes(step, plan):
        try:
            made = mistake.make()
        except OverflowError:  # a tensor that the file's dtype cannot hold is not in it
            continue
        if same_bits(got, made):
            return mistake
        if near is None and nearly(got, made) and not nearly(right, made):
            near = mistake
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
                "provenance-differs",
                f"the file was made with other {CLAIMS[key]} ({said[key] or 'none'}) than those of this check "
                f"({ours[key] or 'none'}){also}; check with the same, or convert again",
                data={"diagnosis": f"other {CLAIMS[key]}"},
            )
        )
    if said["source_digest"] != digest and others & {"rules_sha256", "target", "choices"} and equal:
        notes.append("whether it is the same checkpoint cannot be told: other rules may use other leaves")
    elif said["source_digest"] != digest and equal and _holds_all(plan):
        notes.append(
            "the checkpoint has the same values as the one that the file was made from, stored otherwise (in other chunks, say)"
        )
    elif said["source_digest"] != digest:
        findings.insert(
            0,
            Finding(
                "provenance-differs",
                f"the file says it was made from a checkpoint with the digest {said['source_digest']}, and this one has "
                f"{digest}: another checkpoint, another step, or it has changed since",
                data={"diagnosis": "another checkpoint"},
            ),
        )
    return findings, notes


def _holds_all(plan: Plan) -> bool:
    """Whether every value of the leaves can be told from the tensors: none was rounded, computed with or cut off."""
    return not any(
        step.loses or step.arithmetic or any(isinstance(op, Slice) for part in step.parts for op in part.ops)
        for step in plan.steps
    )


def _added(said: str, ours: str) -> str | None:
    """What `ours` sets beside the same values as `said`, both JSON; None when they contradict each other."""
    try:
        before, now = json.loads(said), json.loads(ours)
        same = all(now[key] == value for key, value in before.items())
    except (ValueError, KeyError, AttributeError):
        return None
    return ", ".join(f"--set {key}={json.dumps(now[key])}" for key in now if key not in before) if same else None
