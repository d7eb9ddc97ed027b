"""Runs the levels of a check, cheapest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from convert.api import plan_conversion
from convert.checkpoints import Source
from convert.core.errors import ConvertError, RuleError, UnavailableError, UserCodeError
from convert.core.fields import nearest
from convert.core.user_code import REFERENCE_OPTION, find_factory, user_code_errors
from convert.planning.burn.modules import conventions_of
from convert.planning.options import DEFAULTS, ConversionOptions, OptionKeywords
from convert.planning.plan import Plan
from convert.rules.library import find_rules
from convert.verify.config.unverified import on_trust
from convert.verify.coverage.hf_directory import other_class
from convert.verify.coverage.level import check_coverage
from convert.verify.layers.burn_as_torch import NOT_RUN
from convert.verify.leaves import comparing, levels_of_leaves
from convert.verify.numerics.precision import require_device, require_precision
from convert.verify.recording.file import load_recording
from convert.verify.recording.source import RecordedSource, evidence_of, recording_defaults
from convert.verify.report.report import LEVELS, LevelReport, Report, Verdict
from convert.verify.sides.user_reference import require_arguments, require_reference
from convert.verify.written import Written, open_written

if TYPE_CHECKING:
    from convert.references.protocol import Reference
    from convert.verify.sides.evidence import Evidence

SHIPPED = "convert.references."  # where the references of the shipped rule files lie


def require_levels(levels: Iterable[str]) -> None:
    """Whether these are words of `LEVELS`.

    Raises:
        ConvertError: one is not.
    """
    for level in levels:
        if level not in LEVELS:
            raise ConvertError(f"there is no level {level!r}{nearest(level, LEVELS)} (known: {', '.join(LEVELS)})")


def plan_of(
    written: Written,
    checkpoint: str | Path | Source,
    options: ConversionOptions = DEFAULTS,
    *,
    model: str | None = None,
) -> Plan:
    """The plan that the file was made by: what the header says, where the caller says nothing else.

    Raises:
        ConvertError: the header names no model and the caller neither; or as `plan_conversion`.
    """
    said = written.metadata
    if not model:
        model = said.get("model")
        if not model:
            raise ConvertError(f"{written.path} does not say which rules made it; name them with --model")
        try:
            find_rules(model, Path(options.rules_dir) if options.rules_dir else None)
        except RuleError as error:
            raise ConvertError(
                f"{written.path} was made by rules called {model!r}, which are not among the known ones; name their file with "
                "--model, such as --model ./rules.yaml"
            ) from error
    return plan_conversion(
        model,
        checkpoint,
        replace(
            options,
            to=options.to or said.get("target") or None,
            dtype=options.dtype or said.get("dtype") or None,
            settings={**written.stated("settings"), **options.settings},
        ),
    )


def user_factory(plan: Plan, factory: str | None) -> str | None:
    """Return the factory if it is user code: that of ``--reference``, or that of a rule file which is not shipped."""
    stated = plan.rules.reference
    return factory or (stated if stated and not stated.startswith(SHIPPED) else None)


def load_reference(plan: Plan, factory: str | None) -> Reference | str:
    """The two models for the model level, or the reason why there are none.

    Args:
        factory: ``module:function``, called with the plan; None is the `reference` of the plan's rule file.

    Raises:
        ConvertError: the caller's factory cannot be imported, or gives no `Reference`.
        UserCodeError: the caller's code failed.
    """
    if conventions_of(plan.loader) is not None:
        if factory is not None:
            raise ConvertError(
                f"--reference gives a PyTorch model, and the file is for Burn ({plan.target}), which is not run here"
            )
        return NOT_RUN
    name = factory or plan.rules.reference
    if not name:
        return f"{plan.rules.path} has no `reference`; give the two models with --reference module:factory"
    factory = user_factory(plan, factory)
    try:
        made = find_factory(name, REFERENCE_OPTION)
    except ConvertError as error:
        if factory is None and isinstance(error.__cause__, ImportError):
            return f"{error.__cause__.name} is not installed"
        raise
    if factory is not None:
        require_arguments(f"{REFERENCE_OPTION}{factory}: the factory", made, ("plan",))
    try:
        with user_code_errors(factory, REFERENCE_OPTION):
            reference: Reference = made(plan)
    except UserCodeError:
        raise
    except ImportError as error:
        return f"{error.name} is not installed"
    except ConvertError as error:
        return str(error)
    if factory is not None:
        require_reference(reference, factory)
    return reference


def check(
    out: str | Path,
    checkpoint: str | Path | Source | None = None,
    options: ConversionOptions = DEFAULTS,
    *,
    model: str | None = None,
    levels: Iterable[str] = LEVELS,
    require: Iterable[str] = (),
    reference: str | None = None,
    recorded: str | Path | None = None,
    device: str = "cpu",
    precision: str | None = None,
    seed: int | None = None,
    backends: bool = False,
    **keywords: Unpack[OptionKeywords],
) -> Report:
    """Checks a conversion against its checkpoint, or against a recording of the JAX model, or both.

    Args:
        out: what was written, by this package or by any other code.
        checkpoint: what it was made from; may be None when `recorded` is given.
        options: as for the conversion; the file's header gives the defaults.
        model: as for the conversion; None is the model that the file's header names.
        levels: which of `LEVELS` to run. require: those of which a skip makes the check undecided.
        reference: ``module:factory`` of the two models; None is the `reference` of the rule file.
        recorded: what `convert.verify.recording.record.record` wrote, in place of running the JAX model.
        device: where torch runs.
        precision: the dtype that users run in, beside lifted float64; None is the recording's, or else float32.
        seed: of the random inputs; None is the recording's, or else 0.
        backends: whether to compare all backends at hand, too.
        keywords: fields of `ConversionOptions`; they take precedence over `options`.

    Raises:
        ConvertError: something cannot be opened, found or understood.
    """
    options = replace(options, **keywords)
    levels, require = tuple(levels), tuple(require)
    require_levels((*levels, *require))
    if seed is not None and seed < 0:
        raise ConvertError(f"--seed {seed}: a seed is 0 or more")
    require_device(device)
    if precision is not None:
        require_precision(precision)
    written = open_written(out)
    said: dict[str, Mapping[str, Any]] = {"--set": options.settings}
    recording = None
    if recorded is not None:
        recording = load_recording(recorded)
        model, options = recording_defaults(recording, written, model, options, precision, reference, seed)
        seed = recording.manifest.seed
        checkpoint = RecordedSource(recording, written) if checkpoint is None else checkpoint
    if checkpoint is None:
        raise ConvertError(
            f"{out} is checked against its checkpoint (--from CKPT), a recording (--recorded FILE), or both"
        )
    plan = plan_of(written, checkpoint, options, model=model)
    evidence = evidence_of(recording, plan, written) if recording is not None else None
    pair = load_reference(replace(plan, written_config=written.config), reference)
    if reference is None and written.path.is_dir() and (other := other_class(plan, written)):
        pair = other  # its module would be of that class: nothing that the reference knows
    made_by = user_factory(plan, reference) if not isinstance(pair, str) else None
    done = tuple(
        _levels(
            plan, written, pair, made_by, set(levels), device, precision or "float32", seed or 0, evidence, backends
        )
    )
    said |= {f"the header of {written.path.name}": written.stated("settings")}
    if recording is not None:
        said |= {f"the recording {recording.path.name}": recording.manifest.settings}
    if trusted := on_trust(plan, said):
        done = tuple(
            replace(level, notes=(*level.notes, trusted)) if level.level == "model" and level.measures else level
            for level in done
        )
    return Report(str(out), str(plan.source.path), plan.rules.model, plan.target, done, require, plan=plan)


def _levels(
    plan: Plan,
    written: Written,
    reference: Reference | str,
    factory: str | None,
    levels: set[str],
    device: str,
    precision: str,
    seed: int,
    evidence: Evidence | None,
    backends: bool,
) -> Iterator[LevelReport]:
    deep = "model" in levels or backends
    weights: Verdict | None = None
    with comparing(plan, written, levels) as compared:
        covered = check_coverage(plan, written, reference, factory=factory) if deep or "coverage" in levels else None
        if covered is not None and "coverage" in levels:
            yield covered
        for done in levels_of_leaves(plan, written, reference, levels, compared, device=device, seed=seed):
            weights = done.verdict if done.level == "weights" else weights
            yield done
    if covered is None or not deep:
        return
    known: Evidence | UserCodeError | str
    try:
        known = _evidence(plan, covered, reference, factory, precision, seed, evidence)
    except UserCodeError as error:
        known = error
    for level in ("model", "backends"):
        if level in levels or (level == "backends" and backends):
            if isinstance(known, UserCodeError):
                yield _broken(level, known)
                continue
            if isinstance(known, str) or isinstance(reference, str):
                yield LevelReport(level, Verdict.SKIPPED, str(known))
                continue
            try:
                with user_code_errors(factory, REFERENCE_OPTION):
                    done = _deep(level, plan, written, reference, known, device, weights)
                yield done
            except UserCodeError as error:
                yield _broken(level, error)
            except UnavailableError as error:
                yield LevelReport(level, Verdict.SKIPPED, str(error))


def _broken(level: str, error: UserCodeError) -> LevelReport:
    return LevelReport(level, Verdict.INCONCLUSIVE, error.said, notes=error.frames)


def _deep(
    level: str,
    plan: Plan,
    written: Written,
    reference: Reference,
    evidence: Evidence,
    device: str,
    weights: Verdict | None,
) -> LevelReport:
    """The levels that run the whole model."""
    if level == "model":
        from convert.verify.model.level import check_model

        return check_model(plan, written, reference, evidence, device=device)
    from convert.verify.model.backends import check_backends

    return check_backends(plan, written, reference, evidence, weights=weights)


def _evidence(
    plan: Plan,
    covered: LevelReport,
    reference: Reference | str,
    factory: str | None,
    precision: str,
    seed: int,
    recorded: Evidence | None,
) -> Evidence | str:
    """What the JAX model gave, recorded or live; or why there is nothing to compare with."""
    if isinstance(reference, str):
        return reference
    if covered.verdict is Verdict.FAILED:
        return "the file's tensors are not those of the model; see coverage"
    try:
        from convert.verify.sides.run_jax import live_evidence

        if recorded is not None:
            import torch  # noqa: F401 - its absence is a reason to skip

            return recorded
        if reference.jax is None:
            return "the reference has no JAX side; give a recording with --recorded"
        with user_code_errors(factory, REFERENCE_OPTION):
            return live_evidence(plan, reference, precision=precision, seed=seed)
    except ImportError as error:
        return f"{error.name} is not installed"
    except UnavailableError as error:
        return str(error)
