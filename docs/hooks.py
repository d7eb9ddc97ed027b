"""Fill the pages of the documentation with what the code says.

A page holds ``<!-- generated: NAME -->``; `GENERATED` maps the name to the function that writes this part. Pages that live at
the root of the repository (`COPIED`) are added to the site, and links that leave ``docs/`` become links to the repository.
"""

from __future__ import annotations

import csv
import dataclasses
import html
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main

import convert
from convert.cli.app import app
from convert.layers import KINDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ERRORS = DOCS / "errors"
REPOSITORY = "https://github.com/ckpt-convert/ckpt-convert"
COPIED = {  # file of the repository -> page of the site
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "benchmarks/README.md": "explanation/benchmarks.md",
    "tests/golden/README.md": "explanation/goldens.md",
}
MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
LINK = re.compile(r"(\]\(|src=\")([^)\"\s#]+)(#[^)\"\s]*)?(?=[)\"])")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table; cells may hold any text but line breaks."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def code(name: str) -> str:
    """Write a dotted name or a path as code that may break behind its dots and slashes."""
    return f"<code>{re.sub(r'(?<=[./])', '<wbr>', html.escape(name))}</code>"


# ---- command line


def commands(command: Any = None, name: str = "convert") -> Iterator[tuple[str, Any]]:
    """List every command with its full name, in the order of the help."""
    command = command or typer.main.get_command(app)
    inner = getattr(command, "commands", {})
    for child in inner:
        yield from commands(inner[child], name if child == "run" else f"{name} {child}")
    if not inner:
        yield name, command


def command_line() -> str:
    """Describe each command: usage, example, arguments, and one table of options per group."""
    parts = []
    for name, command in commands():
        parts += [f"## `{name}`", _plain(command.help)]
        shown = [param for param in command.params if not param.hidden and param.name != "help"]
        arguments = [param for param in shown if param.param_type_name == "argument"]
        usage = " ".join([name, *(_metavar(param) for param in arguments), "[OPTIONS]"])
        example = (command.epilog or "").removeprefix("Example: ")
        parts.append("```text\n" + "\n".join(line for line in (usage, example) if line) + "\n```")
        if arguments:
            parts.append(table(["argument", "meaning"], [[f"`{_metavar(p)}`", _plain(p.help)] for p in arguments]))
        groups: dict[str, list[Any]] = {}
        for param in shown:
            if param.param_type_name == "option":
                groups.setdefault(param.rich_help_panel or "Options", []).append(param)
        for group, options in groups.items():
            title = f"**{group}**\n\n" if len(groups) > 1 else ""
            parts.append(title + table(["option", "meaning"], [_option(param) for param in options]))
    return "\n\n".join(parts)


def _plain(text: str | None) -> str:
    """Remove rich's markup and the line breaks of a help text; paragraphs stay."""
    text = re.sub(r"\[/?(?:bold|dim|italic|cyan|green|red)\]", "", text or "").strip()
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text))


def _metavar(param: Any) -> str:
    return str(param.metavar or (param.name or "").upper())


def _option(param: Any) -> list[str]:
    value = "" if param.is_flag else f" {_metavar(param)}"
    return [", ".join(f"`{name}{value}`" for name in param.opts), _plain(param.help)]


# ---- rule files

KEYS = ("key", "value", "meaning")
LONG = 10  # a list of more values is shortened


def header_keys() -> str:
    """Describe the keys of a rule file's header, with the keys of their values."""
    properties = _schema()
    rows = [row for key in properties if key not in ("rules", "models") for row in _rows(key, properties[key], ())]
    rows += [
        ["`models`", "mapping", _text(properties["models"])],
        ["`rules`", "list", "the rules; see below"],
    ]
    return table(KEYS, rows)


def _schema() -> Mapping[str, Any]:
    return dict(json.loads((ROOT / "rules" / "schema.json").read_text())["properties"])


