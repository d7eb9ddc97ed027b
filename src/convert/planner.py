"""Makes a plan: matches rules to leaves, binds sizes, compiles steps, and collects every finding on the way."""

from __future__ import annotations

import gc
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from convert.beside import Found, contradictions, facts_beside, look_beside
from convert.cell_steps import CUSTOM_CELLS, cell_steps
from convert.compiler import Compiler
from convert.errors import PlanError
from convert.fields import nearest
from convert.kinds import DataPath, Recurrent, Rule, Timescales, conventions, normalized
from convert.kinds.base import ACTIVATION_NAMES
from convert.match import Coverage, Matched, cover
from convert.merging import merge
from convert.named_leaf import MisfitError, constraints
from convert.ops import is_float
from convert.path_steps import path_steps
from convert.plan import Dropped, Plan, expand, one_off
from convert.rulefile import ASK, RuleFile, Version, references
from convert.rules import facts_of
from convert.sizes import Constraint, bind
from convert.sources.base import Source
from convert.sources.merged import Merged
from convert.spec import SAFETENSORS_TAGS, TensorSpec
from convert.steps import Sinusoids, Step, join

MAX_FINDINGS = 12  # in one message; all of them are in PlanError.findings


def make_plan(
    rules: RuleFile,
    source: Source,
    *,
    to: str | None = None,
    dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
    like: Mapping[str, TensorSpec] | None = None,
) -> Plan:
    """Plans a conversion; reads no array.

    Where rules merge leaves, the plan's source is a view of `source` in which they are one (`convert.sources.merged`).

    Args:
        rules: from `convert.load_rules`.
        source: from `convert.open_source`.
        to: a target of the rule file; None is its first.
        dtype: what floating-point tensors are written in; None keeps each leaf's dtype.
        settings: facts, sizes and choices that the tree leaves open, by name.
        like: specs of an existing state_dict that the result must have, name for name and shape for shape.

    Raises:
        PlanError: rules and checkpoint do not fit; `findings` holds every problem.
    """
    with _uncollected():
        return _Planner(rules, source.on_disk, to or next(iter(rules.targets)), dtype, dict(settings or {})).plan(like)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: a plan is many small objects, all of which stay, and to look for garbage among them
    again and again takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass
