"""``convert infer CKPT FILE --reference MODULE:FACTORY``"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convert.cli import infer_text, output
from convert.cli import options as o

if TYPE_CHECKING:
    from convert.checkpoints.source import Source
    from convert.core.tensor_spec import TensorSpec
    from convert.drafting.like.target import TargetModel
    from convert.inference.pair import Pair

SHRINK_OPTION = "--shrink, with "
UNDECIDED = 2  # exit code: tensors are tied or open, or the programs differ
LISTED = 8  # trees of a checkpoint


def infer(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="[CKPT] FILE", help="Checkpoint, and the rule file to write. With --shapes only FILE."),
    ],
    step: o.Step = None,
    item: o.Item = None,
    skeleton: o.Skeleton = None,
    follow_links: o.FollowLinks = False,
    root: Annotated[
        str,
        typer.Option(
            "--root",
            metavar="PATH",
            help="Tree of the model in the checkpoint, such as params; the other leaves are dropped. (default: all leaves)",
            rich_help_panel=o.INPUT,
            show_default=False,
        ),
    ] = "",
    reference: o.Reference = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="Target of the shipped rules that --reference belongs to. (default: their first)",
            rich_help_panel=o.INPUT,
            show_default=False,
        ),
    ] = None,
    jax: Annotated[
        str | None,
        typer.Option(
            "--jax",
            metavar="MODULE:FUNCTION",
            help="JAX model: a function of (parameters, inputs), both by name. Instead of --reference.",
            rich_help_panel=o.INPUT,
        ),
    ] = None,
    torch: Annotated[
        str | None,
        typer.Option(
            "--torch",
            metavar="MODULE:CLASS",
            help="PyTorch model: a class or function without arguments. It is called with the inputs by name.",
            rich_help_panel=o.INPUT,
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            "--inputs",
            metavar="MODULE:FUNCTION",
            help="Inputs: a function of a seed that returns NumPy arrays by name, the same for the same seed.",
            rich_help_panel=o.INPUT,
        ),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            "--shapes",
            metavar="MODULE:FUNCTION",
            help="Function that returns the tree of shapes (jax.eval_shape) or sizes by name, where there is no checkpoint.",
            rich_help_panel=o.INPUT,
        ),
    ] = None,
    settings: o.Settings = None,
    shrink: Annotated[
        list[str] | None,
        typer.Option(
            "--shrink",
            metavar="NAME=SIZE,OTHER",
            help="Derive a shipped family with this size of a letter (or setting) of its rules; confirm the file with the other.",
            rich_help_panel=o.INPUT,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option("--seed", metavar="N", help="Seed of the random weights and inputs.", rich_help_panel=o.PROOF),
    ] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing FILE.", rich_help_panel=o.OUTPUT)
    ] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Derive a rule file from the JAX model and the PyTorch model, and prove it.

    Both models run with random weights. Where a parameter meets the same values in both, it is the same parameter: no name is compared.

    Exit code 2 when a tensor is tied, open or without a rule, or when the models differ or may differ; the file is written, and its questions are marked.
    """
    from convert.core.errors import ConvertError
    from convert.core.findings import Finding
    from convert.core.system import process
    from convert.core.user_code import REFERENCE_OPTION, user_code_errors
    from convert.inference.pair import JAX_OPTION, whole_numbers
    from convert.numerics.precision import require_jax

    require_jax("run it where JAX is installed and starts")
    from convert.inference.rule_file.from_pair import infer_rules

    process.tune()  # a record keeps what it makes: a collection goes through all of it, and finds nothing
    if len(paths) != (1 if shapes else 2):
        expected = "FILE" if shapes else "CKPT FILE"
        raise ConvertError(Finding("usage", path="convert infer", expected=expected, got=" ".join(map(str, paths))))
    file = paths[-1]
    _require_directory(file)
    if not overwrite:
        _refuse_existing(file)
    source = None if shapes else _source(paths[0], step, item, skeleton, follow_links)
    given: Mapping[str, Any] = o.parse_settings(settings)
    numbers = {} if source is None else whole_numbers(source, root.strip("/"))
    with output.prints_to_stderr():
        small = _shrunken(shrink or [], reference, to, given, source)
        first = other = None
        if small:
            source, given = small[0]
            with user_code_errors(reference or "", SHRINK_OPTION):  # models refuse sizes that do not go together
                other = _pair(reference, to, None, None, None, small[1][1], small[1][0])
                first = _pair(reference, to, None, None, None, given, source)
        leaves = {} if source is None else leaf_specs(source)
        pair = first or _pair(reference, to, jax, torch, inputs, given, source)
        found = specs_of(shapes, leaves, root)
        option = REFERENCE_OPTION if reference else JAX_OPTION
        outside = len(found) < len(leaves)
        names = (file.stem, root.strip("/"))
        rules = infer_rules(
            pair,
            described(pair),
            found,
            *names,
            option=option,
            numbers=numbers,
            outside=outside,
            leaf_names=() if source is None else source.names_in_order,
            seed=seed,
        )
    derivation, written = rules.derivation, rules.written
    if not overwrite:
        _refuse_existing(file)  # it may have come in the meantime
    _write(file, written.text)
    confirmed, problem = None, ""
    if other is not None and derivation.proof is not None and not written.open:
        sizes = {name: spec.shape for name, spec in specs_of(None, leaf_specs(small[1][0]), root).items()}
        confirmed, problem = _confirmed(
            written.text, other, sizes, root.strip("/"), seed, allowed=derivation.proof.allowed
        )
    complete = derivation.complete and not written.open and not problem
    if as_json:
        made = {"file": str(file), "complete": complete, "open": dict(written.open), "confirmed": confirmed}
        output.data_json({**made, **derivation.to_dict()})
    elif not quiet:
        output.status(infer_text.written(file, derivation, rules.target, written.text, written.open))
        for line in infer_text.summary(derivation, written.open):
            output.status(line)
        if confirmed is not None or problem:
            output.status(infer_text.confirmation(confirmed, problem))
    if not complete:
        raise typer.Exit(UNDECIDED)


