"""Arguments and options that several commands share, and the words that they are read from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from convert.core.errors import ConvertError

PATH = click.Path(path_type=Path)


class Argument(click.Argument):
    """An argument that the help explains as it does the options; before click 8.5 it had words for these alone."""

    def __init__(self, name: str, explained: str, **more: Any) -> None:
        super().__init__([name], **more)
        self.explained = explained


class Command(click.Command):
    """A command whose help lists its arguments, too."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        arguments = [
            (param.metavar or param.human_readable_name, param.explained)
            for param in self.params
            if isinstance(param, Argument)
        ]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        super().format_options(ctx, formatter)


class Commands(click.Group):
    """Commands in the order in which they are told of."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def command(*params: click.Parameter, name: str | None = None) -> Callable[[Callable[..., None]], Command]:
    """Makes a command of a function that has an argument for each of `params`, by name; its docstring is the help."""

    def made(function: Callable[..., None]) -> Command:
        called = name or function.__name__
        return Command(called, callback=function, params=list(params), help=function.__doc__)

    return made


CHECKPOINT = Argument("checkpoint", "A checkpoint of JAX code: a directory or a file.", metavar="CKPT", type=PATH)
MODEL = Argument("model", "A shipped name (see `convert rules list`) or the path of a rule file.", metavar="MODEL")
TO = click.Option(
    ["--to"],
    metavar="TARGET",
    help="What loads the result: PyTorch code that the rules name, or burn.",
    show_default="the rules' first",
)
DTYPE = click.Option(
    ["--dtype"],
    metavar="DTYPE",
    help="Write floating-point tensors in this dtype, such as bfloat16.",
    show_default="as stored",
)
STEP = click.Option(
    ["--step"], type=int, metavar="N", help="Which step, where there are several.", show_default="the latest"
)
ITEM = click.Option(["--item"], metavar="NAME", help="Which item of a composite checkpoint.")
SKELETON = click.Option(
    ["--skeleton"],
    type=PATH,
    metavar="FILE",
    help="The names of an Equinox file's arrays, from `convert skeleton`.",
    show_default="the rules' leaf_names",
)
SETTINGS = click.Option(
    ["--set", "settings"],
    multiple=True,
    metavar="KEY=VALUE",
    help="A fact that the tree does not hold. May be repeated.",
)
CUSTOM_CELLS = click.Option(
    ["--allow-custom-cells", "custom_cells"],
    is_flag=True,
    help="Write recurrent cells that torch.nn cannot compute for the modules of convert.layers.torch_modules.",
)
RULES_DIR = click.Option(
    ["--rules", "rules_dir"],
    type=PATH,
    metavar="DIR",
    help="A directory of rule files that come before the shipped ones.",
)
LIKE = click.Option(
    ["--like"],
    type=PATH,
    metavar="FILE",
    help="A .safetensors file or a directory whose names and shapes the result must have.",
)
SHARD_SIZE = click.Option(
    ["--max-shard-size"],
    metavar="SIZE",
    help="The most in one file of a directory, such as 2GB.",
    show_default="5GB",
)
# What a conversion follows from, beside model and checkpoint; `convert plan` takes all of it, too.
PLANNING = (TO, DTYPE, STEP, ITEM, SKELETON, SETTINGS, CUSTOM_CELLS, RULES_DIR, LIKE, SHARD_SIZE)
OVERWRITE = click.Option(["--overwrite"], is_flag=True, help="Replace an existing OUT.")
REFERENCE = click.Option(["--reference"], metavar="MODULE:FACTORY", help="The two models, when they are your own.")
REQUIRE = click.Option(
    ["--require"], multiple=True, metavar="LEVEL", help="A level that must not be skipped. May be repeated."
)
JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON to stdout.")

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
    size = float(match[1]) * _UNITS[unit] if match is not None and unit in _UNITS else 0.0
    if not 1 <= size < math.inf:
        raise ConvertError(f"{text!r} is not a size such as 500MB, 2GB or 2GiB")
    return int(size)


def parse_settings(pairs: Iterable[str], custom_cells: bool = False) -> dict[str, Any]:
    """Settings as ``--set key=value`` gives them, the values read as YAML scalars.

    Raises:
        ConvertError: an item without ``=``.
    """
    from convert.core.yaml_nodes import parse_scalar

    settings: dict[str, Any] = {"custom_cells": True} if custom_cells else {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConvertError(f"--set takes key=value, not {pair!r}")
        settings[key.strip()] = parse_scalar(value)
    return settings


def split(values: Iterable[str]) -> tuple[str, ...]:
    """``--level coverage,weights`` and ``--level coverage --level weights`` alike."""
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def shard_bytes(text: str | None, out: Path | None) -> int | None:
    """The limit that ``--max-shard-size`` sets; a single file has none unless the user gives it."""
    if text is not None:
        return parse_size(text)
    return None if out is not None and out.suffix == ".safetensors" else DEFAULT_SHARD_BYTES
