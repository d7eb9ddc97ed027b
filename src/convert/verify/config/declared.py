"""What the source's side computes and no weight tells, as the rules declare it or the header of the written file records it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from convert.core.errors import CheckpointError
from convert.core.path_pattern import Pattern, parse_pattern
from convert.core.yaml_nodes import Node
from convert.planning.plan import Plan
from convert.verify.written import Written

OF_A_LAYER = (
    "activation",
    "epsilon",
    "multiplies_by",
    "momentum",
    "num_groups",
    "strides",
    "dilation",
    "padding",
    "output_padding",
)


@dataclass(frozen=True)
class Stated:
    """A fact as the source's side states it.

    Attributes:
        name: ``activation``, ``epsilon``, ``multiplies_by``, or a fact of the whole model.
        value: for ``multiplies_by`` the target's factor that the weights were written for.
        at: ``file:line`` of the rule or fact, or the header of the written file.
        layer: pattern of the target's modules that it holds for; None: the whole model.
        kind: of the layer.
        allowed: values of the target's that are the same, where `value` is words; see `convert.layers.conv.padding.TorchPadding`.
    """

    name: str
    value: Any
    at: str
    layer: Pattern | None = None
    kind: str = ""
    allowed: tuple[Any, ...] = ()

    @property
    def where(self) -> str:
        """``of LAYER (FILE:LINE)``, for messages."""
        return f"{f'of {self.layer.text} ' if self.layer else ''}({self.at})"


def declared(plan: Plan) -> list[Stated]:
    """What the rules say."""
    said: list[Stated] = []
    for entry in plan.layers:
        for rule in plan.rules.rules:
            layer = rule.layer(plan.target)
            if layer is not None and rule.word == entry["kind"] and layer.path.text == entry["layer"]:
                said += _of_layer(entry, layer.path, rule.at.line_only)
                break
    node = plan.rules.node
    return said + [Stated(name, value, _place(plan, node, name)) for name, value in plan.facts.items()]


def declared_in_header(written: Written) -> list[Stated]:
    """The same, as the written file's header has recorded it; empty when it was written by other code.

    Raises:
        CheckpointError: the header says it in a way that no conversion does.
    """
    at = f"header of {written.path}"
    said: list[Stated] = []
    for entry in written.stated("layers"):
        try:
            said += _of_layer(entry, parse_pattern(entry["layer"]), at)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{written.path}: `layers` in its header has {str(entry)[:80]!r}, which names no layer and its kind ({error}); write "
                "the file again"
            ) from None
    return said + [Stated(name, value, at) for name, value in written.stated("facts").items()]


def _of_layer(entry: Mapping[str, Any], layer: Pattern, at: str) -> Iterator[Stated]:
    for key, value in entry.items():
        name = key.removeprefix("target_")
        if name in OF_A_LAYER and value is not None:
            allowed = tuple(entry.get("allowed_padding", ())) if name == "padding" else ()
            yield Stated(name, value, at, layer, str(entry["kind"]), allowed)


def _place(plan: Plan, node: Node, name: str) -> str:
    """Where a fact of the model got its value."""
    if name in plan.settings:
        return f"--set {name}={plan.settings[name]}"
    if name in plan.rules.layer_types:
        return plan.rules.layer_types[name].at.line_only
    version = node.value["versions"].value.get(plan.version) if plan.version else None
    facts = version.value.get("facts") if version is not None else None
    if facts is None or name not in facts.value:
        facts = node.value["facts"]
    return str(facts.value[name].at.line_only)
