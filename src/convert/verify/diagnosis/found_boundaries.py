"""Find boundaries that the reference does not return: the modules of the JAX model, matched to those of PyTorch by the rules.

A rule names the leaves of a layer and its module in PyTorch. The JAX model runs once more, and its modules record what they are
given and give; hooks do the same in PyTorch. Only layers of which a rule makes all tensors from the leaves of one module are
compared. The two libraries may keep channels, heads or the batch on other axes, so each value is compared in the orders that fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.layers.base import Step
from convert.numerics.compare import difference
from convert.numerics.precision import jax_precision
from convert.planning.plan import Plan
from convert.references.protocol import INPUT, Reference
from convert.verify.diagnosis.norm import CHANNEL_NORMS, FEATURE_NORMS
from convert.verify.diagnosis.site import holder_of
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.run_torch import input_tensors, observed

if TYPE_CHECKING:
    import torch

    from convert.verify.sides.jax_modules import ModuleCall

Array = np.ndarray[Any, np.dtype[Any]]
# Kinds whose module computes more or less than the layer in some libraries: a table is scaled, a parameter has no module.
NOT_COMPARED = ("embedding", "parameter")
MOST_AXES = 5  # of a value all orders of whose axes are tried
HOOKS_FAIL = (AttributeError, AssertionError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class FoundBoundaries:
    """The boundaries that were found in front of a difference.

    Attributes:
        evidence: what the JAX model computed, with the values at these boundaries as PyTorch has them.
        equal: names of boundaries that are equal, in the order of the data.
        differing: names of those that differ, in the same order.
    """

    evidence: Evidence
    equal: tuple[str, ...]
    differing: tuple[str, ...]


def find_boundaries(
    plan: Plan, reference: Reference, module: torch.nn.Module, evidence: Evidence, allowed: float
) -> FoundBoundaries | None:
    """Run both models once more and compare the layers that have a module on both sides; None if there are none.

    Args:
        module: the PyTorch model in float64.
        allowed: the relative error up to which two values are equal.
    """
    if reference.jax is None or not evidence.is_live or evidence.float64_values is None:
        return None
    try:
        calls = _jax_calls(plan, reference, evidence)
    except HOOKS_FAIL:  # the code of the JAX model does not take hooks
        return None
    found = list(_matched(_layers(plan), calls))
    others = set(_in_another_order(plan))
    names = [name for layer, _ in found for name in (layer + INPUT, layer) if name not in others]
    values = _torch_values(reference, module, evidence, names)
    aligned: dict[str, Array] = {}
    equal: list[str] = []
    differing: list[str] = []
    for layer, call in found:
        for name, value in ((layer + INPUT, call.given), (layer, call.result)):
            if name not in values or value is None or name in evidence.native_values:
                continue
            mask = _mask(values[name].shape, evidence.masks)
            orders = list(_orders(value, values[name].shape))
            if not orders:
                continue
            errors = [difference(x, values[name], mask=mask).relative for x in orders]
            # Another order than the likeliest counts where it makes the two equal, not where it only brings them nearer.
            right = next((k for k, error in enumerate(errors) if error <= allowed), 0)
            error, aligned[name] = errors[right], orders[right]
            (equal if error <= allowed else differing).append(name)
    if not aligned:
        return None
    masks = {name: mask for name, x in aligned.items() if (mask := _mask(x.shape, evidence.masks)) is not None}
    extended = replace(
        evidence,
        float64_values={**aligned, **evidence.float64_values},
        native_values={**aligned, **evidence.native_values},
        masks={**evidence.masks, **masks},
    )
    return FoundBoundaries(extended, tuple(equal), tuple(differing))


def _jax_calls(plan: Plan, reference: Reference, evidence: Evidence) -> list[ModuleCall]:
    from convert.numerics.lift_jax import lift
    from convert.verify.sides.jax_modules import with_module_calls
    from convert.verify.sides.run_jax import jax_weights

    side, calls = with_module_calls(reference.jax_side())
    with jax_precision(evidence.precision):
        lift(side)(jax_weights(plan), dict(evidence.inputs))
    return calls()


def _torch_values(
    reference: Reference, module: torch.nn.Module, evidence: Evidence, names: Sequence[str]
) -> dict[str, Array]:
    import torch

    from convert.numerics.lift_torch import lifted

    with torch.no_grad(), lifted():
        inputs = input_tensors(evidence.inputs, "float64", next(module.parameters()).device)
        return observed(reference, module, inputs, names)


def _layers(plan: Plan) -> Mapping[tuple[str, int | None], str]:
    """Return (module of the leaves, index in its stack) -> module of PyTorch, where one stands for the other alone."""
    sources: dict[str, set[tuple[str, int | None] | None]] = {}
    for step in plan.steps:
        sources.setdefault(holder_of(step.name), set()).update(_sources(step, plan))
    found: dict[tuple[str, int | None], list[str]] = {}
    for module, places in sources.items():
        if len(places) == 1 and (place := next(iter(places))) is not None:
            found.setdefault(place, []).append(module)
    return {place: modules[0] for place, modules in found.items() if len(modules) == 1}


def _sources(step: Step, plan: Plan) -> Iterator[tuple[str, int | None] | None]:
    """Yield the modules that hold the leaves of a tensor; None for one that says nothing of the module's output."""
    rule = step.parts[0].rule if step.parts else None
    if rule is None or len(step.parts) > 1 or step.group is not None or step.kind_name in NOT_COMPARED:
        yield None
        return
    if rule.rope is not None or rule.prescaled_by is not None:  # its output is another one, as the rule says
        yield None
        return
    leaf, (_, _, index) = step.parts[0].leaf, step.parts[0].at.partition("=")
    path = leaf.removeprefix(f"{plan.root}/" if plan.root else "").removesuffix("/value").rpartition("/")[0]
    if index and not index.isdecimal():
        yield None
    else:
        yield path, int(index) if index else None


