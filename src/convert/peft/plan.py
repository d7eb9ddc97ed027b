"""Decide what PEFT's adapter consists of, before a leaf is read: one pair of tensors for each module with LoRA pairs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.ops import Op, out_spec
from convert.core.tensor_spec import TensorSpec, widens
from convert.core.value_ops import Cast, Multiply
from convert.core.yaml_nodes import Position
from convert.layers.base import Part, Step
from convert.peft.factors import Factor, PairLayout, pair_layout
from convert.planning.facts.architectures import loaded_classes
from convert.planning.low_rank_source import Merge
from convert.planning.plan import Dropped, Plan

WEIGHT = ".weight"
PREFIX = "base_model.model."  # of PeftModel and LoraModel, which wrap the module
TASKS = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS", "ForQuestionAnswering": "QUESTION_ANS"}  # fmt: skip


@dataclass(frozen=True)
class Share:
    """A pair, and the part of the module's weight that it is added to."""

    merge: Merge
    part: Part
    layout: PairLayout = field(repr=False)

    @property
    def pair_rank(self) -> int:
        """The rank of the pair, which the module has once for each block."""
        return self.layout.rank // self.layout.blocks


@dataclass(frozen=True)
class AdaptedModule:
    """A module of the target with a LoRA pair.

    Attributes:
        name: of the module.
        rule: that makes its weight.
        shares: the pairs; several where the weight is made of several leaves.
        rank, alpha: as in PEFT's configuration: the product is multiplied by alpha / rank.
        down, up: ``lora_A`` and ``lora_B``.
    """

    name: str
    rule: Position
    shares: tuple[Share, ...] = field(repr=False)
    rank: int
    alpha: float
    down: Step
    up: Step

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class AdapterPlan:
    """The adapter of a checkpoint."""

    plan: Plan
    modules: tuple[AdaptedModule, ...]

    @property
    def config(self) -> dict[str, Any]:
        """Contents of ``adapter_config.json``."""
        rank, alpha = (Counter(values).most_common(1)[0][0] for values in ([m.rank for m in self.modules], [m.alpha for m in self.modules]))  # fmt: skip
        loaded = (loaded_classes(self.plan.rules, self.plan.target) or [""])[0]
        return {
            "peft_type": "LORA",
            "task_type": next((task for end, task in TASKS.items() if loaded.endswith(end)), None),
            "base_model_name_or_path": None,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "use_rslora": False,
            "bias": "none",
            "fan_in_fan_out": any(share.layout.transposed for m in self.modules for share in m.shares),
            "target_modules": _targets([m.name for m in self.modules], self.plan.steps),
            "rank_pattern": {self._pattern(m.name): m.rank for m in self.modules if m.rank != rank},
            "alpha_pattern": {self._pattern(m.name): m.alpha for m in self.modules if m.alpha != alpha},
        }

    def _pattern(self, name: str) -> str:
        """Return the pattern that is a module's alone: PEFT takes a name also for the modules that end with it."""
        return f"^{name}" if any(m.name.endswith(f".{name}") for m in self.modules) else name

    @property
    def steps(self) -> tuple[Step, ...]:
        """The tensors."""
        return tuple(step for m in self.modules for step in (m.down, m.up))

    @property
    def nbytes(self) -> int:
        return sum(step.spec.nbytes for step in self.steps)

    @property
    def alone(self) -> Plan:
        """The plan of these tensors alone, to which no other leaf goes."""
        used = {part.leaf for step in self.steps for part in step.parts}
        rules = {part.leaf: step.rule for step in self.plan.steps for part in step.parts}
        rules |= {
            leaf: rules[name] for name, merge in self.plan.merges.items() if name in rules for leaf in merge.leaves
        }
        leaves = self.plan.checkpoint.leaves
        rest = [Dropped(name, leaves[name].spec, "no part of the adapter", rules[name]) for name in leaves if name not in used and name in rules]  # fmt: skip
        dropped = [drop for drop in self.plan.dropped if drop.leaf not in used]
        return replace(self.plan, steps=self.steps, dropped=(*rest, *dropped), merges={})

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return {
            "found": self.plan.found,
            "target": self.plan.target,
            "bytes": self.nbytes,
            "config": self.config,
            "modules": [
                {
                    "module": m.name,
                    "rank": m.rank,
                    "alpha": m.alpha,
                    "from": [[share.merge.first, share.merge.second] for share in m.shares],
                    "rule": m.rule.line_only,
                }
                for m in self.modules
            ],
        }

    def lines(self) -> Iterator[str]:
        """Describe the adapter for people: one line for each module."""
        for m in self.modules:
            pairs = ", ".join(f"{share.merge.first} {share.merge.second}" for share in m.shares)
            yield f"  {m.name}  lora_A {m.down.spec}, lora_B {m.up.spec}, alpha {m.alpha:g} / rank {m.rank}  from {pairs}  ({m.rule.line_only})"
        yield f"target_modules: {', '.join(self.config['target_modules'])}"