class _Planner:
    rules: RuleFile
    source: Source
    target: str
    dtype: str | None
    settings: dict[str, Any]

    def plan(self, like: Mapping[str, TensorSpec] | None) -> Plan:
        self._check_arguments()
        coverage = cover(self.rules, self.source)
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
        coverage, self.source, problems = merge(coverage, self.source, sizes, facts)
        findings += problems
        steps, layers, notes, problems = self._steps(coverage, choices, sizes, facts)
        steps, unjoined = join(steps)
        findings += problems or unjoined
        findings += self._unmet(facts)
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
            source=self.source,
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
                *_for_good(self.source),
                *(note for step in steps for note in step.notes),
            ),
            beside=found,
        )

    def _check_arguments(self) -> None:
        targets = self.rules.targets
        if self.target not in targets:
            raise PlanError(
                f"{self.rules.path}: there is no target {self.target!r}{nearest(self.target, targets)} "
                f"(--to takes {', '.join(targets)})"
            )
        if self.dtype is not None and (SAFETENSORS_TAGS.get(self.dtype) is None or not is_float(self.dtype)):
            floats = [name for name, tag in SAFETENSORS_TAGS.items() if tag and is_float(name)]
            raise PlanError(
                f"--dtype {self.dtype}: not a floating-point dtype of safetensors{nearest(self.dtype, floats)} "
                f"(known: {', '.join(floats)})"
            )
        known = {k: v for k, v in _settable(self.rules).items() if k not in _declared(self.rules) or k in self.settings}
        for key, value in self.settings.items():
            if key == CUSTOM_CELLS and key in known:
                if not isinstance(value, bool):
                    raise PlanError(f"{self.rules.path}: --set {key}={value}: it is true or false")
                continue
            if key not in known:
                raise PlanError(f"{self.rules.path}: --set {key}: there is nothing called {key!r} to set{nearest(key, known)} (known: {', '.join(known)})")  # fmt: skip
            if key in self.rules.choices and value not in self.rules.choices[key]:
                raise PlanError(
                    f"{self.rules.path}: --set {key}={value}: it is one of {', '.join(self.rules.choices[key])}"
                )
            if key in self.rules.axes and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise PlanError(f"{self.rules.path}: --set {key}={value}: a size is a positive integer")
            if key in self.rules.facts and key in _declared(self.rules):
                raise PlanError(
                    f"{self.rules.path}: --set {key}={value}: {key} says what the source computes ({self.rules.facts[key]}), "
                    "and nothing that is written follows it; a source that computes otherwise needs rules of its own"
                )
            if key in self.rules.facts and (wanted := _misfit(key, value, self._examples(key))):
                raise PlanError(f"{self.rules.path}: --set {key}={value}: expected {wanted}")

    def _unmet(self, facts: Mapping[str, Any]) -> Iterator[str]:
        """Facts with which the target's code does not compute."""
        for name, need in self.rules.targets[self.target].needs.items():
            if name in facts and facts[name] != need.value:
                others = [target for target in self.rules.targets if target != self.target]
                yield (
                    f"{need.at.line_only}: {name} is {facts[name]}, and {self.rules.targets[self.target].loads} computes "
                    f"with {need.value}: {need.because}"
                    + (f". Take another target: --to {' or '.join(others)}" if others else "")
                )

    def _remarks(
        self, version: Version | None, sizes: Mapping[str, int], facts: Mapping[str, Any], steps: list[Step]
    ) -> Iterator[str]:
        """What a person should know of the whole."""
        if version is None and (said := one_off(self.rules, sizes, self.settings)):
            yield said
        target = self.rules.targets[self.target]
        for name, need in target.needs.items():
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

    def _examples(self, fact: str) -> list[Any]:
        """Values that the rule file itself gives to a fact: they tell what kind of value it takes."""
        values = [self.rules.facts[fact], *(v.facts[fact] for v in self.rules.versions if fact in v.facts)]
        return [value for value in values if value != ASK]

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

    def _facts(self, version: Version | None, beside: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in self.settings.items() if key in self.rules.facts}
        facts = {**self.rules.facts, **(version.facts if version else {}), **beside, **given}
        return {key: value for key, value in facts.items() if value != ASK}

    def _sizes(self, coverage: Coverage) -> tuple[dict[str, str | None], dict[str, int], list[str]]:
        """Binds letters to sizes; chooses among variants the only one that does not contradict them."""
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
            findings += _collect(known, matched, self.source, choices.get(choice or ""))
        sizes, problems = bind(known, self.rules.axes)
        while waiting:
            decided = False
            for choice, group in list(waiting.items()):
                trials = {variant: self._try(known, group, variant) for variant in group[0].rule.kind.variants}
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
        return choices, sizes, findings + problems

    def _try(self, known: list[Constraint], group: list[Matched], variant: str) -> tuple[list[Constraint], list[str]]:
        trial = list(known)
        bad: list[str] = []
        for matched in group:
            bad += _collect(trial, matched, self.source, variant)
        before = bind(known, self.rules.axes)[1]
        return trial, bad + [f for f in bind(trial, self.rules.axes)[1] if f not in before]

    def _steps(
        self, coverage: Coverage, choices: Mapping[str, str | None], sizes: Mapping[str, int], facts: Mapping[str, Any]
    ) -> tuple[list[Step], list[Mapping[str, Any]], list[str], list[str]]:
        compiler = Compiler(self.source, self.target, self.dtype, facts, self.settings, sizes)
        steps: list[Step] = []
        layers: list[Mapping[str, Any]] = []
        notes: list[str] = []
        findings: list[str] = []
        unserved: list[Rule] = []
        for matched in coverage.matched:
            rule = matched.rule
            layer = rule.layer(self.target)
            if isinstance(rule.kind, Timescales):
                if layer is not None:
                    steps += _buffer(rule, rule.kind, layer.path.fill({}), sizes, facts, notes, findings)
                continue
            if layer is None and not any(matched.leaves.values()):
                continue
            if layer is None:
                unserved.append(rule)
                continue
            try:
                made = list(
                    cell_steps(compiler, matched, layer, custom=bool(self.settings.get(CUSTOM_CELLS)))
                    if isinstance(rule.kind, Recurrent)
                    else path_steps(compiler, matched, layer)
                    if isinstance(rule.kind, DataPath)
                    else compiler.steps(matched, layer, choices.get(rule.choice or ""))
                )
            except MisfitError as misfit:
                findings.append(str(misfit))
                continue
            steps += made
            said = {
                k: _resolved(k, v, facts)
                for k, v in {
                    **rule.kind.facts(layer),
                    **rule.kind.sized_facts(layer, sizes),
                    **conventions.facts(rule, layer),
                    **normalized.facts(rule, layer),
                }.items()
            }
            if said and made:
                layers.append({"layer": layer.path.text, "kind": rule.word, **said})
        return steps, layers, notes, list(dict.fromkeys([*self._unserved(unserved), *findings]))

    def _unserved(self, rules: list[Rule]) -> Iterator[str]:
        """Rules with leaves and without a place for them in this target: one mistake, and so one finding."""
        if not rules:
            return
        others = [name for name in self.rules.targets if serves(self.rules, name)] if len(rules) > 1 else []
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


