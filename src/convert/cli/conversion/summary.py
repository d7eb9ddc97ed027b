"""What a conversion to PyTorch found and wrote, as lines or as JSON; and how a conversion ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from convert.cli import output

if TYPE_CHECKING:
    from convert.planning.plan import Plan
    from convert.verify.report.report import Report
    from convert.writing.execute import Result


def end(summary: dict[str, Any], report: Report | None, as_json: bool) -> None:
    """Print the summary as JSON, and the report of the check, which sets the exit code."""
    if as_json:
        output.data_json({**summary, "check": report.to_dict()} if report is not None else summary)
    if report is not None:
        if not as_json:
            from convert.cli.check_text import lines

            output.data_lines(lines(report))
        raise typer.Exit(report.exit_code)


def to_dict(plan: Plan, result: Result, plan_seconds: float) -> dict[str, Any]:
    """Return the summary for ``--json``; `plan_seconds` is the time to open the checkpoint and to plan."""
    spent = {"plan": plan_seconds, **result.spent}
    return {
        "found": plan.found,
        "model": plan.rules.model,
        "version": plan.version,
        "target": plan.target,
        "loads": plan.rules.targets[plan.target].loads,
        "out": str(result.out),
        "files": list(result.files),
        "tensors": result.tensors,
        "restored": result.restored,
        "bytes": result.nbytes,
        "seconds": round(result.seconds, 3),
        "spent": {phase: round(seconds, 3) for phase, seconds in spent.items()},
        "source": {
            "format": plan.source.format,
            "digest": result.source_digest,
            "notes": [str(note) for note in plan.source.notes],
        },
        "dropped": [{"leaf": d.leaf, "because": d.reason} for d in plan.dropped],
        "notes": [str(note) for note in _notes(plan, result)],
    }


def _notes(plan: Plan, result: Result) -> tuple[Any, ...]:
    of_code = plan.rules.targets[plan.target].differs
    return (*plan.notes, *(plan.config_notes if result.out.suffix != ".safetensors" else of_code))


def named(plan: Plan) -> str:
    """Return the name of the model that was found, in quotes where it is one word of the rule file, such as "out"."""
    rules = plan.rules
    return plan.found.replace(rules.title, f'"{rules.title}"', 1) if rules.title == rules.model else plan.found


def print_summary(plan: Plan, result: Result) -> None:
    """Print what was found and written; details only on a terminal, since a log keeps the rest."""
    choices = [note for note in plan.source.notes if note.code in ("step-chosen", "item-chosen", "weights-divided")]
    details = "; ".join([plan.source.format, *map(str, choices)])
    output.status(f"found {named(plan)} in {plan.source.display_path} ({details})")
    if output.on_terminal():
        for note in plan.source.notes:
            if note not in choices:
                output.status(f"note: {note}", output.NOTE)
        if plan.dropped:
            reasons = "; ".join(dict.fromkeys(d.reason for d in plan.dropped))
            output.status(f"dropped {output.count(len(plan.dropped), 'leaf')}: {reasons}", output.NOTE)
    for note in _notes(plan, result):
        output.status(f"note: {note}", output.NOTE)
    lossy = [step for step in plan.steps if step.loses]
    if lossy:
        output.status(
            f"note: {output.count(len(lossy), 'tensor')} {lossy[0].loses}, for example {lossy[0].name}", output.NOTE
        )
    if result.restored == result.tensors:
        output.status(
            f"kept {result.out}: it was complete, {output.count(result.tensors, 'tensor')} compared with their digests"
        )
        return
    restored = f" ({result.restored:,} of them by an earlier run)" if result.restored else ""
    rate = f", {output.size(int(result.nbytes / result.seconds))}/s" if result.seconds > 0 else ""
    output.status(
        f"wrote {result.out}: {output.count(result.tensors, 'tensor')}{restored}, {output.size(result.nbytes)} in "
        f"{result.seconds:.1f} s{rate}, for {plan.rules.targets[plan.target].loads}"
    )
    if plan.tokenizer is not None:
        output.status(f"copied {', '.join(plan.tokenizer.names)} from {plan.tokenizer.folder}")
