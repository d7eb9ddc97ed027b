"""Compare the class that the sidecar ``config.json`` names with the class that the target of the rules loads.

Models of several classes may have the same tree, such as T5 with a tied head and T5 without a head. Then only `architectures`
says which of them the checkpoint is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from convert.core.findings import Finding
from convert.planning.facts.sidecar import Sidecar
from convert.rules.file import RuleFile

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


def unnamed_class(rules: RuleFile, target: str, sidecar: Sidecar) -> Iterator[str]:
    """Note that models of other classes may have this tree, where no sidecar names the class."""
    same_tree = rules.targets[target].same_tree
    if rules.sidecar is not None and same_tree and not names_class(sidecar):
        yield (
            f"the output is a {' or '.join(loaded_classes(rules, target))}; a {' or '.join(same_tree)} may have the same tree, and no "
            f"{rules.sidecar.file} with {KEY} next to the checkpoint says which one it is"
        )


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
