"""Run the levels of a check, cheapest first.

`check` opens what was written, makes the plan again, finds the two models, and runs the requested levels. The levels read each
source leaf and each written tensor once: weights and layers are compared in one pass, in threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from convert.api import plan_conversion
from convert.checkpoints import Source
from convert.core.errors import ConvertError, PlanError, RuleError, UnavailableError, UserCodeError
from convert.core.findings import Finding
from convert.core.system import signals
from convert.core.text import shortened
from convert.core.user_code import REFERENCE_OPTION, find_factory, user_code_errors
from convert.planning.options import DEFAULTS, ConversionOptions
from convert.planning.plan import Plan
from convert.planning.target_formats.registry import target_names
from convert.references.plan_facts import ReadFacts
from convert.references.protocol import Reference
from convert.references.user_reference import require_factory, require_reference
from convert.rules.library import is_path, named_rules
from convert.verify.config.activations import with_measured
from convert.verify.config.compare import Facts, check_facts, with_facts
from convert.verify.config.judge import RECORDED, contradictions, judge, not_proven, of_layers, of_names, trusted
from convert.verify.coverage.hf_directory import other_class
from convert.verify.coverage.level import check_coverage
from convert.verify.layers.as_torch import as_torch
from convert.verify.layers.level import check_layers, missing
from convert.verify.model.dropped_leaves import ReadLeaf, read_by_the_model, with_read_leaves
from convert.verify.options import CheckKeywords, CheckOptions
from convert.verify.recording.file import load_recording
from convert.verify.recording.match import evidence_of, recording_defaults
from convert.verify.recording.source import RecordedSource, with_written_leaves
from convert.verify.recording.weights import check_recorded_weights
from convert.verify.report.facts import JudgedFact
from convert.verify.report.report import LevelReport, Report, Verdict
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.target_alone import target_alone
from convert.verify.sides.target_code import with_target_errors
from convert.verify.weights.level import WeightsPass
from convert.writing.written import Written, open_written

SHIPPED = "convert.references."  # package of the references that the shipped rule files name


def check(
    out: str | Path,
    checkpoint: str | Path | Source | None = None,
    conversion: ConversionOptions = DEFAULTS,
    options: CheckOptions | None = None,
    *,
    model: str | None = None,
    **keywords: Unpack[CheckKeywords],
) -> Report:
    """Check a conversion against its checkpoint, against a recording of the JAX model, or against both.

    Args:
        out: the output, of this package or of other code.
        checkpoint: the source; may be None when `options` name a recording.
        conversion: options of the conversion; the metadata of the file gives the defaults.
        options: options of the check.
        model: as for the conversion; None is the model that the metadata of the file names.
        keywords: fields of both options; they take precedence.

    Raises:
        ConvertError: something cannot be opened, found or read.
    """
    given: Mapping[str, Any] = keywords
    names = {field.name for field in fields(CheckOptions)}
    options = replace(options or CheckOptions(), **{name: value for name, value in given.items() if name in names})
    conversion = replace(conversion, **{name: value for name, value in given.items() if name not in names})

    written = open_written(out)
    settings = {"--set": conversion.settings, f"the header of {written.path.name}": written.stated("settings")}
    recording = None
    if options.recorded is not None:
        recording = load_recording(options.recorded)
        conversion = recording_defaults(
            recording, written, conversion, options.precision, options.reference, options.seed
        )
        options = replace(options, seed=recording.manifest.seed)
        settings[f"{RECORDED}{recording.path.name}"] = recording.manifest.settings
        checkpoint = RecordedSource(recording, written) if checkpoint is None else checkpoint
    if checkpoint is None:
        raise ConvertError(
            Finding(
                "usage",
                "there is nothing to compare it with",
                path=str(out),
                fix="give its checkpoint (--from CKPT), a recording (--recorded FILE), or both",
            )
        )
    recorded_model = recording.manifest.model if recording is not None else ""
    plan = with_written_leaves(plan_of(written, checkpoint, conversion, model=model, recorded_model=recorded_model))
    _refuse_other_target(plan, written)
    remake = partial(plan_of, written, checkpoint, model=model, recorded_model=recorded_model)
    _refuse_names_of_another_target(plan, written, lambda to: remake(replace(conversion, to=to)))
    read = ReadFacts(plan.facts)
    reference = _reference_of(replace(plan, facts=read), written, options)
    known = partial(judge, plan, settings, read=read.names, trust=tuple(options.trust))
    comparison = Comparison(
        plan,
        written,
        reference,
        _target_of(plan, written, reference),
        user_factory(plan, options.reference),
        evidence_of(recording, plan, written) if recording is not None else None,
        options,
        contradictions(known(), plan),
    )
    levels: tuple[LevelReport, ...] = ()
    facts = Facts()
    for outcome in _run_levels(comparison):
        signals.check()
        if isinstance(outcome, Facts):
            facts = outcome
        else:
            levels = (*levels, outcome)
    agree = any(level.level == "model" and level.verdict is Verdict.PASSED for level in levels)
    others = (*of_layers(facts.unread), *of_names(plan), *facts.unseen)
    judged = (*known(constants=facts.constants, models_agree=agree), *trusted(others, tuple(options.trust)))
    if "model" in options.require:
        levels = tuple(not_proven(level, judged) for level in levels)
    return Report(
        str(out),
        str(plan.source.path),
        plan.rules.model,
        plan.target,
        levels,
        tuple(options.require),
        plan=plan,
        facts=judged,
    )


# ---- what is compared


@dataclass(frozen=True)
class Comparison:
    """The two sides of a check.

    Attributes:
        plan: how each tensor is made of the source.
        written: the output.
        reference: the two models; the reason, when there are none.
        target: what builds the target's module: the reference, or the module alone; the reason, when there is none.
        factory: the ``module:function`` that built them, when it is user code.
        recorded: the recorded values of the JAX model; None runs it.
        options: of the check.
        contradicted: facts that contradict what is known of the model.
    """

    plan: Plan
    written: Written
    reference: Reference | str
    target: Reference | str
    factory: str | None
    recorded: Evidence | None
    options: CheckOptions
    contradicted: tuple[Finding, ...] = ()

    @property
    def from_recording(self) -> bool:
        """Whether the leaves are known from a recording alone."""
        return isinstance(self.plan.checkpoint, RecordedSource)


def plan_of(
    written: Written,
    checkpoint: str | Path | Source,
    options: ConversionOptions = DEFAULTS,
    *,
    model: str | None = None,
    recorded_model: str = "",
) -> Plan:
    """Make the plan of the conversion again; the metadata of the file gives what the options leave open.

    Args:
        model: of the user; a name or a path.
        recorded_model: of the recording, for a file without metadata. Like that of the metadata, it must be a name.

    Raises:
        ConvertError: neither the metadata nor the caller names rules; or as `plan_conversion`.
    """
    metadata = {key: shortened(value) for key, value in written.metadata.items() if key in ("model", "target", "dtype")}
    origin = ""
    if not model:
        origin = f"its header names {metadata['model']}" if metadata.get("model") else "the recording names it"
        model = metadata.get("model") or recorded_model
        fix = "name the rules with --model, such as --model ./rules.yaml"
        if not model:
            raise ConvertError(
                Finding("rules-not-found", "its metadata names no rules", path=str(written.path), fix=fix)
            )
        if is_path(model):
            problem = "its metadata names a rule file by its path; a file that is checked does not choose its own rules"
            raise ConvertError(Finding("rules-not-found", problem, path=str(written.path), got=model, fix=fix))
        try:
            named_rules(model, Path(options.rules_dir) if options.rules_dir else None)
        except RuleError as error:
            problem = f"its metadata names the rules {model!r}, which are not available"
            raise ConvertError(Finding("rules-not-found", problem, path=str(written.path), fix=fix)) from error
    planned = replace(
        options,
        to=options.to or metadata.get("target") or None,
        dtype=options.dtype or metadata.get("dtype") or None,
        settings={**written.stated("settings"), **options.settings},
    )
    try:
        return plan_conversion(model, checkpoint, planned)
    except PlanError as error:
        if not origin:
            raise
        chosen = f"{written.path.name} chose these rules: {origin}; if it is of another model, name that with --model"
        raise error.with_hint("; ".join(filter(None, (chosen, error.hint)))) from error


def _refuse_other_target(plan: Plan, written: Written) -> None:
    """Refuse to compare a file with the plan of another target of the same rules: every tensor would be another one.

    Raises:
        ConvertError: the header of the file names such a target.
    """
    named = written.metadata.get("target", plan.target)
    if plan.target != named and written.metadata.get("model") == plan.rules.model and named in target_names(plan.rules):
        raise ConvertError(
            Finding(
                "target-differs",
                f"the header names the target {named}, --to says {plan.target}",
                path=str(written.path),
                fix="leave out --to",
            )
        )


def _refuse_names_of_another_target(plan: Plan, written: Written, plan_for: Callable[[str], Plan]) -> None:
    """Refuse to compare a file whose tensors have the names of another target of the same rules, all of them and no other.

    Raises:
        ConvertError: the header of the file, or ``--to``, names a target that the file was not written for.
    """
    named = written.metadata.get("target")
    if {step.name for step in plan.steps} == set(written.tensors):
        return
    for other in target_names(plan.rules):
        if other == plan.target:
            continue
        try:
            fits = {step.name for step in plan_for(other).steps} == set(written.tensors)
        except ConvertError:  # this target needs a setting, or takes no such checkpoint
            continue
        if fits:
            says = f"the header names the target {named}" if named else f"the target is {plan.target}"
            problem = f"{says}, and the tensors have the names of the target {other}"
            fix = "convert again: the header was changed" if named else f"give --to {other}"
            raise ConvertError(Finding("target-differs", problem, path=str(written.path), fix=fix))


def user_factory(plan: Plan, factory: str | None) -> str | None:
    """Return the factory if it is user code: that of ``--reference``, or that of a rule file which is not shipped."""
    stated = plan.rules.reference
    return factory or (stated if stated and not stated.startswith(SHIPPED) else None)


def _reference_of(plan: Plan, written: Written, options: CheckOptions) -> Reference | str:
    reference = load_reference(replace(plan, written_config=written.config), options.reference)
    if options.reference is None and written.path.is_dir() and (other := other_class(plan, written)):
        return str(other)  # the reference of the rules does not know the other class
    return reference


def _target_of(plan: Plan, written: Written, reference: Reference | str) -> Reference | str:
    """Return what builds the target's module: where the rules name no reference, its own class alone."""
    if not isinstance(reference, str) or plan.rules.reference or plan.format.not_run or other_class(plan, written):
        return reference
    return target_alone(replace(plan, written_config=written.config)) or reference


