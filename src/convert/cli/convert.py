"""``convert MODEL CKPT OUT``"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convert.cli import back, output
from convert.cli import options as o
from convert.cli import push as pushing
from convert.core.errors import ConvertError
from convert.core.findings import Finding

if TYPE_CHECKING:
    from convert.planning.options import ConversionOptions
    from convert.planning.plan import Plan
    from convert.verify.report.report import Report
    from convert.writing.execute import Event, Result


def convert(
    model: o.Model,
    checkpoint: o.Checkpoint,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="File ending in .safetensors, or a directory; also in a bucket (s3, gs)."),
    ],
    to: o.ToOrBack = None,
    dtype: o.Dtype = None,
    step: o.Step = None,
    item: o.Item = None,
    lora: o.Lora = None,
    skeleton: o.Skeleton = None,
    follow_links: o.FollowLinks = False,
    settings: o.Settings = None,
    adapter: o.Adapter = None,
    custom_cells: o.CustomCells = False,
    rules_dir: o.RulesDir = None,
    like: o.Like = None,
    tree_layout: o.Layout = None,
    max_shard_size: o.ShardSize = None,
    tokenizer: o.Tokenizer = None,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    attest: o.Attest = None,
    push: o.Push = None,
    private: o.Private = False,
    engine: o.Engine = "local",
    address: o.Address = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            max=4096,
            metavar="N",
            help="Leaves converted at a time. (default: number of processors; of a Ray task: up to 4)",
            rich_help_panel=o.OUTPUT,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Check OUT at all levels afterwards, with the exit codes of `convert check`. "
            "The model card of an output directory gets the figures.",
            rich_help_panel=o.PROOF,
        ),
    ] = False,
    reference: o.Reference = None,
    require: o.Require = None,
    trust: o.Trust = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and write nothing.", rich_help_panel=o.REPORT)
    ] = False,
    full: o.Full = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Convert a checkpoint: convert MODEL CKPT OUT."""
    from convert.api import plan_conversion
    from convert.cli.plan import print_plan, read_specs
    from convert.planning.options import ConversionOptions
    from convert.stores import StorePath, located

    _refuse_options(check, dry_run, reference, require, trust)
    elsewhere = to in back.FORMATS or adapter == "peft"
    on_disk = out.suffix != ".safetensors" and not isinstance(located(out), StorePath)
    target = pushing.refuse(push, private, {"--dry-run": dry_run, "the way back and adapters": elsewhere, "an OUT that is no directory of this machine": not on_disk})  # fmt: skip
    _refuse_engine(engine, address, elsewhere)
    said = o.parse_settings(settings, custom_cells)
    if adapter is not None:
        back_to = to if to in back.FORMATS else None
        unused = {"--to": back_to, "--check": check, "--like": like, "--max-shard-size": max_shard_size, "--jobs": jobs, "--tokenizer": tokenizer}  # fmt: skip
        _refuse_adapter(adapter, unused if adapter == "peft" else {}, to)
        said |= {"adapter": adapter} if adapter != "peft" else {}
    if check:  # wrong options of the check are errors before anything is written
        from convert.core.user_code import REFERENCE_OPTION, find_factory
        from convert.verify.options import require_levels

        require_levels(o.split(require))
        _ = find_factory(reference, REFERENCE_OPTION) if reference else None
    if to in back.FORMATS:
        options = ConversionOptions(
            dtype=dtype,
            settings=said,
            step=step,
            item=item,
            skeleton=skeleton,
            follow_links=follow_links,
            rules_dir=rules_dir,
        )
        back.refuse_options(
            to,
            {
                "--lora": lora,
                "--max-shard-size": max_shard_size,
                "--resume": resume,
                "--attest": attest,
                "--tokenizer": tokenizer,
                "--trust": trust and not check,
            },
        )
        reverse_plan = back.plan_back(model, checkpoint, like, tree_layout, options)
        if check:
            back.refuse_check(checkpoint)
        if dry_run:
            from convert.reversing.write import refuse

            refuse(reverse_plan, out, to, overwrite)
            back.print_plan(reverse_plan, full, as_json)
            return
        summary = back.to_dict(reverse_plan, back.write(reverse_plan, out, to, overwrite, jobs, quiet, as_json))
        report = None
        if check:
            from convert.checkpoints import open_source
            from convert.verify.run import check as run_check

            levels, facts = o.split(require), o.split(trust)
            source, forth = open_source(out, follow_links=follow_links), reverse_plan.forward
            options = replace(options, to=forth.target, dtype=forth.dtype, settings=forth.settings)
            report = run_check(
                checkpoint, source, options, model=model, require=levels, trust=facts, reference=reference
            )
        _report(report, summary, as_json)
        return
    back.refuse_layout(tree_layout)
    from convert.writing.execute import Event, prepare
    from convert.writing.shard_size import shard_bytes
    from convert.writing.writer import refuse_existing

    out = destination(out, {"--adapter": adapter == "peft"})
    started = time.perf_counter()
    options = ConversionOptions(
        to=to,
        dtype=dtype,
        settings=said,
        step=step,
        item=item,
        lora=lora,
        skeleton=skeleton,
        follow_links=follow_links,
        rules_dir=rules_dir,
        like=read_specs(like) if like else None,
        tokenizer=tokenizer,
    )
    plan = plan_conversion(model, checkpoint, options)
    if adapter == "peft":
        _write_adapter(plan, out, overwrite, dry_run, quiet, as_json)
        return
    plan_seconds = time.perf_counter() - started
    if trust:
        from convert.verify.config.judge import require_names

        require_names(o.split(trust), plan)
    limit = shard_bytes(max_shard_size, out)
    if attest:
        from convert.outputs.attestation import refuse_inside
        from convert.writing.destination.permitted import require_text_file

        refuse_inside(attest, out, checkpoint, Path(plan.rules.path))
        require_text_file(attest)
    if dry_run:
        _, layout, _ = prepare(plan, out, limit)
        refuse_existing(out, overwrite)
        print_plan(plan, layout, full, as_json)
        return
    result = _completed(plan, out, limit, overwrite) if resume else None
    if result is None:
        with output.progress(quiet or as_json) as show:
            for event in _events(
                plan, model, checkpoint, options, out, engine, address, overwrite, limit, jobs, resume
            ):
                if isinstance(event, Event):
                    show(event.done, event.total)
                else:
                    result = event
    assert result is not None
    if not as_json and not quiet:
        _print_summary(plan, result)
    report = None
    if check:
        from convert.verify.run import check as run_check

        report = run_check(
            out,
            plan.checkpoint,
            options,
            model=model,
            require=o.split(require),
            trust=o.split(trust),
            reference=reference,
        )
        if report.exit_code == 0:
            _add_figures_to_card(out, report)
    if attest and (report is None or report.exit_code == 0):
        write_statement(attest, out)
    summary = _to_dict(plan, result, plan_seconds)
    if target is not None and (report is None or report.exit_code == 0):
        summary |= {"pushed": pushing.push(out, target, private, quiet or as_json)}
    _report(report, summary, as_json)


