"""Unresolved placeholders: keys of a rule whose value is ``ask``, which leave a question open.

Such a rule names its leaves, but not yet what they are. The file can be parsed and its coverage planned; nothing can be
converted until every question is answered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from convert.core.findings import Finding
from convert.core.yaml_nodes import Position, YamlNode
from convert.layers import KINDS
from convert.layers.shared_keys import ASK as ASK

# Key -> value that replaces a placeholder while the rest of the rule is parsed; None: the key is removed. Paths cannot be
# placeholders, as a rule must name its leaves.
REPLACEMENTS: Mapping[str, Any] = {
    "activation": None,
    "prescaled_by": None,
    "dimension_numbers": "NWC,WIO->NWC",
    "einsum": "...D,DE->...E",
    "epsilon": 0,
    "feature_group_count": None,
    "flattened": None,
    "group_size": 1,
    "momentum": None,
    "multiplies_by": "scale",
    "num_groups": 1,
    "padding": None,
    "rope": None,
    "weight_standardization": None,
    "strides": None,
    "transpose_kernel": None,
}
# If the target is a placeholder, this key of the kind may be missing as well: the answer decides what the layer computes.
OPTIONAL_WITHOUT_TARGET: Mapping[str, str] = {
    "linear": "einsum",
    "conv": "dimension_numbers",
    "conv_transpose": "dimension_numbers",
}
_BY_AXES = {2: "NWC,WO->NWC", 3: "NWC,WIO->NWC", 4: "NHWC,HWIO->NHWC", 5: "NDHWC,DHWIO->NDHWC"}
_ARGUMENT = re.compile(rf"\(\w+={ASK}\)$")  # of a cell: ``flax.linen.SimpleCell(residual=ask)``


@dataclass(frozen=True)
class Question:
    """An open question of a rule.

    Attributes:
        at: position of the ``ask``.
        key: key whose value it is.
        path: path of the rule.
        others: number of other rules that have the value as an alias (``*epsilon``).
    """

    at: Position
    key: str
    path: str
    others: int = 0

    def __str__(self) -> str:
        return str(self.finding)

    @property
    def finding(self) -> Finding:
        """The question as a problem of the plan."""
        others = f" (and of {self.others} rule{'s' if self.others > 1 else ''} more)" if self.others else ""
        of_target = self.key in KINDS
        answer = "the module or tensor of the target that is made of it" if of_target else "what the source does"
        return Finding(
            "rule-unfinished",
            f"`{self.key}` of {self.path}{others} is open",
            rule=str(self.at),
            fix=f"write {answer} in place of `{ASK}`",
        )


def questions(rules: Iterable[tuple[Position, str, Mapping[str, Position]]]) -> tuple[Question, ...]:
    """Return the questions of rules, in file order. A question that aliases repeat is returned once.

    Args:
        rules: the position of each, its path, and its open keys with their positions.
    """
    found: dict[Position, tuple[Question, set[Position]]] = {}
    for rule, path, asked in rules:
        for key, at in asked.items():
            found.setdefault(at, (Question(at, key, path), set()))[1].add(rule)
    return tuple(replace(question, others=len(places) - 1) for question, places in found.values())


def replace_placeholders(node: YamlNode, word: str) -> tuple[YamlNode, dict[str, Position]]:
    """Replace the placeholders of a rule; return the rule and the positions of the placeholders by key.

    Args:
        node: the rule, a mapping.
        word: the key of its kind, whose value is the target; a placeholder there is replaced by the path of the leaf.
    """
    assert node.keys_at is not None
    asked = {
        key: child.at
        for key, child in node.items()
        if child.value == ASK and (key in REPLACEMENTS or key == word != "drop")
    }
    cell = node.value.get("cell")
    if cell is not None and isinstance(cell.value, str) and _ARGUMENT.search(cell.value):
        asked["cell"] = cell.at
        node = replace(node, value={**node.value, "cell": replace(cell, value=_ARGUMENT.sub("", cell.value))})
    plus = node.value.get("plus")
    scale = plus.value.get("scale") if plus is not None and plus.is_mapping else None
    if plus is not None and scale is not None and scale.value == ASK:
        assert plus.keys_at is not None
        asked["scale"] = scale.at
        kept = {key: child for key, child in plus.items() if key != "scale"}
        plus = YamlNode(kept, plus.at, {key: plus.keys_at[key] for key in kept})
        node = replace(node, value={**node.value, "plus": plus})
    assert node.keys_at is not None
    start = node.value.get("from")
    if not asked:
        return node, {}
    called = start.value if start is not None else ASK  # a buffer has no leaf
    values = {key: called if key == word else REPLACEMENTS.get(key) for key in asked if key not in ("cell", "scale")}
    kept = {
        key: YamlNode(values[key], child.at) if key in values else child
        for key, child in node.items()
        if key not in values or values[key] is not None
    }
    keys_at = {key: node.keys_at[key] for key in kept}
    left = OPTIONAL_WITHOUT_TARGET.get(word, "") if word in asked else ""
    if left and left not in kept:
        axes = kept["axes"].value if "axes" in kept else ""
        numbers = _BY_AXES.get(len(axes) if isinstance(axes, str) else 0, REPLACEMENTS["dimension_numbers"])
        kept[left] = YamlNode(REPLACEMENTS[left] if left == "einsum" else numbers, asked[word])
        keys_at[left] = asked[word]
    return YamlNode(kept, node.at, keys_at), asked
