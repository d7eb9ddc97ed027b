"""Leaves that the source adds up, and the target has as one: ``bias: conv_x/bias + conv_g/bias``.

Each leaf of a sum has a role of its own until the plan adds them up, so that it is matched as any other leaf of its layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from convert.core.fields import Scalar
from convert.core.path_pattern import Pattern, parse_pattern

PLUS = " + "  # between two paths; a path that has it itself escapes it, as in `a \+ b`


def parse_sum(text: str) -> tuple[Pattern, ...]:
    """Parse a path, or several that are added up.

    >>> [str(path) for path in parse_sum("x_{i}/bias + h_{i}/bias")]
    ['x_{i}/bias', 'h_{i}/bias']

    Raises:
        ValueError: not a path, or one twice.
    """
    paths = tuple(parse_pattern(one.strip()) for one in text.split(PLUS))
    if len({path.text for path in paths}) < len(paths):
        raise ValueError(
            f"{text!r} adds a leaf to itself; name each leaf once, as a rule has no words for its multiples"
        )
    return paths


SUM = Scalar(str, "a tree path such as layers_{i}/bias, or a sum of them such as x/bias + h/bias", parse_sum)


def by_role(role: str, paths: Sequence[Pattern]) -> Mapping[str, Pattern]:
    """Return the roles of the leaves that are added up to the leaf of a role: the first has the role itself."""
    return {f"{role}{PLUS}{k}" if k else role: path for k, path in enumerate(paths)}


def role_of_sum(role: str) -> str:
    """Return the role of the sum that the leaf with this role is a term of; of other leaves their own."""
    return role.partition(PLUS)[0]


def sums_of(roles: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return the role of each sum with those of its terms, in their order."""
    found: dict[str, list[str]] = {}
    for role in roles:
        found.setdefault(role_of_sum(role), []).append(role)
    return {role: terms for role, terms in found.items() if len(terms) > 1}