def _confirmed(
    rules: str, pair: Pair, shapes: Mapping[str, tuple[int, ...]], root: str, seed: int, *, allowed: float
) -> tuple[float | None, str]:
    """Return the relative error of the rules at the other sizes, and why they are not confirmed; empty where they are."""
    from convert.core.errors import ConvertError
    from convert.inference.shrink import confirm

    try:
        with output.prints_to_stderr():
            error = confirm(rules, pair, shapes, root, seed)
    except ConvertError as raised:
        return None, str(raised)
    return error, "" if error <= allowed else "the rules make other weights"


def _shrunken(
    shrink: list[str], reference: str | None, to: str | None, settings: Mapping[str, Any], source: Source | None
) -> list[tuple[Source, Mapping[str, Any]]]:
    """Return the two trees that `--shrink` asks for, with their settings; none where it is not given."""
    from convert.core.errors import ConvertError
    from convert.core.findings import Finding
    from convert.inference.shrink import parse_shrink, shrunken

    if not shrink:
        return []
    if reference is None or source is None:
        expected, got = "CKPT and --reference of a shipped family", "another way to name the models"
        raise ConvertError(Finding("usage", path=f"--shrink {shrink[0]}", expected=expected, got=got))
    sizes = parse_shrink(shrink)
    return [shrunken(reference, settings, source, to, of) for of in (sizes.first, sizes.second)]


def _require_directory(file: Path) -> None:
    """Check, before the search, that a file can be written there."""
    from convert.core.errors import OutputError
    from convert.core.findings import Finding

    if not file.parent.is_dir():
        problem, fix = "the directory does not exist", "create it first, or give another name"
        raise OutputError(Finding("output-not-writable", problem, path=str(file.parent), fix=fix))
    if file.is_dir():
        raise OutputError(
            Finding("output-not-writable", "is a directory", path=str(file), fix="give the name of a file")
        )


def _refuse_existing(file: Path) -> None:
    from convert.core.errors import OutputError
    from convert.core.findings import Finding

    if file.exists():
        problem = "exists, and inferred rules would replace what you wrote"
        raise OutputError(Finding("output-exists", problem, path=str(file), fix="give another name, or --overwrite"))


def _source(checkpoint: Path, step: int | None, item: str | None, skeleton: Path | None, follow_links: bool) -> Source:
    from convert.checkpoints import open_source

    return open_source(checkpoint, step=step, item=item, skeleton=skeleton, follow_links=follow_links)


def leaf_specs(source: Source) -> dict[str, TensorSpec]:
    """Return the shapes and dtypes of a checkpoint's leaves, without flax nnx's ``/value``."""
    from convert.core.nnx_names import without_value

    names = without_value(source.leaves)
    return {names[name]: leaf.spec for name, leaf in source.leaves.items()}


def specs_of(factory: str | None, leaves: Mapping[str, TensorSpec], root: str) -> dict[str, TensorSpec]:
    """Return the shapes and dtypes of the model's parameters, by their names below `root`."""
    from convert.core.errors import ConvertError
    from convert.core.findings import Finding
    from convert.inference.pair import specs_of_function

    if factory is not None:
        return specs_of_function(factory)
    prefix = f"{root.strip('/')}/" if root.strip("/") else ""
    found = {name.removeprefix(prefix): spec for name, spec in leaves.items() if name.startswith(prefix)}
    if not found:
        tops = ", ".join(sorted({name.partition("/")[0] for name in leaves})[:LISTED])
        raise ConvertError(
            Finding(
                "usage", path=f"--root {root}", expected=f"a tree of the checkpoint ({tops})", got="no leaf below it"
            )
        )
    return found


def _pair(
    reference: str | None,
    to: str | None,
    jax: str | None,
    torch: str | None,
    inputs: str | None,
    settings: Mapping[str, Any],
    source: Source | None,
) -> Pair:
    from convert.core.errors import ConvertError
    from convert.core.findings import Finding
    from convert.inference.pair import pair_of_parts, pair_of_reference

    parts = {"--jax": jax, "--torch": torch, "--inputs": inputs}
    given = [name for name, value in parts.items() if value is not None]
    if reference is not None and not given:
        return pair_of_reference(reference, settings, source, to)
    if to is not None and reference is None:
        raise ConvertError(
            Finding("usage", path=f"--to {to}", expected="--reference of a shipped family", got="no --reference")
        )
    if reference is None and jax is not None and torch is not None and inputs is not None:
        return pair_of_parts(jax, torch, inputs)
    got = " and ".join((["--reference"] if reference is not None else []) + given) or "none of them"
    expected = "--reference MODULE:FACTORY, or all of --jax, --torch and --inputs"
    raise ConvertError(
        Finding("usage", path="the two models", expected=expected, got=got, fix="see docs/guides/infer.md")
    )


def _write(file: Path, text: str) -> None:
    from convert.core.errors import OutputError
    from convert.core.findings import Finding

    part = file.with_name(f"{file.name}.part")  # an existing file stays until the new one is whole
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise OutputError(
            Finding("output-not-writable", f"cannot be written: {error.strerror}", path=str(file))
        ) from None


def described(pair: Pair) -> TargetModel:
    """Return the names, shapes and types of the pair's module."""
    from convert.verify.target_model import model_of_module

    return model_of_module(pair.module, f"{type(pair.module).__module__}.{type(pair.module).__qualname__}")
