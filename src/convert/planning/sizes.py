"""Binds axis letters to sizes across all leaves that a rule file names, and finds contradictions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from convert.rules.file import Axis


@dataclass(frozen=True)
class Constraint:
    """One leaf says that a letter has a size.

    Attributes:
        letter: the axis letter, or the name of an index.
        size: what the leaf's shape makes it.
        where: ``file:line`` of the rule.
        leaf: path of the leaf, empty when it is the number of leaves that says so.
        shown: the leaf's spec with its letters, for messages.
    """

    letter: str
    size: int
    where: str
    leaf: str
    shown: str

    def __str__(self) -> str:
        return f"{self.where}: {self.leaf + ': ' if self.leaf else ''}{self.shown}"


def bind(constraints: Iterable[Constraint], axes: Mapping[str, Axis]) -> tuple[dict[str, int], list[str]]:
    """Sizes of all letters that the constraints and the products declared in `axes` determine.

    Returns:
        The sizes, and one finding for each contradiction: both leaves, both shapes.
    """
    bound: dict[str, Constraint] = {}
    findings: list[str] = []
    for new in constraints:
        old = bound.setdefault(new.letter, new)
        if old.size != new.size:
            findings.append(
                f"{new} makes {new.letter} = {new.size}{_meaning(new.letter, axes)}, but {old.leaf or old.shown} "
                f"({old.where}{', ' + old.shown if old.leaf else ''}) makes it {old.size}; {_which(old, new)}"
            )
    sizes = {letter: constraint.size for letter, constraint in bound.items()}
    findings += _solve(sizes, bound, axes)
    return sizes, findings


def _which(old: Constraint, new: Constraint) -> str:
    set_by_hand = next((c.where for c in (old, new) if c.where.startswith("--set")), None)
    return f"leave out {set_by_hand}" if set_by_hand else "one of the two shapes or equations is wrong"


def _meaning(letter: str, axes: Mapping[str, Axis]) -> str:
    return f" ({axes[letter].meaning})" if letter in axes else ""


def _root(number: int, power: int) -> int | None:
    """The integer whose `power` is the number, if there is one."""
    near = round(number ** (1 / power))
    return next((root for root in (near - 1, near, near + 1) if root > 0 and root**power == number), None)


def _solve(sizes: dict[str, int], bound: Mapping[str, Constraint], axes: Mapping[str, Axis]) -> list[str]:
    """Fills in letters that a product determines; a product that does not come out is a finding."""
    findings = []
    open_axes = {name: axis for name, axis in axes.items() if axis.equals}
    progress = True
    while progress:
        progress = False
        for name, axis in list(open_axes.items()):
            unknown = [factor for factor in axis.equals if isinstance(factor, str) and factor not in sizes]
            known = math.prod(sizes[f] if isinstance(f, str) else f for f in axis.equals if f not in unknown)
            product = "*".join(map(str, axis.equals))
            if not unknown:
                progress, _ = True, open_axes.pop(name)
                if sizes.setdefault(name, known) != known:
                    findings.append(
                        f"{axis.at.line_only}: {name} = {product} ({axis.meaning}) is {known}, but "
                        f"{bound.get(name, 'another product')} makes it {sizes[name]}"
                    )
            elif len(set(unknown)) == 1 and name in sizes:
                progress, _ = True, open_axes.pop(name)
                why = f"; {bound[name]} makes it {sizes[name]}" if name in bound else ""
                where = f"{axis.at.line_only}: {name} = {product} ({axis.meaning}): {sizes[name]}"
                if known == 0 or sizes[name] % known:
                    findings.append(f"{where} does not divide by {known}{why}")
                    continue
                root = _root(sizes[name] // known, len(unknown))
                if root is None:
                    findings.append(f"{where} is not such a product of integers{why}")
                else:
                    sizes[unknown[0]] = root
    return findings