def destination(out: Path, local: Mapping[str, object]) -> Path:
    """Return where OUT lies; refuse options that need it on this machine.

    Args:
        local: these options.
    """
    from convert.stores import StorePath, located

    there = located(out)
    for option, value in local.items():
        if value and isinstance(there, StorePath):
            fix = f"leave out {option}, or write to a disk"
            raise ConvertError(Finding("usage", f"{option} needs an OUT on this machine", path=str(there), fix=fix))
    return there


def _events(
    plan: Plan,
    model: str,
    checkpoint: Path,
    options: ConversionOptions,
    out: Path,
    engine: str,
    address: str | None,
    overwrite: bool,
    limit: int | None,
    jobs: int | None,
    resume: bool,
) -> Iterator[Event | Result]:
    """Convert here, or on a cluster."""
    from convert.writing.execute import execute

    if engine == "local":
        yield from execute(plan, out, overwrite=overwrite, max_shard_bytes=limit, jobs=jobs, resume=resume)
        return
    from convert.cluster.execute import execute_tasks
    from convert.cluster.ray_tasks import connected

    with connected(address) as cluster:
        yield from execute_tasks(
            plan,
            model,
            checkpoint,
            options,
            out,
            cluster.run,
            threads=cluster.threads(jobs),
            overwrite=overwrite,
            max_shard_bytes=limit,
            resume=resume,
        )


def write_statement(statement: Path, out: Path) -> None:
    """Write the in-toto statement about an output."""
    import json

    from convert.outputs.attestation import attest
    from convert.outputs.integrity import provenance
    from convert.writing.destination.atomic import write_text
    from convert.writing.written import open_written

    content = attest(out, provenance(open_written(out).metadata))
    write_text(statement, json.dumps(content, indent=2) + "\n")


def _completed(plan: Plan, out: Path, limit: int | None, overwrite: bool) -> Result | None:
    """Return the result of an earlier run that is complete and the same; None where OUT must be written."""
    from convert.outputs.completed import completed
    from convert.writing.execute import prepare

    prepare(plan, out, limit)
    try:
        return completed(plan, out, limit)
    except ConvertError:
        if overwrite:
            return None
        raise


