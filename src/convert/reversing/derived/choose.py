"""Plan the way back with each model of a family, and take the one whose tree gives exactly these tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from convert.core.errors import OptionError, PlanError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec, is_float, widens
from convert.layers.leaf_sums import IMAGINARY, NEXT, PLUS, TIMES_J, sign_of, sums_of, what_is_lost
from convert.layers.leaves import MisfitError
from convert.layers.transforms.weight_normalization import kept
from convert.planning.facts.values import published_version
from convert.planning.matching.match import cover
from convert.planning.options import ConversionOptions
from convert.planning.planner import plan_match
from convert.planning.rule_match import match_rules
from convert.planning.select_rules import Ambiguous, check_taken, explain, own_options, pick, score
from convert.planning.target_formats.registry import with_target
from convert.reversing.config_json import refused_values
from convert.reversing.derived.layouts import DerivedSource, forms, keys_of, layout_of, named
from convert.reversing.derived.leaves import TensorNames, claimed, wanted_leaves
from convert.reversing.derived.modules import for_tensors
from convert.reversing.derived.shapes import Known, Shapes
from convert.reversing.derived.stated import adapted_notes, known_sizes, rows_of_tables, stated_choices, stated_settings
from convert.reversing.left_out import why_left_out
from convert.reversing.plan import ReversePlan, UnwrittenLeaves, reverse
from convert.rules.file import Layout, RuleFile
from convert.writing.written import Written

SAME_MODEL = 0.5  # share of the tensors that are of the same model
ASKED = ("size-unknown", "variant-undecided")  # errors that an answer with --set removes


@dataclass(frozen=True)
class _Trial:
    """One model and target that the tensors may be of."""

    share: float
    rules: RuleFile
    target: str
    written: Written
    names: TensorNames
    layout: str | None
    options: ConversionOptions
    leaf_dtype: str | None


@dataclass(frozen=True)
class _Failed:
    """A model that the tensors are not of, or whose leaves they do not give."""

    stage: int  # that the attempt reached: what a later one finds says more
    error: PlanError


def plan_derived(
    candidates: Sequence[RuleFile], written: Written, layout: str | None, options: ConversionOptions
) -> ReversePlan:
    """Plan the way back to the tree that the rules give.

    Args:
        candidates: the rules, or those of all models of a family.
        layout: name of a published layout; None is the first.
        options: `to` is the target of the tensors; None is the one that fits best. `dtype` is that of the floating-point leaves;
            None is that of the tensors.

    Raises:
        ConvertError: as `convert.plan_reverse`.
    """
    options, leaf_dtype = _dtypes(written, options)
    candidates = [for_tensors(rules, written) for rules in candidates]
    fitting: list[ReversePlan] = []
    failed: list[_Failed] = []
    questions: dict[str, None] = {}  # of models that come before those that fit
    for trial in _likely(candidates, written, layout, options, leaf_dtype):
        planned = _plan(trial)
        if isinstance(planned, ReversePlan):
            fitting.append(planned)
            continue
        failed.append(planned)
        questions |= dict.fromkeys(() if fitting else _question(trial, planned.error))
    if fitting:
        plan = _only(fitting, options)
        check_taken(plan.forward.rules, candidates, options)
        return replace(plan, notes=(*plan.notes, *questions))
    raise _furthest(failed).error if failed else _of_another_model(candidates, written)


def _furthest(failed: Sequence[_Failed]) -> _Failed:
    """Return the attempt that reached the latest stage; of several, the one with the fewest errors."""
    return min(failed, key=lambda one: (-one.stage, len(one.error.findings)))


def _question(trial: _Trial, error: PlanError) -> Iterator[str]:
    """Say which other model the tensors may be of, where its rules only lack an answer of the user."""
    if all(finding.code in ASKED for finding in error.findings):
        first = error.findings[0]
        yield f"the tensors may also be of {trial.rules.title}, named by {trial.rules.model}: {first.problem}; {first.fix}"


def _dtypes(written: Written, options: ConversionOptions) -> tuple[ConversionOptions, str | None]:
    """Return the options of the way forth, whose dtype is that of the tensors, and the dtype of the floating-point leaves.

    Raises:
        OptionError: a leaf of this dtype cannot hold the values of a tensor.
    """
    wanted = options.dtype
    own = {spec.dtype for name, spec in written.specs.items() if is_float(spec.dtype) and not why_left_out(name, spec)}
    if wanted is None or not own:
        return replace(options, dtype=None), None
    if len(own) > 1 or not all(widens(dtype, wanted) for dtype in own):
        raise OptionError(
            Finding(
                "dtype-unknown",
                "without --like it is the dtype of the leaves, which must hold every value of the tensors",
                path=f"--dtype {wanted}",
                expected=f"a dtype at least as wide as {' and '.join(sorted(own))}"
                if len(own) == 1
                else f"no --dtype, as the tensors have several ({', '.join(sorted(own))})",
                got=wanted,
                fix="leave it out, or convert the tensors to one dtype first",
            )
        )
    return replace(options, dtype=own.pop()), wanted


def _likely(
    candidates: Sequence[RuleFile],
    written: Written,
    layout: str | None,
    options: ConversionOptions,
    leaf_dtype: str | None,
) -> list[_Trial]:
    """Return the models and targets that have the names of the most tensors."""
    names = TensorNames(list(written.specs))
    weights = sum(not why_left_out(name, spec) for name, spec in written.specs.items())
    found: list[_Trial] = []
    own = own_options(candidates, options)
    stated = written.metadata.get("model")
    known = stated in [rules.model for rules in candidates]
    for rules in candidates:
        if known and rules.model != stated:
            continue
        targets = (options.to,) if options.to else rules.supported_targets or tuple(rules.targets)
        if not options.to and written.metadata.get("target") in targets:
            targets = (written.metadata["target"],)
        for target in targets:
            if target not in rules.targets:
                continue
            form, _ = next(forms(rules, layout_of(rules, None)))
            have = set().union(*claimed(form, target, names).values())
            share = len(have) / max(weights, 1)
            found.append(_Trial(share, rules, target, written, names, layout, own[rules.model], leaf_dtype))
    best = max((trial.share for trial in found), default=0.0)
    likely = [trial for trial in found if trial.share == best >= SAME_MODEL]
    having = [trial for trial in likely if layout in [None, *(one.name for one in trial.rules.layouts)]]
    if likely and not having:
        layout_of(likely[0].rules, layout)  # which is the error
    return having


def _of_another_model(candidates: Sequence[RuleFile], written: Written) -> PlanError:
    first = next((str(rule.layers[0][1].path) for rule in candidates[0].rules if rule.sources and rule.layers), "")
    return PlanError(
        Finding(
            "rules-of-another-model",
            f"the rules have the names of few of the {len(written.specs)} tensors of {written.path}",
            rule=candidates[0].path,
            expected=first,
            got=next(iter(written.specs), "no tensors"),
            fix="give the rules of this model; `convert rules list` lists the known ones",
        )
    )


def _only(fitting: Sequence[ReversePlan], options: ConversionOptions) -> ReversePlan:
    """Return the plan of the model that the tree itself selects; several targets of one model have the same tree."""
    first = fitting[0]
    rules = list({plan.forward.rules.model: plan.forward.rules for plan in fitting}.values())
    if len(rules) == 1:
        return first
    picked = pick(score(rules, first.forward.checkpoint, options))
    if isinstance(picked, Ambiguous):
        raise explain(picked)
    return next((plan for plan in fitting if plan.forward.rules.model == getattr(picked, "rules", rules[0]).model), first)  # fmt: skip


def _plan(trial: _Trial) -> ReversePlan | _Failed:
    """Plan with one model: with the first form of the layout whose tree gives exactly these tensors.

    Raises:
        OptionError: an option of the user does not fit.
    """
    rules, target, written = trial.rules, trial.target, trial.written
    said = {**stated_settings(rules, target, written), **trial.options.settings}
    options = replace(trial.options, to=target, settings=said)
    layout, failed = layout_of(rules, trial.layout), list[_Failed]()
    for written_so, root in forms(rules, layout):
        for form in _alternatives(replace(rules, rules=written_so), target, trial.names):
            known = known_sizes(rules, target, written, said)
            choices = {name: said[name] for name in rules.choices if name in said}
            choices = {**stated_choices(rules, written), **choices}
            stage = 0
            try:
                variants = {**{name: several[0] for name, several in rules.choices.items()}, **choices}
                source, sizes = _tree(trial, form, root, variants, known)
                stage = 1
                if open_choices := rules.choices.keys() - choices.keys():
                    version = published_version(rules, sizes)
                    choices = {**rules.usual_variants, **(version.choices if version else {}), **choices}
                    if unknown := sorted(open_choices - choices.keys()):
                        raise _undecided(rules, unknown[0])
                    source, sizes = _tree(trial, form, root, choices, known)
                stage = 2
                settings = {**said, **choices, **rows_of_tables(form, target, written, trial.names, said)}
                if refused := list(refused_values(rules, target, written.config or {}, sizes, trial.options.settings)):
                    raise PlanError(*refused)
                plan = plan_match(match_rules(rules, source, replace(options, settings=settings)))
                return _described(reverse(plan, written, like=False), layout, rules)
            except MisfitError as misfit:
                failed.append(_Failed(stage, PlanError(misfit.finding)))
            except OptionError:
                raise
            except PlanError as error:
                failed.append(_Failed(stage, error))
    return _furthest(failed[::-1])


def _undecided(rules: RuleFile, choice: str) -> PlanError:
    rule = next(rule for rule in rules.rules if rule.choice == choice)
    variants = rules.choices[choice]
    return PlanError(
        Finding(
            "variant-undecided",
            f"the tensors are the same for {' and '.join(variants)}, and this is no published size",
            rule=rule.at.line_only,
            path=str(rule.path),
            fix=f"choose with {' or '.join(f'--set {choice}={variant}' for variant in variants)}, or give a checkpoint with --like",
        )
    )


def _described(plan: ReversePlan, layout: Layout, rules: RuleFile) -> ReversePlan:
    """Return the plan with the name of its layout, those of the others, and what the rules drop.

    Raises:
        PlanError: the tensors lack elements of a leaf.
    """
    findings = [
        Finding(
            "not-reversible",
            f"no tensor has {made.rest:,} of the {made.spec.size:,} elements of this leaf",
            rule=made.parts[0][0].rule.line_only,
            path=made.leaf,
            fix="give a checkpoint that has them with --like",
        )
        for made in plan.leaves
        if made.rest
    ]
    if findings:
        raise PlanError(*findings)
    others = [other.name for other in rules.layouts if other is not layout]
    notes = [f"the tree has the layout {layout.name}; --layout also knows {', '.join(others)}"] if others else []
    notes += adapted_notes(rules, plan.written.config)
    drops = [rule for rule in plan.forward.rules.rules if rule.kind.drop_reason is not None]
    unwritten = tuple(UnwrittenLeaves(str(rule.path), rule.kind.drop_reason or "", rule.at) for rule in drops)
    return replace(plan, layout=layout.name, notes=(*plan.notes, *notes), unwritten=unwritten)


def _alternatives(rules: RuleFile, target: str, names: TensorNames) -> Iterator[RuleFile]:
    """Yield the rules without those that `absent_if` replaces: of rules for the same tensors, the last first, and each choice with each."""
    have = claimed(rules.rules, target, names)
    rival = {
        k: {j for j in have if j != k and have[j] & have[k] and not _other_parts(rules, target, j, k)}
        for k in have
        if rules.rules[k].absent_if is not None
    }
    if not any(rival.values()):
        yield rules
        return
    last = max(k for k, others in rival.items() if others)
    for left_out in (rival[last], {k for k in rival if rival[k] & rival[last]}):
        kept_rules = tuple(rule for k, rule in enumerate(rules.rules) if k not in left_out)
        yield from _alternatives(replace(rules, rules=kept_rules), target, names)


def _other_parts(rules: RuleFile, target: str, j: int, k: int) -> bool:
    """Whether two rules make different parts of one tensor."""
    one, two = (rules.rules[x].layer(target) for x in (j, k))
    return one is not None and two is not None and None not in (one.part, two.part) and one.part != two.part


def _lost(rules: RuleFile, target: str) -> Iterator[Finding]:
    """Find the rules whose tensors are computed from several leaves, which they do not tell apart."""
    for rule in rules.rules:
        layer, why = rule.layer(target), ""
        terms = next(iter(sums_of([*rule.sources]).values()), ())
        sign = sign_of(terms)
        if layer is not None and (rule.kind.pair is not None or terms):
            why = "; ".join(what_is_lost(sign))
        elif layer is not None and rule.normalized is not None and not kept(rule, layer):
            why = "the weight with its normalisation folded into it; it does not hold the weight without it"
        if why:
            fix = "keep the leaves apart in the target, or leave this rule out"
            between = {NEXT: NEXT.lstrip(), IMAGINARY: f"{PLUS}{TIMES_J}"}.get(sign, PLUS)
            path = between.join(str(rule.sources[role]) for role in terms or [rule.lead])
            yield Finding("not-reversible", f"the tensor is {why}", rule=rule.at.line_only, path=path, fix=fix)


def _stated_layers(rules: RuleFile) -> dict[str, int]:
    """Return the axes whose size the rules state as a number."""
    stated: dict[str, int] = {}
    for letter, axis in rules.axes.items():
        numbers = [factor for factor in axis.equals if isinstance(factor, int)]
        if numbers and len(numbers) == len(axis.equals):
            stated[letter] = math.prod(numbers)
    return stated


def _tree(
    trial: _Trial, form: RuleFile, root: str, variants: Mapping[str, str], known: Known
) -> tuple[DerivedSource, Mapping[str, int]]:
    """Return the tree of these tensors, and its sizes.

    Raises:
        MisfitError, PlanError: the tensors do not give it.
    """
    rules, target, written = trial.rules, trial.target, trial.written
    if lost := list(_lost(form, target)):
        raise PlanError(*lost)
    shapes = Shapes(form, variants, written.specs)
    try:
        wanted = wanted_leaves(form.rules, target, trial.names, _stated_layers(form))
    except ValueError as error:
        problem = f"the names of the tensors do not give the paths of the leaves: {error}"
        fix = "give a checkpoint of the same model with --like"
        raise PlanError(Finding("tree-not-derived", problem, rule=rules.path, fix=fix)) from None
    made_up, guessed = shapes.made_up(wanted)
    layout = layout_of(rules, trial.layout)
    keys = [keys_of(leaf.path, root, layout) for leaf in wanted]
    specs = {of: TensorSpec(shape, "float32") for of, shape in zip(keys, guessed, strict=True)}
    probe = DerivedSource(written, *named(specs))
    coverage = cover(with_target(replace(form, path_variants=()), target), probe)
    if coverage.findings:
        raise PlanError(*coverage.findings, headline=f"{rules.path} does not fit {written.path}")
    steps = shapes.steps(coverage, probe, target, made_up)
    solved, sizes = shapes.solve(wanted, steps, {"/".join(of): k for k, of in enumerate(keys)}, known)
    if trial.leaf_dtype is not None:
        solved = [replace(spec, dtype=trial.leaf_dtype) if is_float(spec.dtype) else spec for spec in solved]
    return DerivedSource(written, *named(dict(zip(keys, solved, strict=True)))), sizes
