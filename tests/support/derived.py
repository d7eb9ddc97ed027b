"""A derivation that is known to be right: read off the plan of a rule file, with drawn leaves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.api import select_rules
from convert.drafting.like.target import TargetModel, TargetModule
from convert.inference.derivation import Arithmetic, Derivation, Evidence, Fact, Grade, Part, Role, Site, Tensor
from convert.inference.rule_file.drawn import DrawnLeaves
from convert.layers.base import Step
from convert.layers.step_tensor import expected
from convert.planning.options import ConversionOptions
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.rules.file import RuleFile

ROLES = {"linear": Role.PRODUCT, "embedding": Role.LOOKUP, "conv": Role.CONVOLUTION, "conv_transpose": Role.CONVOLUTION}
OFFSETS = {Arithmetic.SAME: 0.0, Arithmetic.ONE_PLUS: 1.0, Arithmetic.MINUS_ONE: -1.0}


def derived(model: str | RuleFile, checkpoint: Path, settings: Mapping[str, Any]) -> tuple[Derivation, TargetModel]:
    """Return what a search would find if the rules are right, and the target that they describe."""
    match = select_rules(model, checkpoint, ConversionOptions(settings=settings))
    source = DrawnLeaves({name: leaf.spec.shape for name, leaf in match.source.leaves.items()})
    source.path = match.source.path  # for config.json
    plan = make_plan(match.rules, source, match.options)
    shapes = {name: leaf.spec.shape for name, leaf in source.leaves.items()}
    values = np.concatenate([np.ravel(source.read(name)) for name in shapes])
    starts = dict(zip(shapes, np.cumsum([0, *(source.read(name).size for name in shapes)]), strict=False))
    order = np.argsort(values)
    tensors = tuple(_tensor(step, plan, values, order, starts, shapes) for step in plan.steps)
    used = {part.leaf for tensor in tensors for part in tensor.parts}
    facts = tuple(fact for step, tensor in zip(plan.steps, tensors, strict=True) for fact in _facts(step, tensor))
    dropped = tuple(name for name in shapes if name not in used)
    return Derivation(tensors, shapes, dropped, facts), _target(plan)


def _tensor(step: Step, plan: Plan, values: np.ndarray, order: np.ndarray, starts: Any, shapes: Any) -> Tensor:
    made = np.asarray(expected(step, plan.source), np.float64).ravel()
    evidence = _evidence(step)
    if not step.parts:
        part = Part(np.arange(made.size), "", np.zeros(0, int), Arithmetic.CONSTANT, evidence, float(made[0]))
        return Tensor(step.name, step.spec.shape, Grade.DERIVED, (part,))
    for arithmetic, offset in OFFSETS.items():
        how = arithmetic
        at = order[np.clip(np.searchsorted(values[order], made - offset - 1e-11), 0, len(order) - 1)]
        if np.allclose(values[at], made - offset, rtol=0, atol=1e-11):
            break
    else:
        raise AssertionError(f"{step.name} is computed from several elements")
    parts = []
    for name, start in starts.items():
        ours = np.flatnonzero((at >= start) & (at < start + int(np.prod(shapes[name]))))
        if len(ours):
            parts.append(Part(ours, name, at[ours] - start, how, evidence, contracted=_contracted(step, name, shapes)))
    return Tensor(step.name, step.spec.shape, Grade.DERIVED, tuple(parts))


def _contracted(step: Step, leaf: str, shapes: Any) -> tuple[int, ...]:
    """The axes of the leaf that the rule's equation sums over."""
    if step.kind_name != "linear" or step.name.endswith("bias"):
        return ()
    rule = next(part.rule for part in step.parts if part.leaf == leaf)
    x, weight, y = re.split(",|->", next(iter(rule.kind.equations.values())).text)
    free = [axis for axis in range(len(shapes[leaf])) if axis not in rule.stacked.values()]
    axes = re.findall(r"\([^)]*\)|.", weight)
    return tuple(
        free[k] for k, axis in enumerate(axes) if all(c in x and c not in y for c in re.sub("[() +]", "", axis))
    )


def _evidence(step: Step) -> Evidence:
    settings = {}
    if step.kind_name in ("conv", "conv_transpose") and "I" in (numbers := step.parts[0].rule.kind.numbers.text):
        given, kernel, made = re.split(",|->", numbers)
        spatial = "".join(letter for letter in given if letter not in "NC")
        specs = {"lhs": (given, "NC"), "rhs": (kernel, "OI"), "out": (made, "NC")}
        text = ", ".join(f"{k}_spec={tuple(s.index(c) for c in roles + spatial)}" for k, (s, roles) in specs.items())
        settings = {"dimension_numbers": f"ConvDimensionNumbers({text})"}
    role = ROLES.get(step.kind_name, Role.SCALE if "norm" in step.kind_name else Role.OTHER)
    convolves = step.kind_name in ("conv", "conv_transpose")
    operation = "conv_general_dilated" if convolves else "dot_general"
    source = Site("source", 0, operation, "model.py:3", "block", settings)
    return Evidence(role, source, Site("target", 0, "mm", "net.py:5", "net"), "input x", "columns", 3, (("mm", 2),))


def _facts(step: Step, tensor: Tensor) -> list[Fact]:
    if "norm" not in step.kind_name or "bias" in step.name or not step.parts:
        return []
    said = step.parts[0].rule.kind.multiplies_by
    same = tensor.parts[0].arithmetic is Arithmetic.SAME
    both = (said == "1+scale") == same
    values = {"epsilon": 1e-6, "multiplies_by": said, "weight": "1+weight" if both else "weight"}
    return [Fact(name, value, (step.name,), ()) for name, value in values.items()]


def _target(plan: Plan) -> TargetModel:
    """The modules: of a known type, but for those with more tensors than a rule makes."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    kinds: dict[str, set[str]] = {}
    for step in plan.steps:
        module, _, last = step.name.rpartition(".")
        shapes.setdefault(module, {})[last] = step.spec.shape
        kinds.setdefault(module, set()).add("attention" if last.startswith("in_proj") else step.kind_name)
    known = {
        name: next(iter(of)) if len(of) == 1 and not of & {"parameter", "buffer"} else "" for name, of in kinds.items()
    }
    known |= {name: "" for name, own in shapes.items() if len(own) > 2 and known[name] == "linear"}
    return TargetModel("T", tuple(TargetModule(name, known[name], own) for name, own in shapes.items()))
