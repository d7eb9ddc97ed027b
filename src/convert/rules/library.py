"""Find rule files by name: shipped ones, those of a directory that the user gives, or a single file."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from convert.core.errors import RuleError
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.core.text import shortened
from convert.core.yaml_nodes import read_text
from convert.rules.file import RuleFile
from convert.rules.parse import parse_models, single_model

TYPE = "model_type"  # key of transformers' config.json


def load_rules(path: str | Path) -> RuleFile:
    """Read and check a rule file of one model.

    Raises:
        RuleError: the file cannot be read, is not valid, or declares several models.
    """
    return single_model(load_models(path), str(path))


def load_models(path: str | Path) -> tuple[RuleFile, ...]:
    """Read and check the rules of every model that a file declares.

    Raises:
        RuleError: the file cannot be read or is not valid.
    """
    path = Path(path)
    return _parsed(read_text(path, _display(path)), _display(path))


@lru_cache(maxsize=64)
def _parsed(text: str, name: str) -> tuple[RuleFile, ...]:
    return parse_models(text, name)


def _display(path: Path) -> str:
    """Return the name of a file for messages: ``rules/NAME`` for a shipped file, and else its path as given."""
    return f"rules/{path.name}" if path.parent == shipped_rules_dir() else str(path)


def is_shipped(name: str) -> bool:
    """Whether a file is a shipped one, by its name in messages."""
    folder, _, file = name.rpartition("/")
    return folder == "rules" and (shipped_rules_dir() / file).is_file()


def shipped_rules_dir() -> Path:
    """Return the folder of the shipped rules: inside the installed package, or ``rules/`` of a source checkout."""
    here = Path(__file__).resolve()
    installed = here.parents[1] / "_rules"
    return installed if installed.is_dir() else here.parents[3] / "rules"


def available_rules(extra: Path | None = None) -> tuple[RuleFile, ...]:
    """Return all rule files: those of the directory `extra`, then the shipped ones without a file of that name in `extra`.

    Raises:
        RuleError: `extra` is not a directory, or a file in it is not valid.
    """
    return _available(extra, "")


def _available(extra: Path | None, word: str) -> tuple[RuleFile, ...]:
    """Parse only the files that contain `word`: parsing all of them takes longer than converting a small checkpoint.

    In shipped files it must occur as a whole word; a user's file may replace a shipped model whose name only contains it.
    """
    whole_word = re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])" if word else "")
    if extra is not None and not extra.is_dir():
        raise RuleError(
            Finding(
                "rules-not-found",
                rule=str(extra),
                expected="a directory of rule files after --rules",
                got="no directory",
                fix="give a single file in place of MODEL",
            )
        )
    found: dict[str, RuleFile] = {}
    for directory in (extra, shipped_rules_dir()):
        for path in sorted(directory.glob("*.yaml")) if directory else ():
            text = read_text(path, _display(path))
            if word in text and (directory == extra or whole_word.search(text)):
                for rules in _parsed(text, _display(path)):
                    found.setdefault(rules.model, rules)
    return tuple(found.values())


def find_rules(model: str, extra: Path | None = None) -> tuple[RuleFile, ...]:
    """Return the rules that MODEL names: a file by its path, a model by its name, or all models of a family.

    Raises:
        RuleError: nothing has this name, or the file is not valid.
    """
    return load_models(model) if is_path(model) else named_rules(model, extra)


def _for_type(rules: RuleFile, model: str) -> RuleFile | None:
    """Return rules of several types of models for one of them; None if they do not support it."""
    types = rules.sidecar.supported.get(TYPE, ()) if rules.sidecar is not None and rules.modules is not None else ()
    if rules.sidecar is None or model not in types:
        return None
    own = tuple(one for one in types if one == model or str(one).startswith(f"{model}_"))  # clip: clip_text_model, too
    return replace(rules, sidecar=replace(rules.sidecar, supported={**rules.sidecar.supported, TYPE: own}))


def rules_of_type(model: str, extra: Path | None = None) -> tuple[RuleFile, ...]:
    """Return the rules of several types of models, for the type MODEL: they know more classes than the rules of that name."""
    known = () if is_path(model) else _available(extra, model)
    return tuple(one for rules in known if (one := _for_type(rules, model)) is not None)


def _is_file(name: str) -> bool:
    """Whether there is such a file; a name that no file can have, as one that is too long, is none."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def is_path(model: str) -> bool:
    """Whether MODEL is the path of a rule file, and not a name."""
    return model.endswith((".yaml", ".yml")) or "/" in model


def named_rules(model: str, extra: Path | None = None) -> tuple[RuleFile, ...]:
    """Return the rules of a model or family: shipped ones, or those of the directory `extra`. Never open a path.

    The header of a converted file may name rules in this way only: whoever made the file must not choose its judge.

    Raises:
        RuleError: nothing has this name.
    """
    known = _available(extra, model)
    named = tuple(rules for rules in known if rules.model == model) or tuple(r for r in known if model in r.families)
    if named:
        return named
    if named := rules_of_type(model, extra):
        return named
    if _is_file(model):
        problem = "it is a file, but a rule file is named by a path with / or ending in .yaml"
        raise RuleError(Finding("rules-not-found", problem, rule=model, fix=f"write ./{model}"))
    known = available_rules(extra)
    names = sorted({rules.model for rules in known}.union(*(rules.families for rules in known)))
    near = did_you_mean(shortened(model), names)
    own = "give your own file by its path, such as ./my-model.yaml"
    raise RuleError(
        Finding(
            "rules-not-found",
            f"no rules are named {shortened(model)!r}",
            expected="" if near else f"one of {', '.join(names)}",
            fix=" Or ".join(filter(None, (near, own))),
        )
    )
