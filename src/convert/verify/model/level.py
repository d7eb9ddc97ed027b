"""Level 4: the JAX model against the PyTorch model, end to end and at every boundary, lifted to float64 and as users run it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.ops import Cast, Op, apply, is_float
from convert.planning.plan import Plan
from convert.planning.step import Step, assemble
from convert.verify.mistakes.catalogue import same_bits
from convert.verify.mistakes.hypothesis import expected
from convert.verify.model.messages import absent, differences, other_function, silent, undecided
from convert.verify.numerics.compare import (
    Difference,
    agreement,
    difference,
    epsilon,
    lifted_tolerance,
    rounded_tolerance,
    run_tolerance,
)
from convert.verify.numerics.precision import jax_precision, torch_pinned
from convert.verify.report.report import LevelReport, Measure, Verdict
from convert.verify.sides.sampling import Sample
from convert.verify.sides.user_reference import require_inputs, require_masks, require_outputs
from convert.verify.written import Written

if TYPE_CHECKING:
    import torch

    from convert.references.protocol import Reference

Array = np.ndarray[Any, np.dtype[Any]]
Values = Mapping[str, Array]


@dataclass(frozen=True)
class Evidence:
    """What the JAX model gave.

    Attributes:
        inputs: by name.
        exact: values at boundaries and outputs in lifted float64, in the order in which data flows; None when unknown.
        drifted: the same as the model computes them in `precision`.
        masks: where values count.
        unlifted: primitives that could not be lifted.
        origin: live, or which recording.
        samples: name -> the part of a value that is known, for those that a recording did not keep whole.
        rounded: dtype to which the weights were rounded whose unrounded values are not known; empty when all are.
        notes: what a reader should know of it.
    """

    inputs: Values
    exact: Values | None
    drifted: Values
    masks: Values
    precision: str = "float32"
    unlifted: tuple[str, ...] = ()
    origin: str = "live"
    environment: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, Sample] = field(default_factory=dict)
    rounded: str = ""
    notes: tuple[str, ...] = ()

    def pick(self, name: str, value: Array) -> Array:
        """What is to be compared with the evidence: the whole value, or the sample that a recording kept.

        Raises:
            ValueError: the value is of another shape than the recorded one.
        """
        return self.samples[name].take(value) if name in self.samples else value

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole value."""
        return self.samples[name].shape if name in self.samples else self.drifted[name].shape


def jax_weights(plan: Plan) -> dict[str, Array]:
    """The source's leaves as a reference's `jax` takes them: by name, flax nnx's ``/value`` removed."""
    prefix = f"{plan.root}/" if plan.root else ""
    dropped = {d.leaf for d in plan.dropped}
    return {
        name.removeprefix(prefix).removesuffix("/value"): plan.checkpoint.read(name)
        for name in plan.checkpoint.leaves
        if name not in dropped
    }


def live_evidence(plan: Plan, reference: Reference, *, precision: str = "float32", seed: int = 0) -> Evidence:
    """Runs the JAX model, in `precision` and lifted.

    Raises:
        ImportError: JAX or the model's package is not installed.
        UserCodeError: the reference's `inputs`, `jax` or `masks` does not give what it must.
    """
    import jax

    from convert.verify.numerics.lift_jax import lift

    side = reference.jax_side()
    inputs = reference.inputs(seed)
    require_inputs(inputs)
    weights = jax_weights(plan)
    with jax_precision(precision):
        narrow = {name: as_jax(value, precision) for name, value in weights.items()}
        drifted = side(narrow, {name: as_jax(value, precision) for name, value in inputs.items()})
        require_outputs(reference.outputs, "jax", drifted)
        lifted = lift(side)
        exact = lifted(weights, dict(inputs))
    return Evidence(  # in the order of the plain call: what passes through a jaxpr comes out with sorted keys
        inputs,
        {name: np.asarray(exact[name]) for name in drifted},
        {name: np.asarray(value, np.float64) for name, value in drifted.items()},
        dict(require_masks(reference.masks(inputs), {name: np.shape(value) for name, value in drifted.items()})),
        precision,
        lifted.unlifted,
        environment={"jax": jax.__version__},
    )


