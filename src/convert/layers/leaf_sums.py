"""Leaves that the source adds up, and the target has as one: ``bias: conv_x/bias + conv_g/bias``; also a leaf and a number: ``forget/bias + 1``;
and two leaves that are the parts of complex numbers: ``filter/real + 1j * filter/imag``.

Each leaf of a sum has a role of its own until the plan adds them up, so that it is matched as any other leaf of its layer. So has each
of several leaves that stand one after the other along an axis: ``from: [x/kernel, h/kernel]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convert.core.fields import Scalar
from convert.core.path_pattern import Pattern, parse_pattern

PLUS = " + "  # between two paths; a path that has it itself escapes it, as in `a \+ b`
NEXT = " , "  # in the role of a leaf that stands behind another one
TIMES_J = "1j * "  # in front of a path whose leaf has the imaginary parts
IMAGINARY = f"{PLUS}1j"  # in the role of such a leaf
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
_MINUS = re.compile(rf" - (?={_NUMBER}(?: [+-] |$))")


@dataclass(frozen=True)
class LeafSum:
    """What a rule names by a path, or by several.

    Attributes:
        paths: of the leaves that the source adds up; one is a leaf alone.
        number: that the source adds to them.
        imaginary: whether there are two paths, and the second is that of the imaginary parts.
    """

    paths: tuple[Pattern, ...]
    number: float = 0.0
    imaginary: bool = False


def parse_sum(text: str) -> LeafSum:
    """Parse a path, or several paths and a number that are added up.

    >>> [str(path) for path in parse_sum("x_{i}/bias + h_{i}/bias").paths]
    ['x_{i}/bias', 'h_{i}/bias']
    >>> parse_sum("forget/bias + 1").number, parse_sum("scale - 0.5").number
    (1.0, -0.5)
    >>> [str(path) for path in parse_sum("filter/real + 1j * filter/imag").paths]
    ['filter/real', 'filter/imag']

    Raises:
        ValueError: not a path, a path twice, several numbers, or more than the two parts of complex numbers.
    """
    terms = [one.strip() for one in _MINUS.sub(f"{PLUS}-", text).split(PLUS)]
    imaginary = any(one.startswith(TIMES_J) for one in terms)
    if imaginary:
        terms = _parts(terms, text)
    numbers = [one for one in terms if is_number(one)] if len(terms) > 1 else []
    if len(numbers) == len(terms) or len(numbers) > 1 or any(float(one) == 0 for one in numbers):
        raise ValueError(
            f"{text!r} adds {' and '.join(numbers)}; a sum has one number other than 0, and a path; write \\{numbers[0]} for a leaf with such a name"
        )
    paths = tuple(parse_pattern(one) for one in terms if one not in numbers)
    if len({path.text for path in paths}) < len(paths):
        raise ValueError(
            f"{text!r} adds a leaf to itself; name each leaf once, as a rule has no words for its multiples"
        )
    return LeafSum(paths, sum(map(float, numbers)), imaginary)


def _parts(terms: Sequence[str], text: str) -> list[str]:
    """Return the path of the real parts, and that of the imaginary ones.

    Raises:
        ValueError: it has other terms.
    """
    if len(terms) != 2 or terms[0].startswith(TIMES_J) or is_number(terms[0]):
        raise ValueError(
            f"{text!r} is not one leaf with the real parts and one with the imaginary ones; write REAL + {TIMES_J}IMAGINARY"
        )
    return [terms[0], terms[1].removeprefix(TIMES_J).strip()]


def is_number(term: str) -> bool:
    """Whether a term of a sum is a number, and no path."""
    return re.fullmatch(f"-?{_NUMBER}", term) is not None


SUM = Scalar(str, "a tree path such as layers_{i}/bias, or a sum such as x/bias + h/bias or forget/bias + 1", parse_sum)


def by_role(role: str, paths: Sequence[Pattern], sign: str = PLUS) -> Mapping[str, Pattern]:
    """Return the roles of the leaves that are added up, or joined, to the leaf of a role: the first has the role itself."""
    later = sign if sign == IMAGINARY else f"{sign}{{}}"
    return {role + later.format(k) if k else role: path for k, path in enumerate(paths)}


def complex_name(real: str, imaginary: str) -> str:
    """Return how a rule names the complex numbers of two leaves."""
    return f"{real}{PLUS}{TIMES_J}{imaginary}"


def what_is_lost(sign: str) -> tuple[str, str]:
    """Return what a tensor is that several leaves make, and why the way back does not read them from it."""
    if sign == IMAGINARY:
        return "complex numbers, whose parts are two leaves", "the way back does not take them apart"
    joined = sign == NEXT
    what = "the values of several leaves, one after the other" if joined else "a sum or product of several leaves"
    return what, "it does not tell them apart"


def role_of_sum(role: str) -> str:
    """Return the role of the sum that the leaf with this role is a term of, or of the leaf that it is joined to; of other leaves their own."""
    return role.partition(PLUS)[0].partition(NEXT)[0]


def place_of(role: str) -> int:
    """Return the place of a leaf among those that are added up or joined."""
    return int(role.removeprefix(role_of_sum(role)).strip(f"{PLUS}{NEXT}").removesuffix("j") or 0)


def sign_of(roles: Sequence[str]) -> str:
    """Return what stands between the leaves of a sum, or between those that are joined."""
    return next((sign for sign in (NEXT, IMAGINARY) if any(sign in role for role in roles)), PLUS)


def sums_of(roles: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return the role of each sum with those of its terms, in their order; and of each leaf that several are joined to."""
    found: dict[str, list[str]] = {}
    for role in roles:
        found.setdefault(role_of_sum(role), []).append(role)
    return {role: terms for role, terms in found.items() if len(terms) > 1}
