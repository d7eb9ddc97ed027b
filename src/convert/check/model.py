"""Level 4: the JAX model against the PyTorch model, end to end and at every boundary, lifted to float64 and as users run it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.check.compare import MARGIN, Difference, agreement, difference, lifted_tolerance, run_tolerance
from convert.check.hypotheses import same_bits
from convert.check.machine import jax_precision, torch_pinned
from convert.check.report import Finding, LevelReport, Measure, Verdict
from convert.check.sampling import Sample
from convert.check.written import Written
from convert.errors import OwnCodeError
from convert.fields import nearest
from convert.ops import Cast, Op, apply, is_float
from convert.plan import Plan
from convert.steps import Step, assemble

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
        name.removeprefix(prefix).removesuffix("/value"): plan.source.on_disk.read(name)
        for name in plan.source.on_disk.leaves
        if name not in dropped
    }


def live_evidence(plan: Plan, reference: Reference, *, precision: str = "float32", seed: int = 0) -> Evidence:
    """Runs the JAX model, in `precision` and lifted.

    Raises:
        ImportError: JAX or the model's package is not installed.
        OwnCodeError: the reference's `jax` does not give its outputs by name.
    """
    import jax

    from convert.check.lift_jax import lift

    side = reference.jax_side()
    inputs = reference.inputs(seed)
    weights = jax_weights(plan)
    with jax_precision(precision):
        narrow = {name: as_jax(value, precision) for name, value in weights.items()}
        drifted = side(narrow, {name: as_jax(value, precision) for name, value in inputs.items()})
        _require_outputs(reference, "jax", drifted)
        lifted = lift(side)
        exact = lifted(weights, dict(inputs))
    return Evidence(  # in the order of the plain call: what passes through a jaxpr comes out with sorted keys
        inputs,
        {name: np.asarray(exact[name]) for name in drifted},
        {name: np.asarray(value, np.float64) for name, value in drifted.items()},
        reference.masks(inputs),
        precision,
        lifted.unlifted,
        environment={"jax": jax.__version__},
    )


def _require_outputs(reference: Reference, function: str, made: Any) -> None:
    """Raises where a function of the reference does not give each of `Reference.outputs` by name: it would go uncompared."""
    if not isinstance(made, Mapping):
        raise OwnCodeError(f"`{function}` gave {type(made).__name__}; it must give values by name: {', '.join(reference.outputs)}")  # fmt: skip
    for name in reference.outputs:
        if name not in made:
            raise OwnCodeError(f"`{function}` gave no value for the output {name!r}{nearest(name, made)}; `outputs` of the reference lists what it must give")  # fmt: skip


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
    leaves = [plan.source.read(part.leaf) for part in step.parts]
    made = [apply(part.ops, leaf) for part, leaf in zip(step.parts, leaves, strict=True)]
    if not same_bits(got, assemble(step.parts, made)):
        return np.asarray(got, np.float64)
    wide = plan.source.unrounded()
    made = [apply(_widened(part.ops), wide.read(part.leaf)) for part in step.parts]
    return assemble(step.parts, made)


def _widened(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The same operations in float64, without the casts."""
    return (Cast("float64"), *(op for op in ops if not isinstance(op, Cast)))


def run_torch(
    reference: Reference,
    state: Mapping[str, torch.Tensor],
    inputs: Values,
    names: list[str],
    *,
    lift: bool,
    precision: str,
    device: str,
) -> tuple[dict[str, Array], tuple[str, ...], torch.nn.Module]:
    """The PyTorch model's values at the boundaries `names` and its outputs.

    Returns:
        The values, the operations that could not be lifted, and the module.
    """
    import torch

    from convert.check.lift_torch import lifted

    with torch_pinned(), torch.no_grad():
        if lift:
            with lifted() as mode:
                module = reference.build(state).to(device)
                values = observed(reference, module, input_tensors(inputs, "float64", device), names)
            return values, tuple(sorted(mode.unlifted)), module
        module = reference.build(state).to(device)
        return observed(reference, module, input_tensors(inputs, precision, device), names), (), module


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
    from convert.references.protocol import observe

    with observe(module, boundaries_of(reference, module, names)) as values:
        outputs = reference.run(module, inputs)
    _require_outputs(reference, "run", outputs)
    return {name: value.detach().double().cpu().numpy() for name, value in {**values, **outputs}.items()}


