"""Level 2: run the plan again and compare each written tensor bit for bit; check that the metadata names this checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from threading import Lock
from types import TracebackType
from typing import Any, Self

import numpy as np

from convert.checkpoints.digest import combine
from convert.core.findings import Finding
from convert.core.tensor_spec import is_float
from convert.layers import Fixed
from convert.layers.base import Part, Step
from convert.numerics.bits import count_unequal, same_bits
from convert.numerics.special_values import count_special_values
from convert.planning.plan import Plan
from convert.verify.mistakes.catalogue import ANOTHER_CONSTANT, NOT_IN_SOURCE, NOT_SCALED
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.stopped import REPORT, Remaining, or_stopped
from convert.verify.weights.causes import FIX
from convert.verify.weights.corruption.find import find_corruption
from convert.verify.weights.diagnose import diagnose
from convert.verify.weights.digests import false_digests
from convert.verify.weights.provenance import check_provenance
from convert.verify.weights.tied import compare_tied
from convert.verify.weights.twins import twin_notes
from convert.writing.execute import computed
from convert.writing.transfer import default_jobs, stream_leaves
from convert.writing.written import Written

Array = np.ndarray[Any, np.dtype[Any]]
WAY_BACK = (
    "if the checkpoint was made of this file, the leaves are wrong and not the tensors: `got` is what a tensor is of its leaf, and "
    "`expected` what it must be; convert back again, with --to and these rules"
)
Rows = tuple[int, int] | None  # of a tensor that several leaves make; None is the whole


class WeightsPass:
    """The weights level, in threads: it starts on entering the context, while other levels import their frameworks."""

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
        with closing(stream_leaves(self._plan, self, jobs=default_jobs())) as moved:
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
            tensor.add(part, want, 0 if same_bits(region, want) else count_unequal(region, want))

    def complete(self, step: Step) -> None:
        pass

    def wait(self) -> None:
        """Wait until all tensors are compared.

        Raises:
            CheckpointError: a leaf could not be read.
        """
        assert self._done is not None
        self._done.result()

    def same(self, step: Step, part: Part) -> bool:
        """Wait, and return whether this part of a tensor equals, bit for bit, what the plan makes of its leaf."""
        self.wait()
        tensor = self._tensors.get(step.name)
        return tensor is not None and tensor.narrow is None and not tensor.wrong.get(part.rows)

    def equal(self, name: str) -> bool:
        """Wait, and return whether a tensor equals, bit for bit, what the plan makes."""
        self.wait()
        tensor = self._tensors.get(name)
        return tensor is not None and tensor.narrow is None and not any(tensor.wrong.values())

    def report(self) -> LevelReport:
        """Wait, and give the outcome."""
        self.wait()
        started = time.monotonic()
        plan, written = self._plan, self._written
        tensors = list(self._tensors.values())
        wrong = {t.step.name: count for t in tensors if (count := sum(t.wrong.values()))}
        special = [note for t in tensors if t.step.name not in wrong for note in t.special_notes()]
        remaining = Remaining()
        untied = remaining("the comparison of tied weights", lambda: compare_tied(plan, written), {})
        wrong = {name: count for name, count in wrong.items() if name not in untied}
        findings = [
            *untied.values(),
            *or_stopped(lambda: diagnose(plan, written, wrong), lambda why: _not_named(plan, wrong, why)),
            *(t.narrow for t in tensors if t.narrow is not None),
            *remaining("the comparison of computed tensors", lambda: [*compare_computed(plan, written)], []),
        ]
        if tensors and len(tensors) < len(plan.steps):
            findings.append(_incomplete(plan, set(self._tensors)))
        provenance, doubts = remaining(
            "the comparison of digests",
            lambda: check_provenance(plan, written, combine(self._digests), equal=not findings),
            ([], []),
        )
        right = {t.step.name for t in tensors if t.step.parts and t.narrow is None} - wrong.keys() - untied.keys()
        provenance += remaining("the comparison of the tensors' digests", lambda: [*false_digests(written, right)], [])
        verdict = Verdict.FAILED if findings or provenance else Verdict.PASSED if tensors else Verdict.SKIPPED
        reason = "" if tensors else "no tensor of the file has the name, shape and dtype of the plan; see coverage"
        if verdict is Verdict.PASSED and remaining.errors:
            verdict, reason = Verdict.INCONCLUSIVE, "; ".join(remaining.errors.values())
        return LevelReport(
            "weights",
            verdict,
            reason,
            (*provenance, *findings),
            notes=(
                f"{len(tensors)} of {len(plan.steps)} tensors compared bit for bit",
                *doubts,
                *([WAY_BACK] if findings and "source_digest" not in written.metadata else []),
                *special,
                *remaining("the search for other trees", lambda: [*twin_notes(plan)], []),
                *remaining.notes,
            ),
            seconds=self._seconds + time.monotonic() - started,
        )


class _Tensor:
    """The state of the comparison of one tensor.

    Attributes:
        step: how the plan makes it.
        wrong: rows of a part -> number of values that differ there.
        narrow: a finding, when the dtype of the file cannot hold the values of the source.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.wrong: dict[Rows, int] = {}
        self.narrow: Finding | None = None
        self._is_float = is_float(step.spec.dtype)
        self._special: dict[str, int] = {}
        self._lock = Lock()

    def add(self, part: Part, want: Array, wrong: int) -> None:
        """Count the wrong values, and the special values of the source. Called from several threads."""
        special = count_special_values(want) if self._is_float else {}
        with self._lock:
            self.wrong[part.rows] = self.wrong.get(part.rows, 0) + wrong
            for kind, count in special.items():
                self._special[kind] = self._special.get(kind, 0) + count

    def special_notes(self) -> list[str]:
        """Note NaN, Inf, subnormals and all zeros. The source has them too, so the conversion is not at fault."""
        name = self.step.name
        if not self._is_float or not self.step.spec.size or not self.step.parts:
            return []
        notes = [
            f"{name} has {count} {kind} values, as the source"
            for kind in ("NaN", "infinite")
            if (count := self._special.get(kind))
        ]
        if self._special.get("zero") == self.step.spec.size:
            notes.append(f"{name} is all zeros, as in the source")
        if subnormal := self._special.get("subnormal"):
            notes.append(f"{name} has {subnormal} subnormal values, which some devices flush to zero")
        return notes


