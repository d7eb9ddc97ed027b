"""The target's module alone: the class of transformers that config.json names, without a JAX model.

Rules that name no reference have its facts compared. `logits` is the reference of a causal language model whose JAX side is too
large or too young to be run here: its values come from a recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from convert.layers.base import Step
from convert.planning.plan import Plan
from convert.references.flax_classes import build_class, run_class
from convert.references.loading import class_of
from convert.references.module_facts import Block, facts
from convert.references.protocol import Reference

if TYPE_CHECKING:
    import torch

UNKNOWN = "unknown"


def target_alone(plan: Plan) -> Reference | None:
    """Return what builds and describes transformers' module; None if the target of the plan is none of its classes."""
    if not {"architectures", "model_type"} <= plan.rules.targets[plan.target].config.keys():
        return None
    return Reference(
        inputs=lambda seed: {},
        build=partial(build_class, *class_of(plan), plan),
        run=lambda module, inputs: {},
        outputs=(),
        reduction=1,
        depth=1,
        facts=partial(_facts, plan),
    )


def logits(plan: Plan) -> Reference:
    """Return the PyTorch model whose output `logits` is compared with a recording of the JAX model.

    Raises:
        ValueError: the target of the plan is no class of transformers.
    """
    alone = target_alone(plan)
    if alone is None:
        raise ValueError(f"the target {plan.target} is no class of transformers")
    widths = [step.spec.shape[-1] for step in plan.steps if len(step.spec.shape) > 1]
    outputs = ("logits",)
    return replace(
        alone,
        run=partial(run_class, outputs),
        outputs=outputs,
        logits=outputs,
        reduction=max(widths, default=1),
        depth=sum(size for index, size in plan.sizes.items() if len(index) == 1 and index.islower()) or 1,
    )


def _facts(plan: Plan, module: torch.nn.Module) -> Mapping[str, Mapping[str, Any]]:
    """Return the facts of norms and convolutions, and the activations for which the rules declare one and the module tells one."""
    found = {name: dict(values) for name, values in facts(module, _blocks(plan, module)).items()}
    for values in found.values():
        if values.get("activation") == UNKNOWN:  # of the other branch of a gated layer
            del values["activation"]
    return found


def _blocks(plan: Plan, module: torch.nn.Module) -> Iterator[Block]:
    """Yield the layers with an activation that stand with the layer behind it in one module, and perhaps with a gated one."""
    names = {step.name.rpartition(".")[0] for step in plan.steps if _has_activation(step)}
    modules = dict(module.named_modules())
    for name in sorted(names):
        parent, _, own = name.rpartition(".")
        if parent not in modules:  # an expert: the class keeps all of them in one tensor
            continue
        shapes = {
            child: tuple(cast("Any", part).weight.shape)
            for child, part in modules[parent].named_children()
            if getattr(getattr(part, "weight", None), "ndim", 0) == 2
        }
        others = {child: shape for child, shape in shapes.items() if child != own}
        behind = [child for child, shape in others.items() if shape == shapes.get(own, ())[::-1]]
        beside = [child for child, shape in others.items() if shape == shapes.get(own) and child not in behind]
        if parent and len(behind) == 1 and len(beside) <= 1 and len(others) == 1 + len(beside):
            yield Block(parent, name, f"{parent}.{behind[0]}", *(f"{parent}.{child}" for child in beside))


def _has_activation(step: Step) -> bool:
    rules = (part.rule for part in step.parts if part.rule is not None)
    activations = {getattr(rule.kind, "activation", None) for rule in rules}
    return step.name.endswith(".weight") and bool(activations - {None, "none"})
