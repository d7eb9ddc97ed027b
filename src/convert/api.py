"""The two calls that most programs need; the command line is a thin layer over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from convert.checkpoints import Source, open_source
from convert.core.errors import PlanError
from convert.core.gc_pause import gc_paused
from convert.planning.match import cover
from convert.planning.options import DEFAULTS, ConversionOptions, OptionKeywords
from convert.planning.plan import Plan
from convert.planning.select_rules import choose_plan
from convert.rules.file import RuleFile
from convert.rules.library import available_rules, find_rules
from convert.writing.execute import Event, Result, execute


@gc_paused()
def plan_conversion(
    model: str | RuleFile,
    checkpoint: str | Path | Source,
    options: ConversionOptions = DEFAULTS,
    **keywords: Unpack[OptionKeywords],
) -> Plan:
    """Plans a conversion: opens the checkpoint, finds the rules, decides everything that needs no data.

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
    options = replace(options, **keywords)
    extra = Path(options.rules_dir) if options.rules_dir else None
    candidates = (model,) if isinstance(model, RuleFile) else find_rules(model, extra)
    if isinstance(checkpoint, Source):
        source = checkpoint
    else:
        leaf_names = [rules.leaf_names for rules in candidates if rules.leaf_names]
        source = open_source(
            checkpoint, step=options.step, item=options.item, skeleton=options.skeleton, leaf_names=leaf_names
        )
    try:
        return choose_plan(candidates, source, options)
    except PlanError as error:
        relative = _relative_that_fits(candidates, source, extra)
        if relative is None:
            able = _relative_that_goes_there(candidates, source, extra, options.to)
            if able is None:
                raise
            raise PlanError(
                f"{error}\nName {able.model} in place of {candidates[0].model} to go without the leaves that it leaves out",
                error.findings,
            ) from None
        raise PlanError(
            f"{error}\nThe tree is that of {relative.model} ({relative.title}): name {relative.model} in place of "
            f"{candidates[0].model}, or {relative.family} to have it recognised",
            error.findings,
        ) from None


def _relative_that_goes_there(
    candidates: tuple[RuleFile, ...], source: Source, extra: Path | None, to: str | None
) -> RuleFile | None:
    """Another model of the family that has a place for all that it takes in a target for which the one named has not."""
    if len(candidates) != 1 or to not in candidates[0].targets or to is None or candidates[0].supports(to):
        return None
    relatives = [r for r in available_rules(extra) if r.family and r.family == candidates[0].family]
    fitting = [r for r in relatives if to in r.targets and r.supports(to) and not cover(r, source).findings]
    return fitting[0] if len(fitting) == 1 else None


def _relative_that_fits(candidates: tuple[RuleFile, ...], source: Source, extra: Path | None) -> RuleFile | None:
    """Another model of the family that the one named belongs to, whose rules account for every leaf of the checkpoint."""
    if len(candidates) != 1 or candidates[0].family is None:
        return None
    relatives = [
        r for r in available_rules(extra) if r.family == candidates[0].family and r.model != candidates[0].model
    ]
    fitting = [rules for rules in relatives if not cover(rules, source).findings]
    return fitting[0] if len(fitting) == 1 and cover(candidates[0], source).findings else None


def convert(
    model: str | RuleFile,
    checkpoint: str | Path | Source,
    out: str | Path,
    options: ConversionOptions = DEFAULTS,
    *,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
    jobs: int | None = None,
    on_event: Callable[[Event], None] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Result:
    """Converts a checkpoint to safetensors.

    Examples:
        >>> convert("timesfm", "timesfm-2.5/ckpt", "timesfm.safetensors").tensors  # doctest: +SKIP
        232

    Args:
        out: a name ending in ``.safetensors`` for one file; anything else is a directory, with ``config.json`` where the
            target has one.
        overwrite: whether an existing output may be replaced.
        max_shard_bytes: for a directory, the most bytes in one file; None is no limit.
        jobs: leaves dealt with at a time; None is the number of processors.
        on_event: called after each leaf.

    The other arguments, and their errors, are those of `plan_conversion`.

    Raises:
        OutputError: the output exists, lies in the checkpoint, or cannot be written. Nothing is left behind.
    """
    plan = plan_conversion(model, checkpoint, options, **keywords)
    for event in execute(plan, out, overwrite=overwrite, max_shard_bytes=max_shard_bytes, jobs=jobs):
        if isinstance(event, Result):
            return event
        if on_event is not None:
            on_event(event)
    raise AssertionError("execute ends with a Result")
