"""``convert MODEL CKPT OUT --adapter peft``: LoRA pairs as PEFT's adapter."""

from __future__ import annotations

from convert.api import plan_conversion
from convert.cli import output
from convert.cli.conversion.request import Request
from convert.cli.conversion.summary import named
from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.peft.plan import plan_adapter
from convert.peft.write import refuse, write_adapter
from convert.stores import StorePath, located


def run(asked: Request) -> None:
    """Write PEFT's adapter, or print what it would hold."""
    out = located(asked.out)
    if isinstance(out, StorePath):
        fix = "leave out --adapter, or write to a disk"
        raise ConvertError(Finding("usage", "--adapter needs an OUT on this machine", path=str(out), fix=fix))
    plan = plan_conversion(asked.model, asked.checkpoint, asked.options)
    adapter = plan_adapter(plan)
    found = f"found {named(plan)} in {plan.source.display_path} ({plan.source.format})"
    if asked.dry_run:
        refuse(adapter, out, asked.writing.overwrite)
        if asked.as_json:
            output.data_json(adapter.to_dict())
        else:
            output.data_lines([found, *adapter.lines()])
        return
    result = write_adapter(adapter, out, overwrite=asked.writing.overwrite)
    if asked.as_json:
        output.data_json({**adapter.to_dict(), "out": str(result.out), "seconds": round(result.seconds, 3)})
    elif not asked.quiet:
        output.status(found)
        output.status(
            f"wrote {out}: LoRA pairs of {output.count(result.modules, 'module')}, {output.size(result.nbytes)}, unmerged, for peft"
        )
