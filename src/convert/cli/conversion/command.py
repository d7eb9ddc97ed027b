"""``convert MODEL CKPT OUT``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convert.cli import options as o


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
    from convert.cli.conversion.request import Proof, Request, Writing, refuse, refuse_without_check
    from convert.planning.options import ConversionOptions

    if not check:
        refuse_without_check({"--reference": reference, "--require": require, "--trust": trust})
    said = o.parse_settings(settings, custom_cells)
    if adapter not in (None, "peft"):
        said |= {"adapter": adapter}
    options = ConversionOptions(
        to=None if to in o.JAX_FORMATS else to,
        dtype=dtype,
        settings=said,
        step=step,
        item=item,
        lora=lora,
        skeleton=skeleton,
        follow_links=follow_links,
        rules_dir=rules_dir,
        tokenizer=tokenizer,
    )
    asked = Request(
        model=model,
        checkpoint=checkpoint,
        out=out,
        options=options,
        to=to,
        adapter=adapter,
        like=like,
        layout=tree_layout,
        writing=Writing(overwrite, resume, max_shard_size, jobs, engine, address),
        attest=attest,
        push=push,
        private=private,
        proof=Proof(reference, o.split(require), o.split(trust)) if check else None,
        dry_run=dry_run,
        full=full,
        quiet=quiet,
        as_json=as_json,
    )
    refuse(asked)
    if (form := asked.jax_format) is not None:
        from convert.cli.conversion import to_jax

        to_jax.run(asked, form)
    elif asked.to_peft:
        from convert.cli.conversion import to_peft

        to_peft.run(asked)
    else:
        from convert.cli.conversion import to_pytorch

        to_pytorch.run(asked)
