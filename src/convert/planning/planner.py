"""Make a plan in stages: match -> size -> compile -> plan. Each stage returns a frozen value and its findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from convert.checkpoints.formats.safetensors import OF_PYTORCH
from convert.checkpoints.source import Source
from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.system.process import collector_paused
from convert.layers.shared_keys import ASK
from convert.planning.adapters.attach import adapter_alone
from convert.planning.adapters.joined import JoinedSource
from convert.planning.adapters.names import alone
from convert.planning.compile_rules import compile_rules
from convert.planning.facts.values import asked_for_sizes
from convert.planning.layer_dtypes import weights_of_other_dtypes
from convert.planning.low_rank_source import with_merges
from convert.planning.modules.sizes import compare_sizes
from convert.planning.notes import plan_notes
from convert.planning.options import DEFAULTS, ConversionOptions, OptionKeywords
from convert.planning.outputs import compare_with_state_dict, made_twice
from convert.planning.plan import Dropped, Plan
from convert.planning.quantised import quantised_weight
from convert.planning.rule_match import RuleMatch, Sized, check_options, match_rules
from convert.planning.target_formats.base import Translation
from convert.planning.tokenizer.files import TokenizerFiles, read_tokenizer
from convert.planning.tokenizer.processors import reads_text
from convert.rules.file import RuleFile


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


@collector_paused()
def plan_match(match: RuleMatch) -> Plan:
    """Stages 2 to 4.

    Raises:
        OptionError, PlanError: as `make_plan`.
    """
    converted = {leaf for one in match.coverage.matched for of_role in one.leaves.values() for leaf in of_role.values()}
    without_layers = not converted
    if alone(match.source.leaves) and without_layers:
        raise PlanError(adapter_alone(match.source))
    if isinstance(match.source, JoinedSource) and (error := match.source.several_places(converted)) is not None:
        raise error
    if match.coverage.claimed < match.coverage.total:
        known = converted.union(drop.leaf for drop in match.coverage.dropped)
        unknown = [name for name in match.source.leaves if name not in known]
        if quantised := quantised_weight(unknown, match.source.leaves, str(match.source.display_path)):
            raise PlanError(quantised)
    check_options(match)
    if match.refused:
        raise misfit_error(match, match.refused)
    if without_layers:
        raise PlanError(no_leaf_matches(match))
    sized, size_findings = match.sized
    compiled, compile_findings = compile_rules(match, sized)
    findings = _unique((*match.coverage.findings, *size_findings, *compile_findings))
    if findings and {finding.code for finding in findings} == {"size-unknown"}:
        asked = asked_for_sizes(match.rules, match.target, sized.sizes, sized.facts, match.options.settings)
        if asked is not None:
            raise PlanError(asked)
    translation = Translation(compiled.steps)
    if not findings:
        leaves = with_merges(match.source, compiled.merges).leaves
        translation = match.format.translate(compiled.steps, lambda leaf: leaves[leaf].spec, match.target)
        findings = (
            translation.findings
            or tuple(made_twice(translation.steps))
            or tuple(weights_of_other_dtypes(compiled.steps, match.source))
        )
    other_sizes, assumed = compare_sizes(match.coverage.rules, match.source, compiled.steps)
    findings = findings or other_sizes
    questions = [question.finding for question in match.coverage.rules.questions]
    if questions and (differs := match.rules.targets[match.target].differs):
        questions = [*(Finding("rule-unfinished", text) for text in differs), _left_open(questions)]
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
        notes=(*plan_notes(match, sized, compiled, translation.steps), *assumed),
        merges=compiled.merges,
        sidecar=sized.sidecar,
        translated=translation.tensors,
        tokenizer=_tokenizer(match, sized),
    )


def _tokenizer(match: RuleMatch, sized: Sized) -> TokenizerFiles | None:
    if not match.options.tokenizer:
        return None
    text = reads_text({**sized.sidecar.config, **match.rules.targets[match.target].config})
    return read_tokenizer(match.options.tokenizer, match.options.follow_links, text=text)


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
        fix=several_trees(match)
        or "list the leaves with `convert inspect`, and the known models with `convert rules list`",
    )


def several_trees(match: RuleMatch) -> str:
    """Say how to choose among keys that the rules do not name, below each of which lies such a model; empty where there are none."""
    if not match.also_below:
        return ""
    model = match.rules.model
    return (
        f"such a model lies below {' and '.join(match.also_below)}: choose one with `root: {match.also_below[0]}` in a copy of the rules "
        f"(`convert rules show {model} > my-model.yaml`)"
    )


def misfit_error(match: RuleMatch, findings: Sequence[Finding]) -> PlanError:
    """Return the error with all findings of a rule file that does not fit a checkpoint, or that fits and is not finished."""
    count = "1 problem" if len(findings) == 1 else f"{len(findings)} problems"
    of_pytorch = any(note.problem == OF_PYTORCH for note in match.source.notes)
    written = ", which PyTorch wrote (its tensors go back to JAX with --to orbax, msgpack or npz)" if of_pytorch else ""
    rules = match.rules
    chosen = rules.family and rules.model.replace("_", "-") != Path(rules.path).stem  # from several in a file
    model = f" ({rules.model})" if chosen else ""
    if all(finding.code == "rule-unfinished" for finding in findings):
        asked = len(match.coverage.rules.questions)
        open_ = "1 question is open" if asked == 1 else f"{asked} questions are open"
        return PlanError(*findings, headline=f"{rules.path}{model} is not finished: {open_}")
    return PlanError(
        *findings,
        headline=f"{rules.path}{model} does not fit {match.source.display_path}{written}: {count}",
        hint=several_trees(match),
    )


def _left_open(questions: Sequence[Finding]) -> Finding:
    """Return the questions as one: most of them may be open for no other reason than what `infer` found in the code."""
    asked = "1 question is" if len(questions) == 1 else f"{len(questions)} questions are"
    fix = "derive the rules again first, and answer what is left then"
    return Finding("rule-unfinished", f"{asked} open (`{ASK}`), which may follow from that", questions[0].rule, fix=fix)


def _unique(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Remove repeated findings and keep the order."""
    kept: list[Finding] = []
    for finding in findings:
        if finding not in kept:
            kept.append(finding)
    return tuple(kept)


def _left_out(match: RuleMatch) -> Iterator[Dropped]:
    """Return the LoRA pairs that the user leaves out."""
    if not match.without_adapters:
        return
    rules = {
        leaf: m.rule.at for m in match.coverage.matched for of_role in m.leaves.values() for leaf in of_role.values()
    }
    for base, pair in match.coverage.pairs.items():
        for leaf in (pair.first, pair.second):
            yield Dropped(leaf, match.source.leaves[leaf].spec, "LoRA pair, left out with --adapter base", rules[base])
