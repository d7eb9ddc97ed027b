"""The layers level: for each rule, the declared JAX operation with the leaves against torch's layer with the written tensors.

The operations are those of JAX and torch (`jnp.einsum`, `F.linear`, ...). The JAX side uses none of the plan's permutations, so a layout
that contradicts its equation is detected. A wrong equation is not: the model level compares with upstream's code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from convert.core.findings import Finding
from convert.layers.base import LayerLeaves, Part, Step
from convert.layers.mistake import Mistake
from convert.numerics.precision import jax_problem, jax_with_float64
from convert.planning.plan import Plan
from convert.verify.layers.measure import measure_activations, measure_group, measure_tensor
from convert.verify.layers.placement import misplaced
from convert.verify.layers.representatives import IsEqual, Representatives
from convert.verify.layers.samples import make_sample, read_layer, rule_of, unstack
from convert.verify.mistakes.named import in_words, mistake_in
from convert.verify.report.report import LevelReport, Measure, Verdict
from convert.verify.stopped import Remaining, or_stopped
from convert.writing.transfer import Work, default_jobs, used_leaves
from convert.writing.written import Written

Array = np.ndarray[Any, np.dtype[Any]]
ROWS = 8192  # of a large table, that are probed
COMPLEX = "the weights are complex, and layers are run with real ones; see the weights and the model level"
NOTHING_TO_RUN = "no tensor of the file has the name, shape and dtype that the rules give; see the coverage level"
_Outcome = tuple[Step, Part, Measure | Finding | None]
_GroupKey = tuple[str, str]  # module and suffix


def check_layers(
    plan: Plan, written: Written, *, device: str = "cpu", seed: int = 0, is_equal: IsEqual | None = None
) -> LevelReport:
    """Run layers on random inputs, in float64 and in the dtype of their weights.

    Args:
        device: where torch runs; JAX runs on the CPU.
        is_equal: whether a part of a tensor is, bit for bit, what the plan makes of its leaf; one layer then stands for others
            (`Representatives`). None: every layer is run.
    """
    if reason := missing():
        return LevelReport("layers", Verdict.SKIPPED, reason)
    started = time.monotonic()
    runs = _LayerRuns(plan, written, device, seed, is_equal)
    with _process_settings(), ThreadPoolExecutor(default_jobs(), thread_name_prefix="convert-layers") as pool:
        for tasks in (runs.chosen(used_leaves(plan)), runs.not_represented()):
            for future in [pool.submit(runs.run, *task) for task in tasks]:
                for outcome in future.result():
                    runs.note(*outcome)
        return replace(runs.report(), seconds=time.monotonic() - started)


def missing() -> str:
    """Return why the layers level cannot run; empty when it can."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return jax_problem()


