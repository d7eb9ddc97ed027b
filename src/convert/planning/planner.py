"""Makes a plan: matches rules to leaves, binds sizes, compiles steps, and collects every finding on the way."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

from convert.checkpoints.source import Source
from convert.core.errors import PlanError
from convert.core.fields import nearest
from convert.core.findings import Finding
from convert.core.gc_pause import gc_paused
from convert.core.ops import is_float
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec
from convert.layers import Rule
from convert.layers.base import Matched, Step
from convert.layers.leaves import MisfitError
from convert.layers.shared_keys import ACTIVATION_NAMES
from convert.layers.transforms import weight_normalization, weight_transforms
from convert.planning.burn.config import Call, burn_call, burn_notes, in_burn
from convert.planning.burn.modules import CONVENTIONS, OUTPUT, Conventions, conventions_of, refusal, with_burn
from convert.planning.burn.tensors import burn_steps
from convert.planning.compile.compiler import Compiler
from convert.planning.compile.named_leaf import constraints
from convert.planning.join import join
from convert.planning.low_rank_source import Merge, with_merges
from convert.planning.match import Coverage, cover
from convert.planning.merged_leaves import merge
from convert.planning.options import DEFAULTS, ConversionOptions, OptionKeywords
from convert.planning.plan import Dropped, Held, Plan, expand, one_off
from convert.planning.settings import check_settings
from convert.planning.sidecar import Found, contradictions, facts_beside, look_beside
from convert.planning.sizes import Constraint, bind
from convert.rules.file import ASK, RuleFile, Version

MAX_FINDINGS = 12  # in one message; all of them are in PlanError.findings


def make_plan(
    rules: RuleFile,
    source: Source,
    options: ConversionOptions = DEFAULTS,
    *,
    coverage: Coverage | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Plan:
    """Plans a conversion; reads no array.

    Args:
        rules: from `convert.load_rules`.
        source: from `convert.open_source`.
        options: `to`, `dtype`, `settings` and `like` of `ConversionOptions`.
        coverage: result of `convert.planning.match.cover` for these rules and this source, if it is known.
        keywords: fields of `ConversionOptions`; they take precedence over `options`.

    Raises:
        PlanError: rules and checkpoint do not fit; `findings` holds every problem.
    """
    with gc_paused():
        options = replace(options, **keywords)
        rules = with_burn(rules, options.to)
        target = options.to or next(iter(rules.targets))
        return _Planner(rules, source, target, options.dtype, dict(options.settings)).plan(options.like, coverage)


@dataclass
class _Planner:
    rules: RuleFile
    source: Source
    target: str
    dtype: str | None
    settings: dict[str, Any]

    def plan(self, like: Mapping[str, TensorSpec] | None, coverage: Coverage | None) -> Plan:
        self._check_arguments()
        coverage = coverage or cover(self.rules, self.source)
        if not any(of_role for matched in coverage.matched for of_role in matched.leaves.values()):
            raise PlanError(self._strangers())
        findings = list(coverage.findings)
        questions = [str(question) for question in coverage.rules.questions]
        coverage = replace(coverage, matched=tuple(m for m in coverage.matched if not m.rule.asked))
        choices, sizes, problems = self._sizes(coverage)
        findings += problems
        found = look_beside(self.rules, self.source)
        findings += contradictions(self.rules, self.target, found, sizes, self.settings)
        version = next((v for v in self.rules.versions if all(sizes.get(k) == n for k, n in v.sizes.items())), None)
        facts = {
            **{
                key: expand(value, sizes)
                for key, value in self._facts(version, facts_beside(self.rules, found)).items()
            },
            **coverage.types,
        }
        coverage, merges, problems = merge(coverage, self.source, sizes, facts)
        findings += problems
        checkpoint, self.source = self.source, with_merges(self.source, merges)
        steps, layers, notes, problems = self._steps(coverage, merges, choices, sizes, facts)
        steps, unjoined = join(steps)
        findings += problems or unjoined
        held: tuple[Held, ...] = ()
        if self.burn is not None and not findings:
            steps, held, problems = burn_steps(steps, self.source, self.target, self.burn)
            findings += problems
        findings += self._unmet(facts)
        findings += self._undivided(sizes, facts, found)
        if not findings:
            findings += _duplicates(steps)
        if not findings and not questions and like is not None:
            findings += _compare(steps, like)
        findings += questions
        if findings:
            findings = list(dict.fromkeys(findings))
            raise PlanError(self._message(findings), tuple(findings))
        return Plan(
            rules=coverage.rules,
            checkpoint=checkpoint,
            merges=merges,
            target=self.target,
            version=version.name if version else None,
            root=coverage.root,
            steps=tuple(steps),
            dropped=tuple(Dropped(c.leaf, self.source.leaves[c.leaf].spec, c.reason, c.at) for c in coverage.dropped),
            sizes=sizes,
            facts=facts,
            layers=tuple(layers),
            choices={k: v for k, v in choices.items() if v is not None},
            dtype=self.dtype,
            settings=self.settings,
            notes=(
                *self._remarks(version, sizes, facts, steps),
                *notes,
                *_unseen(self.rules, found),
                *_for_good(merges),
                *(note for step in steps for note in step.notes),
            ),
            sidecar=found,
            held=held,
        )

    @property
    def burn(self) -> Conventions | None:
        """Burn's conventions, when the target has them."""
        return conventions_of(self.rules.targets[self.target])

    def _check_arguments(self) -> None:
        targets = self.rules.targets
        if self.target not in targets:
            known = dict.fromkeys((*targets, *CONVENTIONS))
            raise PlanError(
                f"{self.rules.path}: there is no target {self.target!r}{nearest(self.target, known)} (--to takes {', '.join(known)})"
            )
        if self.dtype is not None and (SAFETENSORS_TAGS.get(self.dtype) is None or not is_float(self.dtype)):
            floats = [name for name, tag in SAFETENSORS_TAGS.items() if tag and is_float(name)]
            raise PlanError(
                f"--dtype {self.dtype}: not a floating-point dtype of safetensors{nearest(self.dtype, floats)} "
                f"(known: {', '.join(floats)})"
            )
        check_settings(self.rules, self.settings)

    def _unmet(self, facts: Mapping[str, Any]) -> Iterator[str]:
        """Facts with which the target's code does not compute."""
        for name, need in self.rules.targets[self.target].requires.items():
            if name in facts and facts[name] != need.value:
                others = [target for target in self.rules.targets if target != self.target]
                yield (
                    f"{need.at.line_only}: {name} is {facts[name]}, and {self.rules.targets[self.target].loads} computes "
                    f"with {need.value}: {need.because}"
                    + (f". Take another target: --to {' or '.join(others)}" if others else "")
                )

    def _undivided(self, sizes: Mapping[str, int], facts: Mapping[str, Any], found: Found) -> Iterator[str]:
        """Numbers of heads that the width of all of them is no multiple of."""
        for name, letter in self.rules.must_divide.items():
            if name not in facts or letter not in sizes:
                continue
            value, size = facts[name], sizes[letter]
            whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if whole and size % value == 0:
                continue
            if name in self.settings:
                where = f"--set {name}={value} says {value}"
            elif found.config.get(name) is not None and self.rules.sidecar is not None:
                where = f"the {self.rules.sidecar.file} beside the checkpoint says {name} = {value!r}"
            else:
                where = f"{self.rules.path}: {name} is {value!r}"
            meaning = f" ({self.rules.axes[letter].meaning})" if letter in self.rules.axes else ""
            yield (
                f"{where}, and the tree has {letter} = {size}{meaning}, which "
                + (f"does not divide by {value}" if whole else "divides by a whole number above 0 alone")
                + "; one of the two is of another checkpoint"
            )

    def _remarks(
        self, version: Version | None, sizes: Mapping[str, int], facts: Mapping[str, Any], steps: list[Step]
    ) -> Iterator[str]:
        """What a person should know of the whole."""
        if version is None and (said := one_off(self.rules, sizes, self.settings)):
            yield said
        target = self.rules.targets[self.target]
        for name, need in target.requires.items():
            if name not in facts:
                yield f"{target.loads} computes with {name} {need.value}, and the tree does not tell it: {need.because}"
        dtypes: dict[str, list[str]] = {}
        for step in steps:
            if step.parts and is_float(step.spec.dtype):
                dtypes.setdefault(step.spec.dtype, []).append(step.name)
        if len(dtypes) > 1 and target.config:
            shown = ", ".join(f"{len(names)} in {dtype} ({names[0]}, ...)" for dtype, names in dtypes.items())
            yield (
                f"the tensors are of several dtypes, {shown}: config.json names none, and from_pretrained loads all of "
                "them in one; --dtype writes one"
            )

    def _strangers(self) -> str:
        """The message when no rule finds a leaf: the rules are of another model."""
        wanted = next((str(rule.path) for rule in self.rules.rules if rule.word != "drop" and rule.sources), "")
        if not wanted:
            return f"{self.rules.path}: nothing would be written, as no rule of this file takes a leaf; add some"
        found = next(iter(self.source.leaves), None)
        return (
            f"{self.rules.path} does not fit {self.source.called}: none of its {len(self.source.leaves)} leaves matches a rule. "
            f"The rules look for {wanted}, the checkpoint has {found or 'no leaves'}. See the tree with `convert inspect`, "
            "and the models that are known with `convert rules list`"
        )

    def _facts(self, version: Version | None, sidecar: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in self.settings.items() if key in self.rules.facts}
        facts = {**self.rules.facts, **(version.facts if version else {}), **sidecar, **given}
        return {key: value for key, value in facts.items() if value != ASK}

    def _sizes(
        self, coverage: Coverage, every: bool = False
    ) -> tuple[dict[str, str | None], dict[str, int], list[str]]:
        """Binds letters to sizes; chooses among variants the only one that does not contradict them.

        Leaves of one shape say the same, and where all agree, one of each shape is asked; `every` leaf that does not
        is a finding.
        """
        findings: list[str] = []
        known: list[Constraint] = [
            Constraint(key, value, f"--set {key}={value}", "", "the setting")
            for key, value in self.settings.items()
            if key in self.rules.axes
        ]
        for name, count in coverage.counts.items():
            where = next(
                (
                    m.rule.at.line_only
                    for m in coverage.matched
                    if name in (m.rule.path.indices if m.rule.sources else ())
                ),
                "",
            )
            known.append(Constraint(name, count, where, "", f"the number of {{{name}}} in the tree"))
        choices: dict[str, str | None] = {}
        waiting: dict[str, list[Matched]] = {}
        for matched in coverage.matched:
            choice = matched.rule.choice
            if choice and not any(matched.leaves.values()):
                continue  # absent: there is nothing to choose
            if choice and choice not in self.settings:
                waiting.setdefault(choice, []).append(matched)
                continue
            if choice:
                choices[choice] = self.settings[choice]
            findings += _collect(known, matched, self.source, choices.get(choice or ""), every)
        sizes, problems = bind(known, self.rules.axes)
        while waiting:
            decided = False
            for choice, group in list(waiting.items()):
                trials = {variant: self._try(known, group, variant, every) for variant in group[0].rule.kind.variants}
                fitting = [variant for variant, (_, bad) in trials.items() if not bad]
                if len(fitting) == 1:
                    decided, choices[choice] = True, fitting[0]
                    known = trials[fitting[0]][0]
                    sizes, problems = bind(known, self.rules.axes)
                    del waiting[choice]
                elif not fitting:
                    del waiting[choice]
                    shown = "; ".join(f"{variant}: {bad[0]}" for variant, (_, bad) in trials.items())
                    findings.append(
                        f"{group[0].rule.at.line_only}: no variant of {choice!r} fits the checkpoint: {shown}"
                    )
            if not decided:
                break
        for choice, group in waiting.items():
            variants = group[0].rule.kind.variants
            leaf = next(iter(group[0].leaves["weight"].values()), "?")
            findings.append(
                f"{group[0].rule.at.line_only}: {leaf} ({self.source.leaves[leaf].spec if leaf in self.source.leaves else '?'}) fits "
                f"{' and '.join(variants)} alike; the sizes do not tell them apart. Choose with "
                f"{' or '.join(f'--set {choice}={variant}' for variant in variants)}"
            )
        findings += problems
        return self._sizes(coverage, every=True) if findings and not every else (choices, sizes, findings)

    def _try(
        self, known: list[Constraint], group: list[Matched], variant: str, every: bool
    ) -> tuple[list[Constraint], list[str]]:
        trial = list(known)
        bad: list[str] = []
        for matched in group:
            bad += _collect(trial, matched, self.source, variant, every)
        before = bind(known, self.rules.axes)[1]
        return trial, bad + [f for f in bind(trial, self.rules.axes)[1] if f not in before]

    def _steps(
        self,
        coverage: Coverage,
        merges: Mapping[str, Merge],
        choices: Mapping[str, str | None],
        sizes: Mapping[str, int],
        facts: Mapping[str, Any],
    ) -> tuple[list[Step], list[Mapping[str, Any]], list[str], list[str]]:
        custom = self.burn is not None or bool(self.settings.get("custom_cells"))
        compiler = Compiler(self.source, self.target, self.dtype, facts, self.settings, sizes, merges, custom)
        steps: list[Step] = []
        layers: list[Mapping[str, Any]] = []
        notes: list[str] = []
        calls: list[Call] = []
        findings: list[str] = []
        unserved: list[Rule] = []
        for matched in coverage.matched:
            rule = matched.rule
            layer = rule.layer(self.target)
            if layer is None and not any(matched.leaves.values()):
                continue
            if layer is None:
                unserved.append(rule)
                continue
            try:
                if self.burn is not None and (said := refusal(rule, layer)):
                    raise MisfitError(Finding("burn-has-no-layer", said, rule=rule.at.line_only))
                compiled = rule.kind.compile(compiler, matched, layer, choices.get(rule.choice or ""))
            except MisfitError as misfit:
                findings.append(str(misfit))
                continue
            made = compiled.steps
            steps += made
            notes += compiled.notes
            told = {
                k: _resolved(k, v, facts)
                for k, v in {
                    **rule.kind.facts(layer),
                    **rule.kind.sized_facts(layer, sizes),
                    **weight_transforms.facts(rule, layer),
                    **weight_normalization.facts(rule, layer),
                }.items()
            }
            where = layer.path.text
            if self.burn is not None and made:
                call = burn_call(rule, layer, told, made, sizes)
                told = in_burn(told, call)
                calls += [call] if call is not None else []
                where = where.removesuffix(f".{OUTPUT}") if layer.packed_in is not None else where
            if told and made:
                layers.append({"layer": where, "kind": rule.word, **told})
        return steps, layers, [*notes, *burn_notes(calls)], list(dict.fromkeys([*self._unserved(unserved), *findings]))

    def _unserved(self, rules: list[Rule]) -> Iterator[str]:
        """Rules with leaves and without a place for them in this target: one mistake, and so one finding."""
        if not rules:
            return
        others = [name for name in self.rules.targets if self.rules.supports(name)] if len(rules) > 1 else []
        lines = f" (and {len(rules) - 1} rules more)" if len(rules) > 1 else ""
        yield (
            f"{rules[0].at.line_only}: the rule{lines} has no target for {self.target!r}, so {rules[0].path} would be lost; "
            + (
                f"{self.rules.model} goes to {' or '.join(others)} as a whole: --to {others[0]}"
                if others
                else "add one, or give its leaves a `drop:` rule"
            )
        )

    def _message(self, findings: list[str]) -> str:
        groups = _alike(findings)
        lines = [f"{group[0]} ({len(group) - 1} more like it)" if group[1:] else group[0] for group in groups]
        shown = "\n".join(f"  - {line}" for line in lines[:MAX_FINDINGS])
        left = sum(len(group) for group in groups[MAX_FINDINGS:])
        more = f"\n  ... and {left} more" if left else ""
        said = "1 problem" if len(findings) == 1 else f"{len(findings)} problems"
        return f"{self.rules.path} does not fit {self.source.called}: {said}\n{shown}{more}"


