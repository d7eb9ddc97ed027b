"""Plan the way back: which leaves of a JAX tree the pairs of PEFT's adapter become."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convert.checkpoints.source import Source
from convert.core.errors import OptionError, PlanError
from convert.core.findings import Finding
from convert.core.ops import Op
from convert.core.similarity import ClosestNames, did_you_mean
from convert.core.tensor_spec import widens
from convert.core.value_ops import Cast
from convert.layers.base import Step
from convert.peft.adapter import Adapter
from convert.peft.blocks import Rearranged, ranks_of, slots_of
from convert.peft.grafted import FORMS, Form, Grafted, grafted, weights_of
from convert.peft.plan import PREFIX, WEIGHT, AdaptedModule, AdapterPlan, plan_adapter, scaled
from convert.planning.adapters.names import NamedPair, Writer, alone, find_pairs
from convert.planning.adapters.scale import ADAPTER, ALPHA, BASE, RANK, RSLORA, SETTINGS, applies, read_scaling
from convert.planning.plan import Plan
from convert.reversing.plan import ReversePlan, reverse

BLOCKS = "lora_blocks"  # name of --set: modules that share a leaf get elements of the rank of their own
CODE = "adapter-not-importable"
Planner = Callable[
    [Source, str | None, str | None, Mapping[str, Any]], Plan
]  # of a checkpoint, a target, a dtype and settings


def plan_adapter_back(
    adapter: Adapter,
    like: Source,
    settings: Mapping[str, Any],
    targets: Sequence[str | None],
    dtype: str | None,
    plan: Planner,
) -> ReversePlan:
    """Plan the leaves of the pairs; all other leaves are those of a checkpoint.

    Args:
        like: a checkpoint of the base model, with the pairs or without.
        settings: `adapter` is the form of the pairs, where the checkpoint has none.
        targets: whose names the adapter may have.
        dtype: that of the tensors; of pairs that the checkpoint lacks, that of their leaves, at least as wide.
        plan: plans the way forth.

    Raises:
        OptionError: the form is unknown, missing, or not needed.
        PlanError: the adapter and the tree do not fit, or the tree has no place for a pair.
    """
    if alone(like.leaves):
        raise PlanError(_no_base(like))
    form, blocks = _form(like, settings)
    said = {key: value for key, value in settings.items() if key not in (ADAPTER, BLOCKS)}
    own = _dtype_of(adapter)
    written_in = dtype if form is None or dtype is None else own
    plain = {key: value for key, value in said.items() if key not in SETTINGS} | ({} if form else {ADAPTER: BASE})
    base = _base(adapter, [plan(like, to, written_in, plain) for to in targets])
    forth = _Forth(adapter, base.target, written_in, said, plan)
    source = like if form is None else _with_pairs(forth, base, form, blocks, _wide(own, dtype))
    made = forth.of(source)
    written = adapter.written
    if blocks:
        written = Rearranged(written.path, written.metadata, written.tensors, None, plan=made, adapter=adapter)
    if findings := list(_differences(adapter, made, base, form, blocks)):
        count = f"{len(findings)} problem{'s' * (len(findings) > 1)}"
        raise PlanError(*findings, headline=f"the adapter {written.path} and the tree of {like.display_path} do not fit: {count}")  # fmt: skip
    found = reverse(replace(made, modules=tuple(_scaled(m, made, adapter) for m in made.modules)).alone, written, like=form is None)  # fmt: skip
    remedy = _BLOCKS_FIX if form else _OTHER_TREE
    return replace(
        found,
        leaves=tuple(replace(leaf, remedy=remedy) for leaf in found.leaves),
        notes=(*_notes(made, adapter, ALPHA in settings), *found.notes),
    )


def no_tree(adapter: Adapter) -> PlanError:
    """Explain that an adapter does not say which tree it belongs to."""
    convert = f"`convert MODEL {adapter.base or 'BASE_MODEL'} BASE_CKPT --to orbax`"
    return PlanError(
        Finding(
            CODE,
            "an adapter holds neither the tree nor the weights that its pairs belong to",
            path=str(adapter.written.path),
            expected="a checkpoint of the base model, with --like",
            fix=f"convert the base model first ({convert}), then give --like BASE_CKPT and --adapter ({', '.join(FORMS)})",
        )
    )


def _no_base(like: Source) -> Finding:
    """Explain that the checkpoint of `--like` has LoRA pairs, and not the weights that they are added to."""
    return Finding(
        "adapter-alone",
        f"its {len(like.leaves)} leaves belong to LoRA pairs, and the weights that they are added to are not in the checkpoint",
        path=f"--like {like.display_path}",
        expected="a checkpoint of the base model, with the pairs or without",
        got=f"leaves such as {next(iter(like.leaves))}",
        fix=f"give the base model's checkpoint with --like and, as it has no pairs, their form with --adapter ({', '.join(FORMS)})",
    )


@dataclass(frozen=True)
class _Forth:
    """Plans the way forth, with the alpha of the adapter where neither the user nor the checkpoint states one."""

    adapter: Adapter
    to: str
    dtype: str | None
    settings: Mapping[str, Any]
    plan: Planner

    def of(self, source: Source) -> AdapterPlan:
        pairs, said = find_pairs(source.leaves), dict(self.settings)
        if ALPHA not in said and any(map(applies, pairs.values())) and read_scaling(source, pairs, said).alpha is None:
            said[ALPHA] = self._alpha(
                plan_adapter(self.plan(source, self.to, self.dtype, {**said, ALPHA: RANK})), pairs
            )
        return plan_adapter(self.plan(source, self.to, self.dtype, said))

    def _alpha(self, made: AdapterPlan, pairs: Mapping[str, NamedPair]) -> float | str:
        """Return the alpha that gives the factors of the adapter; `rank` where it is the rank of each pair.

        Args:
            made: planned with alphas that are the ranks.
        """
        found = [
            (_whole(self.adapter.modules[m.name].scale * share.pair_rank / share.merge.scale), share.pair_rank)
            for m in made.modules
            for share in m.shares
            if m.name in self.adapter.modules and applies(pairs[share.merge.base or ""])
        ]
        equal = len(found) > 1 and all(alpha == rank for alpha, rank in found)
        return RANK if equal and len(set(found)) > 1 else found[0][0] if found else 1.0


def _form(like: Source, settings: Mapping[str, Any]) -> tuple[Form | None, bool]:
    """Return the form of the pairs, None where the checkpoint has them, and whether modules get blocks of the rank."""
    name, blocks, pairs = settings.get(ADAPTER), settings.get(BLOCKS, False), find_pairs(like.leaves)
    place, known = str(like.display_path), ", ".join(FORMS)
    if pairs and (name is not None or blocks):
        option = f"--adapter {name}" if name is not None else f"--set {BLOCKS}=true"
        raise OptionError(Finding("usage", f"{place} has LoRA pairs, and so their form and rank", path=option, fix="leave it out, or give a checkpoint without pairs"))  # fmt: skip
    if not pairs and name is None:
        raise OptionError(Finding("usage", f"{place} has no LoRA pairs, so their form is open", path="--adapter", expected=f"one of {known}", fix="name the library of the JAX code, or give a checkpoint that has pairs"))  # fmt: skip
    if not pairs and name not in FORMS:
        raise OptionError(Finding("usage", path=f"--adapter {name}", expected=f"one of {known}", got=str(name), fix=did_you_mean(str(name), FORMS) or "choose one of them"))  # fmt: skip
    if not isinstance(blocks, bool):
        raise OptionError(Finding("setting-invalid", path=f"--set {BLOCKS}={blocks}", expected="true or false", got=repr(blocks), fix=f"correct the value of {BLOCKS}"))  # fmt: skip
    return None if pairs else Form(name), blocks


def _dtype_of(adapter: Adapter) -> str:
    return next(adapter.written.specs[m.down].dtype for m in adapter.modules.values())


def _wide(own: str, wanted: str | None) -> str:
    """Return the dtype of the leaves of new pairs.

    Raises:
        OptionError: it cannot hold the values of the adapter.
    """
    if wanted is not None and not widens(own, wanted):
        expected = f"a dtype at least as wide as {own}"
        raise OptionError(Finding("dtype-unknown", "it is the dtype of the pairs' leaves", path=f"--dtype {wanted}", expected=expected, got=wanted, fix="leave it out, or convert the adapter's tensors first"))  # fmt: skip
    return wanted or own


def _base(adapter: Adapter, plans: Sequence[Plan]) -> Plan:
    """Return the plan of the target that has the modules.

    Raises:
        PlanError: none has all.
    """
    stated = adapter.written.metadata.get("target")
    names = {f"{module}{WEIGHT}" for module in adapter.modules}
    best = max(plans, key=lambda plan: (sum(step.name in names for step in plan.steps), plan.target == stated))
    known = {step.name.removesuffix(WEIGHT): step for step in best.steps if step.name.endswith(WEIGHT)}
    closest = ClosestNames(known)
    findings = [
        Finding(CODE, "the model has no such module with a weight", path=f"{PREFIX}{module}", fix=closest.did_you_mean(module) or "give the rules of the adapter's base model")
        for module in adapter.modules
        if module not in known
    ]  # fmt: skip
    if findings:
        raise PlanError(*findings, headline=f"{len(findings)} of the adapter's modules are not in {best.found} ({best.target})")  # fmt: skip
    return best


def _with_pairs(forth: _Forth, base: Plan, form: Form, blocks: bool, dtype: str) -> Grafted:
    """Add the pairs to the tree: planned with rank 1 first, which tells how the rank of a module follows from those of its pairs.

    Raises:
        PlanError: no rank of a pair gives those of its modules.
    """
    adapter = forth.adapter
    weights = weights_of(base, adapter.modules)
    made = forth.of(grafted(base, weights, dict.fromkeys(weights, 1), dtype, form))
    if blocks:
        return grafted(base, weights, ranks_of(slots_of(made, adapter)), dtype, form)
    ranks: dict[str, int] = {}
    findings = []
    for module in made.modules:
        wanted = adapter.modules[module.name].rank if module.name in adapter.modules else None
        for share in module.shares:
            leaf = share.merge.base or ""
            if wanted is None:
                continue
            if wanted % module.rank or ranks.setdefault(leaf, wanted // module.rank) != wanted // module.rank:
                problem = f"the pair of {leaf} has one rank, and the rank {wanted} of this module is not {module.rank * ranks.get(leaf, 1)}"  # fmt: skip
                findings.append(Finding(CODE, problem, module.rule.line_only, module.name, fix=_BLOCKS_FIX))
    several = sorted(set(ranks.values()))
    if form.writer is Writer.OPENPI and len(several) > 1 and not findings:
        problem = f"the pairs would have the ranks {' and '.join(map(str, several))}, as openpi has one for each head, and the adapter one for a module"
        findings.append(Finding(CODE, problem, path=str(adapter.written.path), fix=_BLOCKS_FIX))
    if findings:
        raise PlanError(*findings)
    return grafted(base, weights, ranks, dtype, form)


_OTHER_TREE = "give a checkpoint without pairs, and --adapter with their form"
_BLOCKS_FIX = f"--set {BLOCKS}=true gives each module elements of the rank of its own, with zeros for the others: the same function, another rank"


def _differences(adapter: Adapter, made: AdapterPlan, base: Plan, form: Form | None, blocks: bool) -> Iterator[Finding]:
    """Compare the modules of the adapter with those whose pairs the tree has."""
    planned = {m.name: m for m in made.modules}
    for name in adapter.modules.keys() - planned.keys():
        step = next(step for step in base.steps if step.name == f"{name}{WEIGHT}")
        leaves = ", ".join(dict.fromkeys(part.leaf for part in step.parts))
        fix = _OTHER_TREE
        yield Finding(CODE, f"the tree has no pair beside {leaves}", step.rule.line_only, name, fix=fix)
    for name, module in planned.items():
        own = adapter.modules.get(name)
        pairs = " and ".join(share.merge.first for share in module.shares)
        if own is None:
            if not blocks:
                fix = _BLOCKS_FIX if form else _OTHER_TREE
                yield Finding(CODE, f"the adapter has no pair for this module, and {pairs} is a leaf of it", module.rule.line_only, name, fix=fix)  # fmt: skip
            continue
        specs = adapter.written.specs
        got, want = (specs[own.down].shape, specs[own.up].shape), (module.down.spec.shape, module.up.spec.shape)
        if got[0][1:] != want[0][1:] or (got[1][0], *got[1][2:]) != (want[1][0], *want[1][2:]):
            fix = "the adapter is of a model of another size"
            yield Finding("tensor-spec-differs", rule=module.rule.line_only, path=name, expected=f"{want[0]} and {want[1]} but for the rank", got=f"{got[0]} and {got[1]}", fix=fix)  # fmt: skip
        elif not blocks and own.rank != module.rank:
            fix = _BLOCKS_FIX if form else _OTHER_TREE
            yield Finding(CODE, f"{pairs} gives another rank", module.rule.line_only, name, f"rank {module.rank}", f"rank {own.rank}", fix)  # fmt: skip
        elif not _exact(own.scale / module.scale):
            problem = "the source's code multiplies the product by another factor, and their ratio rounds the values of lora_B"
            fix = "train with an alpha that is the rank times a power of two, or choose qwix, which takes alpha"
            yield Finding(CODE, problem, module.rule.line_only, name, f"{module.scale:g}, or that times a power of two", f"{own.scale:g}", fix)  # fmt: skip


def _whole(alpha: float) -> float:
    return round(alpha) if abs(alpha - round(alpha)) <= 1e-9 * abs(alpha) else alpha


def _exact(ratio: float) -> bool:
    """Whether a multiplication by it does not round."""
    return abs(ratio - 1) < 1e-12 or math.frexp(ratio)[0] in (0.5, -0.5)


def _scaled(module: AdaptedModule, made: AdapterPlan, adapter: Adapter) -> AdaptedModule:
    """Return the module with B multiplied by what the two factors differ in."""
    own = adapter.modules.get(module.name)
    ratio = own.scale / module.scale if own is not None else 1.0
    if abs(ratio - 1) < 1e-12:
        return module
    leaves, up = made.plan.checkpoint.leaves, module.up
    parts = tuple(replace(part, ops=scaled(_unrounded(part.ops), leaves[part.leaf].spec, 1 / ratio, up.spec.dtype)) for part in up.parts)  # fmt: skip
    arithmetic = ", ".join(filter(None, (up.arithmetic, f"x {1 / ratio:g}")))
    step: Step = replace(up, parts=parts, arithmetic=arithmetic)
    return replace(module, up=step)


def _unrounded(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return the operations without the cast at their end: another factor is multiplied before it."""
    return ops[:-1] if ops and isinstance(ops[-1], Cast) else ops


