"""What a check compares: the output, the plan that should have made it, and the two models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from convert.api import plan_conversion
from convert.checkpoints import Source
from convert.core.errors import ConvertError, PlanError, RuleError, UserCodeError
from convert.core.findings import Finding
from convert.core.text import shortened
from convert.core.user_code import REFERENCE_OPTION, find_factory, user_code_errors
from convert.planning.adapters.joined import LORA_PAIRS
from convert.planning.options import DEFAULTS, ConversionOptions
from convert.planning.plan import Plan
from convert.planning.target_formats.registry import target_names
from convert.references.protocol import Reference
from convert.references.target_alone import target_alone
from convert.references.user_reference import require_factory, require_reference
from convert.rules.library import is_path, named_rules
from convert.verify.coverage.hf_directory import other_class
from convert.verify.options import CheckOptions
from convert.verify.recording.source import RecordedSource
from convert.verify.sides.adapters import with_adapters
from convert.verify.sides.evidence import Evidence
from convert.writing.written import Written

_GIVE_LORA = "give it with --lora"
SHIPPED = "convert.references."  # package of the references that the shipped rule files name


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
        plan = plan_conversion(model, checkpoint, planned)
        if _without_its_adapter(written, options) and not plan.merges:
            problem = "it was written with the LoRA pairs of another checkpoint"
            raise PlanError(Finding("adapter-alone", problem, path=str(written.path), got="a checkpoint without pairs", fix=_GIVE_LORA))  # fmt: skip
        return plan
    except PlanError as error:
        if _without_its_adapter(written, options) and not any(f.code == "adapter-alone" for f in error.findings):
            raise error.with_hint(f"{written.path.name} was written with the LoRA pairs of another checkpoint; {_GIVE_LORA}") from error  # fmt: skip
        if not origin:
            raise
        chosen = f"{written.path.name} chose these rules: {origin}; if it is of another model, name that with --model"
        raise error.with_hint("; ".join(filter(None, (chosen, error.hint)))) from error


def _without_its_adapter(written: Written, options: ConversionOptions) -> bool:
    """Whether the header says that the pairs came from another checkpoint, and the user names none."""
    return options.lora is None and LORA_PAIRS in written.metadata.get("source_format", "")


def refuse_other_target(plan: Plan, written: Written) -> None:
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


def refuse_names_of_another_target(plan: Plan, written: Written, plan_for: Callable[[str], Plan]) -> None:
    """Refuse to compare a file whose tensors have exactly the names of another target of the same rules.

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


def reference_of(plan: Plan, written: Written, options: CheckOptions) -> Reference | str:
    reference = load_reference(replace(plan, written_config=written.config), options.reference)
    if options.reference is None and written.path.is_dir() and (other := other_class(plan, written)):
        return str(other)  # the reference of the rules does not know the other class
    return reference


def target_of(plan: Plan, written: Written, reference: Reference | str) -> Reference | str:
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
    if factory is None:
        return with_adapters(reference, plan)
    require_reference(reference, factory)
    return reference
