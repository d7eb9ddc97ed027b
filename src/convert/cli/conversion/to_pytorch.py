"""``convert MODEL CKPT OUT``: safetensors for PyTorch, here or on a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from convert.api import plan_conversion
from convert.cli import output
from convert.cli.conversion import push, summary
from convert.cli.conversion.request import Proof, Request
from convert.cli.plan import print_plan, read_specs
from convert.core.errors import ConvertError
from convert.outputs.attestation import refuse_inside, write_statement
from convert.outputs.completed import completed
from convert.planning.options import ConversionOptions
from convert.planning.plan import Plan
from convert.stores import StorePath, located
from convert.verify.report.report import Report
from convert.writing.destination.permitted import require_text_file
from convert.writing.execute import Event, Result, execute, prepare
from convert.writing.shard_size import shard_bytes
from convert.writing.writer import refuse_existing


def run(asked: Request) -> None:
    """Plan, write, check and report; what the options ask for beyond that follows a check that found no difference."""
    repository = push.repository(asked)
    out = located(asked.out)
    started = time.perf_counter()
    options = replace(asked.options, like=read_specs(asked.like) if asked.like else None)
    plan = plan_conversion(asked.model, asked.checkpoint, options)
    plan_seconds = time.perf_counter() - started
    if asked.proof is not None and asked.proof.trust:
        from convert.verify.config.judge import require_names

        require_names(asked.proof.trust, plan)
    limit = shard_bytes(asked.writing.max_shard_size, out)
    if asked.attest:
        refuse_inside(asked.attest, out, asked.checkpoint, Path(plan.rules.path))
        require_text_file(asked.attest)
    if asked.dry_run:
        _, layout, _ = prepare(plan, out, limit)
        refuse_existing(out, asked.writing.overwrite)
        print_plan(plan, layout, asked.full, asked.as_json)
        return
    result = _write(plan, asked, options, out, limit)
    if not asked.as_json and not asked.quiet:
        summary.print_summary(plan, result)
    report = _check(plan, asked, options, out, asked.proof) if asked.proof is not None else None
    said = summary.to_dict(plan, result, plan_seconds)
    if report is None or report.exit_code == 0:
        if asked.attest:
            write_statement(asked.attest, out)
        if repository is not None:
            said |= {"pushed": push.push(out, repository, asked.private, asked.quiet or asked.as_json)}
    summary.end(said, report, asked.as_json)


def _write(plan: Plan, asked: Request, options: ConversionOptions, out: Path, limit: int | None) -> Result:
    """Write the output and show the progress; keep the output of an earlier run that ``--resume`` finds complete."""
    result = _completed(plan, out, limit, asked.writing.overwrite) if asked.writing.resume else None
    if result is not None:
        return result
    with output.progress(asked.quiet or asked.as_json) as show:
        for event in _events(plan, asked, options, out, limit):
            if isinstance(event, Event):
                show(event.done, event.total)
            else:
                result = event
    assert result is not None
    return result


def _events(
    plan: Plan, asked: Request, options: ConversionOptions, out: Path, limit: int | None
) -> Iterator[Event | Result]:
    """Convert here, or on a cluster."""
    how = asked.writing
    if how.engine == "local":
        yield from execute(plan, out, overwrite=how.overwrite, max_shard_bytes=limit, jobs=how.jobs, resume=how.resume)
        return
    from convert.cluster.execute import execute_tasks
    from convert.cluster.ray_tasks import connected

    with connected(how.address) as cluster:
        yield from execute_tasks(
            plan,
            asked.model,
            asked.checkpoint,
            options,
            out,
            cluster.run,
            threads=cluster.threads(how.jobs),
            overwrite=how.overwrite,
            max_shard_bytes=limit,
            resume=how.resume,
        )


def _completed(plan: Plan, out: Path, limit: int | None, overwrite: bool) -> Result | None:
    """Return the result of an earlier run that is complete and the same; None where OUT must be written."""
    prepare(plan, out, limit)
    try:
        return completed(plan, out, limit)
    except ConvertError:
        if overwrite:
            return None
        raise


def _check(plan: Plan, asked: Request, options: ConversionOptions, out: Path, proof: Proof) -> Report:
    """Check the output; the model card of a directory gets the figures of a check that found no difference."""
    report = proof.report(asked.model, out, plan.checkpoint, options)
    if report.exit_code == 0:
        _add_figures_to_card(out, report)
    return report


def _add_figures_to_card(out: Path, report: Report) -> None:
    """Write the figures of the check into the model card of an output directory; a single file has no card."""
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