def check_model(
    plan: Plan, written: Written, reference: Reference, evidence: Evidence, *, device: str = "cpu"
) -> LevelReport:
    """Compares the PyTorch model with the evidence, boundary by boundary.

    Two figures for each: lifted float64 (are they the same function?) and `evidence.precision` (how far do they drift?).
    """
    import torch

    started = time.monotonic()
    names = list(evidence.exact if evidence.exact is not None else evidence.drifted)
    exact, unlifted, lifted_module = run_torch(
        reference,
        exact_state(plan, written, device),
        evidence.inputs,
        names,
        lift=True,
        precision="float64",
        device=device,
    )
    state = {
        name: torch.tensor(np.asarray(written.read(name), np.float64), device=device).to(
            getattr(torch, evidence.precision)
        )
        for name in written.tensors
    }
    drifted, _, _ = run_torch(
        reference, state, evidence.inputs, names, lift=False, precision=evidence.precision, device=device
    )
    measures, missing = [], []
    first: tuple[str, float] | None = None  # where they differ first, and what is allowed there
    for name in names:
        if name in exact and exact[name].shape == evidence.shape(name):
            measures.append(measure := _measure(name, reference, evidence, exact[name], drifted[name]))
            bound = measure.tolerance if measure.lifted is None else measure.lifted_tolerance
            wrong = not measure.passed
        else:
            missing.append(_absent(name, evidence, exact.get(name)))
            bound, wrong = None, name in exact and name not in evidence.samples
        if wrong and first is None:
            first = name, bound.value if bound is not None else 0.0
    findings = _findings(measures, missing)
    diagnosis = None
    if first is not None:
        from convert.check.diagnose import diagnose

        diagnosis = diagnose(plan, reference, lifted_module, first[0], evidence, first[1], names)
    notes = [f"{len(measures)} boundaries and outputs, {evidence.origin}", *evidence.notes]
    for side, what in (("JAX", evidence.unlifted), ("torch", unlifted)):
        if what:
            notes.append(f"could not be lifted to float64 on {side}'s side: {', '.join(what)}")
    return LevelReport(
        "model",
        Verdict.FAILED if findings else Verdict.PASSED,
        "",
        tuple(findings),
        tuple(measures),
        tuple(notes),
        time.monotonic() - started,
        diagnosis.to_dict() if diagnosis else None,
    )


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's weights, to build another one with."""
    return {name: value.detach() for name, value in module.state_dict().items()}


def _measure(name: str, reference: Reference, evidence: Evidence, exact: Array, drifted: Array) -> Measure:
    mask = evidence.masks.get(name)
    precision = evidence.precision
    reduction, depth = reference.reduction, reference.depth
    exact, drifted = evidence.pick(name, exact), evidence.pick(name, drifted)
    run = _located(difference(drifted, evidence.drifted[name], precision=precision, mask=mask), name, evidence)
    torch_drift = difference(drifted, exact, mask=mask).relative
    is_logits = name in reference.logits
    predicted = agreement(drifted, evidence.drifted[name], mask=mask) if is_logits else None
    if evidence.exact is None:  # a recording of a precision run alone: the lifted torch run stands for the function
        allowed = run_tolerance((torch_drift,), precision, reduction, depth)
        return Measure(name, run, allowed, logits=predicted)
    jax_drift = difference(evidence.drifted[name], evidence.exact[name], mask=mask).relative
    allowed = lifted_tolerance(jax_drift, precision, reduction, depth, evidence.rounded or "float64")
    if evidence.rounded:
        torch_drift = max(torch_drift, allowed.value / MARGIN)
    return Measure(
        name,
        run,
        run_tolerance((jax_drift, torch_drift), precision, reduction, depth),
        _located(difference(exact, evidence.exact[name], precision="float64", mask=mask), name, evidence),
        allowed,
        logits=predicted,
        lifted_logits=agreement(exact, evidence.exact[name], mask=mask) if is_logits else None,
    )


def _located(found: Difference, name: str, evidence: Evidence) -> Difference:
    """The same, with the place in the whole value where only a sample was compared."""
    sample = evidence.samples.get(name)
    return found if sample is None else replace(found, at=sample.index(found.at))


def _absent(name: str, evidence: Evidence, got: Array | None) -> Finding:
    if got is None:
        said = "has a value here, and the PyTorch module has no submodule of this name, or does not call it"
    else:
        said = (
            f"has a value of shape {list(evidence.shape(name))} here, and the PyTorch module one of {list(got.shape)}"
        )
    return Finding(f"{name}: the JAX model {said}", name)


def _findings(measures: list[Measure], missing: list[Finding]) -> list[Finding]:
    findings = list(missing)
    wrong = [measure for measure in measures if not measure.passed]
    if wrong:
        first = wrong[0]
        shown = first.lifted or first.difference
        bound = first.lifted_tolerance or first.tolerance
        assert bound is not None
        findings.append(
            Finding(
                f"first difference at {first.name}: relative error {shown.relative:.1e} where {bound.value:.1e} is allowed "
                f"(PyTorch {shown.got:.6g}, JAX {shown.want:.6g} at {list(shown.at)}); {len(wrong)} of {len(measures)} "
                "boundaries and outputs differ",
                first.name,
                data={"first": first.name, "differing": [measure.name for measure in wrong]},
            )
        )
    return findings