def _notes(made: AdapterPlan, adapter: Adapter, given: bool) -> Iterator[str]:
    """Say what the pairs are multiplied by.

    Args:
        given: whether the user gave alpha; else it follows from the adapter, where no file states it.
    """
    merges = {share.merge.base: share.merge for m in made.modules for share in m.shares}
    first = next(iter(merges.values()))
    ranks = sorted({share.pair_rank for m in made.modules for share in m.shares})
    alpha = made.plan.settings.get(ALPHA)
    if given or alpha is None:
        reason = first.adapter
    else:  # all digits: the JAX code computes with them
        number = "that is the rank" if alpha == RANK else repr(int(alpha) if alpha == int(alpha) else alpha)
        reason = f"it must get alpha {number}{' and rslora' if made.plan.settings.get(RSLORA) else ''}"
    pairs = "1 LoRA pair" if len(merges) == 1 else f"{len(merges)} LoRA pairs"
    yield f"{pairs} of rank {' and '.join(map(str, ranks))}, such as {first.first} {first.second}; the source's code multiplies the product by {first.scale:g} ({reason})"
    by = {adapter.modules[m.name].scale / m.scale for m in made.modules if m.name in adapter.modules}
    if any(abs(ratio - 1) >= 1e-12 for ratio in by):
        yield f"lora_B is multiplied by {', '.join(f'{ratio:g}' for ratio in sorted(by))}, which is exact, as the adapter has other factors than the source's code"
