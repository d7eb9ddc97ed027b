"""``convert verify OUT``"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from convert.cli import options as o
from convert.cli import output
from convert.core.text import one_line

if TYPE_CHECKING:
    from convert.outputs.integrity import Integrity

MAX_FINDINGS = 20


def verify(
    out: o.Out,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="FILE",
            help="File in the directory that you changed or added, such as README.md. Repeatable, or separated by commas.",
            rich_help_panel=o.INPUT,
        ),
    ] = None,
    attest: o.Attest = None,
    full: o.Full = False,
    as_json: o.Json = False,
) -> None:
    """Check that OUT still has the bytes that the conversion wrote, by the digests in its headers. Needs no source.

    Exit codes: 0 intact, 1 damaged, 2 no digests or no such output.
    """
    from convert.outputs.integrity import verify_output
    from convert.stores import located

    out = located(out)
    if attest:
        from convert.outputs.attestation import refuse_inside
        from convert.writing.destination.permitted import require_text_file

        refuse_inside(attest, out)
        require_text_file(attest)
    result = verify_output(out, o.split(ignore))
    if attest and result.intact:
        from convert.outputs.attestation import write_statement

        write_statement(attest, out)
    if as_json:
        output.data_json(result.to_dict())
    else:
        _print(result, full)
    raise typer.Exit(0 if result.intact else 1)


def _print(result: Integrity, full: bool) -> None:
    shown = result.findings if full else result.findings[:MAX_FINDINGS]
    amount = (
        f"{output.count(result.tensors, 'tensor')}, {output.size(result.nbytes)}, {output.count(result.files, 'file')}"
    )
    verdict = "intact" if result.intact else f"damaged, {output.count(len(result.findings), 'difference')}"
    output.data(f"{result.path}: {amount}: {verdict}", style=output.GOOD if result.intact else output.BAD)
    for finding in shown:
        output.data(f"  - {finding}", style=output.BAD)
    if more := len(result.findings) - len(shown):
        output.data(f"  ... and {more} more (--full)")
    for key, value in result.provenance.items():
        output.data(f"  {key}: {one_line(value)}", style=output.NOTE)
    for note in result.notes:
        output.status(f"note: {note}", output.NOTE)
