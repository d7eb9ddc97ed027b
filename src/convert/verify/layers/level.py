"""Level 3: for each rule, the declared JAX operation with the source's weights against torch's layer with the written ones.

The operations are JAX's and torch's own (`jnp.einsum`, `F.linear`, ...); nothing of the plan's permutations is used on the
JAX side, so that a layout which does not follow from its equation shows. A wrong equation cannot show here: the model
level compares with upstream's code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from convert.checkpoints.chunks import Box
from convert.core.findings import Finding
from convert.core.ops import Take, apply
from convert.layers import Embedding
from convert.layers.activations import ACTIVATIONS, activation_pair
from convert.layers.base import LayerLeaves, Part, Step
from convert.planning.plan import Plan
from convert.verify.layers.control_path import measure_path
from convert.verify.layers.placement import misplaced
from convert.verify.layers.probe import Probe, bound
from convert.verify.layers.recurrent import measure_cell
from convert.verify.numerics.compare import Difference, difference
from convert.verify.numerics.precision import jax_with_float64
from convert.verify.report.report import LevelReport, Measure, Verdict
from convert.verify.written import Written
from convert.writing.transfer import Work, default_jobs, used_leaves

Array = np.ndarray[Any, np.dtype[Any]]
NEIGHBOURS = 8192  # rows of a large table that are looked at
_Outcome = tuple[Step, Part, Measure | Finding | None]


def check_layers(
    plan: Plan,
    written: Written,
    *,
    device: str = "cpu",
    seed: int = 0,
    same: Callable[[Step, Part], bool] | None = None,
) -> LevelReport:
    """Runs layers on random inputs in float64 and in the dtype of their weights.

    Args:
        device: where torch runs; JAX runs on its CPU.
        same: whether a part of a tensor is known to be, bit for bit, what the plan makes of its leaf. Of the layers of a
            rule whose tensors are, and are made by the same operations, one is run: it stands for all of them, as the
            operations do not look at the values. It is asked last, and may wait until it knows. None: nothing is known,
            and every layer is run.
    """
    if said := missing():
        return LevelReport("layers", Verdict.SKIPPED, said)
    started = time.monotonic()
    layers = _Layers(plan, written, device, seed, same)
    with _pinned(), ThreadPoolExecutor(default_jobs(), thread_name_prefix="convert-layers") as pool:
        for tasks in (layers.first(used_leaves(plan)), layers.others()):
            for run in [pool.submit(layers.run, *task) for task in tasks]:
                for outcome in run.result():
                    layers.note(outcome)
        return replace(layers.report(), seconds=time.monotonic() - started)


def missing() -> str:
    """Why the layers level cannot run here; empty when it can."""
    try:
        import jax  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return ""


class _Layers:
    """The layers level: `first` and `others` are run, in threads, and what comes of them is noted in their order."""

    def __init__(
        self,
        plan: Plan,
        written: Written,
        device: str,
        seed: int,
        same: Callable[[Step, Part], bool] | None,
    ) -> None:
        self._same = same
        self._stands: dict[Hashable, tuple[Step, Part]] = {}  # of layers made alike, the one that is run
        self._others: dict[str, Work] = {}  # leaf -> the rest of them
        self._implied: dict[Hashable, list[str]] = {}  # the tensors that it stands for
        self._ran: dict[Hashable, Measure] = {}
        self._plan, self._written, self._device, self._seed = plan, written, device, seed
        self._worst: dict[str, Measure] = {}
        self._failed: dict[str, list[str]] = {}
        self._findings: list[Finding] = []
        self._compared = 0
        self._groups: dict[tuple[str, str], list[Step]] = {}  # the steps of each layer that is only known as a whole
        for step in plan.steps:
            if step.group is not None:
                self._groups.setdefault((step.group.module, step.group.suffix), []).append(step)
        self._waiting: dict[tuple[str, str], dict[str, Array]] = {}  # its leaves, until all of them were seen

    def first(self, leaves: Mapping[str, Work]) -> Iterator[tuple[str, Work]]:
        """What `run` takes: each leaf with those of its layers that are run anyhow. Recurrent layers and paths are run at once."""
        for leaf, work in leaves.items():
            due = []
            for step, part in work:
                if step.group is not None:
                    self._keep(step.group, leaf)
                elif self._written.specs.get(step.name) == step.spec:  # otherwise the coverage level names it
                    self._look(step, part)
                    if self._same is not None and (alike := self._alike(step, part)) in self._stands:
                        self._others.setdefault(leaf, []).append((step, part))
                        continue
                    if self._same is not None:
                        self._stands[alike] = step, part
                    due.append((step, part))
            if due:
                yield leaf, due

    def others(self) -> Iterator[tuple[str, Work]]:
        """The layers that none of those that were run stands for."""
        for leaf, work in self._others.items():
            if due := [(step, part) for step, part in work if not self._implies(step, part)]:
                yield leaf, due

    def run(self, leaf: str, due: Work) -> list[_Outcome]:
        """Runs layers that have weights of this leaf. Called from several threads."""
        whole = self._plan.source.read(leaf) if len(due) > 1 else None
        outcomes: list[_Outcome] = []
        with _pinned_here():
            for step, part in due:
                written = self._written.read(step.name)
                if whole is not None:
                    own = _taken(part, whole)
                else:
                    rows = self._rows(step, part)
                    own, written = self._own(part, rows), written[rows]
                outcomes.append((step, part, self._measure(step, part, own, written)))
        return outcomes

    def note(self, outcome: _Outcome) -> None:
        """Keeps what came of a layer's run."""
        step, part, measure = outcome
        if isinstance(measure, Finding):
            self._findings.append(measure)
        elif measure is not None:
            self._compared += 1
            tied = f" as {step.word}" if step.tied else ""  # a table, and a head that is the same
            self._worse(f"{step.rule.line_only} {step.role}{tied}", measure)
            if (alike := self._alike(step, part)) in self._stands and self._stands[alike][1] is part:
                self._ran[alike] = measure

    def _look(self, step: Step, part: Part) -> None:
        assert part.rule is not None
        if said := misplaced(self._plan, part.rule, step, part):
            self._findings.append(Finding("layer-misplaced", said, step.rule.line_only, step.name))

    def _implies(self, step: Step, part: Part) -> bool:
        """Whether another layer of the rule, which was run or will be, says all that there is to say."""
        assert self._same is not None
        if not self._same(step, part):
            return False
        alike = self._alike(step, part)
        if not self._same(*self._stands[alike]):
            self._stands[alike] = step, part
            return False
        self._implied.setdefault(alike, []).append(step.name)
        return True

    def _alike(self, step: Step, part: Part) -> Hashable:
        """What is equal for tensors of a rule that are made alike: only the place in a stack differs, and the values."""
        spec = self._plan.source.leaves[part.leaf].spec
        return id(part.rule), step.role, step.word, part.ops[_stacked(part) :], spec, step.spec, part.rows

    def _rows(self, step: Step, part: Part) -> slice:
        """Of an embedding's table those rows among which entries are looked up: neighbours, where there are many."""
        assert part.rule is not None
        size = step.spec.shape[0] if step.spec.shape else 0
        if not isinstance(part.rule.kind, Embedding) or part.rows is not None or size <= NEIGHBOURS:
            return slice(None)
        start = int(np.random.default_rng(self._seed).integers(0, size - NEIGHBOURS + 1))
        return slice(start, start + NEIGHBOURS)

    def _own(self, part: Part, rows: slice) -> Array:
        """The layer's weight as stored, without the axes that are stacked; no more is read of the leaf.

        Args:
            rows: of the first of its own axes; all of them, or both ends are given.
        """
        spec = self._plan.source.leaves[part.leaf].spec
        origin, shape = [0] * len(spec.shape), list(spec.shape)
        axes = list(range(len(spec.shape)))
        for op in part.ops[: _stacked(part)]:
            assert isinstance(op, Take)
            axis = axes.pop(op.axis)
            origin[axis], shape[axis] = op.index, 1
        if rows.stop is not None:
            origin[axes[0]], shape[axes[0]] = rows.start, rows.stop - rows.start
        box = Box(tuple(origin), tuple(shape))
        return self._plan.source.read_box(part.leaf, box).reshape([shape[axis] for axis in axes])

    def _keep(self, group: LayerLeaves, leaf: str) -> None:
        """A recurrent layer, or a path, is run when all its leaves are there; they come one after the other."""
        key = (group.module, group.suffix)
        seen = self._waiting.setdefault(key, {})
        if leaf in seen:
            return
        seen[leaf] = self._plan.source.read(leaf)
        if len(seen) < len({name for name, _ in group.leaves.values()}):
            return
        steps, leaves = self._groups[key], dict(seen)
        seen.update(dict.fromkeys(seen, seen[leaf][:0]))  # seen, and let go
        if any(self._written.specs.get(step.name) != step.spec for step in steps):
            return  # the coverage level names it
        written = {step.name: self._written.read(step.name) for step in steps}
        rng = np.random.default_rng(self._seed)
        try:
            if group.sizes:  # a recurrent layer
                measures = measure_cell(group, steps, leaves, written, device=self._device, rng=rng)
            else:
                measures = measure_path(group, steps, leaves, written, device=self._device, rng=rng)
        except (RuntimeError, ValueError, TypeError) as error:
            self._findings.append(_unfit(steps[0], steps[0].parts[0], error))
            return
        self._compared += len(steps) if measures else 0
        for measure in measures:
            self._worse(f"{group.rule.at.line_only} {measure.name.partition(', ')[2]}", measure)

    def _worse(self, key: str, measure: Measure) -> None:
        if not measure.passed:
            self._failed.setdefault(key, []).append(measure.name)
        if key not in self._worst or _badness(measure) > _badness(self._worst[key]):
            self._worst[key] = measure

    def _measure(self, step: Step, part: Part, own: Array, written: Array) -> Measure | Finding | None:
        assert part.rule is not None
        rng = np.random.default_rng(self._seed)
        probe = Probe(part.rule, self._plan, step, part, self._device, rng, self._written.read)
        try:
            return probe.measure(own, written)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:  # of JAX, torch, NumPy: shapes do not fit
            return _unfit(step, part, error)

    def report(self) -> LevelReport:
        """What came of it, once every outcome was noted."""
        activations = _activations(self._plan)
        implied = 0
        for alike, measure in self._ran.items():
            names = self._implied.get(alike, [])
            implied += len(names)
            if not measure.passed:
                next(failed for failed in self._failed.values() if measure.name in failed).extend(names)
        worst, findings = self._worst, list(self._findings)
        findings += [_finding(worst[key], names) for key, names in self._failed.items()]
        findings += [_finding(measure, [measure.name]) for measure in activations if not measure.passed]
        return LevelReport(
            "layers",
            Verdict.FAILED if findings else Verdict.PASSED if self._compared else Verdict.SKIPPED,
            ""
            if self._compared
            else "no tensor of the file has the name, shape and dtype that the rules give; see coverage",
            tuple(findings),
            (*worst.values(), *activations),
            self._said(implied),
        )

    def _said(self, implied: int) -> tuple[str, ...]:
        said = f"{self._compared + implied} tensors in {len(self._worst)} groups; the worst of each is shown"
        if not implied:
            return (said,)
        return (
            said,
            f"{self._compared} of them were run; the other {implied} are made by the same operations as one of these, and "
            "are, bit for bit, what these make (see weights)",
        )