class _LayerRuns:
    """The layers that are run, in threads, and the outcomes, which are noted in the order of the plan."""

    def __init__(self, plan: Plan, written: Written, device: str, seed: int, is_equal: IsEqual | None) -> None:
        self._plan, self._written, self._device, self._seed = plan, written, device, seed
        self._representatives = Representatives(plan, is_equal)
        self._postponed: dict[str, Work] = {}  # leaf -> layers that another one may stand for
        self._group_steps: dict[_GroupKey, list[Step]] = {}
        for step in plan.steps:
            if step.group is not None:
                self._group_steps.setdefault((step.group.module, step.group.suffix), []).append(step)
        self._group_leaves: dict[_GroupKey, dict[str, Array]] = {}
        self._worst: dict[str, Measure] = {}  # rule and role -> the measure with the largest error
        self._failed: dict[str, list[str]] = {}  # rule and role -> names of tensors that differ
        self._findings: list[Finding] = []
        self._compared = 0

    def chosen(self, leaves: Mapping[str, Work]) -> Iterator[tuple[str, Work]]:
        """Yield each leaf with those of its layers that `run` runs in any case. Layers with several tensors are run here."""
        for leaf, work in leaves.items():
            chosen = []
            for step, part in work:
                if step.group is not None:
                    self._collect(step.group, leaf)
                elif self._written.specs.get(step.name) == step.spec:  # otherwise it is a finding of the coverage level
                    if finding := misplaced(self._plan, rule_of(part), step, part):
                        self._findings.append(finding)
                    if self._representatives.choose(step, part):
                        chosen.append((step, part))
                    else:
                        self._postponed.setdefault(leaf, []).append((step, part))
            if chosen:
                yield leaf, chosen

    def not_represented(self) -> Iterator[tuple[str, Work]]:
        """Yield each leaf with those of its layers that no layer stands for that was run."""
        for leaf, work in self._postponed.items():
            if rest := [(step, part) for step, part in work if not self._representatives.represents(step, part)]:
                yield leaf, rest

    def run(self, leaf: str, work: Work) -> list[_Outcome]:
        """Run layers that have weights of one leaf. Called from several threads."""
        stacked = self._plan.source.read(leaf) if len(work) > 1 else None
        outcomes: list[_Outcome] = []
        with _thread_settings():
            for step, part in work:
                written = self._written.read(step.name)
                if stacked is not None:
                    stored = unstack(part, stacked)
                else:
                    rows = self._rows(step, part)
                    stored, written = read_layer(self._plan, part, rows), written[rows] if written.ndim else written
                outcomes.append((step, part, self._measure(step, part, stored, written)))
        return outcomes

    def _rows(self, step: Step, part: Part) -> slice:
        """Return some neighbouring rows of a large table whose rows are used one by one; all rows of other tensors."""
        size = step.spec.shape[0] if step.spec.shape else 0
        if not rule_of(part).kind.rowwise or part.rows is not None or size <= ROWS or rule_of(part).concatenated:
            return slice(None)
        start = int(np.random.default_rng(self._seed).integers(0, size - ROWS + 1))
        return slice(start, start + ROWS)

    def _measure(self, step: Step, part: Part, stored: Array, written: Array) -> Measure | Finding | None:
        try:
            sample = make_sample(
                self._plan,
                step,
                part,
                stored,
                written,
                read_written=self._written.read,
                device=self._device,
                seed=self._seed,
            )
            return measure_tensor(sample)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:  # JAX, torch and NumPy: shapes do not fit
            return _not_run(step, part, error)

    def _collect(self, group: LayerLeaves, leaf: str) -> None:
        """Read the leaves of a layer with several tensors, which come one after the other; run it when the last one is there."""
        key = (group.module, group.suffix)
        leaves = self._group_leaves.setdefault(key, {})
        if leaf in leaves:
            return
        leaves[leaf] = self._plan.source.read(leaf)
        if len(leaves) < len({name for name, _ in group.leaves.values()}):
            return
        complete = dict(leaves)
        leaves.update({name: values[:0] for name, values in leaves.items()})  # their memory is given back after the run
        self._run_group(group, self._group_steps[key], complete)

    def _run_group(self, group: LayerLeaves, steps: list[Step], leaves: Mapping[str, Array]) -> None:
        if any(self._written.specs.get(step.name) != step.spec for step in steps):
            return  # a finding of the coverage level
        written = {step.name: self._written.read(step.name) for step in steps}
        rng = np.random.default_rng(self._seed)
        try:
            measures = measure_group(group, steps, leaves, written, device=self._device, rng=rng)
        except (RuntimeError, ValueError, TypeError) as error:
            self._findings.append(_not_run(steps[0], steps[0].parts[0], error))
            return
        self._compared += len(steps) if measures else 0
        for weights, measure in measures.items():
            self._keep_worst(f"{group.rule.at.line_only} {weights}", measure)

    def note(self, step: Step, part: Part, outcome: Measure | Finding | None) -> None:
        """Keep the outcome of a layer's run."""
        if isinstance(outcome, Finding):
            self._findings.append(outcome)
        elif outcome is not None:
            self._compared += 1
            use = step.kind_name if step.tied else ""  # a table that is an embedding and a head is two layers
            self._keep_worst(f"{step.rule.line_only} {step.role} {use}", outcome)
            self._representatives.note(step, part, outcome)

    def _keep_worst(self, key: str, measure: Measure) -> None:
        if not measure.passed:
            self._failed.setdefault(key, []).append(measure.name)
        if key not in self._worst or _error(measure) > _error(self._worst[key]):
            self._worst[key] = measure

    def report(self) -> LevelReport:
        """Return the report, once every outcome was noted."""
        represented = 0
        for measure, names in self._representatives.represented:
            represented += len(names)
            if not measure.passed:
                next(failed for failed in self._failed.values() if measure.name in failed).extend(names)
        remaining = Remaining()
        activations = remaining("the comparison of activations", lambda: [*measure_activations(self._plan)], [])
        failed = [(self._worst[key], names) for key, names in self._failed.items()]
        findings = [*self._findings, *(_differs(measure, names, self._mistake(measure)) for measure, names in failed)]
        findings += [_differs(measure, [measure.name], None) for measure in activations if not measure.passed]
        verdict = Verdict.FAILED if findings else Verdict.PASSED if self._compared else Verdict.SKIPPED
        reason = "" if self._compared else COMPLEX if self._complex else NOTHING_TO_RUN
        if verdict is Verdict.PASSED and remaining.errors:
            verdict, reason = Verdict.INCONCLUSIVE, "; ".join(remaining.errors.values())
        measures = (*self._worst.values(), *activations)
        notes = (*self._notes(represented), *remaining.notes)
        return LevelReport("layers", verdict, reason, tuple(findings), measures, notes)

    def _mistake(self, measure: Measure) -> Mistake | str | None:
        """Return the known mistake with which the file's tensor is made of its leaves; as text, why the search for it ended early."""
        steps = (step for step in self._plan.steps if step.parts)
        step = next((step for step in steps if measure.name in (step.name, *_places(step))), None)
        if step is None:
            return None
        read = partial(self._written.read, step.name)
        return or_stopped(lambda: mistake_in(step, read(), self._plan, step.spec.dtype), str)

    @property
    def _complex(self) -> int:
        """Number of complex tensors, whose layers are not run."""
        return sum(step.spec.dtype.startswith("complex") for step in self._plan.steps)

    def _notes(self, represented: int) -> tuple[str, ...]:
        tensors = self._compared + represented
        # A fused tensor has a measure for each of its parts.
        fused = any("[" in measure.name for measure in self._worst.values())
        what = "tensors and parts of fused tensors" if fused else "tensors"
        counted = f"{tensors} {what} in {len(self._worst)} groups; the worst of each is shown"
        if self._complex:
            counted += f"; {self._complex} complex tensors are compared at the weights and the model level alone"
        if not represented:
            return (counted,)
        return (
            counted,
            f"{self._compared} of them were run; the other {represented} are made by the same operations as one of these, and equal "
            "the plan's result bit for bit (see the weights level)",
        )


