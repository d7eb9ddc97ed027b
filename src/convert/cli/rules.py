"""``convert rules list | show NAME | new CKPT | validate FILE | schema``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from convert.cli import options as o
from convert.cli import output

NAME = o.Argument("name", "A name from `convert rules list`, or the path of a rule file.", metavar="NAME")
FILES = o.Argument("files", "Rule files.", metavar="FILE...", type=o.PATH, nargs=-1, required=True)
DRAFT = o.Argument(
    "file", "Where to write it; must not exist. Without it: stdout.", metavar="[FILE]", type=o.PATH, required=False
)


@o.command(o.RULES_DIR, o.JSON, name="list")
def list_rules(rules_dir: Path | None, as_json: bool) -> None:
    """The rules that can be named as MODEL."""
    from convert.rules.library import available_rules

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


@o.command(NAME, o.RULES_DIR)
def show(name: str, rules_dir: Path | None) -> None:
    """The text of a rule file; of a family, of all its files."""
    from convert.rules.library import find_rules

    for text in dict.fromkeys(rules.text for rules in find_rules(name, rules_dir)):  # several models may be in one file
        output.data(text.rstrip("\n"))


@o.command(o.CHECKPOINT, DRAFT, o.STEP, o.ITEM, o.SKELETON)
def new(checkpoint: Path, file: Path | None, step: int | None, item: str | None, skeleton: Path | None) -> None:
    """Draft a rule file from the tree of a checkpoint. Guesses are marked; what names and shapes do not tell says `ask`."""
    from convert.checkpoints import open_source
    from convert.core.errors import OutputError
    from convert.drafting import draft_rules
    from convert.rules.parse import parse_rules

    source = open_source(checkpoint, step=step, item=item, skeleton=skeleton)
    text = draft_rules(source)
    if file is None:
        output.data(text.rstrip("\n"))
        return
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise OutputError(f"{file} exists, and a draft would replace what you wrote; give another name") from None
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror}") from None
    drafted = parse_rules(text, str(file))
    output.say(
        f"wrote {file}: {output.count(len(drafted.rules), 'rule')} for {output.count(len(source.leaves), 'leaf')}, "
        f"{output.count(len(drafted.questions), 'question')} open; answer them, then `convert plan {file} {checkpoint}`"
    )


@o.command(FILES)
def validate(files: tuple[Path, ...]) -> None:
    """Check rule files: the words, the equations, that sources and targets pair up. What says `ask` is listed, and exits with 2."""
    from convert.core.errors import RuleError
    from convert.rules.library import load_models

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
                open_still = rules.questions
                said = f", {output.count(len(open_still), 'question')} open" if open_still else ""
                output.data(
                    f"{file}:{called} valid{' so far' if open_still else ''}, {output.count(len(rules.rules), 'rule')} "
                    f"for {', '.join(rules.targets)}{said}"
                )
                for question in open_still:
                    output.data(f"  {question}")
                bad += bool(open_still)
    if bad:
        raise click.exceptions.Exit(2)


@o.command()
def schema() -> None:
    """The JSON Schema of rule files, for editors."""
    from convert.rules.schema import schema as rule_schema

    output.data_json(rule_schema())


rules = o.Commands(
    "rules",
    commands=[list_rules, show, new, validate, schema],
    help="The rules: list, show, new, validate, schema.",
    no_args_is_help=True,
)