def as_jax(value: Array, dtype: str) -> Any:
    """An array of JAX; a floating one in this dtype."""
    import jax.numpy as jnp

    return jnp.asarray(value).astype(dtype) if is_float(np.asarray(value).dtype.name) else jnp.asarray(value)


def exact_state(plan: Plan, written: Written, device: str) -> dict[str, torch.Tensor]:
    """The weights in float64, as the plan gives them before the last rounding.

    A tensor that differs from what the plan makes is taken as it was written: it is what is being checked.
    """
    import torch

    state = {}
    for step in plan.steps:
        if step.name not in written.tensors:
            continue
        got = written.read(step.name)
        value = _exact(step, plan, got)
        state[step.name] = torch.tensor(
            value.copy(), dtype=torch.float64, device=device
        )  # torch takes no flipped views
    for name in written.tensors:
        if name not in state:
            state[name] = torch.tensor(np.asarray(written.read(name), np.float64), device=device)
    return state


def _exact(step: Step, plan: Plan, got: Array) -> Array:
    if not step.parts or not is_float(got.dtype.name):
        return np.asarray(got, np.float64)
    if not same_bits(got, expected(step, plan.source)):
        return np.asarray(got, np.float64)
    made = [apply(_widened(part.ops), plan.source_in_float64.read(part.leaf)) for part in step.parts]
    return assemble(step.parts, made)