def _stacked(part: Part) -> int:
    """How many of the first operations take a layer out of a stack."""
    assert part.rule is not None
    return len(part.rule.stacked)


def _taken(part: Part, leaf: Array) -> Array:
    return apply(part.ops[: _stacked(part)], leaf)


def _finding(measure: Measure, names: list[str]) -> Finding:
    """A rule whose layers differ: the worst of them, and which others."""
    exact = measure.lifted or measure.difference
    more = f" (and {len(names) - 1} more of this rule)" if len(names) > 1 else ""
    return Finding(
        "layer-differs",
        f"{measure.name}{more}: torch's layer with the written weights gives {exact.got:.6g} where the declared JAX operation "
        f"gives {exact.want:.6g} at {list(exact.at)}: relative error {exact.relative:.1e} in float64, "
        f"{measure.difference.relative:.1e} in the weights' dtype",
        rule=measure.rule,
        path=measure.name,
        data={"tensors": names},
    )


def _unfit(step: Step, part: Part, error: Exception) -> Finding:
    return Finding(
        "layer-not-run",
        f"the layer cannot be run with what the plan makes of {part.leaf}: {' '.join(str(error).split())}",
        rule=step.rule.line_only,
        path=step.name,
    )


@contextmanager
def _pinned() -> Iterator[None]:
    """Pins what the frameworks hold for the whole process: JAX's float64, torch's threads.

    A few rows times one matrix wait for memory, and torch's threads that wait for each other make them ten times slower.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with jax_with_float64(), _pinned_here():
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _pinned_here() -> Iterator[None]:
    """Pins what the frameworks hold for each thread: JAX's precision of products, torch's gradients."""
    import jax
    import torch

    with jax.default_matmul_precision("highest"), torch.no_grad():
        yield


def _badness(measure: Measure) -> float:
    lifted = measure.lifted or measure.difference
    return lifted.relative if np.isfinite(lifted.relative) else float("inf")


def _activations(plan: Plan) -> list[Measure]:
    """Each activation that the rules declare, over the range where its variants differ most and where it saturates."""
    import jax.numpy as jnp
    import torch

    x = np.linspace(-12, 12, 4801)
    found = {
        str(layer["activation"]): str(layer["layer"]) for layer in plan.layers if layer.get("activation") in ACTIVATIONS
    }
    measures = []
    for name, layer in found.items():
        one, two = activation_pair(name)
        want = np.asarray(one(jnp.asarray(x)))
        exact = difference(two(torch.tensor(x)).numpy(), want, precision="float64")
        drift: Difference = difference(
            two(torch.tensor(x, dtype=torch.float32)).numpy(), np.asarray(one(jnp.asarray(x, "float32")))
        )
        measures.append(Measure(f"{name} (after {layer})", drift, bound("float32", 1), exact, bound("float64", 1)))
    return measures
