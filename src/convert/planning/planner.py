"""Make a plan in stages: match -> size -> compile -> plan. Each stage returns a frozen value and its findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Unpack

from convert.checkpoints.source import Source
from convert.core.errors import OptionError, PlanError
from convert.core.findings import Finding
from convert.core.path_index import PathIndex
from convert.core.path_pattern import NoNameError
from convert.core.similarity import did_you_mean
from convert.core.tensor_spec import SAFETENSORS_TAGS, is_float
from convert.layers import Rule, TargetLayer
from convert.layers.base import Step
from convert.layers.leaves import MisfitError
from convert.layers.shared_keys import ACTIVATION_NAMES
from convert.layers.transforms import weight_normalization, weight_transforms
from convert.planning.adapters.attach import Adapters, adapter_alone, merged_note
from convert.planning.adapters.names import alone
from convert.planning.adapters.scale import ADAPTER, BASE, SETTINGS, read_scaling
from convert.planning.ambiguity import twin_trees
from convert.planning.architectures import class_conflict, unnamed_class
from convert.planning.compile.compiler import Compiler
from convert.planning.facts import (
    collect_facts,
    missing_sidecar_note,
    published_version,
    solve_products,
    truncation_note,
    unknown_requirements,
    unmet_requirements,
)
from convert.planning.low_rank_source import Merge, with_merges
from convert.planning.match import Coverage, cover
from convert.planning.merge_leaves import merge_low_rank
from convert.planning.modules.expand import for_class
from convert.planning.options import DEFAULTS, ConversionOptions, OptionKeywords
from convert.planning.outputs import compare_with_state_dict, join, made_twice
from convert.planning.plan import Dropped, Plan
from convert.planning.settings import check_settings
from convert.planning.sidecar import Sidecar, contradictions, other_values, read_sidecar
from convert.planning.sizes import solve_sizes
from convert.planning.target_formats.base import LayerFacts, TargetFormat, Translation
from convert.planning.target_formats.registry import format_of, target_names, with_target
from convert.planning.tokenizer.files import read_tokenizer
from convert.rules.file import RuleFile, Version

MAX_TREES = 6  # of the leaves that a rule drops as the rest, that a note counts


@dataclass(frozen=True)
class Sized:
    """Stage 2: what the shapes of the leaves determine.

    Attributes:
        coverage: the matched leaves, without rules that are unfinished.
        sizes: axis letters and indices -> size.
        variants: name of a choice -> variant.
        version: the published version with these sizes.
        sidecar: files next to the checkpoint.
        facts: hyperparameters that no leaf holds.
        confirmed: settings that the tree gives, too.
    """

    coverage: Coverage
    sizes: Mapping[str, int]
    variants: Mapping[str, str]
    version: Version | None
    sidecar: Sidecar
    facts: Mapping[str, Any]
    confirmed: frozenset[str]


@dataclass(frozen=True)
class RuleMatch:
    """Stage 1: a rule file and the leaves that its rules match.

    Attributes:
        rules: with the layers of the target (see `convert.planning.target_formats.registry.with_target`).
        source: the checkpoint.
        options: of the conversion.
        coverage: which leaf belongs to which rule.
        refused: why the rules cannot be written for the class of the checkpoint.
    """

    rules: RuleFile
    source: Source = field(repr=False)
    options: ConversionOptions
    coverage: Coverage = field(repr=False)
    refused: tuple[Finding, ...] = ()

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.options.to or next(iter(self.rules.targets))

    @property
    def format(self) -> TargetFormat:
        """Layout of the output."""
        return format_of(self.rules.targets[self.target])

    @cached_property
    def sized(self) -> tuple[Sized, list[Finding]]:
        """Stage 2."""
        return _size(self)


@dataclass(frozen=True)
class CompiledPlan:
    """Stage 3: one step for each tensor of torch's layers.

    Attributes:
        merges: leaves that are computed from several leaves, by name.
        steps: the tensors.
        layers: facts of single layers.
        notes: remarks for the user.
    """

    merges: Mapping[str, Merge]
    steps: tuple[Step, ...]
    layers: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]


def make_plan(
    rules: RuleFile, source: Source, options: ConversionOptions = DEFAULTS, **keywords: Unpack[OptionKeywords]
) -> Plan:
    """Plan a conversion with one rule file. Reads no arrays.

    Args:
        rules: from `convert.load_rules`.
        source: from `convert.open_source`.
        options: `to`, `dtype`, `settings` and `like` of `ConversionOptions`.
        keywords: fields of `ConversionOptions`; they take precedence over `options`.

    Raises:
        OptionError: an option does not suit the rules.
        PlanError: rules and checkpoint do not fit; `findings` holds every problem.
    """
    return plan_match(match_rules(rules, source, replace(options, **keywords)))


def match_rules(
    rules: RuleFile, source: Source, options: ConversionOptions = DEFAULTS, index: PathIndex | None = None
) -> RuleMatch:
    """Stage 1: match the leaves with the rules.

    Args:
        index: of the source's leaves; pass one where several rule files are matched with one source.
    """
    rules, refused = for_class(rules, source)
    rules = with_target(rules, options.to)
    return RuleMatch(rules, source, options, cover(rules, source, index), refused)


def plan_match(match: RuleMatch) -> Plan:
    """Stages 2 to 4.

    Raises:
        OptionError, PlanError: as `make_plan`.
    """
    if alone(match.source.leaves) and not match.coverage.claimed:
        raise PlanError(adapter_alone(match.source))
    check_options(match)
    if match.refused:
        raise misfit_error(match, match.refused)
    if not any(of_role for matched in match.coverage.matched for of_role in matched.leaves.values()):
        raise PlanError(no_leaf_matches(match))
    sized, size_findings = match.sized
    compiled, compile_findings = _compile(match, sized)
    findings = _unique((*match.coverage.findings, *size_findings, *compile_findings))
    translation = Translation(compiled.steps)
    if not findings:
        leaves = with_merges(match.source, compiled.merges).leaves
        translation = match.format.translate(compiled.steps, lambda leaf: leaves[leaf].spec, match.target)
        findings = translation.findings or tuple(made_twice(translation.steps))
    questions = [question.finding for question in match.coverage.rules.questions]
    if not findings and not questions and match.options.like is not None:
        findings = tuple(compare_with_state_dict(translation.steps, match.options.like))
    if findings or questions:
        raise misfit_error(match, (*findings, *questions))
    return Plan(
        rules=match.coverage.rules,
        checkpoint=match.source,
        target=match.target,
        version=sized.version.name if sized.version else None,
        root=match.coverage.root,
        steps=translation.steps,
        dropped=(
            *(Dropped(d.leaf, match.source.leaves[d.leaf].spec, d.reason, d.at) for d in match.coverage.dropped),
            *_left_out(match),
        ),
        sizes=sized.sizes,
        facts=sized.facts,
        layers=compiled.layers,
        choices=sized.variants,
        dtype=match.options.dtype,
        settings=dict(match.options.settings),
        confirmed=sized.confirmed,
        notes=(
            *_notes(match, sized, translation.steps),
            *compiled.notes,
            *missing_sidecar_note(match.rules, sized.sidecar, match.options.settings),
            *other_values(match.rules, match.target, sized.sidecar, {**sized.facts, **sized.sizes}),
            *unnamed_class(match.rules, match.target, sized.sidecar),
            *_merge_note(compiled.merges),
            *_rest_notes(match),
            *_twin_notes(match),
            *(note for step in translation.steps for note in step.notes),
        ),
        merges=compiled.merges,
        sidecar=sized.sidecar,
        translated=translation.tensors,
        tokenizer=read_tokenizer(match.options.tokenizer, match.options.follow_links)
        if match.options.tokenizer
        else None,
    )


def check_options(match: RuleMatch) -> None:
    """Check target, dtype and settings against the rules.

    Raises:
        OptionError: one of them does not suit.
    """
    rules, dtype = match.rules, match.options.dtype
    if match.target not in rules.targets:
        known = target_names(rules)
        raise OptionError(
            Finding(
                "target-unknown",
                "the rules have no such target",
                rule=rules.path,
                path=f"--to {match.target}",
                expected=f"one of {', '.join(known)}",
                got=match.target,
                fix=did_you_mean(match.target, known) or "choose one of them",
            )
        )
    if dtype is not None and (SAFETENSORS_TAGS.get(dtype) is None or not is_float(dtype)):
        floats = [name for name, tag in SAFETENSORS_TAGS.items() if tag and is_float(name)]
        raise OptionError(
            Finding(
                "dtype-unknown",
                path=f"--dtype {dtype}",
                expected=f"a floating-point dtype of safetensors ({', '.join(floats)})",
                got=dtype,
                fix=did_you_mean(dtype, floats) or "choose one of them",
            )
        )
    adapters = SETTINGS if match.coverage.pairs else ()
    check_settings(rules, {k: v for k, v in match.options.settings.items() if k in rules.facts or k not in adapters})


def no_leaf_matches(match: RuleMatch) -> Finding:
    """Explain that the rules are of another model: none of them matches a leaf."""
    rules, source = match.rules, match.source
    expected = next((str(rule.path) for rule in rules.rules if rule.kind.drop_reason is None and rule.sources), "")
    if not expected:
        return Finding("rules-empty", "no rule of this file converts a leaf", rule=rules.path, fix="add rules")
    first = next(iter(source.leaves), None)
    return Finding(
        "rules-of-another-model",
        f"no rule matches any of the {len(source.leaves)} leaves of {source.display_path}",
        rule=rules.path,
        expected=expected,
        got=first or "no leaves",
        fix="list the leaves with `convert inspect`, and the known models with `convert rules list`",
    )


def misfit_error(match: RuleMatch, findings: Sequence[Finding]) -> PlanError:
    """Return the error with all findings of a rule file that does not fit a checkpoint."""
    count = "1 problem" if len(findings) == 1 else f"{len(findings)} problems"
    return PlanError(*findings, headline=f"{match.rules.path} does not fit {match.source.display_path}: {count}")


def _size(match: RuleMatch) -> tuple[Sized, list[Finding]]:
    rules, settings = match.rules, match.options.settings
    coverage = replace(match.coverage, matched=tuple(m for m in match.coverage.matched if not m.rule.asked))
    solution, findings = solve_sizes(coverage, match.source, settings)
    sidecar = read_sidecar(rules, match.source)
    version = published_version(rules, solution.sizes)
    facts = {**collect_facts(rules, version, sidecar, solution.sizes, settings), **coverage.types}
    sizes, contradicted = solve_products(rules, solution.sizes, facts, sidecar, settings)
    findings += class_conflict(rules, match.target, sidecar)
    findings += contradictions(rules, match.target, sidecar, sizes, settings)
    findings += unmet_requirements(rules, match.target, facts, sizes)
    findings += contradicted
    return Sized(coverage, sizes, solution.variants, version, sidecar, facts, solution.confirmed), findings


def _compile(match: RuleMatch, sized: Sized) -> tuple[CompiledPlan, list[Finding]]:
    pairs, adapters = match.coverage.pairs, None
    if pairs:
        scaling = read_scaling(match.source, pairs, _adapter_settings(match))
        adapters = None if _without_adapters(match) else Adapters(pairs, scaling)
    coverage, merges, findings = merge_low_rank(
        sized.coverage, match.source, sized.sizes, sized.facts, sized.variants, adapters
    )
    compiler = Compiler(
        with_merges(match.source, merges),
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
        each = matched.rule.each_layer(match.target)
        lost += [matched.rule] if not each and any(matched.leaves.values()) else []
        for written in each:
            layer = written.layer(match.target)
            assert layer is not None
            try:
                kind = written.kind.resolved(sized.sizes, sized.facts)
            except ValueError as error:
                misfits.append(Finding("size-unknown", str(error), rule=written.at.line_only, path=layer.path.text, fix="write the number, or give the value with --set"))  # fmt: skip
                continue
            rule = written if kind is written.kind else replace(written, kind=kind)
            if (refused := match.format.refuse(rule, layer)) is not None:
                misfits.append(refused)
                continue
            try:
                one = matched if rule is matched.rule else replace(matched, rule=rule)
                compiled = rule.kind.compile(compiler, one, layer, sized.variants.get(rule.choice or ""))
            except MisfitError as misfit:
                misfits.append(misfit.finding)
                continue
            except NoNameError as error:
                fix = "name each element, or number them with an index such as {i}"
                misfits.append(
                    Finding("shape-mismatch", str(error), rule=rule.at.line_only, path=layer.path.text, fix=fix)
                )
                continue
            steps += compiled.steps
            notes += compiled.notes
            if compiled.steps:
                facts = _layer_facts(rule, layer, sized)
                layers.append((rule, match.format.layer_facts(rule, layer, facts, compiled.steps, sized.sizes)))
    joined, unjoined = join(steps)
    described = tuple({"layer": made.name, "kind": rule.kind_name, **made.facts} for rule, made in layers if made.facts)
    notes += match.format.notes([made for _, made in layers])
    return CompiledPlan(merges, tuple(joined), described, tuple(notes)), [
        *findings,
        *_without_target(match, lost),
        *(misfits or unjoined),
    ]


def _unique(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Remove repeated findings and keep the order."""
    kept: list[Finding] = []
    for finding in findings:
        if finding not in kept:
            kept.append(finding)
    return tuple(kept)


