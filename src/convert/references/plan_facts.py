"""What a reference needs from a plan: its model, its target, and facts that no weight holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from convert.core.errors import ConvertError, UnavailableError
from convert.core.findings import Finding
from convert.layers.activations import ACTIVATIONS
from convert.layers.shared_keys import ACTIVATION_NAMES
from convert.planning.plan import Plan


class ReadFacts(dict[str, Any]):
    """The facts of a plan; `names` are those that were read so far.

    A reference that builds its JAX model from them cannot test them.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__(facts)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:  # makes dict(...) and {**...} call __getitem__
        return super().__iter__()

    def items(self) -> Any:
        self.names.update(self)
        return super().items()


def require_model(plan: Plan, models: Collection[str], targets: Collection[str] = ()) -> None:
    """Check that a reference knows the plan's model and target.

    Args:
        targets: that the reference knows; empty if it knows all.

    Raises:
        ConvertError: the plan has another model or target.
    """
    for name, known, planned in (("model", models, plan.rules.model), ("target", targets, plan.target)):
        if known and planned not in known:
            raise ConvertError(
                Finding(
                    "reference-unavailable",
                    f"the reference does not know this {name}",
                    path=plan.rules.path,
                    expected=" or ".join(known),
                    got=planned,
                    fix="name another `reference` in the rule file, or give one with --reference",
                )
            )


def require_fact(plan: Plan, name: str) -> Any:
    """Return a fact of the plan.

    Raises:
        ConvertError: neither the tree, nor config.json, nor a setting gives it.
    """
    if name not in plan.facts:
        raise ConvertError(
            Finding(
                "fact-missing",
                f"the tree does not contain {name}, which the reference needs",
                path=str(plan.source.display_path),
                fix=f"give it with --set {name}=...",
            )
        )
    return plan.facts[name]


def activation_fact(plan: Plan, name: str) -> str:
    """Return the activation that a fact names, by its name in rules.

    Raises:
        ConvertError: nothing gives the fact, or it is no activation that a reference has.
    """
    given = str(require_fact(plan, name))
    value = ACTIVATION_NAMES.get(given, given)
    if value not in ACTIVATIONS:
        raise ConvertError(
            Finding(
                "reference-unavailable",
                f"the reference has no activation of this name, which {name} gives",
                path=str(plan.source.display_path),
                expected=", ".join(ACTIVATIONS),
                got=given,
                fix="correct it, if it is wrong; otherwise give the two models with --reference",
            )
        )
    return value


def not_installed(side: str, error: ImportError, install: str) -> UnavailableError:
    """Return the error of a side whose package is missing."""
    return UnavailableError(
        Finding("reference-unavailable", f"{side} cannot be imported: {error}", fix=f"install it: {install}")
    )