def _for_good(source: Source) -> Iterator[str]:
    """That merged leaves cannot be taken apart again."""
    if isinstance(source, Merged):
        first = next(iter(source.merges.values()))
        count = len(source.merges)
        yield (
            f"{'1 weight is' if count == 1 else f'{count} weights are'} made of several leaves, which cannot be had back: "
            f"{first.name}{', ...' if count > 1 else ''}"
        )


def _unseen(rules: RuleFile, found: Found) -> Iterator[str]:
    """That the file is not there from which facts would have come."""
    if rules.beside is not None and not found.config:
        said = {key: value for key, value in rules.facts.items() if value != ASK}
        yield (
            f"there is no {rules.beside.file} beside the checkpoint; "
            f"{', '.join(f'{key} {value}' for key, value in said.items())} are what the rules take for granted"
        )


def _alike(findings: list[str]) -> list[list[str]]:
    """Findings in groups: three or more that differ in numbers alone have one cause, and are shown as one line."""
    groups: dict[str, list[str]] = {}
    for finding in findings:
        groups.setdefault(re.sub(r"\d+", "#", finding), []).append(finding)
    few = [[[finding] for finding in group] if len(group) < 3 else [group] for group in groups.values()]
    return list(itertools.chain(*few))


def _settable(rules: RuleFile) -> dict[str, Any]:
    """What --set may name."""
    cells = {CUSTOM_CELLS: None} if any(isinstance(rule.kind, Recurrent) for rule in rules.rules) else {}
    return {**rules.facts, **rules.axes, **rules.choices, **cells}


def _declared(rules: RuleFile) -> set[str]:
    """Facts in words, or true or false, that nothing refers to: they describe the source, and nothing can follow them."""
    used = {
        said for t in rules.targets.values() for said in (*references(t.config), *references(t.generation), *t.needs)
    }
    used |= {said for rule in rules.rules for said in facts_of(rule)}
    return {k for k, v in rules.facts.items() if isinstance(v, str | bool) and v != ASK and k not in used}


SEVERAL = ("eos_token_id",)  # integers of which transformers' configuration takes a list, too: generation stops at any