def _in_another_order(plan: Plan) -> Iterator[str]:
    """Yield the inputs and outputs of layers whose rule declares that the two sides flatten or concatenate them in different orders."""
    for step in plan.steps:
        rule = step.parts[0].rule if step.parts else None
        if rule is None:
            continue
        layer, outputs = holder_of(step.name), "".join(of for _, of in rule.kind.weight_axes)
        if rule.flattened is not None or any(axis not in outputs or rule.kind_name in (*FEATURE_NORMS, *CHANNEL_NORMS) for axis in rule.concatenated):  # fmt: skip
            yield layer + INPUT
        if any(axis in outputs for axis in rule.concatenated):
            yield layer


def _matched(
    layers: Mapping[tuple[str, int | None], str], calls: Sequence[ModuleCall]
) -> Iterator[tuple[str, ModuleCall]]:
    """Yield modules of PyTorch with the first call of the JAX module of the same layer, in the order of the calls."""
    paths = {path for path, _ in layers}
    counts: dict[str, int] = {}
    for call in calls:
        owners = [path for path in paths if call.path and (path == call.path or path.endswith(f"/{call.path}"))]
        if call.path in owners:
            owners = [call.path]
        if len(owners) != 1:
            continue
        count = counts[call.path] = counts.get(call.path, -1) + 1
        module = layers.get((owners[0], count)) or (layers.get((owners[0], None)) if count == 0 else None)
        if module is not None:
            yield module, call


def _orders(value: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """Yield a value of JAX in the orders of axes that have the shape of PyTorch's, the likeliest first."""
    moved = [np.moveaxis(value, *axes) for axes in ((-1, 1), (0, 1))] if value.ndim > 2 else []
    fitting = [x for x in (value, *moved) if x.shape == shape]
    if not fitting and value.ndim == len(shape) <= MOST_AXES:  # heads in front of the positions
        fitting = [x for axes in permutations(range(value.ndim)) if (x := value.transpose(axes)).shape == shape]
    yield from fitting
    if value.shape != shape and value.size == int(np.prod(shape)):  # heads side by side, or one batch has no axis
        yield value.reshape(shape)


def _mask(shape: tuple[int, ...], masks: Mapping[str, Array]) -> Array | None:
    """Return a mask of an output whose leading axes are those of the value: padding does not count."""
    for mask in masks.values():
        lead = mask.shape[: mask.ndim - next((k for k, n in enumerate(reversed(mask.shape)) if n != 1), mask.ndim)]
        if len(lead) > 1 and shape[: len(lead)] == lead:
            return mask.reshape(*lead, *[1] * (len(shape) - len(lead)))
    return None
