"""Run the PyTorch model on the converted weights, in the precision that users run and in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.tensor_spec import is_float
from convert.layers.base import Step
from convert.layers.step_tensor import expected
from convert.numerics.bits import same_bits
from convert.numerics.compare import epsilon
from convert.numerics.precision import torch_pinned
from convert.numerics.real_numbers import tensor_in_float64
from convert.planning.plan import Plan
from convert.references.protocol import INPUT, Reference, observe
from convert.references.user_reference import require_outputs
from convert.verify.sides.evidence import Evidence, Values
from convert.verify.sides.float64_plan import float64_step
from convert.writing.execute import computed
from convert.writing.written import Written

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]


def exact_state(plan: Plan, written: Written, device: str) -> dict[str, torch.Tensor]:
    """Return the weights in float64, before their last rounding.

    A tensor in the file that is not what the plan makes is used as it is in the file.
    """
    import torch

    state = {}
    for step in plan.steps:
        if step.name not in written.tensors:
            continue
        value = _exact(step, plan, written.read(step.name)).copy()  # torch takes no flipped views
        state[step.name] = torch.tensor(value, device=device)
    for name in written.tensors:
        if name not in state:
            state[name] = torch.tensor(_in_float64(written.read(name)), device=device)
    return state


def _in_float64(value: Array) -> Array:
    """Return an array in float64; integers and truth values, such as the indices and masks that a module saves, as they are."""
    if not is_float(value.dtype.name):
        return value
    with np.errstate(invalid="ignore"):  # a signalling NaN, such as swapped bytes give
        return np.asarray(value, np.float64)


def _exact(step: Step, plan: Plan, got: Array) -> Array:
    """Return the value of a tensor before its last rounding, if the file holds the rounded value."""
    if not is_float(got.dtype.name):
        return _in_float64(got)
    if not step.parts and step.value is not None and same_bits(got, computed(step)):  # a table that code computes
        return computed(replace(step, spec=replace(step.spec, dtype="float64")))
    if not step.parts:
        return _in_float64(got)
    if not same_bits(got, expected(step, plan.source)):
        return _in_float64(got)
    return expected(float64_step(step), plan.source_in_float64)


@dataclass(frozen=True)
class TorchRun:
    """One run of the PyTorch model.

    Attributes:
        values: at the boundaries, and the outputs.
        unlifted: operations that could not run in float64.
        casts: of a float64 run: the narrower floats to which the code casts, which the run removed.
        rounded: of a float64 run: the tensors that were rounded before the code ran.
        switches: whether the code of the model lets PyTorch round the factors of float32 products.
    """

    values: dict[str, Array]
    unlifted: tuple[str, ...]
    casts: frozenset[str]
    module: torch.nn.Module
    rounded: tuple[str, ...] = ()
    switches: bool = False


def run_torch(
    reference: Reference,
    state: Mapping[str, torch.Tensor],
    inputs: Values,
    names: list[str],
    *,
    lift: bool,
    precision: str,
    device: str,
    shaken: bool = False,
) -> TorchRun:
    """Run the PyTorch model and record the values at the boundaries `names`.

    Args:
        lift: run in float64 throughout, with the casts of the code removed.
        shaken: whether a lifted run moves the tensors that were rounded before the code ran.
    """
    import torch

    from convert.numerics.float32_products import rounds_float32_products
    from convert.numerics.lift_torch import Lift, lifted

    with torch_pinned(), torch.no_grad():
        if lift:
            given = input_tensors(inputs, "float64", device)
            with lifted(Lift(shaken)) as mode:
                module = reference.build(state).to(device)
                mode.know(module.state_dict().values())
                values = observed(reference, module, given, names)
            return TorchRun(values, tuple(sorted(mode.unlifted)), mode.casts, module, tuple(sorted(mode.rounded)))
        module = reference.build(state).to(device)
        values = observed(reference, module, input_tensors(inputs, precision, device), names)
        return TorchRun(values, (), frozenset(), module, switches=rounds_float32_products())


def input_tensors(inputs: Values, precision: str, device: str | torch.device) -> dict[str, Any]:
    """Return the inputs as tensors, cast to this precision if they are floating, or complex."""
    import torch

    of_complex = torch.complex128 if precision == "float64" else torch.complex64

    out: dict[str, Any] = {}
    for name, value in inputs.items():
        tensor = torch.as_tensor(np.array(value), device=device)
        dtype = getattr(torch, precision) if tensor.is_floating_point() else of_complex if tensor.is_complex() else None
        out[name] = tensor.to(dtype or tensor.dtype)
    return out


def boundaries_of(reference: Reference, module: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names that are submodules of the module; the model level reports those that are not."""
    known = {name for name, _ in module.named_modules()}
    return [name for name in names if name not in reference.outputs and name.removesuffix(INPUT) in known]