def _misfit(key: str, value: Any, examples: list[Any]) -> str:
    """What a setting should have been, going by the values that are known; empty when it will do."""
    if not examples:
        return ""
    if key in SEVERAL:
        listed = value if isinstance(value, list) and value else [value]
        if all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in listed):
            return ""
        return f"an integer, or a list of integers such as [{examples[0]}, 106]"
    example = examples[0]
    if isinstance(example, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(example, (int, float)):
        number = "an integer" if all(isinstance(e, int) for e in examples) else "a number"
        fits = isinstance(value, int if number == "an integer" else (int, float)) and not isinstance(value, bool)
        if not fits or (value <= 0 and all(e > 0 for e in examples)):
            return (
                f"{number} above 0, such as {example}"
                if all(e > 0 for e in examples)
                else f"{number}, such as {example}"
            )
        return ""
    if isinstance(example, str):
        return "" if isinstance(value, str) else f"a word, such as {example}"
    same = isinstance(value, type(example)) and all(isinstance(v, (int, float)) for v in value)
    return "" if same else f"{json.dumps(example)} or another list of numbers"


def _collect(known: list[Constraint], matched: Matched, source: Source, variant: str | None) -> list[str]:
    """Adds a rule's constraints to `known`; the findings are leaves that contradict the rule on their own."""
    try:
        known.extend(constraints(matched, source, variant))
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


def _buffer(
    rule: Rule,
    kind: Timescales,
    name: str,
    sizes: Mapping[str, int],
    facts: Mapping[str, Any],
    notes: list[str],
    findings: list[str],
) -> Iterator[Step]:
    if rule.when and rule.when not in facts:
        notes.append(
            f"{name} is left out: the target has it only when {rule.when} is true, and nothing says whether it is "
            f"(--set {rule.when}=true|false)"
        )
        return
    if rule.when and not isinstance(facts[rule.when], bool):
        findings.append(
            f"{rule.at.line_only}: {rule.when} is {facts[rule.when]!r}, neither true nor false; give it with "
            f"--set {rule.when}=true|false"
        )
        return
    if rule.when and not facts[rule.when]:
        return
    if kind.width not in sizes:
        findings.append(
            f"{rule.at.line_only}: {name} has the width {kind.width}, to which no leaf and no product of `axes` gives a size; "
            "correct the letter"
        )
        return
    scales = [facts.get(said) for said in ("min_timescale", "max_timescale")]
    positive = [float(scale) for scale in scales if isinstance(scale, int | float) and scale > 0]
    if len(positive) < 2:
        findings.append(
            f"{rule.at.line_only}: {name} needs min_timescale and max_timescale, two positive numbers, not "
            f"{scales[0]} and {scales[1]}; give them with --set min_timescale=... --set max_timescale=..."
        )
        return
    low, high = positive
    half = sizes[kind.width] // 2
    step = math.log(high / low) / max(half - (kind.last == "included"), 1)
    if kind.positions is None:
        yield Step(name, TensorSpec((half,), "float32"), (), rule.word, rule.at, "computed from sizes", "", (low, step))
        return
    rows = sizes.get(kind.positions) if isinstance(kind.positions, str) else kind.positions
    if rows is None or sizes[kind.width] % 2:
        said = (
            f"{name} has {kind.positions} positions, to which no leaf and no product of `axes` gives a size"
            if rows is None
            else f"{name} has the width {kind.width} = {sizes[kind.width]}, which is no pairs of a sine and a cosine"
        )
        findings.append(f"{rule.at.line_only}: {said}; correct the letter")
        return
    table = Sinusoids(low, step, kind.layout == "interleaved")
    spec = TensorSpec((rows, 2 * half), "float32")
    yield Step(name, spec, (), rule.word, rule.at, "computed from sizes", "", table)


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


def choose_plan(
    candidates: tuple[RuleFile, ...],
    source: Source,
    *,
    to: str | None = None,
    dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
    like: Mapping[str, TensorSpec] | None = None,
) -> Plan:
    """The plan of the rule file that fits the checkpoint; arguments as in `make_plan`.

    Where several fit, it is the one that drops fewest leaves: the model with a vision tower, for a tree that has one.

    Raises:
        PlanError: none fits (the findings are those of the nearest), or several do.
    """
    if len(candidates) == 1:
        return make_plan(candidates[0], source, to=to, dtype=dtype, settings=settings, like=like)
    source = source.on_disk
    coverages = {rules.model: cover(rules, source) for rules in candidates}
    shares = {model: _share(coverage, source) for model, coverage in coverages.items()}
    best = sorted(candidates, key=lambda rules: -shares[rules.model])
    misspelt = set(settings or ()) - {key for rules in candidates for key in _settable(rules)}
    errors: dict[str, PlanError] = {}
    fitting: list[Plan] = []
    for rules in best:
        if shares[rules.model] == 0:
            continue
        own = {k: v for k, v in (settings or {}).items() if k in _settable(rules)}
        only = settings if rules is best[0] and misspelt else own  # which is an error of the nearest file
        try:
            fitting.append(make_plan(rules, source, to=to, dtype=dtype, settings=only, like=like))
        except PlanError as error:
            errors[rules.model] = error
    fewest = min((len(plan.dropped) for plan in fitting), default=0)
    fitting = [plan for plan in fitting if len(plan.dropped) == fewest]
    for rules in best if fitting else ():  # a damaged tower is no reason to leave it out
        knows_more = (
            len(coverages[rules.model].dropped) < fewest and shares[rules.model] >= shares[fitting[0].rules.model]
        )
        if rules.model in errors and knows_more and serves(rules, fitting[0].target):
            raise PlanError(
                f"{errors[rules.model]}\nName {fitting[0].rules.model} in place of {best[0].family} to go without the leaves "
                "that it leaves out",
                errors[rules.model].findings,
            )
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = " and ".join(plan.rules.model for plan in fitting)
        raise PlanError(f"{source.called} fits {names} alike; name one of them in place of {best[0].family}")
    said = ", ".join(f"{rules.model} knows {round(100 * shares[rules.model])} % of the leaves" for rules in best)
    able = [
        rules for rules in best if to is None or to not in rules.targets or serves(rules, to)
    ]  # the others would say only that
    first = next((rules for rules in able if rules.model in errors and shares[rules.model] > 0.5), best[0])
    nearest_error = errors.get(first.model)
    if nearest_error is None:
        found = next(iter(source.leaves), "no leaves")
        raise PlanError(
            f"{source.called} ({source.format}) fits none of {', '.join(rules.model for rules in best)}: none of its "
            f"{len(source.leaves)} leaves matches a rule; the first is {found}. See the tree with `convert inspect`, and the "
            "models that are known with `convert rules list`"
        )
    if not coverages[first.model].findings:  # the model is known; the mistake is another
        raise nearest_error
    raise PlanError(
        f"{nearest_error}\nThat is the nearest of {best[0].family or best[0].model}: {said}", nearest_error.findings
    )


def fit(rules: RuleFile, source: Source) -> float:
    """The share of leaves that the rules know, from 0 to 1; leaves that they only drop do not count."""
    return _share(cover(rules, source), source)


def serves(rules: RuleFile, target: str) -> bool:
    """Whether every rule that takes leaves says where they go for this target."""
    return all(rule.layer(target) for rule in rules.rules if rule.sources and rule.word != "drop")


def _share(coverage: Coverage, source: Source) -> float:
    dropped = {claim.leaf for claim in coverage.dropped}
    rest = len(source.leaves) - len(dropped)
    return (coverage.claimed - len(dropped)) / rest if rest else 0.0