def load_reference(plan: Plan, factory: str | None) -> Reference | str:
    """Build the two models for the model level, or give the reason why there are none.

    Args:
        factory: ``module:function``, called with the plan; None is the `reference` of the plan's rule file.

    Raises:
        ConvertError: the caller's factory cannot be imported, or gives no `Reference`.
        UserCodeError: the caller's code failed.
    """
    if plan.format.not_run:
        if factory is not None:
            problem = f"it builds a PyTorch model, and the target {plan.target} is Burn, which is not run here"
            raise ConvertError(Finding("usage", problem, path=f"{REFERENCE_OPTION}{factory}", fix="leave it out"))
        return plan.format.not_run
    name = factory or plan.rules.reference
    if not name:
        return f"{plan.rules.path} has no `reference`; give the two models with --reference module:factory"
    factory = user_factory(plan, factory)
    try:
        make = find_factory(name, REFERENCE_OPTION)
    except ConvertError as error:
        if factory is None and isinstance(error.__cause__, ImportError):
            return f"{error.__cause__.name} is not installed"
        raise
    if factory is not None:
        require_factory(factory, make)
    try:
        with user_code_errors(factory, REFERENCE_OPTION):
            reference: Reference = make(plan)
    except UserCodeError:
        raise
    except ImportError as error:
        return f"{error.name} is not installed"
    except ConvertError as error:
        return str(error)
    if factory is not None:
        require_reference(reference, factory)
    return reference