def plan_adapter(plan: Plan) -> AdapterPlan:
    """Plan the adapter.

    Raises:
        PlanError: the tree has no LoRA pair, or one has no place in PEFT's format.
    """
    made = {name: merge for name, merge in plan.merges.items() if isinstance(merge, Merge) and merge.adapter}
    if not made or plan.translated:
        problem = "the tree has no LoRA pair that an adapter could hold" if not made else f"the tensors of {plan.target!r} are not laid out for torch"  # fmt: skip
        fix = "leave out --adapter peft" if not made else "give a PyTorch target with --to"
        raise PlanError(Finding("adapter-not-exportable", problem, path=str(plan.source.display_path), fix=fix))
    modules, findings = [], []
    for step in plan.steps:
        if any(part.leaf in made for part in step.parts):
            try:
                modules.append(_module(plan, step, made))
            except ValueError as error:
                fix = "merge the pairs: leave out --adapter peft"
                findings.append(Finding("adapter-not-exportable", str(error), step.rule.line_only, step.name, fix=fix))
    if findings:
        raise PlanError(*findings, headline=f"{len(findings)} of the LoRA pairs have no place in a PEFT adapter")
    return AdapterPlan(plan, tuple(modules))


def _module(plan: Plan, step: Step, made: Mapping[str, Merge]) -> AdaptedModule:
    if step.tied:
        raise ValueError(f"the tensor is tied to {step.tied}: PEFT would add the product to one of the two")
    if step.role != "weight" or not step.name.endswith(WEIGHT):
        raise ValueError("the tensor is not the weight of a module, and PEFT adapts modules")
    leaves, shares = plan.checkpoint.leaves, []
    for part in step.parts:
        if (merge := made.get(part.leaf)) is not None:
            pair = leaves[merge.first].spec, leaves[merge.second].spec
            layout = pair_layout(merge, part, plan.source.leaves[part.leaf].spec, step.spec, pair)
            shares.append(Share(merge, part, layout))
    if len({share.layout.transposed for share in shares}) > 1:
        raise ValueError("its parts have inputs on different axes")
    if len(shares) > 1 and len(step.spec.shape) > 2:
        raise ValueError("the tensor is a kernel that several leaves are parts of")
    rank, scale, start = sum(share.layout.rank for share in shares), shares[0].merge.scale, 0
    downs, ups = [], []
    for share in shares:
        layout, several = share.layout, len(shares) > 1
        rows = (start, start + layout.rank) if several else None
        start += layout.rank
        downs.append((layout.down, 1.0, rows))
        ups.append((layout.up, layout.factor * (share.merge.scale / scale), rows))
    alpha = scale * rank
    whole = round(alpha)
    alpha = whole if abs(alpha - whole) <= 1e-12 * abs(alpha) else alpha
    name = step.name.removesuffix(WEIGHT)
    down, up = (_tensor(plan, step, f"{PREFIX}{name}.lora_{end}.weight", of, axis) for end, of, axis in (("A", downs, 0), ("B", ups, -1)))  # fmt: skip
    return AdaptedModule(name, step.rule, tuple(shares), rank, alpha, down, up)


def _tensor(plan: Plan, step: Step, name: str, factors: Sequence[tuple[Factor, float, tuple[int, int] | None]], axis: int) -> Step:  # fmt: skip
    """Return ``lora_A`` or ``lora_B``: what is made of each leaf, multiplied by a factor."""
    specs = [plan.checkpoint.leaves[factor.leaf].spec for factor, _, _ in factors]
    dtype = _dtype(plan, {spec.dtype for spec in specs}, any(factor.sums or by != 1 for factor, by, _ in factors))
    parts = []
    for (factor, by, rows), spec in zip(factors, specs, strict=True):
        ops = scaled(factor.ops, spec, by, dtype)
        parts.append(Part(factor.leaf, ops, rows, factor.layout, "", (), (), axis=axis if rows else 0))
    shapes = [out_spec(part.ops, spec).shape for part, spec in zip(parts, specs, strict=True)]
    shape = shapes[0]
    if len(shapes) > 1:  # of a matrix
        total = sum(one[axis] for one in shapes)
        shape = (total, shape[1]) if axis == 0 else (shape[0], total)
    arithmetic = ", ".join(dict.fromkeys(f"x {by:g}" for _, by, _ in factors if by != 1))
    return Step(name, TensorSpec(shape, dtype), tuple(parts), step.kind_name, step.rule, arithmetic=arithmetic)


def scaled(ops: tuple[Op, ...], spec: TensorSpec, by: float, dtype: str) -> tuple[Op, ...]:
    """Return the operations with a multiplication in float64 and a cast after them, as far as there is something to do."""
    given = out_spec(ops, spec).dtype
    if by == 1:
        return ops if given == dtype else (*ops, Cast(dtype))
    return (*ops, *(() if given == "float64" else (Cast("float64"),)), Multiply(by), *(() if dtype == "float64" else (Cast(dtype),)))  # fmt: skip


def _dtype(plan: Plan, dtypes: set[str], computed: bool) -> str:
    """Return the dtype of a tensor: that of its leaves where they have one, and float32 where values are computed."""
    if plan.dtype is not None:
        return plan.dtype
    return min(dtypes) if len(dtypes) == 1 and (not computed or widens("float32", min(dtypes))) else "float32"


def _targets(names: Sequence[str], steps: Sequence[Step]) -> list[str]:
    """Return the last parts of the names where all such modules are adapted, as PEFT's users write them; else whole names."""
    every: dict[str, set[str]] = defaultdict(set)
    for step in steps:
        if step.role == "weight" and step.name.endswith(WEIGHT):
            module = step.name.removesuffix(WEIGHT)
            every[module.rpartition(".")[2]].add(module)
    return sorted(_short(names, every))


def _short(names: Sequence[str], every: Mapping[str, set[str]]) -> Iterator[str]:
    own: dict[str, set[str]] = defaultdict(set)
    for name in names:
        own[name.rpartition(".")[2]].add(name)
    for last, modules in own.items():
        yield from ({last} if modules == every[last] and not last.isdecimal() else modules)
