"""``convert rules list | show NAME | validate FILE | schema``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from convert.cli import options as o
from convert.cli import output

app = typer.Typer(help="The rules: list, show, validate, schema.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A name from `convert rules list`, or the path of a rule file.")
]
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Rule files.", show_default=False)]


@app.command("list")
def list_rules(rules_dir: o.RulesDir = None, as_json: o.Json = False) -> None:
    """The rules that can be named as MODEL."""
    from convert.library import available_rules

    known = available_rules(rules_dir)
    if as_json:
        output.data_json([_describe(rules) for rules in known])
        return
    rows = [("NAME", "FAMILY", "TARGETS", "TITLE", "PUBLISHED SIZES")]
    rows += [
        (r.model, r.family or "-", ", ".join(r.targets), r.title, ", ".join(v.name for v in r.versions) or "-")
        for r in known
    ]
    for line in output.table(rows):
        output.data(line)


def _describe(rules: Any) -> dict[str, Any]:
    return {
        "model": rules.model,
        "family": rules.family,
        "title": rules.title,
        "file": rules.path,
        "sha256": rules.sha256,
        "targets": {name: target.loads for name, target in rules.targets.items()},
        "versions": [version.name for version in rules.versions],
    }


@app.command()
def show(name: Name, rules_dir: o.RulesDir = None) -> None:
    """The text of a rule file; of a family, of all its files."""
    from convert.library import find_rules

    for text in dict.fromkeys(rules.text for rules in find_rules(name, rules_dir)):  # several models may be in one file
        output.data(text.rstrip("\n"))


@app.command()
def validate(files: Files) -> None:
    """Check rule files: the words, the equations, that sources and targets pair up."""
    from convert.errors import RuleError
    from convert.library import load_models

    bad = 0
    for file in files:
        try:
            models = load_models(file)
        except RuleError as error:
            output.error(str(error))
            bad += 1
        else:
            for rules in models:
                called = f" {rules.model}:" if len(models) > 1 else ""
                output.data(
                    f"{file}:{called} valid, {output.count(len(rules.rules), 'rule')} for {', '.join(rules.targets)}"
                )
    if bad:
        raise typer.Exit(2)


@app.command()
def schema() -> None:
    """The JSON Schema of rule files, for editors."""
    from convert.rules_schema import schema as rule_schema

    output.data_json(rule_schema())