# ---- the levels


def _run_levels(comparison: Comparison) -> Iterator[LevelReport | Facts]:
    """Yield the levels; between them, which facts were compared with the target."""
    options = comparison.options
    weights: Verdict | None = None
    coverage: LevelReport | None = None
    facts = Facts()
    with _weights_pass(comparison) as weights_pass:
        if "coverage" in options.levels or options.runs_models:
            coverage = check_coverage(
                comparison.plan, comparison.written, comparison.target, factory=comparison.factory
            )
            if "coverage" in options.levels:
                yield coverage
        for level in _leaf_levels(comparison, weights_pass):
            if isinstance(level, Facts):
                facts = level
            elif level.level == "weights":
                weights = level.verdict
            yield level
    if coverage is not None and options.runs_models:
        yield from _model_levels(comparison, coverage, weights, facts)


def _weights_pass(comparison: Comparison) -> AbstractContextManager[WeightsPass | None]:
    """Start the weights level in threads, where it is requested and the source can be read."""
    if comparison.from_recording or "weights" not in comparison.options.levels:
        return nullcontext()
    return WeightsPass(comparison.plan, comparison.written)


def _leaf_levels(comparison: Comparison, weights: WeightsPass | None) -> Iterator[LevelReport | Facts]:
    """Run the levels weights and layers. The weights are compared while the layers level imports the frameworks."""
    plan, written, levels = comparison.plan, comparison.written, comparison.options.levels
    with ThreadPoolExecutor(2, thread_name_prefix="convert-check") as pool:
        if "layers" in levels:
            if not comparison.from_recording:
                missing()  # imports the frameworks
            layers = pool.submit(_layers_level, comparison, weights)
            facts = pool.submit(check_facts, plan, written, comparison.target, training=comparison.options.training)
        if weights is not None:
            yield weights.report()
        elif "weights" in levels:
            yield check_recorded_weights(plan, written)
        if "layers" in levels:
            found = facts.result()
            found = replace(found, findings=(*comparison.contradicted, *found.findings))
            yield with_facts(layers.result(), found)
            yield found


