"""``convert check OUT --from CKPT``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from convert.cli import options as o
from convert.cli import output
from convert.core.errors import ConvertError, OutputError

if TYPE_CHECKING:
    from convert.verify.report.report import Report


@o.command(
    o.Argument("out", "A .safetensors file, or a directory of them.", metavar="OUT", type=o.PATH),
    click.Option(["--from", "source"], type=o.PATH, metavar="CKPT", help="The checkpoint that it was made from."),
    click.Option(
        ["--recorded"],
        type=o.PATH,
        metavar="FILE",
        help="What `convert record` wrote: JAX need not be installed here, nor CKPT be.",
    ),
    click.Option(["--model"], metavar="MODEL", help="The rules, when the file does not say."),
    o.TO,
    o.DTYPE,
    o.STEP,
    o.ITEM,
    o.SKELETON,
    o.SETTINGS,
    o.RULES_DIR,
    click.Option(
        ["--level"],
        multiple=True,
        metavar="LEVEL",
        help="coverage, weights, layers, model. May be repeated.",
        show_default="all",
    ),
    o.REQUIRE,
    o.REFERENCE,
    click.Option(
        ["--device"], default="cpu", metavar="DEVICE", help="Where torch runs: cpu or cuda.", show_default=True
    ),
    click.Option(
        ["--precision"],
        metavar="DTYPE",
        help="What users run in: float32, bfloat16 or float64.",
        show_default="the recording's, or float32",
    ),
    click.Option(["--seed"], type=int, help="Of the random inputs.", show_default="the recording's, or 0"),
    click.Option(
        ["--backends"],
        is_flag=True,
        help="Compare JAX, torch, torch.compile, CUDA and the reference's own backends, too.",
    ),
    click.Option(["--junit"], type=o.PATH, metavar="FILE", help="Write the report as JUnit XML, too."),
    click.Option(["--html"], type=o.PATH, metavar="FILE", help="Write the report as one HTML page, too."),
    o.JSON,
)
def check(
    out: Path,
    source: Path | None,
    recorded: Path | None,
    model: str | None,
    to: str | None,
    dtype: str | None,
    step: int | None,
    item: str | None,
    skeleton: Path | None,
    settings: tuple[str, ...],
    rules_dir: Path | None,
    level: tuple[str, ...],
    require: tuple[str, ...],
    reference: str | None,
    device: str,
    precision: str | None,
    seed: int | None,
    backends: bool,
    junit: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Prove that a conversion computes the same as its source, or say where and why not.

    Exit codes: 0 equal, 1 different, 2 inconclusive.
    """
    from convert.cli.check_text import lines
    from convert.planning.options import ConversionOptions
    from convert.verify.report.report import LEVELS
    from convert.verify.run import check as run

    _refuse((out, recorded), source, (junit, html))
    try:
        report = run(
            out,
            source,
            ConversionOptions(
                to=to,
                dtype=dtype,
                settings=o.parse_settings(settings),
                step=step,
                item=item,
                skeleton=skeleton,
                rules_dir=rules_dir,
            ),
            model=model,
            levels=o.split(level) or LEVELS,
            require=o.split(require),
            reference=reference,
            recorded=recorded,
            device=device,
            precision=precision,
            seed=seed,
            backends=backends,
        )
    except BaseException as error:  # whatever it was, reports of an earlier check must not stay
        stopped = _stopped(out, source or recorded, model, to, o.split(require), error)
        _write(stopped, junit, html)
        if as_json:
            output.data_json(stopped.to_dict())
        raise
    _write(report, junit, html)
    if as_json:
        output.data_json(report.to_dict())
    else:
        for line in lines(report):
            output.data(line)
    raise click.exceptions.Exit(report.exit_code)


def _stopped(
    out: Path, source: Path | None, model: str | None, to: str | None, require: tuple[str, ...], error: BaseException
) -> Report:
    """Build the report of a check that an error stopped."""
    from convert.verify.report.report import Report

    said = str(error) if isinstance(error, ConvertError) else f"{type(error).__name__} {error}".strip()
    return Report(str(out), str(source or ""), model or "", to or "", (), require, error=said)


def _refuse(files: tuple[Path | None, ...], source: Path | None, reports: tuple[Path | None, ...]) -> None:
    """Before the work is done: a report replaces what is there, so it must not be what is being checked."""
    for report in (path for path in reports if path is not None):
        here = report.resolve()
        named = [path.resolve() for path in files if path is not None]
        if here in named or (source is not None and here.is_relative_to(source.resolve())):
            raise OutputError(f"{report}: is part of what is checked; give another name for the report")
        if not here.parent.is_dir():
            raise OutputError(f"{report}: the directory {here.parent} does not exist; create it first")


def _write(report: Report, junit: Path | None, html: Path | None) -> None:
    from convert.writing.atomic import write_text

    if junit is not None:
        from convert.verify.report.junit import to_junit

        write_text(junit, to_junit(report))
    if html is not None:
        from convert.verify.report.html import to_html

        write_text(html, to_html(report, report.plan.to_dict() if report.plan else None))