def _places(step: Step) -> Iterator[str]:
    """Yield the names of the measures of a fused tensor's parts."""
    return (f"{step.name}[{part.place}]" for part in step.parts if part.place)


def _error(measure: Measure) -> float:
    exact = measure.float64 or measure.difference
    return exact.relative if np.isfinite(exact.relative) else float("inf")


def _differs(measure: Measure, names: list[str], mistake: Mistake | str | None) -> Finding:
    """Return the finding of a rule whose layers differ, with the layer that differs most."""
    exact = measure.float64 or measure.difference
    cause = f": {mistake if isinstance(mistake, str) else in_words(mistake)}" if mistake is not None else ""
    more = f", and {len(names) - 1} more tensors of this rule differ" if len(names) > 1 else ""
    return Finding(
        "layer-differs",
        f"torch's layer with the written weights differs from the declared JAX operation{cause}{more}",
        measure.rule,
        measure.name,
        expected=f"{exact.want:.6g} at {list(exact.at)}",
        got=f"{exact.got:.6g} (relative error {exact.relative:.1e} in float64, {measure.difference.relative:.1e} in the weights' dtype)",
        fix="see the weights level: where it fails, convert again; where it passes, report the rule as a bug",
        data={"tensors": names, **({"diagnosis": mistake.name} if isinstance(mistake, Mistake) else {})},
    )


def _not_run(step: Step, part: Part, error: Exception) -> Finding:
    return Finding(
        "layer-not-run",
        f"the layer cannot be run with the values of {part.leaf}",
        step.rule.line_only,
        step.name,
        expected="shapes that fit the operation of the rule",
        got=f"the error: {' '.join(str(error).split())}",
        fix="correct the axes or the equation in the rule, so that its shapes fit",
    )


@contextmanager
def _process_settings() -> Iterator[None]:
    """Set what the frameworks have for a process: float64 in JAX, and one torch thread.

    A few rows times one matrix wait for memory; torch's threads wait for each other, which takes ten times as long.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with jax_with_float64(), _thread_settings():
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _thread_settings() -> Iterator[None]:
    """Set what the frameworks have for each thread: the precision of JAX's products, and no gradients in torch."""
    import jax
    import torch

    with jax.default_matmul_precision("highest"), torch.no_grad():
        yield