def _adapter_settings(match: RuleMatch) -> dict[str, Any]:
    """Return the settings that are no facts of the rules."""
    return {key: value for key, value in match.options.settings.items() if key not in match.rules.facts}


def _without_adapters(match: RuleMatch) -> bool:
    """Whether the user wants the weights without the LoRA pairs of the tree."""
    return bool(match.coverage.pairs) and _adapter_settings(match).get(ADAPTER) == BASE


def _left_out(match: RuleMatch) -> Iterator[Dropped]:
    """Return the LoRA pairs that the user leaves out."""
    if not _without_adapters(match):
        return
    rules = {
        leaf: m.rule.at for m in match.coverage.matched for of_role in m.leaves.values() for leaf in of_role.values()
    }
    for base, pair in match.coverage.pairs.items():
        for leaf in (pair.first, pair.second):
            yield Dropped(leaf, match.source.leaves[leaf].spec, "LoRA pair, left out with --adapter base", rules[base])


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


def _notes(match: RuleMatch, sized: Sized, steps: Sequence[Step]) -> Iterator[str]:
    if sized.version is None and (note := truncation_note(match.rules, sized.sizes, match.options.settings)):
        yield note
    yield from unknown_requirements(match.rules, match.target, sized.facts)
    dtypes: dict[str, list[str]] = {}
    for step in steps:
        if step.parts and is_float(step.spec.dtype):
            dtypes.setdefault(step.spec.dtype, []).append(step.name)
    if len(dtypes) > 1 and match.rules.targets[match.target].config:
        shown = ", ".join(f"{len(names)} in {dtype} ({names[0]}, ...)" for dtype, names in dtypes.items())
        yield (
            f"the tensors have several dtypes, {shown}: config.json names none, and from_pretrained loads all of them in one; "
            "--dtype writes one"
        )


