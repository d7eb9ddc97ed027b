"""Decide what PEFT's adapter consists of, before a leaf is read: one pair of tensors for each module with LoRA pairs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec, widens
from convert.layers.base import Part, Step
from convert.peft.factors import Array, PairLayout, pair_layout
from convert.planning.architectures import loaded_classes
from convert.planning.low_rank_source import Merge
from convert.planning.plan import Plan

WEIGHT = ".weight"
PREFIX = "base_model.model."  # of PeftModel and LoraModel, which wrap the module
TASKS = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS", "ForQuestionAnswering": "QUESTION_ANS"}  # fmt: skip


@dataclass(frozen=True)
class Share:
    """A pair, and the part of the module's weight that it is added to."""

    merge: Merge
    part: Part
    layout: PairLayout = field(repr=False)


@dataclass(frozen=True)
class AdaptedModule:
    """A module of the target with a LoRA pair.

    Attributes:
        name: of the module.
        step: its weight.
        shares: the pairs; several where the weight is made of several leaves.
        rank, alpha: as in PEFT's configuration: the product is multiplied by alpha / rank.
        down, up: specs of ``lora_A`` and ``lora_B``.
    """

    name: str
    step: Step = field(repr=False)
    shares: tuple[Share, ...] = field(repr=False)
    rank: int
    alpha: float
    down: TensorSpec
    up: TensorSpec

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two tensors."""
        return f"{PREFIX}{self.name}.lora_A.weight", f"{PREFIX}{self.name}.lora_B.weight"

    def compute(self, read: Any) -> tuple[Array, Array]:
        """Compute ``lora_A`` and ``lora_B`` from the leaves."""
        down, up = np.zeros(self.down.shape, np.float64), np.zeros((self.up.shape[0], self.rank), np.float64)
        start, scale = 0, self.shares[0].merge.scale
        for share in self.shares:
            layout, stop = share.layout, start + share.layout.rank
            rows = slice(*share.part.rows) if share.part.rows else slice(None)
            outputs = (share.part.axis == 0) != layout.transposed
            a = layout.down(read(share.merge.first)).astype(np.float64)
            b = layout.up(read(share.merge.second), share.merge.scale / scale).astype(np.float64)
            down[start:stop, slice(None) if outputs else rows] = a
            up[rows if outputs else slice(None), start:stop] = b
            start = stop
        return down.astype(self.down.dtype), up.astype(self.up.dtype).reshape(self.up.shape)


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
            "rank_pattern": {m.name: m.rank for m in self.modules if m.rank != rank},
            "alpha_pattern": {m.name: m.alpha for m in self.modules if m.alpha != alpha},
        }

    @property
    def nbytes(self) -> int:
        return sum(m.down.nbytes + m.up.nbytes for m in self.modules)

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
                    "rule": m.step.rule.line_only,
                }
                for m in self.modules
            ],
        }

    def lines(self) -> Iterator[str]:
        """Describe the adapter for people: one line for each module."""
        for m in self.modules:
            pairs = ", ".join(f"{share.merge.first} {share.merge.second}" for share in m.shares)
            yield f"  {m.name}  lora_A {m.down}, lora_B {m.up}, alpha {m.alpha:g} / rank {m.rank}  from {pairs}  ({m.step.rule.line_only})"
        yield f"target_modules: {', '.join(self.config['target_modules'])}"


def plan_adapter(plan: Plan) -> AdapterPlan:
    """Plan the adapter.

    Raises:
        PlanError: the tree has no LoRA pair, or one has no place in PEFT's format.
    """
    made = {name: merge for name, merge in plan.merges.items() if merge.adapter}
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
    shares = []
    for part in step.parts:
        if (merge := made.get(part.leaf)) is not None:
            shape = merge.pair_forms[0].shape or plan.checkpoint.leaves[merge.first].spec.shape
            sizes = dict(zip(merge.pair_forms[0].axes, shape, strict=True))
            layout = pair_layout(
                merge, part, plan.source.leaves[part.leaf].spec, {x: sizes[x] for x in merge.product.shared}
            )
            shares.append(Share(merge, part, layout))
    if len({share.layout.transposed for share in shares}) > 1:
        raise ValueError("its parts have inputs on different axes")
    rank, first = sum(share.layout.rank for share in shares), shares[0]
    outputs = step.spec.shape[-1] if first.layout.transposed else step.spec.shape[0]
    inputs = (step.spec.shape[0],) if first.layout.transposed else step.spec.shape[1:]
    dtypes = [_dtype(plan, [getattr(s.merge, of) for s in shares], any(_computes(s, first, of) for s in shares)) for of in ("first", "second")]  # fmt: skip
    up = (outputs, rank, *(1 for _ in inputs[1:]))  # of a convolution: a kernel of one position
    alpha = first.merge.scale * rank
    whole = round(alpha)
    alpha = whole if abs(alpha - whole) <= 1e-12 * abs(alpha) else alpha
    return AdaptedModule(
        step.name.removesuffix(WEIGHT),
        step,
        tuple(shares),
        rank,
        alpha,
        TensorSpec((rank, *inputs), dtypes[0]),
        TensorSpec(up, dtypes[1]),
    )


def _computes(share: Share, first: Share, of: str) -> bool:
    """Whether the values of a leaf are computed with."""
    layout = share.layout
    side = layout.first if of == "first" else layout.second
    return bool(side.alone) or (of == "second" and (layout.factor != 1 or share.merge.scale != first.merge.scale))


def _dtype(plan: Plan, leaves: Sequence[str], computed: bool) -> str:
    """Return the dtype of a tensor: that of its leaves where they have one, and float32 where values are computed."""
    dtypes = {plan.checkpoint.leaves[leaf].spec.dtype for leaf in leaves}
    if plan.dtype is not None:
        return plan.dtype
    return dtypes.pop() if len(dtypes) == 1 and (not computed or widens("float32", min(dtypes))) else "float32"


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
