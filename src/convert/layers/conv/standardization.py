"""Weight standardisation: the kernel that a convolution computes with has mean 0 and deviation 1 over what each filter sums."""

from __future__ import annotations

import re
from dataclasses import dataclass

from convert.core.fields import Key, Scalar

_NUMBER = r"(?P<epsilon>[0-9.]+(?:e-?[0-9]+)?)"
_FORMS = (  # the epsilon outside and inside of the root
    (re.compile(rf"\(w-mean\)/\(std\+{_NUMBER}\)"), False),
    (re.compile(rf"\(w-mean\)/sqrt\(var\+{_NUMBER}\)"), True),
)
FORMS = ("(w - mean) / (std + 1e-5)", "(w - mean) / sqrt(var + 1e-5)")


@dataclass(frozen=True)
class Standardized:
    """The equation of the source.

    Attributes:
        text: as written.
        epsilon: what it adds.
        inside: whether to the variance, inside of the root.
    """

    text: str
    epsilon: float
    inside: bool


def parse_standardized(text: str) -> Standardized:
    """Parse one of `FORMS`, with any epsilon.

    Raises:
        ValueError: something else.
    """
    bare = re.sub(r"\s", "", text)
    for pattern, inside in _FORMS:
        if (found := pattern.fullmatch(bare)) is not None:
            try:
                return Standardized(text.strip(), float(found["epsilon"]), inside)
            except ValueError:
                break
    raise ValueError(f"{text!r} is not a known standardization: {FORMS[0]} (big_vision), or {FORMS[1]}")


STANDARDIZED = Key(
    Scalar(str, f"an equation such as {FORMS[0]}", parse_standardized),
    f"Equation by which the source standardizes the kernel over the spatial axes and I: {FORMS[0]} or {FORMS[1]}. "
    "The standardized kernel is written, computed in float32 or wider. Default: no standardization.",
)
