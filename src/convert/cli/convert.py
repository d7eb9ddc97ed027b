"""``convert MODEL CKPT OUT``"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from convert.cli import options as o
from convert.cli import output
from convert.core.errors import ConvertError


@o.command(
    o.MODEL,
    o.CHECKPOINT,
    o.Argument("out", "A .safetensors file, or a directory.", metavar="OUT", type=o.PATH),
    *o.PLANNING,
    o.OVERWRITE,
    click.Option(["--jobs"], type=click.IntRange(1, 4096), metavar="N", help="Threads.", show_default="the processors"),
    click.Option(
        ["--check"],
        is_flag=True,
        help="Check OUT at all levels, too; exit codes are those of `convert check`. The card of a directory that passes gets "
        "the figures.",
    ),
    o.REFERENCE,
    o.REQUIRE,
    click.Option(["--dry-run"], is_flag=True, help="Print the plan and write nothing."),
    click.Option(["--quiet", "-q"], is_flag=True, help="No progress and no summary."),
    o.JSON,
)
def run(
    model: str,
    checkpoint: Path,
    out: Path,
    to: str | None,
    dtype: str | None,
    step: int | None,
    item: str | None,
    skeleton: Path | None,
    settings: tuple[str, ...],
    custom_cells: bool,
    rules_dir: Path | None,
    like: Path | None,
    max_shard_size: str | None,
    overwrite: bool,
    jobs: int | None,
    check: bool,
    reference: str | None,
    require: tuple[str, ...],
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint: convert MODEL CKPT OUT."""
    from convert.api import plan_conversion
    from convert.cli.plan import print_plan, read_specs
    from convert.planning.options import ConversionOptions

    if check and dry_run:
        raise ConvertError("--dry-run writes nothing, so there is nothing to --check; leave one of them out")
    for option, given in (("--reference", reference), ("--require", require)):
        if given and not check:
            raise ConvertError(f"{option} is an option of the check; add --check, or run `convert check` afterwards")
    if check:  # what is wrong with these is said before anything is written
        from convert.core.user_code import REFERENCE_OPTION, find_factory
        from convert.verify.run import require_levels

        require_levels(o.split(require))
        _ = find_factory(reference, REFERENCE_OPTION) if reference else None
    from convert.writing.atomic import refuse_existing
    from convert.writing.execute import Event, Result, execute, prepare

    started = time.perf_counter()
    options = ConversionOptions(
        to=to,
        dtype=dtype,
        settings=o.parse_settings(settings, custom_cells),
        step=step,
        item=item,
        skeleton=skeleton,
        rules_dir=rules_dir,
        like=read_specs(like) if like else None,
    )
    plan = plan_conversion(model, checkpoint, options)
    planned = time.perf_counter() - started
    limit = o.shard_bytes(max_shard_size, out)
    if dry_run:
        _, layout, _ = prepare(plan, out, limit)
        refuse_existing(out, overwrite)
        print_plan(plan, layout, as_json)
        return
    result: Result | None = None
    with output.progress(quiet or as_json) as show:
        for event in execute(plan, out, overwrite=overwrite, max_shard_bytes=limit, jobs=jobs):
            if isinstance(event, Event):
                show(event.done, event.total)
            else:
                result = event
    assert result is not None
    if not as_json and not quiet:
        _summary(plan, result)
    report = None
    if check:
        from convert.verify.run import check as run_check

        report = run_check(
            out,
            plan.checkpoint,
            options,
            model=model,
            require=o.split(require),
            reference=reference,
        )
        if report.exit_code == 0:
            _note(out, report)
    if as_json:
        said = _report(plan, result, planned)
        output.data_json({**said, "check": report.to_dict()} if report is not None else said)
    if report is not None:
        if not as_json:
            from convert.cli.check_text import lines

            for line in lines(report):
                output.data(line)
        raise click.exceptions.Exit(report.exit_code)


def _note(out: Path, report: Any) -> None:
    """The figures of a check that passed go into the model card; a single file has none."""
    from convert.verify.report.card_rows import figures
    from convert.writing.atomic import write_text
    from convert.writing.model_card import CARD, add_figures

    card = out / CARD
    if card.is_file():
        write_text(card, add_figures(card.read_text(encoding="utf-8"), figures(report)))


def _report(plan: Any, result: Any, planned: float) -> dict[str, Any]:
    """`planned`: seconds that it took to open the checkpoint and to plan."""
    spent = {"plan": planned, **result.spent}
    return {
        "found": plan.found,
        "model": plan.rules.model,
        "version": plan.version,
        "target": plan.target,
        "loads": plan.rules.targets[plan.target].loads,
        "out": str(result.out),
        "files": list(result.files),
        "tensors": result.tensors,
        "bytes": result.nbytes,
        "seconds": round(result.seconds, 3),
        "spent": {what: round(seconds, 3) for what, seconds in spent.items()},
        "source": {"format": plan.source.format, "digest": result.source_digest, "notes": list(plan.source.notes)},
        "dropped": [{"leaf": d.leaf, "because": d.reason} for d in plan.dropped],
        "notes": [*plan.notes, *(plan.config_notes if result.out.suffix != ".safetensors" else ())],
    }


def _summary(plan: Any, result: Any) -> None:
    """The closing words; in a pipe only what a log should keep."""
    chosen = [note for note in plan.source.notes if note.startswith(("step ", "item "))]
    output.say(f"found {plan.found} in {plan.source.called} ({'; '.join([plan.source.format, *chosen])})")
    if output.on_terminal():
        for note in plan.source.notes:
            if note not in chosen:
                output.say(f"note: {note}")
        if plan.dropped:
            reasons = "; ".join(dict.fromkeys(d.reason for d in plan.dropped))
            output.say(f"left out {output.count(len(plan.dropped), 'leaf')}: {reasons}")
    for note in (*plan.notes, *(plan.config_notes if result.out.suffix != ".safetensors" else ())):
        output.say(f"note: {note}")
    lossy = [step for step in plan.steps if step.loses]
    if lossy:
        output.say(f"note: {output.count(len(lossy), 'tensor')} {lossy[0].loses}, for example {lossy[0].name}")
    rate = f", {output.size(int(result.nbytes / result.seconds))}/s" if result.seconds > 0 else ""
    output.say(
        f"wrote {result.out}: {output.count(result.tensors, 'tensor')}, {output.size(result.nbytes)} in {result.seconds:.1f} s{rate}, "
        f"for {plan.rules.targets[plan.target].loads}"
    )