def _widened(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The same operations in float64, without the casts."""
    return (Cast("float64"), *(op for op in ops if not isinstance(op, Cast)))


@dataclass(frozen=True)
class TorchRun:
    """One run of the PyTorch model.

    Attributes:
        values: at the boundaries, and the outputs.
        unlifted: operations that could not be lifted.
        casts: of a lifted run: whether the code casts to narrower floats, so that without lifting it rounds.
    """

    values: dict[str, Array]
    unlifted: tuple[str, ...]
    casts: bool
    module: torch.nn.Module


def run_torch(
    reference: Reference,
    state: Mapping[str, torch.Tensor],
    inputs: Values,
    names: list[str],
    *,
    lift: bool,
    precision: str,
    device: str,
) -> TorchRun:
    """Runs the PyTorch model, observed at the boundaries `names`."""
    import torch

    from convert.verify.numerics.lift_torch import lifted

    with torch_pinned(), torch.no_grad():
        if lift:
            with lifted() as mode:
                module = reference.build(state).to(device)
                values = observed(reference, module, input_tensors(inputs, "float64", device), names)
            return TorchRun(values, tuple(sorted(mode.unlifted)), mode.casts, module)
        module = reference.build(state).to(device)
        return TorchRun(observed(reference, module, input_tensors(inputs, precision, device), names), (), False, module)


def input_tensors(inputs: Values, precision: str, device: str) -> dict[str, Any]:
    """Inputs as torch takes them, floating ones in this precision."""
    import torch

    out: dict[str, Any] = {}
    for name, value in inputs.items():
        tensor = torch.as_tensor(np.array(value), device=device)
        out[name] = tensor.to(getattr(torch, precision)) if tensor.is_floating_point() else tensor
    return out


def boundaries_of(reference: Reference, module: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the names at which the module can be observed; of those that it lacks, the report says so."""
    from convert.references.protocol import INPUT

    known = {name for name, _ in module.named_modules()}
    return [name for name in names if name not in reference.outputs and name.removesuffix(INPUT) in known]


def observed(
    reference: Reference, module: torch.nn.Module, inputs: Mapping[str, Any], names: list[str]
) -> dict[str, Array]:
    """Values at the boundaries among `names`, and the outputs, of one run."""
    import torch

    from convert.references.protocol import observe

    with observe(module, boundaries_of(reference, module, names)) as values:
        outputs = reference.run(module, inputs)
    require_outputs(reference.outputs, "run", outputs)
    outputs = {name: torch.as_tensor(value) for name, value in outputs.items()}
    return {name: value.detach().double().cpu().numpy() for name, value in {**values, **outputs}.items()}


@dataclass(frozen=True)
class LiftedTorch:
    """The PyTorch model in lifted float64.

    Attributes:
        exact: values with the weights before their last rounding; written: with the weights as they were written.
        moved: with the weights moved at random by as much as rounding moved them, where the unrounded ones are not known; else
            the same as `exact`.
        casts: whether the code casts to narrower floats, so that without lifting it rounds.
    """

    exact: Values
    written: Values
    moved: Values
    unlifted: tuple[str, ...]
    casts: bool
    module: torch.nn.Module


def lifted_torch(
    plan: Plan,
    written: Written,
    reference: Reference,
    evidence: Evidence,
    names: list[str],
    device: str,
    *,
    finest: str = "float64",
) -> LiftedTorch:
    """Runs the PyTorch model in lifted float64, two or three times where rounding changed the weights.

    Args:
        finest: weights that were rounded to this dtype, or to a finer one, are not run as they were written: nobody could tell.
    """
    import torch

    def run(state: Mapping[str, torch.Tensor]) -> TorchRun:
        return run_torch(reference, state, evidence.inputs, names, lift=True, precision="float64", device=device)

    exact = exact_state(plan, written, device)
    lifted = run(exact)
    rounded = written_state(written, device)
    coarser = any(
        epsilon(spec.dtype) > epsilon(finest) and not torch.equal(exact[name], rounded[name])
        for name, spec in written.specs.items()
        if is_float(spec.dtype)
    )
    as_written = run(rounded).values if coarser else lifted.values
    moved = run(_moved(exact, written, evidence.rounded)).values if evidence.rounded else lifted.values
    return LiftedTorch(lifted.values, as_written, moved, lifted.unlifted, lifted.casts, lifted.module)


def written_state(written: Written, device: str, dtype: str = "float64") -> dict[str, torch.Tensor]:
    """The weights as they were written, in a dtype."""
    import torch

    to = getattr(torch, dtype)
    return {
        name: torch.tensor(np.asarray(written.read(name), np.float64), device=device).to(to) for name in written.tensors
    }


def _moved(state: Mapping[str, torch.Tensor], written: Written, dtype: str) -> dict[str, torch.Tensor]:
    """The weights of a dtype, each moved by up to half a last place: one more rounding of numbers that nobody knows."""
    import torch

    rng = np.random.default_rng(0)
    out = {}
    for name, value in state.items():
        out[name] = value
        if written.specs[name].dtype == dtype:
            move = torch.tensor(rng.uniform(-0.5, 0.5, tuple(value.shape)) * epsilon(dtype), device=value.device)
            out[name] = value * (1 + move)
    return out


def check_model(
    plan: Plan, written: Written, reference: Reference, evidence: Evidence, *, device: str = "cpu"
) -> LevelReport:
    """Compares the PyTorch model with the evidence, boundary by boundary.

    Two figures for each: lifted float64 (are they the same function?) and `evidence.precision` (how far do they drift?).
    The level could not tell when an output was not compared, or only with numbers that say nothing.
    """
    started = time.monotonic()
    names = list(evidence.exact if evidence.exact is not None else evidence.drifted)
    torch_side = lifted_torch(plan, written, reference, evidence, names, device, finest=evidence.precision)
    exact, inputs, precision = torch_side.exact, evidence.inputs, evidence.precision
    state = written_state(written, device, precision)
    drifted = run_torch(reference, state, inputs, names, lift=False, precision=precision, device=device).values
    measures, missing = [], []
    drift = 0.0  # of JAX's run, up to here
    for name in names:
        if name in exact and exact[name].shape == evidence.shape(name):
            drift = max(drift, _jax_drift(name, evidence))
            measures.append(_measure(name, reference, evidence, torch_side, drifted, drift))
        else:
            missing.append(absent(name, evidence, exact.get(name)))
    diagnosis = None
    wrong = {measure.name for measure in measures if other_function(measure)}
    wrong |= {found.path for found in missing if found.path in exact and found.path not in evidence.samples}
    first = next((name for name in names if name in wrong), None)
    if first is not None:
        from convert.verify.diagnosis.diagnose import diagnose

        bounds = {m.name: m.tolerance if m.lifted is None else m.lifted_tolerance for m in measures}
        bound = bounds.get(first)
        allowed = bound.value if bound is not None else 0.0
        diagnosis = diagnose(plan, reference, torch_side.module, first, evidence, allowed, names)
    notes = [f"{len(measures)} boundaries and outputs, {evidence.origin}", *evidence.notes]
    for side, what in (("JAX", evidence.unlifted), ("torch", torch_side.unlifted)):
        if what:
            notes.append(f"could not be lifted to float64 on {side}'s side: {', '.join(what)}")
    notes += silent(measures, evidence)
    findings = [*missing, *differences(measures, evidence.precision)]
    open_ = list(undecided(measures, reference.outputs, evidence))
    verdict = Verdict.FAILED if findings else Verdict.INCONCLUSIVE if open_ else Verdict.PASSED
    told = verdict is Verdict.INCONCLUSIVE
    return LevelReport(
        "model",
        verdict,
        "; ".join(open_) if told else "",
        tuple(findings),
        tuple(measures),
        tuple(notes if told else [*notes, *open_]),
        time.monotonic() - started,
        diagnosis.to_dict() if diagnosis else None,
    )


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's weights, to build another one with."""
    return {name: value.detach() for name, value in module.state_dict().items()}


def _jax_drift(name: str, evidence: Evidence) -> float:
    """How far JAX's run is from its lifted run; 0 where that is not known or not finite, so that it allows nothing."""
    if evidence.exact is None:
        return 0.0
    drift = difference(evidence.drifted[name], evidence.exact[name], mask=evidence.masks.get(name)).relative
    return drift if math.isfinite(drift) else 0.0


def _measure(
    name: str, reference: Reference, evidence: Evidence, torch_side: LiftedTorch, run_values: Values, drift: float
) -> Measure:
    """One boundary or output; what torch's own run gave has no part in what is allowed.

    Args:
        run_values: of torch in the precision that users run.
        drift: JAX's largest so far.
    """
    mask = evidence.masks.get(name)
    precision = evidence.precision
    reduction, depth = reference.reduction, reference.depth
    exact, written, drifted = (
        evidence.pick(name, values[name]) for values in (torch_side.exact, torch_side.written, run_values)
    )
    run = _located(difference(drifted, evidence.drifted[name], precision=precision, mask=mask), name, evidence)
    is_logits = name in reference.logits
    predicted = agreement(drifted, evidence.drifted[name], mask=mask) if is_logits else None
    weights = 0.0
    lifted = lifted_bound = predicted_lifted = None
    if evidence.exact is not None:  # else a recording of a precision run alone
        lifted = _located(difference(exact, evidence.exact[name], precision="float64", mask=mask), name, evidence)
        own = difference(evidence.drifted[name], evidence.exact[name], mask=mask).relative
        lifted_bound = lifted_tolerance(own, precision, reduction, depth)
        predicted_lifted = agreement(exact, evidence.exact[name], mask=mask) if is_logits else None
        if evidence.rounded:
            moved = difference(evidence.pick(name, torch_side.moved[name]), exact, mask=mask).relative
            lifted_bound = rounded_tolerance(lifted_bound, moved, evidence.rounded)
            weights = lifted_bound.value  # as far as the lifted runs may be apart, so may the others
        if torch_side.written is not torch_side.exact:
            weights += difference(written, evidence.exact[name], mask=mask).relative
    allowed = run_tolerance(drift, precision, reduction, depth, weights=weights, casts=torch_side.casts)
    return Measure(name, run, allowed, lifted, lifted_bound, logits=predicted, lifted_logits=predicted_lifted)


def _located(found: Difference, name: str, evidence: Evidence) -> Difference:
    """The same, with the place in the whole value where only a sample was compared."""
    sample = evidence.samples.get(name)
    return found if sample is None else replace(found, at=sample.index(found.at))
