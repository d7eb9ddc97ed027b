"""The hyperparameters of the source that no weight holds: declared by the rules, or recorded in the metadata of the file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.path_pattern import Pattern, parse_pattern
from convert.planning.plan import Plan
from convert.writing.written import Written

LAYER_FACTS = (
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
class DeclaredFact:
    """A fact of the source.

    Attributes:
        name: ``activation``, ``epsilon``, ``multiplies_by``, or a fact of the whole model.
        value: for ``multiplies_by``, the factor of the target for which the weights were written.
        at: ``file:line`` of the rule or fact, or the header of the file.
        layer: pattern of the modules that it holds for; None for the whole model.
        kind: of the layer.
        allowed: values of the target that mean the same, where `value` is a text; see `convert.layers.conv.padding.TorchPadding`.
    """

    name: str
    value: Any
    at: str
    layer: Pattern | None = None
    kind: str = ""
    allowed: tuple[Any, ...] = ()

    @property
    def where(self) -> str:
        """``of LAYER (FILE:LINE)``."""
        return f"{f'of {self.layer.text} ' if self.layer else ''}({self.at})"


def declared_facts(plan: Plan) -> list[DeclaredFact]:
    """List the facts that the rules declare."""
    facts: list[DeclaredFact] = []
    for entry in plan.layers:
        for rule in itertools.chain.from_iterable(one.each_layer(plan.target) for one in plan.rules.rules):
            layer = rule.layer(plan.target)
            if layer is not None and rule.kind_name == entry["kind"] and layer.path.text == entry["layer"]:
                facts += _layer_facts(entry, layer.path, rule.at.line_only)
                break
    given = {name: f"--set {name}={value}" for name, value in plan.settings.items()}
    return facts + [
        DeclaredFact(name, value, given.get(name) or origin_in_rules(plan, name)) for name, value in plan.facts.items()
    ]


def recorded_facts(written: Written) -> list[DeclaredFact]:
    """List the facts that the metadata of the file records; empty for files of other code.

    Raises:
        CheckpointError: the metadata has another form than a conversion writes.
    """
    at = f"header of {written.path}"
    facts: list[DeclaredFact] = []
    for entry in written.stated("layers"):
        try:
            facts += _layer_facts(entry, parse_pattern(entry["layer"]), at)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                Finding(
                    "converted-metadata-invalid",
                    f"an entry of `layers` in its metadata was written by other code ({error})",
                    path=str(written.path),
                    expected="a layer and its kind",
                    got=str(entry)[:80],
                    fix="remove `layers` from the metadata, or convert again",
                )
            ) from None
    return facts + [DeclaredFact(name, value, at) for name, value in written.stated("facts").items()]


def _layer_facts(entry: Mapping[str, Any], layer: Pattern, at: str) -> Iterator[DeclaredFact]:
    for key, value in entry.items():
        name = key.removeprefix("target_")
        if name in LAYER_FACTS and value is not None:
            allowed = tuple(entry.get("allowed_padding", ())) if name == "padding" else ()
            yield DeclaredFact(name, value, at, layer, str(entry["kind"]), allowed)


def origin_in_rules(plan: Plan, name: str) -> str:
    """Return ``file:line`` of the value that the rules give to a fact of the model."""
    if name in plan.rules.layer_types:
        return plan.rules.layer_types[name].at.line_only
    node = plan.rules.node
    version = node.value["versions"].value.get(plan.version) if plan.version else None
    facts = version.value.get("facts") if version is not None else None
    if facts is None or name not in facts.value:
        facts = node.value["facts"]
    return str(facts.value[name].at.line_only)
