"""A planted fault, and what the check must say about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from faults.plants import Plant

ONE, TWO, TWO_FIVE = "timesfm-1.0", "timesfm-2.0", "timesfm-2.5"
UPSTREAM, HUGGING = "timesfm", "transformers"
BOTH = (UPSTREAM, HUGGING)
IN = ":in"

# names of the same place in the four modules, by the names of transformers' 2.5
LAYERS: Mapping[tuple[bool, str], str] = {
    (False, UPSTREAM): "stacked_transformer.layers.",
    (False, HUGGING): "decoder.layers.",
    (True, UPSTREAM): "stacked_xf.",
    (True, HUGGING): "model.layers.",
}


class Said(Protocol):
    """What the check said; see `faults.catalogue.Outcome`."""

    levels: tuple[str, ...]
    at: str
    diagnosis: str
    model: tuple[str, str] | None
    before: float | None
    after: float | None
    ruled_out: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """A fault of the catalogue.

    Attributes:
        name: what is wrong, in a few words.
        case, to: the golden and the target that it is planted for.
        plant: how.
        level: the cheapest level that catches it.
        at: what that level names: a tensor, a layer, or a boundary of the model.
        diagnosis: its name for the fault; empty: none fits, and what was ruled out is listed.
        model: place and name that the model level gives, when another level is the cheapest; None: it does not fail.
        rounding: the relative error that an undone fault may leave.
    """

    name: str
    case: str
    to: str
    plant: Plant
    level: str
    at: str
    diagnosis: str
    model: tuple[str, str] | None = None
    rounding: float = 1e-9

    @property
    def id(self) -> str:
        """For messages and test names."""
        return f"{self.name} ({self.plant.where}, {self.case}, {self.to})"

    def problems(self, said: Said) -> Iterator[str]:
        """What differs from what is expected."""
        if not said.levels:
            yield "not caught"
            return
        model = (self.at, self.diagnosis) if self.level == "model" else self.model
        pairs = (
            ("level", said.levels[0], self.level),
            ("at", said.at, self.at),
            ("diagnosis", said.diagnosis, self.diagnosis),
            ("model", said.model, model),
        )
        for word, got, want in pairs:
            if got != want:
                yield f"{word}: {got!r}, expected {want!r}"
        tried = said.before is not None  # else a declaration is wrong, and there is nothing to undo
        if said.model and said.model[1] and tried and not (said.after is not None and said.after <= self.rounding):
            yield f"the diagnosis leaves an error of {said.after}"
        if said.model and not said.model[1] and not said.ruled_out:
            yield "nothing is diagnosed, and nothing was ruled out"


def layer(case: str, to: str, i: int = 0) -> str:
    """Name of a layer in the target's module, with a dot behind it."""
    return f"{LAYERS[case == TWO_FIVE, to]}{i}."
