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
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .safetensors file.", show_default=False)],
    to: o.To = None,
    step: o.StepNumber = None,
    item: o.Item = None,
    skeleton: o.Skeleton = None,
    settings: o.Settings = None,
    custom_cells: o.CustomCells = False,
    rules_dir: o.RulesDir = None,
    reference: o.Reference = None,
    precision: Annotated[
        str, typer.Option("--precision", metavar="DTYPE", help="What users run in: float32, bfloat16 or float64.")
    ] = "float32",
    seed: Annotated[int, typer.Option("--seed", help="Of the random inputs, and of what is kept of large values.")] = 0,
    max_size: Annotated[
        str,
        typer.Option(
            "--max-size", metavar="SIZE", help="The most that OUT may take: larger values are kept in part, at random."
        ),
    ] = "64MB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing OUT.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary.")] = False,
    as_json: o.Json = False,
) -> None:
    """Run the JAX model and keep what it gives, for `convert check --recorded` where there is no JAX."""
    from convert.api import plan_conversion
    from convert.check.record import record as run
    from convert.check.run import load_reference
    from convert.errors import ConvertError

    plan = plan_conversion(
        model,
        checkpoint,
        to=to,
        settings=o.parse_settings(settings, custom_cells),
        step=step,
        item=item,
        skeleton=skeleton,
        rules_dir=rules_dir,
    )
    pair = load_reference(plan, reference)
    if isinstance(pair, str):
        raise ConvertError(f"{checkpoint} cannot be recorded: {pair}")
    done = run(
        plan,
        pair,
        out,
        factory=reference or "",
        seed=seed,
        precision=precision,
        max_bytes=o.parse_size(max_size),
        overwrite=overwrite,
    )
    if as_json:
        output.data_json(
            {
                "out": str(done.out),
                "bytes": done.nbytes,
                "values": done.values,
                "sampled": done.sampled,
                "model": plan.rules.model,
                "target": plan.target,
                "precision": precision,
                "seed": seed,
                "unlifted": list(done.evidence.unlifted),
            }
        )
    elif not quiet:
        if done.evidence.unlifted:
            output.say(f"note: could not be lifted to float64: {', '.join(done.evidence.unlifted)}")
        kept = f", {done.sampled} of them in part" if done.sampled else ""
        output.say(
            f"wrote {done.out}: {done.values} boundaries and outputs of {plan.found}{kept}, {output.size(done.nbytes)}, "
            f"for {plan.rules.targets[plan.target].loads}"
        )
