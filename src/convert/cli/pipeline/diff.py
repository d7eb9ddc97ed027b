"""``convert diff A B``"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convert.cli import options as o
from convert.cli import output

if TYPE_CHECKING:
    from convert.outputs.difference import TensorDifference, Weights, WeightsDifference
    from convert.planning.options import ConversionOptions

MAX_TENSORS = 20
_HELP = "Weights: a .safetensors file, a directory of them, or with --model a checkpoint."


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help=_HELP)],
    b: Annotated[Path, typer.Argument(metavar="B", help=f"{_HELP} Errors are relative to its values.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Rules by which a checkpoint is read as the tensors of a conversion. If both sides are safetensors, B is the checkpoint.",
            rich_help_panel=o.INPUT,
            autocompletion=o.complete_model,
        ),
    ] = None,
    to: o.To = None,
    dtype: o.Dtype = None,
    step: o.Step = None,
    item: o.Item = None,
    lora: o.Lora = None,
    skeleton: o.Skeleton = None,
    follow_links: o.FollowLinks = False,
    settings: o.Settings = None,
    rules_dir: o.RulesDir = None,
    full: o.Full = False,
    as_json: o.Json = False,
) -> None:
    """Compare two sets of weights: names, shapes, dtypes, and values bit for bit, the worst first.

    Exit codes: 0 equal, 1 different, 2 error.
    """
    from convert.outputs.difference import compare_weights
    from convert.planning.options import ConversionOptions

    options = ConversionOptions(
        to=to,
        dtype=dtype,
        settings=o.parse_settings(settings),
        step=step,
        item=item,
        lora=lora,
        skeleton=skeleton,
        follow_links=follow_links,
        rules_dir=rules_dir,
    )
    sides = _open(a, b, model, options)
    found = compare_weights(*sides)
    if as_json:
        output.data_json({"a": str(sides[0].path), "b": str(sides[1].path), **found.to_dict()})
    else:
        output.data_lines(_lines(found, full))
    raise typer.Exit(1 if found.differing else 0)


def _open(a: Path, b: Path, model: str | None, options: ConversionOptions) -> tuple[Weights, Weights]:
    """Open each side as weights, or through the rules."""
    from convert.api import plan_conversion
    from convert.outputs.difference import PlannedWeights
    from convert.stores import located
    from convert.writing.written import open_written

    a, b = located(a), located(b)

    def weights(path: Path) -> Weights:
        written = open_written(path)
        written.require_files()
        return written

    if model is None:
        return weights(a), weights(b)
    through = [not _holds_weights(path) for path in (a, b)]
    through = through if any(through) else [False, True]
    first, second = (
        PlannedWeights(plan_conversion(model, path, options)) if rules else weights(path)
        for path, rules in zip((a, b), through, strict=True)
    )
    return first, second


def _holds_weights(path: Path) -> bool:
    return path.suffix == ".safetensors" or (path.is_dir() and any(path.glob("*.safetensors")))


def _lines(found: WeightsDifference, full: bool) -> Iterator[str | output.Line]:
    verdict = f"{found.equal:,} of {output.count(found.tensors, 'tensor')} equal bit for bit"
    if not found.differing:
        yield output.Line(verdict, output.GOOD)
        return
    shown = found.differing if full else found.differing[:MAX_TENSORS]
    rows = [("TENSOR", "DIFFERS IN", "A", "B", "ELEMENTS", "MAX ABS", "RELATIVE", "AT", "A HAS", "B HAS")]
    yield from output.headed(output.table([*rows, *map(_row, shown)], right=(4, 5, 6)))
    if more := len(found.differing) - len(shown):
        yield f"... and {more} more (--full)"
    yield ""
    yield output.Line(f"{verdict}, {len(found.differing):,} different", output.BAD)


def _row(tensor: TensorDifference) -> tuple[str, ...]:
    b = "same" if tensor.a == tensor.b else tensor.b or "-"
    place = tensor.name, " and ".join(tensor.kinds), tensor.a or "-", b
    if "values" not in tensor.kinds:
        return (*place, "", "", "", "", "", "")
    at = f"[{', '.join(map(str, tensor.at))}]"
    return (
        *place, f"{tensor.count:,}", f"{tensor.max_abs:.3g}", f"{tensor.relative:.1e}", at, tensor.value_a, tensor.value_b,
    )  # fmt: skip