def _report(report: Report | None, summary: dict[str, Any], as_json: bool) -> None:
    """Print the summary as JSON, and the report of the check, which sets the exit code."""
    if as_json:
        output.data_json({**summary, "check": report.to_dict()} if report is not None else summary)
    if report is not None:
        if not as_json:
            from convert.cli.check_text import lines

            output.data_lines(lines(report))
        raise typer.Exit(report.exit_code)


def _refuse_options(
    check: bool, dry_run: bool, reference: str | None, require: list[str] | None, trust: list[str] | None
) -> None:
    if check and dry_run:
        raise ConvertError(Finding("usage", "--dry-run writes nothing that --check could check", fix="leave one out"))
    for option, value in (("--reference", reference), ("--require", require), ("--trust", trust)):
        if value and not check:
            raise ConvertError(
                Finding(
                    "usage", f"{option} is an option of the check", fix="add --check, or run `convert check` afterwards"
                )
            )


def _refuse_engine(engine: str, address: str | None, elsewhere: bool) -> None:
    if engine not in ("local", "ray"):
        raise ConvertError(Finding("usage", path="--engine", expected="local or ray", got=engine))
    if address is not None and engine != "ray":
        raise ConvertError(Finding("usage", "--address is the head of a Ray cluster", fix="add --engine ray"))
    if engine == "ray" and elsewhere:
        problem = "--engine ray writes safetensors for PyTorch only"
        raise ConvertError(Finding("usage", problem, fix="leave it out for adapters and the way back"))


def _refuse_adapter(adapter: str, given: Mapping[str, object], to: str | None) -> None:
    if adapter not in ("peft", "base") and to not in back.FORMATS:  # the way back also has the forms of pairs
        raise ConvertError(Finding("usage", path=f"--adapter {adapter}", expected="peft or base", got=adapter, fix="leave it out to have the pairs merged"))  # fmt: skip
    for option, value in given.items():
        if value:
            raise ConvertError(
                Finding("usage", f"{option} has no meaning with --adapter {adapter}", fix="leave one out")
            )


def _write_adapter(plan: Plan, out: Path, overwrite: bool, dry_run: bool, quiet: bool, as_json: bool) -> None:
    """Write PEFT's adapter, or print what it would hold, and say so."""
    from convert.peft.plan import plan_adapter
    from convert.peft.write import refuse, write_adapter

    adapter = plan_adapter(plan)
    found = f"found {plan.found} in {plan.source.display_path} ({plan.source.format})"
    if dry_run:
        refuse(adapter, out, overwrite)
        if as_json:
            output.data_json(adapter.to_dict())
        else:
            output.data_lines([found, *adapter.lines()])
        return
    result = write_adapter(adapter, out, overwrite=overwrite)
    if as_json:
        output.data_json({**adapter.to_dict(), "out": str(result.out), "seconds": round(result.seconds, 3)})
    elif not quiet:
        output.status(found)
        output.status(
            f"wrote {out}: LoRA pairs of {output.count(result.modules, 'module')}, {output.size(result.nbytes)}, unmerged, for peft"
        )


def _add_figures_to_card(out: Path, report: Report) -> None:
    """Write the figures of a passed check into the model card of an output directory; a single file has no card."""
    from convert.stores import StorePath
    from convert.stores.upload import write_object
    from convert.verify.report.card_rows import card_rows
    from convert.writing.destination.atomic import write_text
    from convert.writing.destination.permitted import os_errors
    from convert.writing.model_card import CARD, add_figures

    card = out / CARD
    if not card.is_file():
        return
    text = add_figures(card.read_text(encoding="utf-8"), card_rows(report))
    if isinstance(card, StorePath):
        with os_errors(card):
            write_object(card, text.encode())
    else:
        write_text(card, text)


def _to_dict(plan: Plan, result: Result, plan_seconds: float) -> dict[str, Any]:
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
    return (*plan.notes, *(plan.config_notes if result.out.suffix != ".safetensors" else ()))


def _print_summary(plan: Plan, result: Result) -> None:
    """Print what was found and written; details only on a terminal, since a log keeps the rest."""
    choices = [note for note in plan.source.notes if note.code in ("step-chosen", "item-chosen", "weights-divided")]
    details = "; ".join([plan.source.format, *map(str, choices)])
    output.status(f"found {plan.found} in {plan.source.display_path} ({details})")
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
