"""The target's module alone, for rules that name no reference: the class that config.json names, without a JAX model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from convert.layers.base import Step
from convert.planning.plan import Plan
from convert.references.flax_transformers.transformers_module import build
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
        build=partial(_build, plan),
        run=lambda module, inputs: {},
        outputs=(),
        reduction=1,
        depth=1,
        facts=partial(_facts, plan),
    )


def _build(plan: Plan, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    return build(plan, _tied(class_of(plan)[0]), weights)


def _tied(name: str) -> Mapping[str, str]:
    """Return the names that a class ties to others."""
    try:
        import transformers
    except ImportError:
        return {}
    keys = getattr(getattr(transformers, name, None), "_tied_weights_keys", None)
    return keys if isinstance(keys, Mapping) else {}


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
    for name in sorted(names):
        parent, _, own = name.rpartition(".")
        shapes = {
            child: tuple(cast("Any", part).weight.shape)
            for child, part in module.get_submodule(parent).named_children()
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
