"""``convert record MODEL CKPT OUT``"""

from __future__ import annotations

from pathlib import Path

import click

from convert.cli import options as o
from convert.cli import output


@o.command(
    o.MODEL,
    o.CHECKPOINT,
    o.Argument("out", "A .safetensors file.", metavar="OUT", type=o.PATH),
    o.TO,
    o.STEP,
    o.ITEM,
    o.SKELETON,
    o.SETTINGS,
    o.CUSTOM_CELLS,
    o.RULES_DIR,
    o.REFERENCE,
    click.Option(
        ["--precision"],
        default="float32",
        metavar="DTYPE",
        help="What users run in: float32, bfloat16 or float64.",
        show_default=True,
    ),
    click.Option(
        ["--seed"], default=0, help="Of the random inputs, and of what is kept of large values.", show_default=True
    ),
    click.Option(
        ["--max-size"],
        default="64MB",
        metavar="SIZE",
        help="The most that OUT may take: larger values are kept in part, at random.",
        show_default=True,
    ),
    o.OVERWRITE,
    click.Option(["--quiet", "-q"], is_flag=True, help="No summary."),
    o.JSON,
)
def record(
    model: str,
    checkpoint: Path,
    out: Path,
    to: str | None,
    step: int | None,
    item: str | None,
    skeleton: Path | None,
    settings: tuple[str, ...],
    custom_cells: bool,
    rules_dir: Path | None,
    reference: str | None,
    precision: str,
    seed: int,
    max_size: str,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run the JAX model and keep what it gives, for `convert check --recorded` where there is no JAX."""
    from convert.api import plan_conversion
    from convert.core.errors import ConvertError
    from convert.planning.options import ConversionOptions
    from convert.verify.recording.record import record as run
    from convert.verify.run import load_reference

    plan = plan_conversion(
        model,
        checkpoint,
        ConversionOptions(
            to=to,
            settings=o.parse_settings(settings, custom_cells),
            step=step,
            item=item,
            skeleton=skeleton,
            rules_dir=rules_dir,
        ),
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
