"""Run the two sides of a layer, and compare them: in float64, and in the dtype of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.core.ops import apply
from convert.core.tensor_spec import is_float
from convert.core.value_ops import Add, AddIdentity, Multiply
from convert.layers.activations import ACTIVATIONS, activation_pair
from convert.layers.base import LayerLeaves, ProbeSample, Step
from convert.layers.probe import Probe, probe_of_sum
from convert.layers.step_tensor import assemble
from convert.numerics.compare import difference, epsilon
from convert.numerics.tolerances import Tolerance
from convert.planning.plan import Plan
from convert.verify.report.report import Measure
from convert.writing.execute import computed

Array = np.ndarray[Any, np.dtype[Any]]


def measure_tensor(sample: ProbeSample) -> Measure | None:
    """Compare the two sides of a tensor's layer; None for tensors that are not of floating point."""
    if not is_float(sample.stored.dtype.name) or not is_float(sample.written.dtype.name):
        return None
    probe = sample.rule.kind.probe(sample)
    step, precision = sample.step, sample.precision
    exact = difference(*probe.run("float64"), precision="float64")
    drift = difference(*probe.run(precision), precision=precision)
    return Measure(
        f"{step.name}[{sample.part.place}]" if sample.part.place else step.name,
        drift,
        _rounding(probe, precision),
        exact,
        _rounding(probe, "float64") if not step.loses and not step.arithmetic else _cast(probe, step),
        sample.rule.at.line_only,
    )


def _rounding(probe: Probe, precision: str) -> Tolerance:
    return Tolerance(probe.factor * epsilon(precision), f"{probe.terms} x eps({precision}): {probe.reason}")


def _cast(probe: Probe, step: Step) -> Tolerance:
    """Return the bound in float64 where the weights were rounded to the written dtype: nothing else may differ."""
    reason = step.loses or f"rounded once to {step.spec.dtype} after '{step.arithmetic}'"
    value = probe.cast_factor * epsilon(step.spec.dtype)
    return Tolerance(value, f"{probe.cast_factor:g} x eps({step.spec.dtype}): the weights were {reason}")


def measure_group(
    group: LayerLeaves,
    steps: list[Step],
    leaves: Mapping[str, Array],
    written: Mapping[str, Array],
    *,
    device: str,
    rng: np.random.Generator,
) -> dict[str, Measure]:
    """Compare the two sides of a layer whose tensors belong together, with its weights, and with random ones.

    Where the state is 0, or biases or coefficients are, different equations agree; with random weights they do not.

    Args:
        steps: that make the tensors of the layer.
        leaves: of the source, by name.
        written: tensors of the file, by name.

    Returns:
        Which weights -> measure; nothing when the leaves are not of floating point.
    """
    if not all(is_float(x.dtype.name) for x in (*leaves.values(), *written.values())):
        return {}
    kind, name = group.rule.kind, f"{group.module} ({group.suffix})" if group.suffix else group.module
    role_of = {leaf: role for role, (leaf, _) in group.leaves.items()}
    random = {leaf: kind.random_leaf(role_of[leaf], x, rng) for leaf, x in leaves.items()}
    from_random = {step.name: _made(step, random) for step in steps}
    measures = {}
    for weights, source, tensors in (("", leaves, written), ("random weights", random, from_random)):
        stored = {role: apply(takes, source[leaf]) for role, (leaf, takes) in group.leaves.items()}
        by_role = {step.role: _of_inputs_in_order(tensors[step.name], step.role, group.inputs) for step in steps}
        probe = kind.probe_group(stored, by_role, device=device, rng=rng)
        measures[weights] = _measure_group(f"{name}, {weights}" if weights else name, probe, steps, group)
    return measures


def _of_inputs_in_order(tensor: Array, role: str, inputs: tuple[int, ...]) -> Array:
    """Return a tensor of a recurrent layer with the columns of its input in the source's order."""
    return tensor[:, np.argsort(inputs)] if inputs and role == "weight_ih" else tensor


def _made(step: Step, leaves: Mapping[str, Array]) -> Array:
    """Compute the tensor that a step makes of these leaves."""
    if not step.parts:
        return computed(step)
    return assemble(step.parts, [apply(part.ops, leaves[part.leaf]) for part in step.parts])


def _measure_group(name: str, probe: Probe, steps: list[Step], group: LayerLeaves) -> Measure:
    exact, drift = (difference(*probe.run(dtype), precision=dtype) for dtype in ("float64", "float32"))
    exact_bound, drift_bound = (_group_bound(probe, dtype, steps) for dtype in ("float64", "float32"))
    return Measure(name, drift, drift_bound, exact, exact_bound, group.rule.at.line_only)


def _group_bound(probe: Probe, precision: str, steps: list[Step]) -> Tolerance:
    """Return the bound of a layer with several tensors: on top of both sides' rounding comes what a cast of the weights lost."""
    bound = _rounding(probe, precision)
    rounded = next((step.spec.dtype for step in steps if step.loses or _rounds(step)), None)
    if rounded is None:
        return bound
    value = bound.value + probe.cast_factor * epsilon(rounded)
    return Tolerance(value, f"{bound.why}, and the weights were rounded to {rounded}")


def _rounds(step: Step) -> bool:
    """Whether a step computes values that are rounded; a change of sign rounds nothing."""
    ops = (op for part in step.parts for op in part.ops)
    return any(isinstance(op, (Add, AddIdentity)) or (isinstance(op, Multiply) and abs(op.value) != 1) for op in ops)


def measure_activations(plan: Plan) -> list[Measure]:
    """Compare each activation that the rules declare, over the range where its variants differ most and where it saturates."""
    import jax.numpy as jnp
    import torch

    x = np.linspace(-12, 12, 4801)
    layers = {
        str(layer["activation"]): str(layer["layer"]) for layer in plan.layers if layer.get("activation") in ACTIVATIONS
    }
    measures = []
    for name, layer in layers.items():
        jax_function, torch_function = activation_pair(name)

        def run(dtype: str, one: Any = jax_function, two: Any = torch_function) -> tuple[Array, Array]:
            return two(torch.tensor(x, dtype=getattr(torch, dtype))).numpy(), np.asarray(one(jnp.asarray(x, dtype)))

        exact, drift = (difference(*run(dtype), precision=dtype) for dtype in ("float64", "float32"))
        bounds = [_rounding(probe_of_sum(run, 1), dtype) for dtype in ("float32", "float64")]
        measures.append(Measure(f"{name} (after {layer})", drift, bounds[0], exact, bounds[1]))
    return measures