def _not_named(plan: Plan, wrong: Mapping[str, int], why: str) -> list[Finding]:
    """Return the finding of all tensors that differ, where the search for the mistake ended early."""
    steps = {step.name: step for step in plan.steps}
    first = next(iter(wrong))
    return [
        Finding(
            "weights-differ",
            why,
            steps[first].rule.line_only,
            first,
            expected="what the rules make of the source",
            got=f"{sum(wrong.values())} values differ in {len(wrong)} tensors",
            fix=REPORT,
            data={"tensors": list(wrong), "values": sum(wrong.values())},
        )
    ]


def _too_narrow(step: Step, leaf: str, error: OverflowError) -> Finding:
    return Finding(
        "weights-overflow",
        f"the dtype of the file cannot hold the values of {leaf}: {error}",
        step.rule.line_only,
        step.name,
        got=str(step.spec),
        data={"diagnosis": "overflow"},
    )


def compare_computed(plan: Plan, written: Written) -> Iterator[Finding]:
    """Compare the tensors that the plan computes without a leaf, such as position tables."""
    for step in plan.steps:
        if step.value is None or written.specs.get(step.name) != step.spec:
            continue
        if not same_bits(got := written.read(step.name), want := computed(step)):
            yield _computed_finding(step, got, want)


def _computed_finding(step: Step, got: Array, want: Array) -> Finding:
    count = count_unequal(got, want)
    corruption = find_corruption(got, want)
    constant = f"{step.value:g}" if isinstance(step.value, float) else ""
    diagnosis = "another buffer"
    if constant and step.kind_name == Fixed.kind_name:
        corruption, diagnosis = None, ANOTHER_CONSTANT
    elif constant:  # written where the source has no weight
        diagnosis = NOT_SCALED if step.role == "weight" else NOT_IN_SOURCE
    return Finding(
        "weights-differ",
        corruption.description if corruption else diagnosis,
        step.rule.line_only,
        step.name,
        expected=f"{constant} everywhere ({step.arithmetic})" if constant else "the values that the rule computes",
        got=f"{count} of {step.spec.size} values differ",
        fix=FIX,
        data={"values": count, "diagnosis": diagnosis},
    )


def _incomplete(plan: Plan, names: set[str]) -> Finding:
    absent = [step for step in plan.steps if step.name not in names]
    return Finding(
        "weights-not-compared",
        f"the file does not hold {len(absent)} of the {len(plan.steps)} tensors with the shape and dtype of the plan, for "
        f"example {absent[0].name} ({absent[0].spec})",
        fix="see the coverage level",
        data={"diagnosis": "not compared", "tensors": [step.name for step in absent]},
    )