def observed(
    reference: Reference, module: torch.nn.Module, inputs: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Array]:
    """Run the model once and return the values at the boundaries among `names`, and the outputs."""
    import torch

    with observe(module, boundaries_of(reference, module, names)) as values:
        outputs = reference.run(module, inputs)
    require_outputs(reference.outputs, "run", outputs)
    outputs = {name: torch.as_tensor(value) for name, value in outputs.items()}
    return {name: tensor_in_float64(value) for name, value in {**values, **outputs}.items()}


@dataclass(frozen=True)
class TorchInFloat64:
    """The PyTorch model, run in float64.

    Attributes:
        exact: values with the weights before their last rounding; written: with the weights in the file.
        perturbed: with the weights changed at random by as much as rounding may have changed them, if their values before
            rounding are unknown; else the same as `exact`.
        unlifted: operations that could not run in float64.
        casts: the narrower floats to which the code casts, which the runs removed.
        rounded: the tensors that were rounded before the code ran; `shaken`: values with these moved as much as rounding may have
            moved them, or None if there are none.
    """

    exact: Values
    written: Values
    perturbed: Values
    unlifted: tuple[str, ...]
    casts: frozenset[str]
    module: torch.nn.Module
    rounded: tuple[str, ...] = ()
    shaken: Values | None = None


def torch_in_float64(
    plan: Plan,
    written: Written,
    reference: Reference,
    evidence: Evidence,
    names: list[str],
    device: str,
    *,
    finest: str = "float64",
) -> TorchInFloat64:
    """Run the PyTorch model in float64; two or three times if rounding changed the weights.

    Args:
        finest: weights that were rounded to this dtype or a finer one run only before rounding: the effect is negligible.
    """
    import torch

    def run(state: Mapping[str, torch.Tensor], shaken: bool = False) -> TorchRun:
        inputs = evidence.inputs
        return run_torch(reference, state, inputs, names, lift=True, precision="float64", device=device, shaken=shaken)

    exact = exact_state(plan, written, device)
    lifted = run(exact)
    rounded = written_state(written, device)
    coarser = any(
        epsilon(spec.dtype) > epsilon(finest) and not torch.equal(exact[name], rounded[name])
        for name, spec in written.specs.items()
        if is_float(spec.dtype)
    )
    as_written = run(rounded).values if coarser else lifted.values
    perturbed = run(_perturbed(exact, written, evidence.rounded)).values if evidence.rounded else lifted.values
    shaken = run(exact, shaken=True).values if lifted.rounded else None
    of_run = (lifted.unlifted, lifted.casts, lifted.module, lifted.rounded)
    return TorchInFloat64(lifted.values, as_written, perturbed, *of_run, shaken)


def written_state(written: Written, device: str, dtype: str = "float64") -> dict[str, torch.Tensor]:
    """Return the weights in the file, cast to a dtype."""
    import torch

    to = getattr(torch, dtype)
    state = {name: torch.tensor(_in_float64(written.read(name)), device=device) for name in written.tensors}
    return {name: x.to(to) if x.is_floating_point() else x for name, x in state.items()}


def _perturbed(state: Mapping[str, torch.Tensor], written: Written, dtype: str) -> dict[str, torch.Tensor]:
    """Change each weight of a dtype at random by up to half a unit in the last place, as one more rounding would."""
    import torch

    rng = np.random.default_rng(0)
    out = {}
    for name, value in state.items():
        out[name] = value
        if written.specs[name].dtype == dtype:
            move = torch.tensor(rng.uniform(-0.5, 0.5, tuple(value.shape)) * epsilon(dtype), device=value.device)
            out[name] = value * (1 + move)
    return out
