"""Run the levels of a check, cheapest first.

`check` opens what was written, makes the plan again, finds the two models, and runs the requested levels. The levels read each
source leaf and each written tensor once: weights and layers are compared in one pass, in threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from convert.checkpoints import Source
from convert.core.errors import ConvertError, UnavailableError, UserCodeError
from convert.core.findings import Finding
from convert.core.system import signals
from convert.core.user_code import REFERENCE_OPTION, user_code_errors
from convert.numerics.precision import jax_on_the_cpu, jax_problem
from convert.planning.options import DEFAULTS, ConversionOptions
from convert.references.plan_facts import ReadFacts
from convert.references.protocol import Reference
from convert.verify.comparison import (
    Comparison,
    plan_of,
    reference_of,
    refuse_names_of_another_target,
    refuse_other_target,
    target_of,
    user_factory,
)
from convert.verify.config.activations import with_measured
from convert.verify.config.compare import Facts, check_facts, with_facts
from convert.verify.config.judge import RECORDED, contradictions, judge, not_proven, of_layers, of_names, trusted
from convert.verify.coverage.level import check_coverage
from convert.verify.layers.as_torch import as_torch
from convert.verify.layers.level import check_layers, missing
from convert.verify.model.dropped_leaves import ReadLeaf, read_by_the_model, with_read_leaves
from convert.verify.options import CheckKeywords, CheckOptions
from convert.verify.recording.file import load_recording
from convert.verify.recording.match import evidence_of, recording_defaults
from convert.verify.recording.source import RecordedSource, with_written_leaves
from convert.verify.recording.weights import check_recorded_weights
from convert.verify.report.facts import JudgedFact, Status
from convert.verify.report.report import LevelReport, Report, Verdict
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.target_code import with_target_errors
from convert.verify.stopped import REPORT, Remaining
from convert.verify.weights.level import WeightsPass
from convert.writing.written import open_written

DROPPED = "the search for dropped leaves that the JAX model reads"


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
                path=str(written.path),
                fix="give its checkpoint (--from CKPT), a recording (--recorded FILE), or both",
            )
        )
    recorded_model = recording.manifest.model if recording is not None else ""
    plan = with_written_leaves(plan_of(written, checkpoint, conversion, model=model, recorded_model=recorded_model))
    refuse_other_target(plan, written)
    remake = partial(plan_of, written, checkpoint, model=model, recorded_model=recorded_model)
    refuse_names_of_another_target(plan, written, lambda to: remake(replace(conversion, to=to)))
    read = ReadFacts(plan.facts)
    reference = reference_of(replace(plan, facts=read), written, options)
    known = partial(judge, plan, settings, read=read.names, trust=tuple(options.trust))
    comparison = Comparison(
        plan,
        written,
        reference,
        target_of(plan, written, reference),
        user_factory(plan, options.reference),
        evidence_of(recording, plan, written) if recording is not None else None,
        options,
        contradictions(known(), plan),
    )
    levels: tuple[LevelReport, ...] = ()
    facts = Facts()
    with jax_on_the_cpu() if "layers" in options.levels or options.runs_models else nullcontext():
        for outcome in _run_levels(comparison):
            signals.check()
            if isinstance(outcome, Facts):
                facts = outcome
            else:
                levels = (*levels, outcome)
    agree = any(level.level == "model" and level.verdict is Verdict.PASSED for level in levels)
    remaining = Remaining()

    def judgement() -> tuple[JudgedFact, ...]:
        others = (*of_layers(facts.unread, models_agree=agree), *of_names(plan), *facts.unseen)
        return (*known(constants=facts.constants, models_agree=agree), *trusted(others, tuple(options.trust)))

    judged = remaining("the judgement of facts", judgement, ())
    judged += tuple(_not_tested(what, why) for what, why in remaining.errors.items())
    if "model" in options.require:
        levels = tuple(not_proven(level, judged) for level in levels)
    return Report(
        str(written.path),
        str(plan.source.path),
        plan.rules.model,
        plan.target,
        levels,
        tuple(options.require),
        plan=plan,
        facts=judged,
    )


def _run_levels(comparison: Comparison) -> Iterator[LevelReport | Facts]:
    """Yield the levels; between them, which facts were compared with the target."""
    options = comparison.options
    weights: Verdict | None = None
    coverage: LevelReport | None = None
    facts = Facts()
    with _weights_pass(comparison) as weights_pass:
        if "coverage" in options.levels or options.runs_models:
            coverage = _kept(
                "coverage",
                lambda: check_coverage(
                    comparison.plan, comparison.written, comparison.target, factory=comparison.factory
                ),
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
            layers = pool.submit(_kept, "layers", partial(_layers_level, comparison, weights))
            facts = pool.submit(check_facts, plan, written, comparison.target, training=comparison.options.training)
        if weights is not None:
            yield _kept("weights", weights.report)
        elif "weights" in levels:
            yield _kept("weights", lambda: check_recorded_weights(plan, written))
        if "layers" in levels:
            remaining = Remaining()
            found = remaining("the comparison of facts", facts.result, Facts())
            found = replace(found, findings=(*comparison.contradicted, *found.findings))
            yield with_facts(_left_open(layers.result(), remaining), found)
            yield found


def _kept(level: str, run: Callable[[], LevelReport]) -> LevelReport:
    """Return the outcome of a level; inconclusive where an error of this package ends it: those of the other levels stand."""
    remaining = Remaining()
    ended = LevelReport(level, Verdict.INCONCLUSIVE)
    return _left_open(remaining(f"the {level} level", run, ended), remaining)


def _left_open(level: LevelReport, remaining: Remaining) -> LevelReport:
    """Return the level with the errors that ended a part of it; what passed otherwise is inconclusive."""
    if not remaining.errors:
        return level
    undecided = level.verdict in (Verdict.PASSED, Verdict.INCONCLUSIVE)
    reason = "; ".join(filter(None, (level.reason, *remaining.errors.values()))) if undecided else level.reason
    verdict = Verdict.INCONCLUSIVE if undecided else level.verdict
    return replace(level, verdict=verdict, reason=reason, notes=(*level.notes, *remaining.notes))


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
    remaining = Remaining()
    try:
        if isinstance(reference, str):
            raise _unavailable(reference)
        if coverage.verdict is Verdict.FAILED:
            tensors = any(finding.code != "directory-not-loadable" for finding in coverage.findings)
            what = (
                "the file does not hold the tensors of the model" if tensors else "the files of the directory are wrong"
            )
            raise _unavailable(f"{what}; see coverage")
        evidence = remaining("the run of the JAX model", partial(_evidence, comparison, reference), None)
    except (UserCodeError, UnavailableError) as error:
        dropped = _dropped(comparison, reference, None) if isinstance(error, UserCodeError) else ()
        yield from (with_read_leaves(_stopped(level, error), dropped) for level in requested)
        return
    if evidence is None:
        yield from (_left_open(LevelReport(level, Verdict.INCONCLUSIVE), remaining) for level in requested)
        return
    dropped = remaining(DROPPED, lambda: _dropped(comparison, reference, evidence), ())
    for level in requested:
        try:
            with user_code_errors(comparison.factory, REFERENCE_OPTION):
                report = _kept(level, lambda: _model_level(level, comparison, reference, evidence, weights))  # noqa: B023
                if level == "model":
                    report, facts = _with_the_rest(report, comparison, reference, evidence, facts, dropped, remaining)
        except (UserCodeError, UnavailableError) as error:
            report = _stopped(level, error)
        if level == "model":
            report = with_read_leaves(report, dropped)
        if level == "model" and "layers" not in options.levels:
            report = with_facts(report, Facts(comparison.contradicted))
        yield report
    yield replace(facts, findings=(), notes=())


def _with_the_rest(
    report: LevelReport,
    comparison: Comparison,
    reference: Reference,
    evidence: Evidence,
    facts: Facts,
    dropped: tuple[ReadLeaf, ...],
    remaining: Remaining,
) -> tuple[LevelReport, Facts]:
    """Return the model level, where it passed, with what its outputs do not show; and the facts that are known of it.

    What an error of this package ends is not verified.
    """

    def tried(what: str, test: Callable[[], LevelReport]) -> LevelReport:
        return remaining(what, test, report) if report.verdict is Verdict.PASSED else report

    chosen: list[JudgedFact] = []
    report = tried("the test of whether outputs depend on weights", lambda: _with_dependence(report, comparison, reference, evidence))  # fmt: skip
    report = tried("the comparison of choices", lambda: _with_choices(report, comparison, reference, evidence, chosen))
    if report.verdict is Verdict.PASSED:
        written, inputs, device = comparison.written, evidence.inputs, comparison.options.device
        measured = partial(with_measured, facts, written, reference, inputs, device=device)
        facts = remaining("the comparison of activations", measured, facts)
        report = with_facts(report, facts)
        seen = remaining("the search for what inputs do not show", lambda: _unseen(comparison, reference, evidence), ())
        open_ = (_not_tested(what, why) for what, why in remaining.errors.items())
        facts = replace(facts, unseen=(*(leaf.fact for leaf in dropped), *seen, *chosen, *open_))
    return replace(report, notes=(*report.notes, *remaining.notes)), facts


def _not_tested(what: str, why: str) -> JudgedFact:
    return JudgedFact(what, "not run to its end", "this package", Status.UNVERIFIED, next=f"{why}; {REPORT}")


def _unseen(comparison: Comparison, reference: Reference, evidence: Evidence) -> tuple[JudgedFact, ...]:
    """List what the models do not show; the tests of this package show that its own references show everything."""
    from convert.verify.model.unseen import unseen

    return tuple(unseen(comparison.plan, reference, evidence)) if comparison.factory is not None else ()


def _with_dependence(
    report: LevelReport, comparison: Comparison, reference: Reference, evidence: Evidence
) -> LevelReport:
    """Return the level as inconclusive where the outputs of the user's reference do not depend on the weights."""
    plan, written, device = comparison.plan, comparison.written, comparison.options.device
    if comparison.factory is None:
        return report
    from convert.verify.model.dependence import independent

    if not (reasons := list(independent(plan, written, reference, evidence, device))):
        return report
    return replace(report, verdict=Verdict.INCONCLUSIVE, reason="; ".join(reasons))


def _with_choices(
    report: LevelReport,
    comparison: Comparison,
    reference: Reference,
    evidence: Evidence,
    not_compared: list[JudgedFact],
) -> LevelReport:
    """Return the level with what it says of the numbers that a user's models choose by; add the choices that are not compared."""
    if comparison.factory is None:
        return report
    from convert.verify.model.choices import check_choices

    plan, written, device = comparison.plan, comparison.written, comparison.options.device
    found = check_choices(plan, written, reference, evidence, report.measures, device)
    not_compared += found.facts
    if found.finding is None:
        return report
    diagnosis = found.diagnosis.to_dict() if found.diagnosis is not None else None
    return replace(report, verdict=Verdict.FAILED, findings=(found.finding,), diagnosis=diagnosis)


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
        from convert.verify.sides.run_jax import jax_leaves, live_evidence

        if comparison.recorded is not None:
            import torch  # noqa: F401 - without it the level is skipped

            return comparison.recorded
        if reference.jax is None:
            raise _unavailable("the reference has no JAX model; give a recording with --recorded")
        if problem := jax_problem():
            raise _unavailable(problem)
        with user_code_errors(comparison.factory, REFERENCE_OPTION, jax_leaves(comparison.plan)):
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
