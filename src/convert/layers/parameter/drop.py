"""Leaves that a rule leaves out of the output, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.core.fields import FLAG, Key
from convert.layers.base import LayerKind
from convert.layers.shared_keys import (
    REASON,
)


@dataclass(frozen=True)
class Drop(LayerKind):
    """Leaves that the target does not need.

    Attributes:
        because: why, in words.
        rest: whether only leaves are dropped that no other rule matches.
    """

    because: str
    rest: bool = False

    guide: ClassVar[str] = "rules"
    kind_name: ClassVar[str] = "drop"
    doc: ClassVar[str] = "Leaves that are not converted, with the reason."
    keys: ClassVar[Mapping[str, Key]] = {
        "because": Key(
            REASON, "Reason why these leaves are not converted.", required=True, example="the training step"
        ),
        "rest": Key(
            FLAG,
            "Whether the rule drops only the leaves that no other rule matches; the plan counts them. Default: false, and a leaf that another rule matches as well is an error.",
        ),
    }
    target: ClassVar[None] = None

    from_key: ClassVar[str] = "none"

    @property
    def drop_reason(self) -> str:
        return self.because

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Drop:
        return cls(values["because"], values.get("rest", False))
