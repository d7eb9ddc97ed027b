"""``convert record MODEL CKPT OUT``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convert.cli import options as o
from convert.cli import output


def record(
    model: o.Model,
    checkpoint: o.Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File ending in .safetensors.")],
    to: o.To = None,
    step: o.Step = None,
    item: o.Item = None,
    lora: o.Lora = None,
    skeleton: o.Skeleton = None,
    follow_links: o.FollowLinks = False,
    settings: o.Settings = None,
    custom_cells: o.CustomCells = False,
    rules_dir: o.RulesDir = None,
    reference: o.Reference = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            metavar="DTYPE",
            help="Precision in which users run the model: float32, bfloat16 or float64.",
            rich_help_panel=o.PROOF,
        ),
    ] = "float32",
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            metavar="N",
            help="Seed of the random inputs, and of the sampling of large values.",
            rich_help_panel=o.PROOF,
        ),
    ] = 0,
    max_size: Annotated[
        str,
        typer.Option(
            "--max-size",
            metavar="SIZE",
            help="Maximum size of OUT; values that do not fit are stored as a random sample.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = "64MB",
    overwrite: o.Overwrite = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Run the JAX model and record its inputs, outputs and layer values, for `convert check --recorded`.

    The check then needs neither JAX nor the checkpoint.
    """
    from convert.api import plan_conversion
    from convert.core.errors import ConvertError
    from convert.core.findings import Finding
    from convert.planning.options import ConversionOptions
    from convert.verify.comparison import load_reference
    from convert.verify.recording.record import record as run
    from convert.writing.shard_size import parse_size

    plan = plan_conversion(
        model,
        checkpoint,
        ConversionOptions(
            to=to,
            settings=o.parse_settings(settings, custom_cells),
            step=step,
            item=item,
            lora=lora,
            skeleton=skeleton,
            follow_links=follow_links,
            rules_dir=rules_dir,
        ),
    )
    with output.prints_to_stderr():
        pair = load_reference(plan, reference)
    if isinstance(pair, str):
        raise ConvertError(
            Finding("reference-unavailable", path=str(checkpoint), problem=f"cannot be recorded: {pair}")
        )
    with output.prints_to_stderr():
        recording = run(
            plan,
            pair,
            out,
            factory=reference or "",
            seed=seed,
            precision=precision,
            max_bytes=parse_size(max_size, "--max-size"),
            overwrite=overwrite,
        )
    if as_json:
        output.data_json(
            {
                "out": str(recording.out),
                "bytes": recording.nbytes,
                "values": recording.values,
                "sampled": recording.sampled,
                "model": plan.rules.model,
                "target": plan.target,
                "precision": precision,
                "seed": seed,
                "unlifted": list(recording.evidence.unlifted),
            }
        )
    elif not quiet:
        if recording.evidence.unlifted:
            output.status(f"note: not evaluated in float64: {', '.join(recording.evidence.unlifted)}", output.NOTE)
        sampled = f", {recording.sampled} of them sampled" if recording.sampled else ""
        output.status(
            f"wrote {recording.out}: {recording.values} boundaries and outputs of {plan.found}{sampled}, "
            f"{output.size(recording.nbytes)}, for {plan.rules.targets[plan.target].loads}"
        )