def _rest_notes(match: RuleMatch) -> Iterator[str]:
    """Count the leaves that no rule but one with `rest` matches, by their first key."""
    for rule in match.coverage.rules.rules:
        leaves = [drop.leaf for drop in match.coverage.dropped if drop.rest and drop.at == rule.at]
        if leaves:
            depth = 1 + (match.coverage.root.count("/") + 1 if match.coverage.root else 0)
            counts = Counter("/".join(leaf.split("/")[:depth]) for leaf in leaves)
            shown = [f"{tree} ({count:,})" for tree, count in counts.most_common(MAX_TREES)]
            more = f", and {len(counts) - MAX_TREES:,} more" if len(counts) > MAX_TREES else ""
            many = "1 leaf that no other rule matches is" if len(leaves) == 1 else f"{len(leaves):,} leaves that no other rule matches are"  # fmt: skip
            yield f"{many} dropped by {rule.at.line_only}: {', '.join(shown)}{more}"


def _twin_notes(match: RuleMatch) -> Iterator[str]:
    """Say which dropped trees could be converted in place of the tree that is."""
    for twin in twin_trees(match.source.leaves, {drop.leaf for drop in match.coverage.dropped}):
        yield (
            f"{twin.tree} has the paths and shapes of {twin.of or 'the converted tree'} and is dropped: {twin.of or 'the latter'} is "
            "converted; if the other one is meant (an average of the weights, for instance), change `keep` of `copies`, or `root`, of the rules"
        )


def _merge_note(merges: Mapping[str, Merge]) -> Iterator[str]:
    yield from merged_note(merges)
    merges = {name: merge for name, merge in merges.items() if not merge.adapter}
    if merges:
        first, count = next(iter(merges.values())), len(merges)
        yield (
            f"{'1 weight is' if count == 1 else f'{count} weights are'} computed from several leaves, which the output does not "
            f"keep: {first.name}{', ...' if count > 1 else ''}"
        )