def _layers_level(comparison: Comparison, weights: WeightsPass | None) -> LevelReport:
    plan, written = comparison.plan, comparison.written
    device, seed = comparison.options.device, comparison.options.seed or 0
    if comparison.from_recording:
        return LevelReport("layers", Verdict.SKIPPED, "needs the weights of the checkpoint: give it with --from")
    if not plan.format.not_run:
        same = weights.same if weights is not None else None
        return check_layers(plan, written, device=device, seed=seed, is_equal=same)
    torch_plan, file = as_torch(plan, written)
    equal = None if weights is None else lambda step, part: all(map(weights.equal, file.translated[step.name].names))
    level = check_layers(torch_plan, file, device=device, seed=seed, is_equal=equal)
    return replace(level, notes=(*level.notes, plan.format.run_as_torch))


def _model_levels(
    comparison: Comparison, coverage: LevelReport, weights: Verdict | None, facts: Facts
) -> Iterator[LevelReport | Facts]:
    """Run the levels that need both models; without them, each is skipped or inconclusive, with the reason."""
    options, reference = comparison.options, comparison.reference
    requested = [*(["model"] if "model" in options.levels else []), *(["backends"] if options.backends else [])]
    try:
        if isinstance(reference, str):
            raise _unavailable(reference)
        if coverage.verdict is Verdict.FAILED:
            tensors = any(finding.code != "directory-not-loadable" for finding in coverage.findings)
            what = (
                "the file does not hold the tensors of the model" if tensors else "the files of the directory are wrong"
            )
            raise _unavailable(f"{what}; see coverage")
        evidence = _evidence(comparison, reference)
    except (UserCodeError, UnavailableError) as error:
        dropped = _dropped(comparison, reference, None) if isinstance(error, UserCodeError) else ()
        yield from (with_read_leaves(_stopped(level, error), dropped) for level in requested)
        return
    dropped = _dropped(comparison, reference, evidence)
    for level in requested:
        try:
            with user_code_errors(comparison.factory, REFERENCE_OPTION):
                report = _model_level(level, comparison, reference, evidence, weights)
                if level == "model":
                    report = _with_dependence(report, comparison, reference, evidence)
                if level == "model" and report.verdict is Verdict.PASSED:
                    inputs, device = evidence.inputs, options.device
                    facts = with_measured(facts, comparison.written, reference, inputs, device=device)
                    report = with_facts(report, facts)
                    unseen = (*(leaf.fact for leaf in dropped), *_unseen(comparison, reference, evidence))
                    facts = replace(facts, unseen=unseen)
        except (UserCodeError, UnavailableError) as error:
            report = _stopped(level, error)
        if level == "model":
            report = with_read_leaves(report, dropped)
        if level == "model" and "layers" not in options.levels:
            report = with_facts(report, Facts(comparison.contradicted))
        yield report
    yield replace(facts, findings=(), notes=())


