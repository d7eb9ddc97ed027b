"""Compare the class that the files next to the checkpoint name with the class that the target of the rules loads.

Models of several classes may have the same tree, such as T5 with a tied head and T5 without a head. Then only `architectures` in the
sidecar ``config.json`` says which of them the checkpoint is, or a word of another file (`distinguished_by`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.planning.facts.sidecar import Sidecar, bytes_beside_or_above
from convert.rules.file import DistinguishedBy, RuleFile

KEY = "architectures"


def class_conflict(rules: RuleFile, target: str, sidecar: Sidecar) -> Iterator[Finding]:
    """Report that the sidecar names another class than the one that the target loads."""
    planned, named = loaded_classes(rules, target), _classes(sidecar.config.get(KEY))
    if rules.sidecar is None or rules.modules is not None or not planned or not named or set(named) <= set(planned):
        return  # of rules with `modules`, the sidecar chooses the class
    expected, got = " or ".join(planned), " and ".join(named)
    yield Finding(
        "config-conflict",
        f"the {rules.sidecar.file} of the checkpoint names another class than the rules {rules.model}, which fit the tree",
        rule=rules.sidecar.at,
        path=KEY,
        expected=expected,
        got=got,
        fix=f"if the checkpoint is a {expected}, set {KEY} to {json.dumps(planned)} in {rules.sidecar.file}; if it is a {got}, "
        "use rules of that class (`convert rules list`, `convert rules new`)",
        data={"classes": named},
    )


def unnamed_class(rules: RuleFile, target: str, sidecar: Sidecar, source: Source) -> Iterator[str]:
    """Note that models of other classes may have this tree, where no file next to the checkpoint tells them apart."""
    same_tree = rules.targets[target].same_tree
    missing = ""
    if rules.distinguished_by is not None:
        missing = "" if _telling_file(rules.distinguished_by, source) else rules.distinguished_by.file
    elif rules.sidecar is not None and not names_class(sidecar):
        missing = f"{rules.sidecar.file} with {KEY}"
    if same_tree and missing:
        yield (
            f"the output is a {' or '.join(loaded_classes(rules, target))}; a {' or '.join(same_tree)} may have the same tree, and no "
            f"{missing} next to the checkpoint says which one it is"
        )


def of_another_model(rules: RuleFile, source: Source) -> Iterator[Finding]:
    """Report that the file of `distinguished_by` is that of another model with the same tree."""
    telling = rules.distinguished_by
    found = None if telling is None else _telling_file(telling, source)
    if telling is None or found is None:
        return
    path, text = found
    if bool(re.search(rf"(?<!\w){re.escape(telling.word)}(?!\w)", text)) != telling.has_word:
        with_word, without = f"a file with {telling.word}", f"a file without {telling.word}"
        yield Finding(
            "config-conflict",
            f"the {telling.file} of the checkpoint is that of another model with the tree of {rules.model}",
            rule=telling.at,
            path=str(path),
            expected=with_word if telling.has_word else without,
            got=without if telling.has_word else with_word,
            fix=f"name {rules.family or 'the other model'} in place of {rules.model}, or move the file elsewhere if it is of another checkpoint",
        )


def _telling_file(telling: DistinguishedBy, source: Source) -> tuple[Path, str] | None:
    found = bytes_beside_or_above(source, telling.file)
    return None if found is None else (found[0], found[1].decode(errors="replace"))


def names_class(sidecar: Sidecar) -> bool:
    """Whether the sidecar says of which class the model is."""
    return bool(_classes(sidecar.config.get(KEY)))


def loaded_classes(rules: RuleFile, target: str) -> list[str]:
    """Return the classes that load the output; none if the rules name none."""
    config: Mapping[str, Any] = rules.targets[target].config
    return _classes(config.get(KEY))


def _classes(value: Any) -> list[str]:
    """Return the names of the PyTorch classes; transformers' flax class of the same model has ``Flax`` before the name."""
    names = value if isinstance(value, list) else [value]
    return [name.removeprefix("Flax") for name in names if isinstance(name, str) and name]
