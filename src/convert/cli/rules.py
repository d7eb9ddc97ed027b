"""``convert rules list | show NAME | new CKPT | validate FILE | schema``"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convert.cli import options as o
from convert.cli import output
from convert.cli.help import Command, Group

if TYPE_CHECKING:
    from convert.checkpoints.source import Source
    from convert.core.findings import Finding
    from convert.rules.file import RuleFile

rules = typer.Typer(
    cls=Group, help="List, show, draft and validate rule files.", no_args_is_help=True, rich_markup_mode="rich"
)


@rules.command(name="list", cls=Command, epilog="Example: convert rules list --rules my-rules/")
def list_rules(rules_dir: o.RulesDir = None, as_json: o.Json = False) -> None:
    """List the shipped rules, which can be named as MODEL."""
    from convert.rules.library import available_rules

    available = available_rules(rules_dir)
    if as_json:
        output.data_json([_to_dict(rules) for rules in available])
        return
    rows = [("NAME", "FAMILY", "TARGETS", "TITLE", "PUBLISHED SIZES")]
    rows += [
        (
            r.model,
            r.family or "-",
            ", ".join(r.supported_targets),
            r.title,
            ", ".join(v.name for v in r.versions) or "-",
        )
        for r in available
    ]
    output.data_lines(output.headed(output.table(rows)))


def _to_dict(rules: RuleFile) -> dict[str, Any]:
    return {
        "model": rules.model,
        "family": rules.family,
        "title": rules.title,
        "file": rules.path,
        "sha256": rules.sha256,
        "targets": {name: rules.targets[name].loads for name in rules.supported_targets},
        "versions": [version.name for version in rules.versions],
    }


@rules.command(cls=Command, epilog="Example: convert rules show timesfm-2.5")
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name from `convert rules list`, or path of a rule file.",
            autocompletion=o.complete_model,
        ),
    ],
    rules_dir: o.RulesDir = None,
) -> None:
    """Print a rule file; for a family, all its files."""
    from convert.rules.library import find_rules

    for text in dict.fromkeys(rules.text for rules in find_rules(name, rules_dir)):  # one file may hold several models
        output.data(text.rstrip("\n"))


@rules.command(cls=Command, epilog="Example: convert rules new ckpt/ mine.yaml --like my_model:make")
def new(
    checkpoint: o.Checkpoint,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="New file. Without it the draft goes to stdout.")
    ] = None,
    step: o.Step = None,
    item: o.Item = None,
    skeleton: o.Skeleton = None,
    follow_links: o.FollowLinks = False,
    root: Annotated[
        str,
        typer.Option(
            "--root",
            metavar="PATH",
            help="Tree to draft, such as agent/actor/params; the other leaves are dropped. (default: all leaves)",
            rich_help_panel=o.INPUT,
            show_default=False,
        ),
    ] = "",
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="TARGET",
            help="PyTorch model whose names, shapes and types of modules answer questions: MODULE:FACTORY of your code, a .safetensors file, or a directory with the config.json of a transformers model. (default: all names are asked for)",
            rich_help_panel=o.INPUT,
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="MODULE:FACTORY",
            help="Function that builds your own pair of models, JAX and PyTorch: both run, and what they show is answered, with its evidence. (default: no model runs)",
            rich_help_panel=o.INPUT,
            show_default=False,
        ),
    ] = None,
    settings: o.Settings = None,
) -> None:
    """Draft a rule file from the tree of a checkpoint.

    Guesses are marked. Where names and shapes leave a question open, the value is `ask`. --like answers from the PyTorch model,
    and --reference from both models, as `convert infer` does; only what they leave open is drafted.
    """
    from convert.checkpoints import open_source
    from convert.core.errors import ConvertError, OutputError
    from convert.core.findings import Finding
    from convert.drafting import draft_rules
    from convert.rules.parse import parse_rules
    from convert.verify.target_model import read_target

    if like is not None and reference is not None:
        expected, got = "--like or --reference, which has the PyTorch model, too", "both"
        raise ConvertError(Finding("usage", path=f"--like {like}", expected=expected, got=got))
    source = open_source(checkpoint, step=step, item=item, skeleton=skeleton, follow_links=follow_links)
    name = "my-model" if file is None else file.stem
    said: list[str] = []
    with output.prints_to_stderr():
        if reference is None:
            text = draft_rules(source, name, root, read_target(like) if like is not None else None)
        else:
            text, said = _answered(source, name, root.strip("/"), reference, o.parse_settings(settings))
    if file is None:
        output.data(text.rstrip("\n"))
        return
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise OutputError(
            Finding(
                "output-exists",
                "exists, and a draft would replace what you wrote",
                path=str(file),
                fix="give another name",
            )
        ) from None
    except OSError as error:
        with suppress(OSError):
            file.unlink()
        raise OutputError(
            Finding("output-not-writable", f"cannot be written: {error.strerror}", path=str(file))
        ) from None
    draft = parse_rules(text, str(file))
    output.status(
        f"wrote {file}: {output.count(len(draft.rules), 'rule')} for {output.count(len(source.leaves), 'leaf')}, "
        f"{output.count(len(draft.questions), 'question')} open; "
        f"{'answer them, then' if draft.questions else 'next:'} `convert plan {file} {checkpoint}`"
    )
    for line in said:
        output.status(line)


def _answered(
    source: Source, name: str, root: str, reference: str, settings: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """Return a draft with the rules that two programs show, and what was found; the rest is drafted for the rest of the module."""
    from convert.cli.infer import described, leaf_specs, specs_of
    from convert.cli.infer_text import beside, counted, summary
    from convert.core.user_code import REFERENCE_OPTION
    from convert.drafting import draft_rules
    from convert.drafting.draft import KnownRules
    from convert.inference.pair import pair_of_reference, whole_numbers
    from convert.numerics.precision import require_jax

    require_jax("run it where JAX is installed and starts")
    from convert.inference.rule_file.from_pair import infer_rules

    pair = pair_of_reference(reference, settings, source)
    leaves = specs_of(None, leaf_specs(source), root)
    numbers = whole_numbers(source, root)
    rules = infer_rules(pair, described(pair), leaves, name, root, option=REFERENCE_OPTION, numbers=numbers)
    written = rules.written
    known = KnownRules(reference, written.sure, written.left, written.letters)
    text = draft_rules(source, name, root, rules.open_target, known)
    return text, [
        counted(rules.derivation) + beside(rules.derivation, rules.target, written.text),
        *summary(rules.derivation, written.open),
    ]


@rules.command(cls=Command, epilog="Example: convert rules validate mine.yaml")
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Rule files.")],
    sarif: o.Sarif = None,
) -> None:
    """Validate rule files: keys, equations, and that sources and targets pair up.

    Open questions (`ask`) are listed. Exit code 2 when a file is not valid or not finished.
    """
    from convert.core.errors import OutputError, RuleError
    from convert.core.findings import Finding
    from convert.rules.library import load_models

    if sarif and sarif.resolve() in [file.resolve() for file in files]:
        problem, fix = "is one of the rule files", "give another name"
        raise OutputError(Finding("output-within-input", problem, path=str(sarif), fix=fix))
    failed = False
    found: list[Finding] = []
    for file in files:
        try:
            models = load_models(file)
        except RuleError as error:
            output.error(error.shared_code, str(error))
            found += error.findings
            failed = True
        else:
            for rules in models:
                name = f" {rules.model}:" if len(models) > 1 else ""
                questions = rules.questions
                count = f", {output.count(len(questions), 'question')} open" if questions else ""
                output.data_lines(
                    [
                        f"{file}:{name} valid{' so far' if questions else ''}, {output.count(len(rules.rules), 'rule')} "
                        f"for {', '.join(rules.supported_targets)}{count}"
                    ]
                )
                for question in questions:
                    output.data_lines([f"  {question}"])
                failed |= bool(questions)
    if sarif:
        import json

        from convert.verify.report.sarif import sarif as to_sarif
        from convert.writing.destination.atomic import write_text
        from convert.writing.provenance import tool_version

        content = to_sarif([(finding, "error") for finding in found], tool_version(), str(files[0]))
        write_text(sarif, json.dumps(content, indent=2) + "\n")
    if failed:
        raise typer.Exit(2)


@rules.command(cls=Command, epilog="Example: convert rules schema > rules.schema.json")
def schema() -> None:
    """Print the JSON Schema of rule files, for editors."""
    from convert.rules.schema import schema as rule_schema

    output.data_json(rule_schema())
