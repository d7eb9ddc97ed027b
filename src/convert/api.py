"""The calls that most programs need: open, select, plan, then write a file, fill a module or read tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from convert.checkpoints import Source, open_source
from convert.checkpoints.divided import divided
from convert.core.errors import OptionError, PlanError
from convert.core.findings import Finding
from convert.planning.adapters.joined import joined
from convert.planning.options import DEFAULTS, ConversionOptions, OptionKeywords, SourceKeywords
from convert.planning.plan import Plan
from convert.planning.planner import plan_match
from convert.planning.rule_match import RuleMatch
from convert.planning.select_rules import NoMatch, explain, select, suggest_other, suggest_relative
from convert.rules.file import RuleFile
from convert.rules.library import available_rules, find_rules, rules_of_type
from convert.writing.execute import Event, Result, execute

if TYPE_CHECKING:
    import torch

    from convert.loading.module import Loaded
    from convert.loading.tensors import StateDict
    from convert.peft.write import AdapterResult
    from convert.reversing.plan import ReversePlan
    from convert.reversing.write import CheckpointResult
    from convert.writing.written import Written


def plan_conversion(
    model: str | RuleFile,
    checkpoint: str | Path | Source,
    options: ConversionOptions = DEFAULTS,
    **keywords: Unpack[OptionKeywords],
) -> Plan:
    """Open a checkpoint, select the rules that fit it, and decide everything that needs no array.

    Args:
        model: a shipped name (``timesfm``), the path of a rule file, or a loaded one.
        checkpoint: its path, or an opened source.
        options: see `ConversionOptions`.
        keywords: fields of `ConversionOptions`, such as ``dtype="bfloat16"``; they take precedence over `options`.

    Raises:
        CheckpointError: the checkpoint cannot be opened.
        RuleError: there are no such rules, or they are not valid.
        PlanError: rules and checkpoint do not fit.
    """
    return plan_selected(select_rules(model, checkpoint, replace(options, **keywords)))


def select_rules(model: str | RuleFile, checkpoint: str | Path | Source, options: ConversionOptions) -> RuleMatch:
    """Open a checkpoint and select the rules that fit it: the first half of `plan_conversion`, with its arguments and errors.

    A single rule file is selected in any case; `plan_selected` says why it does not fit.
    """
    candidates = (model,) if isinstance(model, RuleFile) else find_rules(model, _rules_dir(options))
    source = _open(checkpoint, candidates, options)
    of_more_classes = rules_of_type(model, _rules_dir(options)) if isinstance(model, str) else ()
    choice = select(candidates, of_more_classes, source, options)
    if not isinstance(choice, RuleMatch):
        error, other = explain(choice), ""
        if isinstance(choice, NoMatch) and not isinstance(error, OptionError):
            other = suggest_other(choice.nearest, _others(candidates, options), str(model))
        raise error.with_hint("; ".join(filter(None, (error.hint, other))))
    return choice


def plan_selected(match: RuleMatch) -> Plan:
    """Plan the conversion with the selected rules: the second half of `plan_conversion`, with its errors."""
    try:
        return plan_match(match)
    except OptionError:
        raise
    except PlanError as error:
        relative = suggest_relative(match, _relatives(match.rules, match.options))
        hint = relative or suggest_other(match, _others((match.rules,), match.options), match.rules.model)
        raise error.with_hint(hint or error.hint) from None


def convert(
    model: str | RuleFile,
    checkpoint: str | Path | Source,
    out: str | Path,
    options: ConversionOptions = DEFAULTS,
    *,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
    jobs: int | None = None,
    resume: bool = False,
    on_event: Callable[[Event], None] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Result:
    """Convert a checkpoint to safetensors.

    Examples:
        >>> convert("timesfm", "timesfm-2.5/ckpt", "timesfm.safetensors").tensors  # doctest: +SKIP
        232

    Args:
        out: a name ending in ``.safetensors`` for one file; any other name is a directory, with ``config.json`` if the
            target has one.
        overwrite: whether an existing output may be replaced.
        max_shard_bytes: for a directory, the largest size of one file; None is no limit.
        jobs: leaves that are processed at a time; None is the number of processors.
        resume: whether to continue an unfinished output, and to leave this one for the next run when it is interrupted.
        on_event: called after each leaf.

    The other arguments and their errors are those of `plan_conversion`.

    Raises:
        OutputError: the output exists, lies in the checkpoint, or cannot be written; or the unfinished one is of another conversion
            (``resume-mismatch``). Without `resume`, no unfinished output is left.
    """
    plan = plan_conversion(model, checkpoint, options, **keywords)
    for event in execute(plan, out, overwrite=overwrite, max_shard_bytes=max_shard_bytes, jobs=jobs, resume=resume):
        if isinstance(event, Result):
            return event
        if on_event is not None:
            on_event(event)
    raise AssertionError("execute ends with a Result")


def convert_adapter(
    model: str | RuleFile,
    checkpoint: str | Path | Source,
    out: str | Path,
    options: ConversionOptions = DEFAULTS,
    *,
    overwrite: bool = False,
    **keywords: Unpack[OptionKeywords],
) -> AdapterResult:
    """Write the LoRA pairs of a checkpoint, unmerged, as PEFT's adapter: ``adapter_model.safetensors`` and ``adapter_config.json``.

    Examples:
        >>> convert_adapter("gemma", "gemma-3-1b-lora/ckpt", "adapter").modules  # doctest: +SKIP
        182

    Args:
        out: a directory.
        overwrite: whether an existing output may be replaced.

    The other arguments and their errors are those of `plan_conversion`.

    Raises:
        PlanError: the tree has no LoRA pair, or one has no place in PEFT's format (``adapter-not-exportable``).
        OutputError: the output exists, lies in the checkpoint, or cannot be written. No unfinished output is left.
    """
    from convert.peft.plan import plan_adapter
    from convert.peft.write import write_adapter

    return write_adapter(
        plan_adapter(plan_conversion(model, checkpoint, options, **keywords)), out, overwrite=overwrite
    )


def load_into(
    module: torch.nn.Module,
    model: str | RuleFile,
    checkpoint: str | Path | Source,
    options: ConversionOptions = DEFAULTS,
    *,
    device: torch.device | str | None = None,
    jobs: int | None = None,
    on_event: Callable[[Event], None] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Loaded:
    """Fill a PyTorch module from a checkpoint, without a file in between.

    Every parameter and persistent buffer gets its values on its device and in its dtype, as `convert` with that ``--dtype`` would
    write them. Tied parameters stay tied. Names and shapes must agree exactly, as with ``load_state_dict(strict=True)``; all that does
    not is an error before the module is changed. Memory beside the module: one piece for each thread. After an error while leaves are
    read, the module holds some new values.

    Examples:
        >>> load_into(model, "gemma", "gemma-3-1b/ckpt")  # doctest: +SKIP
        Loaded(tensors=340, nbytes=1999771904, ...)

    Args:
        module: as the target's constructor makes it; its parameters may be on the meta device.
        device: where parameters on the meta device get memory; None is the device of the module's other tensors, or the CPU.
        jobs: leaves that are processed at a time; None is the number of processors.
        on_event: called after each leaf.

    The other arguments, and other errors, are those of `plan_conversion`; `dtype` is the module's.

    Raises:
        PlanError: the module has a tensor that the checkpoint does not give, or of another shape, or the reverse
            (``state-dict-mismatch``); it ties parameters that the checkpoint has apart (``tied-weights-differ``); a tensor of the
            module cannot be filled (``module-tensor-unsupported``); a value does not fit its dtype (``value-overflow``).
    """
    from convert.loading.module import fill

    options = replace(options, **keywords)
    if options.dtype is not None:
        raise OptionError(
            Finding(
                "usage",
                path="dtype",
                expected="no dtype: that of the module counts",
                got=options.dtype,
                fix="cast the module first, with `module.to(dtype)`",
            )
        )
    match = select_rules(model, checkpoint, options)

    def plan_for(dtype: str | None) -> Plan:
        return plan_selected(replace(match, options=replace(match.options, dtype=dtype)))

    return fill(module, plan_for, device=device, jobs=jobs, on_event=on_event)


def state_dict(
    model: str | RuleFile,
    checkpoint: str | Path | Source,
    options: ConversionOptions = DEFAULTS,
    **keywords: Unpack[OptionKeywords],
) -> StateDict:
    """Return the state_dict of a conversion as a lazy mapping: each access reads one tensor. Arguments and errors are those of `plan_conversion`.

    Examples:
        >>> tensors = state_dict("gemma", "gemma-3-1b/ckpt")  # doctest: +SKIP
        >>> tensors.specs["model.norm.weight"], tensors["model.norm.weight"].mean()  # doctest: +SKIP
    """
    from convert.loading.tensors import StateDict

    return StateDict(plan_conversion(model, checkpoint, options, **keywords))


def plan_reverse(
    model: str | RuleFile,
    tensors: str | Path,
    like: str | Path | Source | None = None,
    options: ConversionOptions = DEFAULTS,
    *,
    layout: str | None = None,
    **keywords: Unpack[SourceKeywords],
) -> ReversePlan:
    """Plan the way back: from the tensors of a PyTorch model to the leaves of a JAX checkpoint, with the same rules. Reads no arrays.

    Args:
        tensors: a ``.safetensors`` file, a directory that ``from_pretrained`` loads, or one with PEFT's adapter, whose pairs become
            leaves of the tree of `like`. Where that has no pairs, ``settings={"adapter": "gemma"}`` names their form.
        like: a checkpoint of the same model. It gives the tree, the shapes and the dtypes of the leaves, and those leaves that no
            tensor holds. None: the rules give the tree, and the tensors its shapes and dtypes.
        layout: without `like`, the name of a published form of the tree, such as ``NESTED``; None is the usual one.

    The other arguments, and other errors, are those of `plan_conversion`. Without `to`, the target is the one that the
    tensors' file states, or else the first one whose names they have. `dtype` is that of the tensors, and without `like` that of the
    floating-point leaves, at least as wide.

    Raises:
        PlanError: an operation has no inverse (``not-reversible``), or a tensor is missing, unexpected or of another shape.
    """
    from convert.peft.adapter import is_adapter, no_adapter
    from convert.reversing.plan import merged_pairs, reverse
    from convert.reversing.published_names import forms_of, plan_any
    from convert.writing.written import open_written

    options = replace(options, **keywords)
    if is_adapter(Path(tensors)):
        return _reverse_adapter(model, Path(tensors), like, options, layout)
    if options.settings.get("adapter", "base") != "base":
        raise no_adapter(Path(tensors), str(options.settings["adapter"]))
    written = open_written(tensors)
    written.require_files()
    candidates = (model,) if isinstance(model, RuleFile) else find_rules(model, _rules_dir(options))
    if like is None:
        from convert.reversing.derived.choose import plan_derived

        return plan_any(forms_of(written, candidates), lambda form: plan_derived(candidates, form, layout, options))
    if layout is not None:
        raise _has_its_layout()
    match = select_rules(model, like, options)
    if match.coverage.pairs and not match.without_adapters:
        raise merged_pairs(match.source, match.coverage.pairs)
    targets = _targets(match.rules, written.metadata, options)
    plans = [plan_selected(replace(match, options=replace(match.options, to=to))) for to in targets]

    def to_its_target(form: Written) -> ReversePlan:
        return reverse(max(plans, key=lambda plan: sum(step.name in form.specs for step in plan.steps)), form)

    return plan_any(forms_of(written, candidates), to_its_target)


def _reverse_adapter(
    model: str | RuleFile,
    folder: Path,
    like: str | Path | Source | None,
    options: ConversionOptions,
    layout: str | None,
) -> ReversePlan:
    """Plan the way back of PEFT's adapter, with the arguments and errors of `plan_reverse`."""
    from convert.peft.adapter import open_adapter
    from convert.peft.back import no_tree, plan_adapter_back
    from convert.planning.adapters.scale import SETTINGS

    adapter = open_adapter(folder)
    if like is None:
        raise no_tree(adapter)
    if layout is not None:
        raise _has_its_layout()
    candidates = (model,) if isinstance(model, RuleFile) else find_rules(model, _rules_dir(options))
    source = _open(like, candidates, options)
    own = {name: value for name, value in options.settings.items() if name not in (*SETTINGS, "lora_blocks")}
    match = select_rules(model, source, replace(options, settings=own))
    return plan_adapter_back(
        adapter,
        source,
        options.settings,
        _targets(match.rules, adapter.written.metadata, options),
        options.dtype,
        lambda tree, to, dtype, settings: plan_conversion(
            model, tree, replace(options, to=to, dtype=dtype, settings=settings)
        ),
    )