def _for_good(merges: Mapping[str, Merge]) -> Iterator[str]:
    """That merged leaves cannot be taken apart again."""
    if merges:
        first = next(iter(merges.values()))
        count = len(merges)
        yield (
            f"{'1 weight is' if count == 1 else f'{count} weights are'} made of several leaves, which cannot be had back: "
            f"{first.name}{', ...' if count > 1 else ''}"
        )


def _unseen(rules: RuleFile, found: Found) -> Iterator[str]:
    """That the file is not there from which facts would have come."""
    if rules.sidecar is not None and not found.config:
        said = {key: value for key, value in rules.facts.items() if value != ASK}
        yield (
            f"there is no {rules.sidecar.file} beside the checkpoint; "
            f"{', '.join(f'{key} {value}' for key, value in said.items())} are what the rules take for granted"
        )


def _alike(findings: list[str]) -> list[list[str]]:
    """Findings in groups: three or more that differ in numbers alone have one cause, and are shown as one line."""
    groups: dict[str, list[str]] = {}
    for finding in findings:
        groups.setdefault(re.sub(r"\d+", "#", finding), []).append(finding)
    few = [[[finding] for finding in group] if len(group) < 3 else [group] for group in groups.values()]
    return list(itertools.chain(*few))


def _collect(known: list[Constraint], matched: Matched, source: Source, variant: str | None, every: bool) -> list[str]:
    """Adds a rule's constraints to `known`; the findings are leaves that contradict the rule on their own."""
    try:
        known.extend(constraints(matched, source, variant, every))
    except MisfitError as misfit:
        return [str(misfit)]
    return []


