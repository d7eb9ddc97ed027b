"""Stage 3: compile each rule to the tensors of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convert.core.findings import Finding
from convert.core.path_pattern import NoNameError
from convert.layers import Rule, TargetLayer
from convert.layers.base import CompiledRule, Matched, Step
from convert.layers.leaves import MisfitError
from convert.layers.shared_keys import ACTIVATION_NAMES
from convert.layers.transforms import weight_normalization, weight_transforms
from convert.planning.adapters.attach import Adapters, modules_of
from convert.planning.adapters.scale import read_scaling
from convert.planning.compile.compiler import Compiler
from convert.planning.low_rank_source import with_merges
from convert.planning.merge_leaves import merge_leaves
from convert.planning.merged_leaf import MergedLeaf
from convert.planning.outputs import join
from convert.planning.rule_match import RuleMatch, Sized
from convert.planning.target_formats.base import LayerFacts, TargetFormat


@dataclass(frozen=True)
class CompiledPlan:
    """What stage 3 gives: one step for each tensor of torch's layers.

    Attributes:
        merges: leaves that are computed from several leaves, by name.
        steps: the tensors.
        layers: facts of single layers.
        notes: remarks for the user.
    """

    merges: Mapping[str, MergedLeaf]
    steps: tuple[Step, ...]
    layers: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]


def compile_rules(match: RuleMatch, sized: Sized) -> tuple[CompiledPlan, list[Finding]]:
    """Stage 3: compile each rule to the tensors of its layers, and collect what does not fit.

    Where a file gives modules of the target an alpha or rank of their own, the rules are compiled twice: the first time says which
    leaves the modules are made of.

    Raises:
        OptionError: the factor of a LoRA product is not as the options say.
        PlanError: the files that state it contradict each other, or say that more is computed.
    """
    if not match.coverage.pairs:
        return _compile(match, sized, None)
    scaling = read_scaling(match.source, match.coverage.pairs, match.adapter_settings)
    if match.without_adapters:
        return _compile(match, sized, None)
    adapters = Adapters(match.coverage.pairs, scaling)
    if not scaling.needs_modules:
        return _compile(match, sized, adapters)
    made, findings = _compile(match, sized, None)
    if findings:
        return made, findings
    if unknown := list(scaling.unknown_patterns([step.name for step in made.steps])):
        return made, unknown
    return _compile(match, sized, replace(adapters, modules=modules_of(made.steps)))


def _compile(match: RuleMatch, sized: Sized, adapters: Adapters | None) -> tuple[CompiledPlan, list[Finding]]:
    coverage, merges, findings = merge_leaves(
        sized.coverage, match.source, sized.sizes, sized.facts, sized.variants, adapters
    )
    source = with_merges(match.source, merges)
    compiler = Compiler(
        source,
        match.target,
        match.options.dtype,
        sized.facts,
        match.options.settings,
        sized.sizes,
        merges,
        match.format.custom_cells or bool(match.options.settings.get("custom_cells")),
        frozenset(letter for letter, axis in match.rules.axes.items() if axis.varies),
    )
    steps: list[Step] = []
    layers: list[tuple[Rule, LayerFacts]] = []
    notes: list[str] = []
    lost: list[Rule] = []
    misfits: list[Finding] = []
    for matched in coverage.matched:
        if not all(leaf in source.leaves for of_role in matched.leaves.values() for leaf in of_role.values()):
            continue  # it reads a leaf of a pair that another rule merges: two rules claim that leaf
        each = matched.rule.each_layer(match.target)
        lost += [matched.rule] if not each and any(matched.leaves.values()) else []
        for written in each:
            layer = written.layer(match.target)
            assert layer is not None
            try:
                rule = _resolved(written, layer, sized, match.format)
                compiled = _compiled(
                    compiler, replace(matched, rule=rule), layer, sized.variants.get(rule.choice or "")
                )
            except MisfitError as misfit:
                if misfit.finding.code != "setting-invalid" or sized.refused.isdisjoint(rule.kind.facts_used):
                    misfits.append(misfit.finding)
                continue
            steps += compiled.steps
            notes += compiled.notes
            if compiled.steps:
                facts = _layer_facts(rule, layer, sized)
                layers.append((rule, match.format.layer_facts(rule, layer, facts, compiled.steps, sized.sizes)))
    joined, unjoined = join(steps)
    joined, unknown = _shared(joined, match)
    described = tuple({"layer": made.name, "kind": rule.kind_name, **made.facts} for rule, made in layers if made.facts)
    notes += match.format.notes([made for _, made in layers])
    return CompiledPlan(merges, tuple(joined), described, tuple(notes)), [
        *findings,
        *_without_target(match, lost),
        *(misfits or unjoined or unknown),
    ]


def _shared(steps: Sequence[Step], match: RuleMatch) -> tuple[list[Step], list[Finding]]:
    """Return the tensors with those that the target stores under further names, and the names that no rule makes."""
    found, unknown = list(steps), []
    for name, others in match.rules.targets[match.target].shared.items():
        own = [step for step in steps if step.name == name or step.name.startswith(f"{name}.")]
        if not own and not match.coverage.rules.questions:  # the answer to one may make it
            problem = f"`shared` of the target {match.target!r} names {name}, which no rule makes"
            unknown.append(
                Finding("rule-without-target", problem, path=name, fix="name a tensor or a module of a rule")
            )
        for step, other in ((step, other) for step in own for other in others):
            found.append(
                replace(step, name=other + step.name.removeprefix(name), tied=step.tied or step.name, notes=())
            )
    return found, unknown


def _resolved(rule: Rule, layer: TargetLayer, sized: Sized, target: TargetFormat) -> Rule:
    """Return the rule with its sizes as numbers.

    Raises:
        MisfitError: a size is unknown, or the target cannot hold the layer.
    """
    try:
        kind = rule.kind.resolved(sized.sizes, sized.facts)
    except ValueError as error:
        fix = "write the number, or give the value with --set"
        raise MisfitError(
            Finding("size-unknown", str(error), rule=rule.at.line_only, path=layer.path.text, fix=fix)
        ) from error
    rule = rule if kind is rule.kind else replace(rule, kind=kind)
    if (refused := target.refuse(rule, layer)) is not None:
        raise MisfitError(refused)
    return rule


def _compiled(compiler: Compiler, matched: Matched, layer: TargetLayer, variant: str | None) -> CompiledRule:
    """Return the tensors of one layer.

    Raises:
        MisfitError: the leaves contradict the rule, or the target cannot hold them.
    """
    try:
        return matched.rule.kind.compile(compiler, matched, layer, variant)
    except NoNameError as error:
        fix = "name each element, or number them with an index such as {i}"
        at = matched.rule.at.line_only
        raise MisfitError(Finding("shape-mismatch", str(error), rule=at, path=layer.path.text, fix=fix)) from error


def _layer_facts(rule: Rule, layer: TargetLayer, sized: Sized) -> dict[str, Any]:
    facts = {
        **rule.kind.facts(layer),
        **rule.kind.sized_facts(layer, sized.sizes),
        **weight_transforms.facts(rule, layer),
        **weight_normalization.facts(rule, layer),
    }
    return {key: _resolve(key, value, sized.facts) for key, value in facts.items()}


def _resolve(key: str, value: Any, facts: Mapping[str, Any]) -> Any:
    """Replace a reference to a fact by its value."""
    if key == "epsilon" and isinstance(value, str):
        return facts.get(value)
    if key == "activation" and isinstance(value, str) and value.startswith("$"):
        name = facts.get(value[1:])
        return ACTIVATION_NAMES.get(name, name) if isinstance(name, str) else name
    return value


def _without_target(match: RuleMatch, rules: Sequence[Rule]) -> Iterator[Finding]:
    """Report rules that match leaves and have no layer in this target, as one finding."""
    if not rules:
        return
    complete = [name for name in match.rules.targets if match.rules.supports(name)] if len(rules) > 1 else []
    yield Finding(
        "rule-without-target",
        f"the rule{f' (and {len(rules) - 1} more)' if len(rules) > 1 else ''} has no target for {match.target!r}, so "
        f"{rules[0].path} would be lost",
        rule=rules[0].at.line_only,
        fix=f"convert all of {match.rules.model} with {' or '.join(f'--to {name}' for name in complete)}"
        if complete
        else "add one, or give its leaves a `drop:` rule",
    )
