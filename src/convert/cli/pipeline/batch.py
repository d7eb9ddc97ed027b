"""``convert batch jobs.yaml`` and ``convert batch MODEL 'ckpts/*' OUT_DIR``"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convert.cli import options as o
from convert.cli import output
from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.system import signals

if TYPE_CHECKING:
    from convert.batch.jobs import Job
    from convert.batch.report import BatchReport
    from convert.batch.run import Event


def batch(
    what: Annotated[
        list[str] | None, typer.Argument(metavar="JOBS.YAML | MODEL PATTERN OUT_DIR", show_default=False)
    ] = None,
    to: o.To = None,
    dtype: o.Dtype = None,
    settings: o.Settings = None,
    rules_dir: o.RulesDir = None,
    max_shard_size: o.ShardSize = None,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    jobs: Annotated[
        int,
        typer.Option("--jobs", min=1, max=256, metavar="N", help="Conversions at a time.", rich_help_panel=o.BATCH),
    ] = 1,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="Start the other jobs after one has failed.", rich_help_panel=o.BATCH),
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="K/N",
            help="Run every Nth job from the Kth: the part of one of N machines.",
            rich_help_panel=o.BATCH,
        ),
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(
            "--check",
            metavar="LEVELS",
            help="Levels of `convert check` that each output must pass, such as coverage,weights. A skip is a failure.",
            rich_help_panel=o.PROOF,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Find what can be refused, and write nothing.", rich_help_panel=o.REPORT)
    ] = False,
    junit: o.Junit = None,
    html: o.Html = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a jobs file.", rich_help_panel=o.REPORT)
    ] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Convert many checkpoints: those of a jobs file, or those that match a pattern.

    All jobs are planned first. Two jobs with one output, missing checkpoints, unknown rules and a disk that is too small are errors
    before a byte is read. Options for all jobs are overridden by the keys of a job.

    Exit codes: 0 all converted, 1 a job failed, 2 nothing was started.
    """
    from convert.batch import jobs as jobs_module
    from convert.batch.preflight import preflight
    from convert.writing.destination.atomic import write_text
    from convert.writing.destination.permitted import require_text_file

    if schema:
        output.data_json(jobs_module.schema())
        return
    reports = [path for path in (junit, html) if path is not None]
    for report in reports:
        require_text_file(report)
    common = _common(to, dtype, settings, rules_dir, max_shard_size, o.split(check))
    found = _read(what or [], common)
    with output.prints_to_stderr():
        planned = preflight(
            found,
            jobs_module.take_shard(found, shard),
            overwrite=overwrite,
            resume=resume,
            create=not dry_run,
            reports=reports,
        )
    if dry_run:
        for one in planned:
            output.data(f"{jobs_module.command(one.job.convert_arguments())}  # {output.size(one.nbytes)}")
        return
    from convert.batch.report import BatchReport, to_html, to_junit
    from convert.batch.run import run_jobs
    from convert.writing.provenance import tool_version

    if resume:
        signals.rest = "what is done is kept; continue with --resume"
    started = time.monotonic()
    with output.batch_progress(len(planned), sum(one.nbytes for one in planned), quiet or as_json) as display:
        outcomes = run_jobs(
            planned,
            jobs=jobs,
            keep_going=keep_going,
            extra=[*(["--overwrite"] if overwrite else []), *(["--resume"] if resume else [])],
            on_event=lambda event: _show(display, event),
        )
    made = BatchReport(tool_version(), tuple(outcomes), time.monotonic() - started)
    if junit is not None:
        write_text(junit, to_junit(made))
    if html is not None:
        write_text(html, to_html(made))
    if as_json:
        output.data_json(made.to_dict())
    else:
        _print(made, quiet)
    raise typer.Exit(made.exit_code)


def _read(what: list[str], common: dict[str, Any]) -> list[Job]:
    from convert.batch.jobs import NAME, expand, read_jobs

    if len(what) == 1 and Path(what[0]).suffix in (".yaml", ".yml"):
        return read_jobs(Path(what[0]), common)
    if len(what) == 3:
        model, pattern, out = what
        out = out if NAME in out else str(Path(out) / NAME)
        return expand({**common, "model": model, "checkpoint": pattern, "out": out})
    problem = "" if what else "nothing says what to convert"
    raise ConvertError(
        Finding(
            "usage",
            problem,
            expected="JOBS.YAML, or MODEL PATTERN OUT_DIR",
            got=f"{len(what)} arguments",
            fix="put the pattern into quotes, or the shell replaces it by its matches",
        )
    )


def _common(
    to: str | None,
    dtype: str | None,
    settings: list[str] | None,
    rules_dir: Path | None,
    max_shard_size: str | None,
    check: tuple[str, ...],
) -> dict[str, Any]:
    """Return the options for all jobs by their names in a jobs file."""
    from convert.verify.options import require_levels
    from convert.writing.shard_size import parse_size

    require_levels(check)
    if max_shard_size is not None:
        parse_size(max_shard_size, "--max-shard-size")
    values = {
        "to": to,
        "dtype": dtype,
        "set": o.parse_settings(settings),
        "rules": str(rules_dir) if rules_dir else None,
        "max_shard_size": max_shard_size,
        "check": check,
    }
    return {key: value for key, value in values.items() if value}


def _show(display: output.BatchDisplay, event: Event) -> None:
    from convert.batch.run import Progress, Status

    if isinstance(event, Progress):
        display.job(event.job.name, event.phase, event.done, event.total)
    elif event.status is Status.FAILED:
        display.finished(event.job.name, "failed", output.BAD)
    elif event.status is Status.CONVERTED:
        passed = f", {', '.join(event.levels)} passed" if event.levels else ""
        restored = f" ({event.restored:,} of them by an earlier run)" if event.restored else ""
        text = f"{output.count(event.tensors, 'tensor')}{restored}, {output.size(event.nbytes)} in {event.seconds:.1f} s{passed}"
        display.finished(event.job.name, text, "")


def _print(made: BatchReport, quiet: bool) -> None:
    for outcome in made.failures:
        output.data(f"failed: {outcome.error}: {outcome.command}", style=output.BAD)
    if quiet:
        return
    counts = ", ".join(f"{number:,} {status}" for status, number in made.counts.items()) or "this shard has no jobs"
    output.data(
        f"{counts}; {output.size(made.nbytes)} in {made.seconds:.1f} s",
        style=output.BAD if made.failures else output.GOOD,
    )