def _unseen(comparison: Comparison, reference: Reference, evidence: Evidence) -> tuple[JudgedFact, ...]:
    """List what the models do not show; the tests of this package show that its own references show everything."""
    from convert.verify.model.unseen import unseen

    return tuple(unseen(comparison.plan, reference, evidence)) if comparison.factory is not None else ()


def _with_dependence(
    report: LevelReport, comparison: Comparison, reference: Reference, evidence: Evidence
) -> LevelReport:
    """Return the level as inconclusive where the outputs of the user's reference do not depend on the weights."""
    plan, written, device = comparison.plan, comparison.written, comparison.options.device
    if comparison.factory is None or report.verdict is not Verdict.PASSED:
        return report
    from convert.verify.model.dependence import independent

    if not (reasons := list(independent(plan, written, reference, evidence, device))):
        return report
    return replace(report, verdict=Verdict.INCONCLUSIVE, reason="; ".join(reasons))


def _dropped(comparison: Comparison, reference: Reference | str, evidence: Evidence | None) -> tuple[ReadLeaf, ...]:
    """Return the dropped leaves that the JAX model of a user reads; None as evidence: it failed without them."""
    if comparison.factory is None or comparison.recorded is not None or isinstance(reference, str):
        return ()
    return read_by_the_model(comparison.plan, reference, comparison.options.seed or 0, evidence)


def _stopped(level: str, error: UserCodeError | UnavailableError) -> LevelReport:
    """An error of user code leaves a level inconclusive; a model that is not available skips it."""
    if isinstance(error, UserCodeError):
        return LevelReport(level, Verdict.INCONCLUSIVE, str(error.findings[0]), notes=error.frames)
    return LevelReport(level, Verdict.SKIPPED, str(error))


def _unavailable(reason: str) -> UnavailableError:
    return UnavailableError(Finding("reference-unavailable", reason))


def _evidence(comparison: Comparison, reference: Reference) -> Evidence:
    """Give the recorded values of the JAX model, or run it.

    Raises:
        UnavailableError: a framework is not installed, or there is neither a JAX model nor a recording.
        UserCodeError: the user's JAX model failed.
    """
    options = comparison.options
    try:
        from convert.verify.sides.run_jax import live_evidence

        if comparison.recorded is not None:
            import torch  # noqa: F401 - without it the level is skipped

            return comparison.recorded
        if reference.jax is None:
            raise _unavailable("the reference has no JAX model; give a recording with --recorded")
        with user_code_errors(comparison.factory, REFERENCE_OPTION):
            return live_evidence(
                comparison.plan, reference, precision=options.precision or "float32", seed=options.seed or 0
            )
    except ImportError as error:
        raise _unavailable(f"{error.name} is not installed") from error


def _model_level(
    level: str, comparison: Comparison, reference: Reference, evidence: Evidence, weights: Verdict | None
) -> LevelReport:
    plan, written = comparison.plan, comparison.written
    if comparison.factory is None:
        reference = with_target_errors(reference)
    if level == "model":
        from convert.verify.model.dependence import jax_without_weights
        from convert.verify.model.level import check_model

        own = partial(jax_without_weights, plan, reference, evidence) if comparison.factory is not None else None
        return check_model(plan, written, reference, evidence, device=comparison.options.device, proves_nothing=own)
    from convert.verify.model.backends import check_backends

    return check_backends(plan, written, reference, evidence, weights=weights)
