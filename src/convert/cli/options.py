"""Arguments and options that several commands share, as annotated types for Typer, and how their values are parsed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from convert.core.errors import ConvertError
from convert.core.findings import Finding

INPUT = "What to read"
OUTPUT = "What to write"
BATCH = "How to run the jobs"
PROOF = "What to prove"
REPORT = "What to print"

JAX_FORMATS = ("orbax", "msgpack", "npz")  # values of --to that are no target of the rules


def complete_model(incomplete: str) -> list[str]:
    """List the shipped models and families that start with what is typed, for shell completion."""
    from convert.rules.library import available_rules

    rules = available_rules()
    names = {rule.model for rule in rules}.union(*(rule.families for rule in rules))
    return sorted(name for name in names if name.startswith(incomplete))


Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CKPT", help="Checkpoint written by JAX code: a directory, a file, or its URL (s3, gs, http, https)."
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Shipped model (`convert rules list`) or path of a rule file.",
        autocompletion=complete_model,
    ),
]
_TO = "PyTorch code that loads the result: a target of the rules, or burn."
_FIRST = "(default: the rules' first target)"
To = Annotated[
    str | None,
    typer.Option("--to", metavar="TARGET", help=f"{_TO} {_FIRST}", rich_help_panel=OUTPUT),
]
ToOrBack = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="TARGET",
        help=f"{_TO} With orbax, msgpack or npz, CKPT is PyTorch weights, and the result is a checkpoint of JAX code. {_FIRST}",
        rich_help_panel=OUTPUT,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Dtype of the floating-point tensors, such as bfloat16. (default: as stored)",
        rich_help_panel=OUTPUT,
    ),
]
Step = Annotated[
    int | None,
    typer.Option(
        "--step",
        metavar="N",
        help="Training step, if the directory holds several. (default: the latest)",
        rich_help_panel=INPUT,
    ),
]
Item = Annotated[
    str | None,
    typer.Option(
        "--item", metavar="NAME", help="Item of a composite checkpoint, such as params.", rich_help_panel=INPUT
    ),
]
Lora = Annotated[
    Path | None,
    typer.Option(
        "--lora",
        metavar="CKPT",
        help="Checkpoint with LoRA pairs alone, as Tunix and MaxText save them; or one of its steps. They are added to the weights of "
        "the base model, which the other checkpoint has.",
        rich_help_panel=INPUT,
    ),
]
Skeleton = Annotated[
    Path | None,
    typer.Option(
        "--skeleton",
        metavar="FILE",
        help="Leaf names of an Equinox file, written by `convert skeleton`. (default: leaf_names of the rules)",
        rich_help_panel=INPUT,
    ),
]
FollowLinks = Annotated[
    bool,
    typer.Option("--follow-links", help="Follow links that lead out of CKPT.", rich_help_panel=INPUT),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a hyperparameter, axis size or variant that the checkpoint does not store, such as vocab_size=32000. "
        "Repeatable.",
        rich_help_panel=INPUT,
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="WHAT",
        help="What becomes of the LoRA pairs of the tree. peft: OUT gets them alone, unmerged, as PEFT's adapter_model.safetensors and "
        "adapter_config.json. base: the weights are written without them. (default: they are merged) Back from PEFT's adapter, where "
        "the tree of --like has no pairs, their form: qwix.einsum, qwix.dot_general, gemma, openpi or flax.nnx.",
        rich_help_panel=OUTPUT,
    ),
]
CustomCells = Annotated[
    bool,
    typer.Option(
        "--allow-custom-cells",
        help="Allow recurrent cells that torch.nn lacks; their modules are in convert.layers.torch_modules.",
        rich_help_panel=OUTPUT,
    ),
]
RulesDir = Annotated[
    Path | None,
    typer.Option(
        "--rules",
        metavar="DIR",
        help="Directory of rule files; they take precedence over the shipped ones.",
        rich_help_panel=INPUT,
    ),
]
Like = Annotated[
    Path | None,
    typer.Option(
        "--like",
        metavar="FILE",
        help="Safetensors file or directory whose tensor names and shapes the result must have. With --to orbax, msgpack "
        "or npz: checkpoint of the same model, whose tree, shapes and dtypes the result gets.",
        rich_help_panel=OUTPUT,
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="NAME",
        help="With --to orbax, msgpack or npz, and without --like: the form of the tree, one of the `layouts` of the rules, "
        "such as NESTED. (default: the first)",
        rich_help_panel=OUTPUT,
    ),
]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="Maximum size of a file of an output directory, such as 2GB. (default: 5GB)",
        rich_help_panel=OUTPUT,
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="DIR",
        help="Directory, or its URL, whose tokenizer, processor, generation and licence files are copied into the directory OUT.",
        rich_help_panel=OUTPUT,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing OUT.", rich_help_panel=OUTPUT)]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue an unfinished OUT with the tensors that are missing, and keep it when interrupted. What is there is "
        "compared with its digests. Another checkpoint, other rules, options or another version are refused.",
        rich_help_panel=OUTPUT,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="local|ray",
        help="Where to convert: on this machine, or each file of OUT as a task of a Ray cluster, whose machines see CKPT and OUT under "
        "the same paths.",
        rich_help_panel=OUTPUT,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Head of the Ray cluster, or `auto`. Without it, Ray runs on this machine.",
        rich_help_panel=OUTPUT,
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(
        "--reference",
        metavar="MODULE:FACTORY",
        help="Function that builds your own pair of models, JAX and PyTorch.",
        rich_help_panel=PROOF,
    ),
]
Require = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="LEVEL",
        help="Exit with code 2 (inconclusive) when this level is skipped, or for model when a fact is not verified. "
        "Repeatable, or separated by commas.",
        rich_help_panel=PROOF,
    ),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="FACT",
        help="Accept this fact, such as sliding_window, although nothing confirms it. Repeatable, or separated by commas.",
        rich_help_panel=PROOF,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="DTYPE",
        help="Precision in which users run the model: float32, bfloat16 or float64. "
        "(default: the recording's, or float32)",
        rich_help_panel=PROOF,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", help="Seed of the random inputs. (default: the recording's, or 0)", rich_help_panel=PROOF
    ),
]
Attest = Annotated[
    Path | None,
    typer.Option(
        "--attest",
        metavar="FILE",
        help="Write an in-toto statement: the SHA-256 of every file of OUT, and what made it. To be signed by other tools.",
        rich_help_panel=OUTPUT,
    ),
]
Push = Annotated[
    str | None,
    typer.Option(
        "--push",
        metavar="OWNER/NAME",
        help="Upload OUT to this repository of the Hugging Face Hub afterwards, in one commit; @BRANCH may follow.",
        rich_help_panel=OUTPUT,
    ),
]
Private = Annotated[
    bool,
    typer.Option("--private", help="Make the repository of --push private, if it is new.", rich_help_panel=OUTPUT),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Converted .safetensors file, or a directory of them.")]
Junit = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="Write the report as JUnit XML.", rich_help_panel=REPORT),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write the report as one HTML page.", rich_help_panel=REPORT),
]
Sarif = Annotated[
    Path | None,
    typer.Option(
        "--sarif",
        metavar="FILE",
        help="Write the findings as SARIF, at the lines of the rule file.",
        rich_help_panel=REPORT,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.", rich_help_panel=REPORT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.", rich_help_panel=REPORT)]
Full = Annotated[
    bool, typer.Option("--full", help="List every entry; do not fold repeated layers.", rich_help_panel=REPORT)
]


def parse_settings(pairs: Iterable[str] | None, custom_cells: bool = False) -> dict[str, Any]:
    """Parse the values of ``--set key=value``; each value is read as a YAML scalar.

    Raises:
        ConvertError: a pair has no ``=``.
    """
    from convert.core.yaml_nodes import parse_scalar

    settings: dict[str, Any] = {"custom_cells": True} if custom_cells else {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConvertError(
                Finding("usage", path="--set", expected="key=value", got=repr(pair), fix="add the value")
            )
        settings[key.strip()] = parse_scalar(value)
    return settings


def split(values: Iterable[str] | None) -> tuple[str, ...]:
    """Split comma-separated values: ``--level coverage,weights`` equals ``--level coverage --level weights``."""
    return tuple(part.strip() for value in values or () for part in value.split(",") if part.strip())


def refuse_options_of_pytorch(to: str, given: Mapping[str, object]) -> None:
    """Refuse options that only a conversion to PyTorch has.

    Raises:
        ConvertError: one of them was given.
    """
    for option, value in given.items():
        if value:
            problem = f"{option} is an option of a conversion to PyTorch"
            raise ConvertError(Finding("usage", problem, path=f"--to {to}", fix="leave it out"))


def refuse_layout(layout: str | None) -> None:
    """Refuse the option of the way back.

    Raises:
        ConvertError: it was given.
    """
    if layout is not None:
        fix = f"add --to {' or '.join(JAX_FORMATS)}"
        raise ConvertError(
            Finding("usage", "only the way back to JAX has a choice of layout", path="--layout", fix=fix)
        )
