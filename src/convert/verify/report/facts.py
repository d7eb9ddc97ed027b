"""The facts of a conversion that no weight holds, and what each was compared with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

OUTPUTS_AGREE = "the PyTorch module does not say it; the outputs are equal, so that there is nothing to do"
BY_OUTPUTS = "compared by the outputs alone"
LONGEST = 60  # letters of a value
MOST = 4  # layers with the same fact


class Status(StrEnum):
    """What is known of a fact. `TRUSTED`: nothing confirms it, and ``--trust`` names it."""

    VERIFIED = "verified"
    UNVERIFIED = "not verified"
    CONTRADICTED = "contradicted"
    TRUSTED = "trusted"


@dataclass(frozen=True)
class JudgedFact:
    """A fact, and whether something that does not come from the rules confirms it.

    Attributes:
        name: as in the rules, or the axis letter or choice that ``--set`` gives.
        value: with which the models compute.
        origin: where the value comes from: ``rules/gemma.yaml:82``, ``--set``, the header, a recording, config.json.
        status: the outcome.
        evidence: what confirms it, or the value that is known otherwise; empty when there is nothing.
        decides: whether the output or the JAX model depends on it. Otherwise it only describes the source.
        layers: the layers that it holds for; empty for the whole model.
        next: how to get it confirmed, where a look at the training configuration does not help.
    """

    name: str
    value: Any
    origin: str
    status: Status
    evidence: str = ""
    decides: bool = True
    layers: str = ""
    next: str = ""

    @property
    def open(self) -> bool:
        """Whether a comparison of the two models is no proof because of this fact."""
        return self.decides and self.status in (Status.UNVERIFIED, Status.CONTRADICTED)

    @property
    def shown(self) -> str:
        """``NAME = VALUE``, with the layers."""
        return f"{self.name} = {shown(self.value)}{f' of {self.layers}' if self.layers else ''}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "from": self.origin,
            "status": str(self.status),
            "evidence": self.evidence,
            "decides": self.decides,
            "layers": self.layers,
            "next": self.next,
        }


def shown(value: Any) -> str:
    """Return a value as text; a long one is cut between two words."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rpartition(' ')[0] or text[:LONGEST]} ..."


def listed(facts: Iterable[JudgedFact]) -> tuple[tuple[str, str], ...]:
    """Give the facts that a reader must know of: ``not verified``, then ``trusted``; and in one line those that the equal outputs settle.

    Each names the fact, its value and where this comes from.
    """
    groups: dict[Status, list[str]] = {}
    settled: dict[str, list[str]] = {}
    for fact in facts:
        if fact.status is Status.UNVERIFIED and fact.next == OUTPUTS_AGREE:
            settled.setdefault(fact.name, []).append(fact.layers)
            continue
        more = f"; known: {fact.evidence}" if fact.status is not Status.VERIFIED and fact.evidence else ""
        more += f"; {fact.next}" if fact.status is Status.UNVERIFIED and fact.next else ""
        groups.setdefault(fact.status, []).append(f"{fact.shown} ({fact.origin}{more})")
    known = [(str(status), text) for status in (Status.UNVERIFIED, Status.TRUSTED) for text in groups.get(status, ())]
    if settled:
        named = "; ".join(f"{name} of {_several(layers)}" for name, layers in settled.items())
        known.append((BY_OUTPUTS, f"{named} ({OUTPUTS_AGREE})"))
    return tuple(known)


def _several(layers: list[str]) -> str:
    more = f" and {len(layers) - MOST} more" if len(layers) > MOST else ""
    return f"{', '.join(layers[:MOST])}{more}"