def _targets(rules: RuleFile, metadata: Mapping[str, str], options: ConversionOptions) -> tuple[str | None, ...]:
    """Return the targets that tensors may be of: the user's, the one that their file states, or all."""
    stated = options.to or metadata.get("target", "")
    return (stated,) if options.to or stated in rules.targets else rules.supported_targets or (None,)


def _has_its_layout() -> OptionError:
    fix = "leave one of the two out"
    return OptionError(Finding("usage", "a checkpoint given with --like has its layout", path="--layout", fix=fix))


def convert_back(
    model: str | RuleFile,
    tensors: str | Path,
    out: str | Path,
    like: str | Path | Source | None = None,
    options: ConversionOptions = DEFAULTS,
    *,
    layout: str | None = None,
    form: str = "orbax",
    overwrite: bool = False,
    jobs: int | None = None,
    on_event: Callable[[Event], None] | None = None,
    **keywords: Unpack[SourceKeywords],
) -> CheckpointResult:
    """Convert a PyTorch model's weights to a checkpoint of JAX code.

    Examples:
        >>> convert_back("gemma", "gemma-3-1b-pt", "ckpt", layout="NESTED")  # doctest: +SKIP

    Args:
        out: a directory for ``orbax``, else a name that ends in the format's.
        form: ``orbax``, ``msgpack`` (flax) or ``npz``.
        overwrite: whether an existing output may be replaced.
        jobs: leaves that are written at a time (``orbax``); None is the number of processors.
        on_event: called after each leaf.

    The other arguments and their errors are those of `plan_reverse`.

    Raises:
        PlanError: as `load_pytree`.
        OutputError: the output exists, lies in the checkpoint or among the tensors, or cannot be written. No unfinished output is left.
    """
    from convert.reversing.write import write_checkpoint

    plan = plan_reverse(model, tensors, like, options, layout=layout, **keywords)
    return write_checkpoint(plan, out, form, overwrite=overwrite, jobs=jobs, on_event=on_event)


