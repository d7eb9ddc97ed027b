"""``convert check OUT --from CKPT``"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convert.cli import options as o
from convert.cli import output
from convert.core.errors import ConvertError, OutputError
from convert.core.findings import Finding
from convert.core.system import signals
from convert.core.user_code import exit_of_user_code

if TYPE_CHECKING:
    from convert.verify.report.report import Report


def check(
    out: o.Out,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="CKPT",
            help="Checkpoint from which OUT was converted. This or --recorded is required.",
            rich_help_panel=o.INPUT,
        ),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--recorded",
            metavar="FILE",
            help="Recording made by `convert record`; then neither JAX nor CKPT is needed.",
            rich_help_panel=o.INPUT,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Rules; needed only if the header of OUT does not name them.",
            rich_help_panel=o.INPUT,
            autocompletion=o.complete_model,
        ),
    ] = None,
    to: o.To = None,
    dtype: o.Dtype = None,
    step: o.Step = None,
    item: o.Item = None,
    lora: o.Lora = None,
    skeleton: o.Skeleton = None,
    follow_links: o.FollowLinks = False,
    settings: o.Settings = None,
    rules_dir: o.RulesDir = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            "--level",
            metavar="LEVEL",
            help="coverage, weights, layers or model. Repeatable, or separated by commas. (default: all)",
            rich_help_panel=o.PROOF,
        ),
    ] = None,
    require: o.Require = None,
    trust: o.Trust = None,
    reference: o.Reference = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="DEVICE", help="Where PyTorch runs: cpu or cuda.", rich_help_panel=o.PROOF),
    ] = "cpu",
    precision: o.Precision = None,
    seed: o.Seed = None,
    backends: Annotated[
        bool,
        typer.Option(
            "--backends",
            help="Compare backends, too: JAX, torch, torch.compile, CUDA and those of the reference.",
            rich_help_panel=o.PROOF,
        ),
    ] = False,
    training: Annotated[
        bool,
        typer.Option(
            "--training",
            help="Count differences that only training sees: momentum, dropout. Without it they are notes.",
            rich_help_panel=o.PROOF,
        ),
    ] = False,
    junit: o.Junit = None,
    html: o.Html = None,
    sarif: o.Sarif = None,
    as_json: o.Json = False,
) -> None:
    """Prove that a converted model computes the same as its source, or name the bug and the rule.

    Exit codes: 0 equal, 1 different, 2 inconclusive.
    """
    from convert.cli.check_text import lines
    from convert.cli.conversion.to_jax import refuse_check
    from convert.planning.options import ConversionOptions
    from convert.rules import library
    from convert.verify.report.report import LEVELS
    from convert.verify.run import check as run
    from convert.verify.stopped import or_stopped

    rules = Path(model) if model and library.is_path(model) else None
    _refuse_report_paths((out, recorded, rules), source, (junit, html, sarif))

    def abort(error: BaseException) -> Report:
        """Replace the reports of an earlier check, which must not stay."""
        report = _aborted(out, source or recorded, model, to, o.split(require), error)
        _write(report, junit, html, sarif)
        return report

    interrupted = signals.cleanup(lambda: abort(KeyboardInterrupt())) if junit or html or sarif else nullcontext()
    try:
        with interrupted, output.prints_to_stderr():
            refuse_check(out)
            report = run(
                out,
                source,
                ConversionOptions(
                    to=to,
                    dtype=dtype,
                    settings=o.parse_settings(settings),
                    step=step,
                    item=item,
                    lora=lora,
                    skeleton=skeleton,
                    follow_links=follow_links,
                    rules_dir=rules_dir,
                ),
                model=model,
                levels=o.split(level) or LEVELS,
                require=o.split(require),
                trust=o.split(trust),
                reference=reference,
                recorded=recorded,
                device=device,
                precision=precision,
                seed=seed,
                backends=backends,
                training=training,
            )
    except BaseException as raised:
        error = exit_of_user_code(raised) or raised
        aborted = abort(error)
        if as_json:
            output.data_json(aborted.to_dict())
        raise
    if as_json:
        output.data_json(report.to_dict())
    else:
        output.data_lines(or_stopped(lambda: list(lines(report)), partial(_in_brief, report), "the report"))
    _write(report, junit, html, sarif)
    raise typer.Exit(report.exit_code)


def _in_brief(report: Report, why: str) -> list[str]:
    """Return the verdicts, where the report cannot be written."""
    return [*(f"{level.level}: {level.verdict}" for level in report.levels), why, report.verdict]


def _aborted(
    out: Path, source: Path | None, model: str | None, to: str | None, require: tuple[str, ...], error: BaseException
) -> Report:
    """Return the inconclusive report of a check that an error ended."""
    from convert.stores import located
    from convert.verify.report.report import Report

    if isinstance(error, ConvertError):
        errors = error.findings
    else:
        errors = (Finding("internal", f"{type(error).__name__} {error}".strip()),)
    return Report(
        str(located(out)), str(located(source)) if source else "", model or "", to or "", (), require, errors=errors
    )


def _refuse_report_paths(files: tuple[Path | None, ...], source: Path | None, reports: tuple[Path | None, ...]) -> None:
    """Refuse, before the work starts, to replace what is checked by a report."""
    from convert.writing.destination.permitted import require_text_file

    for report in (path for path in reports if path is not None):
        path = report.resolve()
        inputs = [file.resolve() for file in files if file is not None]
        if path in inputs or (source is not None and path.is_relative_to(source.resolve())):
            raise OutputError(
                Finding("output-within-input", "is part of what is checked", path=str(report), fix="give another name")
            )
        require_text_file(report)


def _write(report: Report, junit: Path | None, html: Path | None, sarif: Path | None) -> None:
    from convert.writing.destination.atomic import write_text

    if junit is not None:
        from convert.verify.report.junit import to_junit

        write_text(junit, to_junit(report))
    if html is not None:
        from convert.verify.report.html import to_html

        write_text(html, to_html(report, report.plan.to_dict() if report.plan else None))
    if sarif is not None:
        import json

        from convert.verify.report.sarif import to_sarif
        from convert.writing.provenance import tool_version

        write_text(sarif, json.dumps(to_sarif(report, tool_version()), indent=2) + "\n")
