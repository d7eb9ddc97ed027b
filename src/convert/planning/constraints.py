"""Bind axis letters to sizes across all leaves that a rule file matches, and find contradictions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from convert.core.findings import Finding
from convert.rules.file import Axis


@dataclass(frozen=True)
class Constraint:
    """One statement about the size of a letter.

    Attributes:
        letter: the axis letter, or the name of an index; with a number, such as H[3], the letter in this layer.
        size: the size.
        rule: ``file:line`` of the rule; empty for a setting.
        leaf: path of the leaf whose shape gives the size; empty when the number of leaves gives it.
        shown: the leaf's spec with its letters, or another description of the evidence.
        setting: ``--set D=7`` when the user gave the size.
    """

    letter: str
    size: int
    rule: str
    leaf: str
    shown: str
    setting: str = ""

    @property
    def place(self) -> str:
        """The rule or the setting."""
        return self.setting or self.rule

    def __str__(self) -> str:
        return f"{self.place}: {self.leaf + ': ' if self.leaf else ''}{self.shown}"


@dataclass(frozen=True)
class SumConstraint:
    """One statement about the sizes of the letters that an axis is made of.

    Attributes:
        terms: the letters whose sizes multiply to one part of the axis.
        size: of the axis: the sum of its parts.
        rule, leaf, shown: as for `Constraint`.
    """

    terms: tuple[str, ...]
    size: int
    rule: str
    leaf: str
    shown: str


Statement = Constraint | SumConstraint


def of_layers_before(statements: Iterable[Statement], axes: Mapping[str, Axis]) -> Iterator[Constraint]:
    """Yield what the sizes of axes that are `behind` others, such as the rows of a layer, say of those in front of them."""
    for one in statements:
        if isinstance(one, SumConstraint) or "[" not in one.letter:
            continue
        letter, _, layer = one.letter.removesuffix("]").partition("[")
        if front := axes[letter].in_front(int(layer)):
            yield replace(one, letter=front)


def bind(constraints: Iterable[Statement], axes: Mapping[str, Axis]) -> tuple[dict[str, int], list[Finding]]:
    """Return the sizes of all letters that the constraints and the products in `axes` determine, and contradictions.

    Of contradicting sizes, that of a setting holds, or else the one that the most rules state, so that one wrong rule does not
    put the blame on all others.
    """
    bound: dict[str, Constraint] = {}
    disputed: dict[str, list[Constraint]] = {}
    sums: dict[tuple[tuple[str, ...], int], SumConstraint] = {}
    known: list[Constraint] = []
    for one in constraints:
        if isinstance(one, SumConstraint):
            sums.setdefault((one.terms, one.size), one)
        else:
            known.append(one)
    for new in known:
        if bound.setdefault(new.letter, new).size != new.size:
            disputed[new.letter] = []
    for new in known if disputed else ():
        if new.letter in disputed:
            disputed[new.letter].append(new)
    bound |= {letter: _stated_most(stated) for letter, stated in disputed.items()}
    findings = [
        _conflict(bound[new.letter], new, axes)
        for new in known
        if new.letter in disputed and new.size != bound[new.letter].size
    ]
    sizes = {letter: constraint.size for letter, constraint in bound.items()}
    unsolved = list(sums.values())
    same = {letter: other for letter, axis in axes.items() if len(axis.equals) == 1 and isinstance(other := axis.equals[0], str)}  # fmt: skip
    while True:
        more = _solve_products(sizes, bound, axes)
        before = len(sizes)
        unsolved = [one for one in unsolved if not _solve_sum(sizes, one, same, findings)]
        if len(sizes) == before:
            return sizes, [*findings, *more, *_no_multiples(sizes, bound, axes)]


def _solve_sum(sizes: dict[str, int], one: SumConstraint, same: Mapping[str, str], findings: list[Finding]) -> bool:
    """Add the only unknown letter of a sum to `sizes`; return whether nothing is unknown any more.

    Args:
        same: letter -> the letter that has its size: both sides of a square are one unknown.
    """
    unknowns = [[same.get(letter, letter) for letter in term if letter not in sizes] for term in one.terms]
    unknown = list(dict.fromkeys(letter for term in unknowns for letter in term))
    powers = {len(term) for term in unknowns if term}
    if len(unknown) > 1 or len(powers) > 1:
        return False
    known = [math.prod(sizes[letter] for letter in term if letter in sizes) for term in one.terms]
    fixed = sum(size for term, size in zip(unknowns, known, strict=True) if not term)
    each = sum(known) - fixed  # so many elements for each element of the unknown axis
    left = one.size - fixed
    power = max(powers, default=1)
    root = _integer_root(left // each, power) if unknown and each and left > 0 and left % each == 0 else None
    if root is not None:
        sizes[unknown[0]] = root
    elif unknown or left:
        given = ", ".join(f"{x}={sizes[x]}" for x in dict.fromkeys("".join(one.terms)) if x in sizes)
        misfit = (
            f"which is no multiple of {each}"
            if power == 1
            else f"which is not {each} times an integer to the power {power}"
        )
        letters = "*".join(unknown * power)
        whole = f"{left} elements are left for {letters}, {misfit}" if unknown else f"its parts have {fixed} together"
        if unknown and left < 1:
            whole = f"its other parts have {fixed}, and none are left for {letters}"
        findings.append(
            Finding(
                "size-conflict",
                f"the axis has {one.size} elements; {f'with {given}, ' if given else ''}{whole}",
                rule=one.rule,
                path=one.leaf,
                expected=one.shown,
                fix="correct the equation, or the sizes in `axes` and --set",
            )
        )
    return True


def _stated_most(stated: list[Constraint]) -> Constraint:
    """Return the first constraint with the size that a setting or the most rules state; the first of equally many."""
    places: dict[int, set[str]] = {}
    for constraint in stated:
        places.setdefault(constraint.size, set()).add(constraint.place)
    return max(stated, key=lambda constraint: (bool(constraint.setting), len(places[constraint.size])))


def _conflict(old: Constraint, new: Constraint, axes: Mapping[str, Axis]) -> Finding:
    letter = new.letter.partition("[")[0]
    meaning = f" ({axes[letter].meaning})" if letter in axes else ""
    setting = old.setting or new.setting
    return Finding(
        "size-conflict",
        f"{new.shown} makes {new.letter} = {new.size}{meaning}, but {old.leaf or old.shown} "
        f"({old.place}{', ' + old.shown if old.leaf else ''}) makes it {old.size}",
        rule=new.rule,
        path=new.leaf or new.setting,
        fix=f"leave out {setting}"
        if setting
        else "correct one of the two equations, unless one of the shapes is wrong",
        data={"letter": new.letter, "sizes": [old.size, new.size]},
    )


def _solve_products(sizes: dict[str, int], bound: Mapping[str, Constraint], axes: Mapping[str, Axis]) -> list[Finding]:
    """Add the letters that a product determines to `sizes`, and report products that do not hold."""
    findings = []
    unsolved = {name: axis for name, axis in axes.items() if axis.equals}
    progress = True
    while progress:
        progress = False
        for name, axis in list(unsolved.items()):
            unknown = [factor for factor in axis.equals if isinstance(factor, str) and factor not in sizes]
            known = math.prod(sizes[f] if isinstance(f, str) else f for f in axis.equals if f not in unknown)
            if not unknown:
                progress, _ = True, unsolved.pop(name)
                if sizes.setdefault(name, known) != known:
                    findings.append(_unequal_product(name, axis, known, sizes, bound))
            elif len(set(unknown)) == 1 and name in sizes:
                progress, _ = True, unsolved.pop(name)
                reason = f" ({bound[name]} makes it {sizes[name]})" if name in bound else ""
                if known == 0 or sizes[name] % known:
                    findings.append(_broken_product(name, axis, f"{sizes[name]} is not divisible by {known}{reason}"))
                    continue
                root = _integer_root(sizes[name] // known, len(unknown))
                if root is None:
                    findings.append(
                        _broken_product(name, axis, f"{sizes[name]} is not such a product of integers{reason}")
                    )
                else:
                    sizes[unknown[0]] = root
    return findings


def _unequal_product(
    name: str, axis: Axis, product: int, sizes: Mapping[str, int], bound: Mapping[str, Constraint]
) -> Finding:
    """Report a product of known sizes that is not the size of its letter."""
    factors = {factor: sizes[factor] for factor in axis.equals if isinstance(factor, str)}
    stated = [bound[letter] for letter in factors if letter in bound]
    expected = f"{product}, as {', '.join(f'{letter} = {size}' for letter, size in factors.items())}"
    found = _broken_product(name, axis, "the sizes disagree")
    both = [*stated, *([bound[name]] if name in bound else [])]
    setting = next((one.setting for one in both if one.setting), "")
    return replace(
        found,
        path=next((one.leaf for one in both if one.leaf), ""),
        expected=(expected if factors else str(product)) + (f" by {stated[0].place}" if stated else ""),
        got=f"{sizes[name]}, by {bound.get(name, 'another product')}",
        fix=f"leave out {setting}" if setting else found.fix,
        data={"letter": name, "sizes": [sizes[name], product]},
    )


def _broken_product(name: str, axis: Axis, problem: str) -> Finding:
    return Finding(
        "size-conflict",
        f"{name} = {'*'.join(map(str, axis.equals))} ({axis.meaning}): {problem}",
        rule=axis.at.line_only,
        fix="convert a tree whose leaves fit one another, or correct the product or the equation in rules of your own",
    )


def _no_multiples(
    sizes: Mapping[str, int], bound: Mapping[str, Constraint], axes: Mapping[str, Axis]
) -> Iterator[Finding]:
    """Report axes whose size does not divide that of the letter that they name."""
    for name, axis in axes.items():
        whole = axis.divides
        if name in sizes and whole in sizes and (sizes[name] == 0 or sizes[whole] % sizes[name]):
            of, by = (f", by {bound[x]}" if x in bound else "" for x in (name, whole))
            yield Finding(
                "size-conflict",
                f"{whole} ({axes[whole].meaning}) is no multiple of {name} ({axis.meaning})",
                rule=axis.at.line_only,
                path=bound[whole].leaf if whole in bound else "",
                expected=f"{whole} to be a multiple of {sizes[name]}{of}",
                got=f"{sizes[whole]}{by}",
                fix="convert a tree whose leaves fit one another, or correct the equation in rules of your own",
                data={"letter": whole, "sizes": [sizes[whole], sizes[name]]},
            )


def _integer_root(number: int, power: int) -> int | None:
    """Return the integer whose `power` is the number, if there is one."""
    near = round(number ** (1 / power))
    return next((root for root in (near - 1, near, near + 1) if root > 0 and root**power == number), None)
