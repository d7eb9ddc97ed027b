"""``convert MODEL IN OUT --to orbax``: the way back, from PyTorch weights to a checkpoint of JAX code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.api import plan_reverse
from convert.cli import output
from convert.cli.conversion.request import Proof, Request
from convert.cli.conversion.summary import end, named
from convert.cli.reverse_plan import print_plan
from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.reversing.plan import ReversePlan
from convert.reversing.write import CheckpointResult, refuse, write_checkpoint

if TYPE_CHECKING:
    from convert.verify.report.report import Report


def run(asked: Request, to: str) -> None:
    """Plan, write, check and report.

    Args:
        to: format of the checkpoint.
    """
    plan = plan_reverse(asked.model, asked.checkpoint, asked.like, asked.options, layout=asked.layout)
    if asked.proof is not None:
        refuse_check(asked.checkpoint)
    if asked.dry_run:
        refuse(plan, asked.out, to, asked.writing.overwrite)
        print_plan(plan, asked.full, asked.as_json)
        return
    result = _write(plan, asked, to)
    report = _check(plan, asked, asked.proof) if asked.proof is not None else None
    end(_to_dict(plan, result), report, asked.as_json)


def refuse_check(tensors: Path) -> None:
    """Refuse the check of an adapter, of which there is no model.

    Raises:
        ConvertError: the tensors are those of PEFT's adapter.
    """
    from convert.peft.adapter import is_adapter

    if is_adapter(tensors):
        problem = "the check compares models, and an adapter is none"
        fix = (
            "leave it out: every value is computed forward again while an adapter goes back; for all levels, merge the adapter with PEFT "
            "(`merge_and_unload`), and check the saved model against the tree with the pairs"
        )
        raise ConvertError(Finding("usage", problem, path=str(tensors), fix=fix))


def _write(plan: ReversePlan, asked: Request, to: str) -> CheckpointResult:
    """Write the checkpoint, and say so."""
    with output.progress(asked.quiet or asked.as_json) as show:
        result = write_checkpoint(
            plan,
            asked.out,
            to,
            overwrite=asked.writing.overwrite,
            jobs=asked.writing.jobs,
            on_event=lambda event: show(event.done, event.total),
        )
    if not asked.quiet and not asked.as_json:
        output.status(f"found {named(plan.forward)} in {plan.written.path} ({plan.forward.target})")
        for note in plan.notes:
            output.status(f"note: {note}", output.NOTE)
        if plan.left_out:
            reasons = "; ".join(dict.fromkeys(plan.left_out.values()))
            output.status(f"left out {output.count(len(plan.left_out), 'tensor')}: {reasons}", output.NOTE)
        rate = f", {output.size(int(result.nbytes / result.seconds))}/s" if result.seconds > 0 else ""
        output.status(
            f"wrote {asked.out}: {output.count(result.leaves, 'leaf')}, {output.size(result.nbytes)} in {result.seconds:.1f} s{rate}, {result.format}"
        )
    return result


def _check(plan: ReversePlan, asked: Request, proof: Proof) -> Report:
    """Check the given weights against the checkpoint that was written."""
    from convert.checkpoints import open_source

    source, forth = open_source(asked.out, follow_links=asked.options.follow_links), plan.forward
    options = replace(asked.options, to=forth.target, dtype=forth.dtype, settings=forth.settings)
    return proof.report(asked.model, asked.checkpoint, source, options)


def _to_dict(plan: ReversePlan, result: CheckpointResult) -> dict[str, Any]:
    """Return the summary for ``--json``."""
    return {
        "found": plan.forward.found,
        "model": plan.forward.rules.model,
        "target": plan.forward.target,
        "out": str(result.out),
        "format": result.format,
        "leaves": result.leaves,
        "bytes": result.nbytes,
        "seconds": round(result.seconds, 3),
        "kept": [{"leaf": kept.leaf, "because": kept.reason} for kept in plan.kept],
        "left_out": dict(plan.left_out),
        "notes": list(plan.notes),
    }