def rule_keys() -> str:
    """Describe the keys of every kind of rule: one table per kind, and one for the keys that most kinds share."""
    kinds = {kind["title"]: kind for kind in _schema()["rules"]["items"]["oneOf"]}
    shared = [
        key for key in kinds["parameter"]["properties"] if sum(key in k["properties"] for k in kinds.values()) > 10
    ]
    first = kinds["linear"]["properties"]
    rows = [[f"`{key}`", _value(first[key]), _text(first[key])] for key in shared if key in first]
    parts = ["### Keys of every rule that reads leaves", table(KEYS, rows)]
    for name, kind in kinds.items():
        required = kind.get("required", ())
        parts.append(f"### `{name}` {{#{name}}}")
        parts.append(_sentence(re.sub(r"^Target of the rule: [^.]*\. ", "", _text(kind["properties"][name]))))
        own = [key for key in kind["properties"] if key not in shared or (key == "from" and key in required)]
        rows = [row for key in own for row in _rows(key, kind["properties"][key], required, own=key == name)]
        parts.append(table(KEYS, rows))
    return "\n\n".join(parts)


def layer_kinds() -> str:
    """List every kind of layer, what it becomes, and the guide that describes it."""
    guides = {kind.guide: (DOCS / "guides" / f"{kind.guide}.md").read_text() for kind in KINDS.values()}
    titles = {guide: text.partition("\n")[0].removeprefix("# ") for guide, text in guides.items()}
    rows = [
        [f"`{word}`", _sentence(kind.doc), f"[{titles[kind.guide]}]({kind.guide}.md)"] for word, kind in KINDS.items()
    ]
    return table(["key", "target", "guide"], rows)


def _rows(key: str, value: Mapping[str, Any], required: Sequence[str], own: bool = False) -> Iterator[list[str]]:
    """Write a key's row, and those of the keys that its value may have."""
    meaning = "name of the target's module, or a mapping with the keys below" if own else _text(value)
    yield [code(key), _value(value), f"**required**: {meaning}" if key in required else meaning]
    for name, inner in _inner(value).items():
        yield [code(f"{key}.{name}"), _value(inner), _text(inner)]


