"""The rule files that there are: shipped ones, a directory of the user's, a single file; found by name."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from convert.core.errors import RuleError
from convert.core.fields import nearest
from convert.core.yaml_nodes import read_text
from convert.rules.file import RuleFile
from convert.rules.parse import parse_models, single_model


def load_rules(path: str | Path) -> RuleFile:
    """Reads and checks a rule file of one model.

    Raises:
        RuleError: unreadable, not valid (the message has line and column), or of several models.
    """
    return single_model(load_models(path), str(path))


def load_models(path: str | Path) -> tuple[RuleFile, ...]:
    """Reads and checks the rules of every model that a file declares.

    Raises:
        RuleError: unreadable or not valid; the message has line and column.
    """
    path = Path(path)
    return _parsed(read_text(path, _display(path)), _display(path))


@lru_cache(maxsize=64)
def _parsed(text: str, called: str) -> tuple[RuleFile, ...]:
    return parse_models(text, called)


def _display(path: Path) -> str:
    """A shipped file is called ``rules/NAME``, wherever it is installed; others as the user called them."""
    return f"rules/{path.name}" if path.parent == shipped_rules_dir() else str(path)


def shipped_rules_dir() -> Path:
    """Where the shipped rules lie: inside the installed package, or ``rules/`` of a source checkout."""
    here = Path(__file__).resolve()
    installed = here.parents[1] / "_rules"
    return installed if installed.is_dir() else here.parents[3] / "rules"


def available_rules(extra: Path | None = None) -> tuple[RuleFile, ...]:
    """All rule files: those of the directory `extra` first, then the shipped ones that it does not replace by name.

    Raises:
        RuleError: `extra` is no directory, or a file in it is not valid.
    """
    return _available(extra, "")


def _available(extra: Path | None, word: str) -> tuple[RuleFile, ...]:
    """Of the files in which `word` stands, in shipped ones alone; to parse them all takes longer than to convert a small
    checkpoint. A file of the user's may replace a shipped model whose name `word` is only a part of."""
    alone = re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])" if word else "")
    if extra is not None and not extra.is_dir():
        raise RuleError(f"{extra}: --rules takes a directory of rule files; a single file is given in place of MODEL")
    found: dict[str, RuleFile] = {}
    for directory in (extra, shipped_rules_dir()):
        for path in sorted(directory.glob("*.yaml")) if directory else ():
            text = read_text(path, _display(path))
            if word in text and (directory == extra or alone.search(text)):
                for rules in _parsed(text, _display(path)):
                    found.setdefault(rules.model, rules)
    return tuple(found.values())


def find_rules(model: str, extra: Path | None = None) -> tuple[RuleFile, ...]:
    """The rule files that MODEL means: a file by its path, one by its name, or all of a family.

    Raises:
        RuleError: there are none by this name, or the file is not valid.
    """
    if model.endswith((".yaml", ".yml")) or "/" in model:
        return load_models(model)
    known = _available(extra, model)
    named = tuple(rules for rules in known if rules.model == model) or tuple(r for r in known if r.family == model)
    if named:
        return named
    known = available_rules(extra)
    names = sorted({rules.model for rules in known} | {rules.family for rules in known if rules.family})
    raise RuleError(
        f"there are no rules called {model!r}{nearest(model, names)} (known: {', '.join(names)}; "
        "a file of your own is given by its path, such as ./my-model.yaml)"
    )