def _resolved(key: str, value: Any, facts: Mapping[str, Any]) -> Any:
    """What a layer computes, where the rule refers to a fact."""
    if key == "epsilon" and isinstance(value, str):
        return facts.get(value)
    if key == "activation" and isinstance(value, str) and value.startswith("$"):
        said = facts.get(value[1:])
        return ACTIVATION_NAMES.get(said, said) if isinstance(said, str) else said
    return value


def _duplicates(steps: list[Step]) -> Iterator[str]:
    seen: dict[str, Step] = {}
    for step in steps:
        first = seen.setdefault(step.name, step)
        if first is not step:
            yield (
                f"{step.rule.line_only}: the target tensor {step.name} ({step.spec}) is already made by {first.rule.line_only} "
                f"({first.spec}); each target has one source, so change one of the two paths"
            )


def _compare(steps: list[Step], like: Mapping[str, TensorSpec]) -> Iterator[str]:
    made = {step.name: step for step in steps}
    asked = itertools.count()

    def near(name: str, known: Mapping[str, object]) -> str:  # slow among thousands; later findings are not shown
        return nearest(name, known) if next(asked) < MAX_FINDINGS else ""

    for name, spec in like.items():
        if name not in made:
            yield f"{name} ({spec}) of the wanted state_dict has no source; add a rule for it{near(name, made)}"
        elif made[name].spec.shape != spec.shape:
            step = made[name]
            yield f"{step.rule.line_only}: {name} comes out as {step.spec} and the wanted state_dict has {spec}; correct the rule"
    for name, step in made.items():
        if name not in like:
            yield f"{step.rule.line_only}: {name} ({step.spec}) is not in the wanted state_dict; correct its name or drop it{near(name, like)}"
