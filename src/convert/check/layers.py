"""Level 3: for each rule, the declared JAX operation with the source's weights against torch's layer with the written ones.

The operations are JAX's and torch's own (`jnp.einsum`, `F.linear`, ...); nothing of the plan's permutations is used on the
JAX side, so that a layout which does not follow from its equation shows. A wrong equation cannot show here: the model
level compares with upstream's code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.check.activations import ACTIVATIONS, activation_pair
from convert.check.cells import measure_cell
from convert.check.compare import Difference, difference
from convert.check.names import misplaced
from convert.check.paths import measure_path
from convert.check.probe import Probe, bound
from convert.check.report import Finding, LevelReport, Measure, Verdict
from convert.check.written import Written
from convert.plan import Plan
from convert.steps import CellLeaves, Part, PathLeaves, Step
from convert.streaming import Work, read_used

if TYPE_CHECKING:
    pass

Array = np.ndarray[Any, np.dtype[Any]]


def check_layers(plan: Plan, written: Written, *, device: str = "cpu", seed: int = 0) -> LevelReport:
    """Runs every layer on random inputs in float64 and in the dtype of its weights.

    Args:
        device: where torch runs; JAX runs on its CPU.
    """
    if said := missing():
        return LevelReport("layers", Verdict.SKIPPED, said)
    layers = LayersPass(plan, written, device=device, seed=seed)
    with layers.running(), read_used(plan) as leaves:
        for leaf, work, array in leaves:
            layers.see(leaf, work, array)
        return layers.report()


def missing() -> str:
    """Why the layers level cannot run here; empty when it can."""
    try:
        import jax  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return ""


class LayersPass:
    """The layers level, fed with the source's leaves one by one, within `running`, in the thread that entered it."""

    def __init__(self, plan: Plan, written: Written, *, device: str, seed: int) -> None:
        self._plan, self._written, self._device, self._seed = plan, written, device, seed
        self._worst: dict[str, Measure] = {}
        self._failed: dict[str, list[str]] = {}
        self._findings: list[Finding] = []
        self._compared = 0
        self._seconds = 0.0
        self._groups: dict[tuple[str, str], list[Step]] = {}  # the steps of each layer that is only known as a whole
        for step in plan.steps:
            if step.group is not None:
                self._groups.setdefault((step.group.module, step.group.suffix), []).append(step)
        self._waiting: dict[tuple[str, str], dict[str, Array]] = {}  # its leaves, until all of them were seen

    @contextmanager
    def running(self) -> Iterator[None]:
        """Pins precision and threads of both frameworks."""
        import jax
        import torch

        with _jax_float64(jax), jax.default_matmul_precision("highest"), torch.no_grad(), _one_thread():
            yield

    def see(self, leaf: str, work: Work, array: Array) -> None:
        """Runs all layers that have weights of this leaf."""
        started = time.monotonic()
        for step, part in work:
            if step.group is not None:
                self._keep(step.group, leaf, array)
            elif self._written.specs.get(step.name) == step.spec:  # otherwise the coverage level names it
                self._run(step, part, array)
        self._seconds += time.monotonic() - started

    def _keep(self, group: CellLeaves | PathLeaves, leaf: str, array: Array) -> None:
        """A recurrent layer, or a path, is run when all its leaves are there; they come one after the other."""
        key = (group.module, group.suffix)
        seen = self._waiting.setdefault(key, {})
        if leaf in seen:
            return
        seen[leaf] = array
        if len(seen) < len({name for name, _ in group.leaves.values()}):
            return
        steps, leaves = self._groups[key], dict(seen)
        seen.update(dict.fromkeys(seen, array[:0]))  # seen, and let go
        if any(self._written.specs.get(step.name) != step.spec for step in steps):
            return  # the coverage level names it
        written = {step.name: self._written.read(step.name) for step in steps}
        rng = np.random.default_rng(self._seed)
        try:
            if isinstance(group, CellLeaves):
                measures = measure_cell(group, steps, leaves, written, device=self._device, rng=rng)
            else:
                measures = measure_path(group, steps, leaves, written, device=self._device, rng=rng)
        except (RuntimeError, ValueError, TypeError) as error:
            self._findings.append(_unfit(steps[0], steps[0].parts[0], error))
            return
        self._compared += len(steps) if measures else 0
        for measure in measures:
            self._note(f"{group.rule.at.line_only} {measure.name.partition(', ')[2]}", measure)

    def _note(self, key: str, measure: Measure) -> None:
        if not measure.passed:
            self._failed.setdefault(key, []).append(measure.name)
        if key not in self._worst or _badness(measure) > _badness(self._worst[key]):
            self._worst[key] = measure

    def _run(self, step: Step, part: Part, array: Array) -> None:
        rule = part.rule
        assert rule is not None
        if said := misplaced(self._plan, rule, step, part):
            self._findings.append(Finding(f"{step.name}: {said}", step.name, step.rule.line_only))
        rng = np.random.default_rng(self._seed)
        probe = Probe(rule, self._plan, step, part, self._device, rng, self._written.read)
        try:
            measure = probe.measure(array, self._written.read(step.name))
        except (
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
        ) as error:  # of JAX, torch or NumPy: shapes that do not fit
            self._findings.append(_unfit(step, part, error))
            return
        if measure is None:
            return
        self._compared += 1
        self._note(f"{step.rule.line_only} {step.role}", measure)

    def report(self) -> LevelReport:
        """What came of it, once every leaf was seen."""
        started = time.monotonic()
        activations = _activations(self._plan)
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
            (f"{self._compared} tensors in {len(worst)} groups; the worst of each is shown",),
            self._seconds + time.monotonic() - started,
        )


def _finding(measure: Measure, names: list[str]) -> Finding:
    """A rule whose layers differ: the worst of them, and which others."""
    exact = measure.lifted or measure.difference
    more = f" (and {len(names) - 1} more of this rule)" if len(names) > 1 else ""
    return Finding(
        f"{measure.name}{more}: torch's layer with the written weights gives {exact.got:.6g} where the declared JAX operation "
        f"gives {exact.want:.6g} at {list(exact.at)}: relative error {exact.relative:.1e} in float64, "
        f"{measure.difference.relative:.1e} in the weights' dtype",
        measure.name,
        measure.rule,
        {"tensors": names},
    )


def _unfit(step: Step, part: Part, error: Exception) -> Finding:
    return Finding(
        f"{step.name}: the layer cannot be run with what the plan makes of {part.leaf}: {' '.join(str(error).split())}",
        step.name,
        step.rule.line_only,
    )


@contextmanager
def _jax_float64(jax: Any) -> Iterator[None]:
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """A few rows times one matrix wait for memory, and threads that wait for each other make them ten times slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
