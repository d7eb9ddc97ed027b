"""The options of a check, as one value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.numerics.precision import require_device, require_precision
from convert.planning.options import OptionKeywords
from convert.verify.report.report import LEVELS


@dataclass(frozen=True)
class CheckOptions:
    """What the user chose for a check, in addition to the options of the conversion.

    Attributes:
        levels: which of `LEVELS` to run.
        require: levels of which a skip makes the check inconclusive; ``model`` also requires that its facts are verified.
        trust: facts that count although nothing confirms them.
        reference: ``module:function`` that builds the two models; None is the `reference` of the rule file.
        recorded: a recording of the JAX model's values; None runs the JAX model.
        device: where PyTorch runs: ``cpu``, ``cuda`` or ``cuda:1``.
        precision: native precision of the model; None is the recording's, or else float32.
        seed: of the random inputs; None is the recording's, or else 0.
        backends: whether to compare the backends, too.
        training: whether a difference that only training sees, such as a momentum, makes the models different.
    """

    levels: Iterable[str] = LEVELS
    require: Iterable[str] = ()
    trust: Iterable[str] = ()
    reference: str | None = None
    recorded: str | Path | None = None
    device: str = "cpu"
    precision: str | None = None
    seed: int | None = None
    backends: bool = False
    training: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        object.__setattr__(self, "require", tuple(self.require))
        object.__setattr__(self, "trust", tuple(self.trust))
        require_levels((*self.levels, *self.require))
        if self.seed is not None and self.seed < 0:
            raise ConvertError(Finding("usage", path="--seed", expected="a number of at least 0", got=str(self.seed)))
        require_device(self.device)
        if self.precision is not None:
            require_precision(self.precision)

    @property
    def runs_models(self) -> bool:
        """Whether a level that runs both models is requested."""
        return "model" in self.levels or self.backends


class CheckKeywords(OptionKeywords, total=False):
    """The fields of `ConversionOptions` and of `CheckOptions` as keyword arguments."""

    levels: Iterable[str]
    require: Iterable[str]
    trust: Iterable[str]
    reference: str | None
    recorded: str | Path | None
    device: str
    precision: str | None
    seed: int | None
    backends: bool
    training: bool


def require_levels(levels: Iterable[str]) -> None:
    """Refuse a level that does not exist.

    Raises:
        ConvertError: with the known levels.
    """
    for level in levels:
        if level not in LEVELS:
            raise ConvertError(
                Finding(
                    "usage",
                    f"there is no level {level!r}",
                    expected=f"one of {', '.join(LEVELS)}",
                    fix=did_you_mean(level, LEVELS),
                )
            )
