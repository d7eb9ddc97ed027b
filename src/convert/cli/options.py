"""Options that several commands share, and the words that they are read from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from convert.errors import ConvertError

Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="CKPT", help="A checkpoint of JAX code: a directory or a file.", show_default=False),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A shipped name (see `convert rules list`) or the path of a rule file.",
        show_default=False,
    ),
]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="TARGET",
        help="What loads the result: PyTorch code that the rules name, or burn.",
        show_default="the rules' first",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Write floating-point tensors in this dtype, such as bfloat16.",
        show_default="as stored",
    ),
]
StepNumber = Annotated[
    int | None,
    typer.Option("--step", metavar="N", help="Which step, where there are several.", show_default="the latest"),
]
Item = Annotated[
    str | None, typer.Option("--item", metavar="NAME", help="Which item of a composite checkpoint.", show_default=False)
]
Skeleton = Annotated[
    Path | None,
    typer.Option(
        "--skeleton",
        metavar="FILE",
        help="The names of an Equinox file's arrays, from `convert skeleton`.",
        show_default="the rules' records",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A fact that the tree does not hold. May be repeated.", show_default=False
    ),
]
CustomCells = Annotated[
    bool,
    typer.Option(
        "--allow-custom-cells",
        help="Write recurrent cells that torch.nn cannot compute for the modules of convert.torch_modules.",
    ),
]
RulesDir = Annotated[
    Path | None,
    typer.Option("--rules", metavar="DIR", help="A directory of rule files that come before the shipped ones."),
]
Like = Annotated[
    Path | None,
    typer.Option(
        "--like", metavar="FILE", help="A .safetensors file or a directory whose names and shapes the result must have."
    ),
]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size", metavar="SIZE", help="The most in one file of a directory, such as 2GB.", show_default="5GB"
    ),
]
Reference = Annotated[
    str | None,
    typer.Option("--reference", metavar="MODULE:FACTORY", help="The two models, when they are your own."),
]
Require = Annotated[
    list[str] | None,
    typer.Option("--require", metavar="LEVEL", help="A level that must not be skipped. May be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]

DEFAULT_SHARD_BYTES = 5 * 10**9  # huggingface_hub's MAX_SHARD_SIZE at the time of writing: "5GB", meaning 5 * 10**9
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(text: str) -> int:
    """Bytes of a size such as ``2GB`` (decimal) or ``2GiB`` (binary).

    Raises:
        ConvertError: not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B?)\s*", text, re.IGNORECASE)
    unit = match[2].upper() if match else None
    if unit is not None and unit not in _UNITS:
        unit += "B"
    if match is None or unit not in _UNITS or float(match[1]) * _UNITS[unit] < 1:
        raise ConvertError(f"{text!r} is not a size such as 500MB, 2GB or 2GiB")
    return int(float(match[1]) * _UNITS[unit])


def parse_settings(pairs: list[str] | None, custom_cells: bool = False) -> dict[str, Any]:
    """Settings as ``--set key=value`` gives them, the values read as YAML scalars.

    Raises:
        ConvertError: an item without ``=``.
    """
    from convert.yamlfile import parse_scalar

    settings: dict[str, Any] = {"custom_cells": True} if custom_cells else {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConvertError(f"--set takes key=value, not {pair!r}")
        settings[key.strip()] = parse_scalar(value)
    return settings


def split(values: list[str] | None) -> tuple[str, ...]:
    """``--level coverage,weights`` and ``--level coverage --level weights`` alike."""
    return tuple(part.strip() for value in values or () for part in value.split(",") if part.strip())


def shard_bytes(text: str | None, out: Path | None) -> int | None:
    """The limit that ``--max-shard-size`` sets; a single file has none unless the user gives it."""
    if text is not None:
        return parse_size(text)
    return None if out is not None and out.suffix == ".safetensors" else DEFAULT_SHARD_BYTES