def _inner(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the keys of a value that is a mapping, or may be one."""
    if "properties" in value:
        return dict(value["properties"])
    choices = (*value.get("anyOf", ()), *value.get("oneOf", ()))
    more = value.get("additionalProperties")
    choices = (*choices, more) if isinstance(more, Mapping) else choices
    return next((found for choice in choices if (found := _inner(choice))), {})


def _value(value: Mapping[str, Any]) -> str:
    """Name the type of a value, as a reader of YAML says it."""
    if "enum" in value:
        named = [f"`{json.dumps(x) if not isinstance(x, str) else x}`" for x in value["enum"]]
        return ", ".join(named if len(named) <= LONG else [*named[:3], "..."])
    if "const" in value:
        return f"`{value['const']}`"
    choices = (*value.get("anyOf", ()), *value.get("oneOf", ()))
    if choices:
        return " or ".join(dict.fromkeys(_value(choice) for choice in choices if choice.get("const") != "ask"))
    types = value.get("type", "any")
    types = [types] if isinstance(types, str) else [one for one in types if one != "null"]
    names = {"string": "text", "object": "mapping", "array": "list", "boolean": "true or false", "any": "any value"}
    return " or ".join(dict.fromkeys(names.get(one, one) for one in types))


def _text(value: Mapping[str, Any]) -> str:
    return str(value.get("description", ""))


def _sentence(text: str) -> str:
    """Write a description as a sentence."""
    text = text if re.match(r"[\w.]*\.", text.split(" ")[0]) else text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def shipped_rules() -> str:
    """List the models whose rules are shipped."""
    rows = []
    for rules in convert.available_rules():
        targets = ", ".join(f"`{target}`" for target in rules.targets)
        sizes = ", ".join(version.name for version in rules.versions)
        rows.append([f"`{rules.model}`", f"`{rules.family}`" if rules.family else "", rules.title, targets, sizes])
    return table(["MODEL", "family", "title", "`--to`", "published sizes"], rows)


# ---- the rest of the reference


def python_api() -> str:
    """Ask mkdocstrings for every public name."""
    groups = {
        "Convert": (
            "convert",
            "plan_conversion",
            "execute",
            "load_into",
            "Loaded",
            "state_dict",
            "StateDict",
            "plan_reverse",
            "convert_adapter",
            "AdapterResult",
            "convert_back",
            "CheckpointResult",
            "load_pytree",
            "ReversePlan",
            "Plan",
            "Step",
            "Event",
            "Result",
        ),
        "Checkpoints": ("open_source", "Source", "Leaf", "TensorSpec", "Format", "Options"),
        "Rules": ("available_rules", "load_rules", "load_models", "parse_rules", "RuleFile"),
        "Drafts": ("draft_rules", "survey_rules", "Survey"),
        "Rules from two programs": ("infer", "Derivation"),
        "Two models of your own": ("Reference", "Observed", "Variant", "Deferred", "fill_pytree"),
        "Errors": ("ConvertError", "CheckpointError", "RuleError", "PlanError", "OutputError"),
    }
    listed = {name for names in groups.values() for name in names}
    groups["More"] = tuple(name for name in convert.__all__ if name not in listed)
    parts = []
    for title, names in groups.items():
        known = [name for name in names if name in convert.__all__]
        if known:
            parts += [f"## {title}", *(f"::: {_home(name)}.{name}" for name in known)]
    return "\n\n".join(parts)


def _home(name: str) -> str:
    """Find the module that defines a public name."""
    return str(getattr(convert, name).__module__)


def error_index() -> str:
    """List the error codes with the first sentence of their pages."""
    rows = []
    for path in sorted(ERRORS.glob("*.md")):
        body = path.read_text().split("## What it means", 1)[-1].strip()
        first = re.split(r"(?<=[.!?])\s", body.replace("\n", " "), maxsplit=1)[0]
        rows.append([f"[`{path.stem}`](../errors/{path.name})", first])
    return table(["code", "meaning"], rows)


def rooms() -> str:
    """List the folders of the package with the first sentence of their docstrings, in the order of the data."""
    order = (
        "checkpoints",
        "layers",
        "rules",
        "planning",
        "writing",
        "loading",
        "reversing",
        "verify",
        "references",
        "drafting",
        "cli",
    )
    order += ("inference", "programs", "numerics", "core")
    rows = []
    for name in order:
        text = importlib.import_module(f"convert.{name}").__doc__ or ""
        rows.append([f"[`{name}/`](../../src/convert/{name})", text.strip().split("\n\n")[0].replace("\n", " ")])
    return table(["folder", "what lives there"], rows)


def report_fields() -> str:
    """Describe the objects of a report by the attributes that their docstrings list."""
    parts = []
    report = importlib.import_module("convert.verify.report.report")
    compare = importlib.import_module("convert.numerics.compare")
    findings = importlib.import_module("convert.core.findings")
    facts = importlib.import_module("convert.verify.report.facts")
    owners = {"Report": report, "LevelReport": report, "Measure": report, "JudgedFact": facts}
    owners |= {"Finding": findings, "Difference": compare}
    for name, module in owners.items():
        kind = getattr(module, name)
        said = _attributes(kind.__doc__ or "")
        rows = [[f"`{f.name}`", said.get(f.name, "")] for f in dataclasses.fields(kind)]
        first = (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        parts.append(f"### `{name}`\n\n{first}\n\n{table(['field', 'meaning'], rows)}")
    return "\n\n".join(parts)


# ---- the fault catalogue


def fault_count() -> str:
    """Count the rows, those that were caught, and those that the report names."""
    rows = _csv("faults.csv")
    caught = sum(bool(row["caught at"]) for row in rows)
    named = sum(not row["diagnosed as"].startswith("not named") for row in rows)
    return f"**{len(rows)} faults, {caught} caught, {named} diagnosed by name.**"


def faults() -> str:
    """Write the catalogue, in a block that tables.js makes searchable."""
    rows = _csv("faults.csv")

    def cell(name: str, text: str) -> str:
        parts = text.split("; ") if text else []
        return "<br>".join(code(part) if name == "localised to" and part else part for part in parts)

    body = table(list(rows[0]), [[cell(name, text) for name, text in row.items()] for row in rows])
    return f'<div class="searchable" markdown>\n\n{body}\n\n</div>'


def faults_by_family() -> str:
    """Say where each fault of the project's list is planted, and why not elsewhere."""
    rows = _csv("faults-by-family.csv")
    return table(list(rows[0]), [[text.replace("; ", "<br>") for text in row.values()] for row in rows])


def families() -> str:
    """Write the table of families, with the number of its rows."""
    rows = _csv("families.csv")
    body = table(list(rows[0]), [[text or "not recorded" for text in row.values()] for row in rows])
    return f'**{len(rows)} rows.**\n\n<div class="searchable" markdown>\n\n{body}\n\n</div>'


def _csv(name: str) -> list[dict[str, str]]:
    with (DOCS / "explanation" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _attributes(docstring: str) -> dict[str, str]:
    """Read the ``Attributes:`` section of a docstring; several names may share a line."""
    section = re.search(r"Attributes:\n(.*?)(?:\n\s*\n\s*\w+:\n|\Z)", docstring, re.DOTALL)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (section[1] if section else "").splitlines():
        if start := re.match(r"\s{4,8}([\w, ]+?)(?: \([^)]*\))?: (.*)", line):
            for part in re.split(r";\s(?=\w+: )", start[0].strip()):
                key, _, text = part.partition(": ")
                names = [name.strip() for name in key.split(",")]
                found |= dict.fromkeys(names, text)
        else:
            for name in names:
                found[name] = f"{found[name]} {line.strip()}".strip()
    return found


GENERATED: Mapping[str, Callable[[], str]] = {
    "command-line": command_line,
    "header-keys": header_keys,
    "rule-keys": rule_keys,
    "layer-kinds": layer_kinds,
    "shipped-rules": shipped_rules,
    "python-api": python_api,
    "error-index": error_index,
    "rooms": rooms,
    "report-fields": report_fields,
    "fault-count": fault_count,
    "faults": faults,
    "faults-by-family": faults_by_family,
    "families": families,
}


# ---- mkdocs


def fill(text: str) -> str:
    """Put the generated parts in place of their marks."""
    return MARK.sub(lambda mark: GENERATED[mark[1]](), text)


def link(text: str, home: Path, page: str) -> str:
    """Turn links that leave ``docs/`` into links to the site's copy, or to the repository.

    Args:
        text: Markdown of the page.
        home: the file that the text is from; its links are relative to it.
        page: where the site has it, below ``docs/``.
    """

    def one(found: re.Match[str]) -> str:
        start, target, anchor = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = Path(os.path.normpath(home.parent / target))
        inside = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if inside in COPIED:
            moved = DOCS / COPIED[inside]
        elif path.is_relative_to(DOCS) and not path.is_dir():
            moved = path
        elif path.suffix == ".svg":
            moved = DOCS / "assets" / path.name
        elif path.exists():
            return f"{start}{REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/main/{inside}{anchor}"
        else:
            raise ValueError(f"{home}: the link {target} leads nowhere")
        return f"{start}{os.path.relpath(moved, (DOCS / page).parent)}{anchor}"

    return LINK.sub(one, text)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages of the repository's root, and the figures of the benchmarks."""
    from mkdocs.structure.files import File

    for origin, page in COPIED.items():
        files.append(File.generated(config, page, content=link((ROOT / origin).read_text(), ROOT / origin, page)))
    for figure in sorted((ROOT / "benchmarks" / "results").glob("*.svg")):
        files.append(File.generated(config, f"assets/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in the generated parts, and correct the links."""
    uri = page.file.src_uri
    if uri in COPIED.values():
        return markdown
    return link(fill(markdown), DOCS / uri, uri)