def load_pytree(
    model: str | RuleFile,
    tensors: str | Path,
    like: str | Path | Source | None = None,
    options: ConversionOptions = DEFAULTS,
    *,
    layout: str | None = None,
    sharding: Any = None,
    **keywords: Unpack[SourceKeywords],
) -> Any:
    """Return the JAX tree of a PyTorch model's weights, as nested dicts of arrays.

    Every value that is computed back is computed forward again, and must give the bits of its tensor.

    Examples:
        >>> params = load_pytree("gemma", "gemma-3-1b-pt")  # doctest: +SKIP

    Args:
        sharding: a `jax.sharding.Sharding` for every leaf, or a function of a leaf's name and `TensorSpec` that returns one: the
            leaves are then of `jax.Array`, and each device reads only its part. None: NumPy arrays.

    The other arguments and their errors are those of `plan_reverse`.

    Raises:
        PlanError: a value cannot be computed back (``value-not-reversible``), or tensors that are one leaf differ
            (``tied-weights-differ``).
    """
    from convert.reversing.source import ReversedSource
    from convert.reversing.tree import read_tree

    source = ReversedSource(plan_reverse(model, tensors, like, options, layout=layout, **keywords))
    source.check_constants()
    return read_tree(source, sharding)


def _open(checkpoint: str | Path | Source, candidates: Sequence[RuleFile], options: ConversionOptions) -> Source:
    base = divided(checkpoint) if isinstance(checkpoint, Source) else _open_path(checkpoint, candidates, options)
    if options.lora is None or base.adapter is not None:
        return base
    return joined(base, open_source(options.lora, follow_links=options.follow_links))


def _open_path(checkpoint: str | Path, candidates: Sequence[RuleFile], options: ConversionOptions) -> Source:
    leaf_names = [rules.leaf_names for rules in candidates if rules.leaf_names]
    return open_source(
        checkpoint,
        step=options.step,
        item=options.item,
        skeleton=options.skeleton,
        leaf_names=leaf_names,
        follow_links=options.follow_links,
    )


def _relatives(rules: RuleFile, options: ConversionOptions) -> list[RuleFile]:
    """List the other models of a family."""
    family = rules.family
    return [
        other
        for other in available_rules(_rules_dir(options))
        if family and other.family == family and other.model != rules.model
    ]


def _others(candidates: Sequence[RuleFile], options: ConversionOptions) -> list[RuleFile]:
    """List the models that are not among the candidates."""
    known = {rules.model for rules in candidates}
    return [other for other in available_rules(_rules_dir(options)) if other.model not in known]


def _rules_dir(options: ConversionOptions) -> Path | None:
    return Path(options.rules_dir) if options.rules_dir else None
