"""Composite axes of a leaf, as einops writes them: a product of axes, ``(N C H)``, or a sum of parts, ``(N H + K H + K H)``.

In a flattened axis the first letter varies slowest. Parts stand one after the other; where letters stand around the sum, as in
``(K (G + 1 + 1) H)``, each element of the outer axes has all parts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase, ascii_uppercase

from convert.core.ops import Op, Reshape, Slice


@dataclass(frozen=True)
class AxisGroup:
    """One composite axis of a leaf, made of the axes `before`, of one of the parts, and of the axes `after`.

    Attributes:
        parts: the letters of each part; there is one part where the axis has no ``+``, and ``1`` is a part without letters.
        chosen: the part that is used; None: the axis as a whole.
    """

    before: str
    parts: tuple[str, ...]
    after: str
    chosen: int | None = None

    @property
    def letters(self) -> str | None:
        """The letters of the axes that it is opened into; None: it is one axis, as all its parts are used."""
        if len(self.parts) > 1 and self.chosen is None:
            return None
        return self.before + self.parts[self.chosen or 0] + self.after

    @property
    def terms(self) -> tuple[str, ...]:
        """The letters whose sizes multiply to that of each part; the sum is the size of the axis."""
        return tuple(self.before + part + self.after for part in self.parts)

    def __str__(self) -> str:
        parts = " + ".join(" ".join(part) or "1" for part in self.parts)
        if not self.before + self.after:
            return f"({parts})"
        inner = f"({parts})" if len(self.parts) > 1 else parts
        return f"({' '.join(filter(None, (' '.join(self.before), inner, ' '.join(self.after))))})"

    def opened(self, axis: int, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[list[Op], tuple[int, ...]]:
        """Return the operations that open this axis of an array into the axes `letters`, and the shape of the result.

        Raises:
            ValueError: a size is unknown, or the sizes do not give that of the axis; the message is the reason.
        """
        letters = self.letters
        if letters is None:
            return [], shape
        outer, lengths, inner = self._counted(sizes)
        if outer * sum(lengths) * inner != shape[axis]:
            known = ", ".join(f"{letter}={sizes[letter]}" for letter in dict.fromkeys("".join(self.terms)))
            raise ValueError(f"the axis has {shape[axis]} elements, and {self} with {known} has {outer * sum(lengths) * inner}")  # fmt: skip
        head, tail = shape[:axis], shape[axis + 1 :]
        ops: list[Op] = []
        if self.chosen is not None:
            start = sum(lengths[: self.chosen])
            if self.before or self.after:
                ops.append(Reshape((*head, outer, sum(lengths), inner, *tail)))
            ops.append(Slice(axis + bool(self.before or self.after), start, start + lengths[self.chosen]))
        made = (*head, *(sizes[letter] for letter in letters), *tail)
        if len(letters) != 1 or ops[:-1]:
            ops.append(Reshape(made))
        return ops, made

    def _counted(self, sizes: Mapping[str, int]) -> tuple[int, list[int], int]:
        """Return the number of elements of the axes `before`, of each part, and of the axes `after`.

        Raises:
            ValueError: a size is unknown; the message is the reason.
        """
        unknown = dict.fromkeys(letter for term in self.terms for letter in term if letter not in sizes)
        if unknown:
            first = next(iter(unknown))
            raise ValueError(
                f"the axis is {self}, and nothing gives {' and '.join(unknown)} a size; declare it in `axes`, such as "
                f"{first}: {{is: ..., equals: 8}}, or with --set {first}=8"
            )
        outer, *lengths, inner = (
            math.prod(sizes[letter] for letter in text) for text in (self.before, *self.parts, self.after)
        )
        return outer, lengths, inner

    def run_of(self, part: int, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """Return where a part lies along the axis: of each `period` elements, those from `start` to `stop`.

        Raises:
            ValueError: a size is unknown; the message is the reason.
        """
        _, lengths, inner = self._counted(sizes)
        start = sum(lengths[:part]) * inner
        return sum(lengths) * inner, start, start + lengths[part] * inner


_LETTER = re.compile(r"[A-Za-z]")


def parse_group(text: str) -> AxisGroup:
    """Parse ``(N C H)``, ``(N H + K H + K H)`` or ``(K (G + 1 + 1) H)``, without or with the outer parentheses.

    Raises:
        ValueError: another form; the message is the reason.
    """
    inside = text.strip()
    if inside.startswith("(") and _closing(inside, 0) == len(inside) - 1:
        inside = inside[1:-1]
    at = inside.find("(")
    if at >= 0:
        end = _closing(inside, at)
        before, parts, after = inside[:at], inside[at + 1 : end], inside[end + 1 :]
        if "+" in before + after or "(" in parts + after or "+" not in parts:
            raise ValueError(f"{text} has parentheses inside that are no sum; write such as (K (G + 1 + 1) H)")
        return AxisGroup(_letters(before, text, True), tuple(_letters(x, text) for x in parts.split("+")), _letters(after, text, True))  # fmt: skip
    return AxisGroup("", tuple(_letters(part, text) for part in inside.split("+")), "")


def _letters(part: str, text: str, empty: bool = False) -> str:
    """Return the letters of a product; none for ``1``."""
    bare = "".join(part.split())
    if bare == "1" or (not bare and empty):
        return ""
    if not bare or not all(_LETTER.fullmatch(letter) for letter in bare):
        raise ValueError(f"{text} is not letters, such as (N H), or parts of letters, such as (N H + K H + K H)")
    if len(set(bare)) < len(bare):
        raise ValueError(f"{text} has a letter twice in one product")
    return bare


def _closing(text: str, at: int) -> int:
    """Return the position of the parenthesis that closes the one at `at`; -1: there is none."""
    depth = 0
    for k in range(at, len(text)):
        depth += (text[k] == "(") - (text[k] == ")")
        if depth == 0:
            return k
    return -1


def take_groups(text: str, *, apart: bool = False) -> tuple[str, dict[str, AxisGroup]]:
    """Replace each group in a text by one letter that the text does not have; the same group by the same letter.

    Args:
        text: of an equation, in which a group is one axis wherever it stands; or of the axes of one array.
        apart: whether each group is an axis of its own, as in `(1 + 1)(1 + 1)` of one array.

    >>> take_groups("...D,D(C F)->...(C F)")
    ('...D,Dz->...z', {'z': AxisGroup(before='', parts=('CF',), after='', chosen=None)})

    Raises:
        ValueError: a parenthesis is open, or a group has another form; the message is the reason.
    """
    free = (letter for letter in (*reversed(ascii_lowercase), *reversed(ascii_uppercase)) if letter not in text)
    groups: dict[str, AxisGroup] = {}
    named: dict[AxisGroup, str] = {}
    flat, at = "", 0
    while at < len(text):
        if text[at] == ")":
            raise ValueError(f"{text!r} has a ')' without '('")
        if text[at] != "(":
            flat += text[at]
            at += 1
            continue
        end = _closing(text, at)
        if end < 0:
            raise ValueError(f"{text!r} has a '(' without ')'")
        group = parse_group(text[at : end + 1])
        if apart or group not in named:
            named[group] = next(free)
            groups[named[group]] = group
        flat += named[group]
        at = end + 1
    return flat, groups


@dataclass(frozen=True)
class AxisNames:
    """The axes of a leaf or of a target tensor, in stored order.

    Attributes:
        letters: one for each axis; a dot is an axis of size 1.
        groups: what an axis is made of, by its letter.
    """

    letters: str
    groups: Mapping[str, AxisGroup]

    @property
    def opened(self) -> tuple[str, ...]:
        """The letters of each axis; none for an axis of size 1."""
        return tuple("" if letter == "." else open_letters(letter, self.groups) for letter in self.letters)

    @property
    def text(self) -> str:
        """The axes, for people: ``1 T (N H)``."""
        return " ".join(shown(self.letters, self.groups))


def parse_axis_names(text: str) -> AxisNames:
    """Parse letters of axes in stored order, such as ``.TD``, ``T(N H)`` or ``(K + M)D``; a dot is an axis of size 1.

    Raises:
        ValueError: no letters, one twice, two sums, or something else; the message is the reason.
    """
    names = parse_leaf_axes(text)
    check_one_sum(names.letters, names.groups)
    return names


def parse_leaf_axes(text: str) -> AxisNames:
    """Parse letters of axes as `parse_axis_names` does; several axes may be sums.

    Raises:
        ValueError: no letters, one twice, or something else; the message is the reason.
    """
    flat, groups = take_groups(text, apart=True)
    letters = "".join(flat.split())
    for each in each_part(letters, groups):
        used = open_letters(letters, each).replace(".", "")
        if not letters or (used and not (used.isascii() and used.isalpha())) or len(set(used)) < len(used):
            raise ValueError(f"axes are different letters, such as ED, .ED or (N H)D, not {text!r}")
    return AxisNames(letters, groups)


def open_letters(text: str, groups: Mapping[str, AxisGroup]) -> str:
    """Replace the letter of each group by the letters that it is opened into; one that stays whole keeps its letter."""
    return "".join(letter if letter not in groups else _opened(letter, groups[letter]) for letter in text)


def _opened(letter: str, group: AxisGroup) -> str:
    opened = group.letters
    return letter if opened is None else opened


def shown(letters: str, groups: Mapping[str, AxisGroup]) -> list[str]:
    """Return the axes of a leaf for people: a letter, ``1`` for a dot, and groups as the rule writes them."""
    return [str(groups[letter]) if letter in groups else "1" if letter == "." else letter for letter in letters]


def open_axes(
    letters: str, shape: tuple[int, ...], groups: Mapping[str, AxisGroup], sizes: Mapping[str, int]
) -> tuple[list[Op], str, tuple[int, ...]]:
    """Open all groups among the axes of an array: return the operations, and letters and shape of the result.

    Raises:
        ValueError: as `AxisGroup.opened`.
    """
    ops: list[Op] = []
    for at in reversed(range(len(letters))):
        if letters[at] in groups:
            more, shape = groups[letters[at]].opened(at, shape, sizes)
            ops += more
    return ops, open_letters(letters, groups), shape


def with_part(groups: Mapping[str, AxisGroup], part: int) -> dict[str, AxisGroup]:
    """Choose a part of the groups that are sums."""
    return {x: replace(group, chosen=part) if len(group.parts) > 1 else group for x, group in groups.items()}


def sums_of(letters: str, groups: Mapping[str, AxisGroup]) -> list[str]:
    """Return the letters of the axes that are sums and of which no part is chosen, in the order of the axes."""
    return [letter for letter in letters if letter in groups and groups[letter].letters is None]


def check_one_sum(letters: str, groups: Mapping[str, AxisGroup]) -> None:
    """Check that one axis at most is a sum.

    Raises:
        ValueError: two are.
    """
    if len(sums := sums_of(letters, groups)) > 1:
        first, second, *_ = (str(groups[letter]) for letter in sums)
        raise ValueError(
            f"{first} and {second} are both sums; one axis can be split into parts, or a rule takes one part of each with `part`"
        )


def each_part(letters: str, groups: Mapping[str, AxisGroup]) -> Iterator[dict[str, AxisGroup]]:
    """Yield the groups with each choice of one part of each sum; the groups themselves where none is a sum."""
    sums = sums_of(letters, groups)
    for chosen in itertools.product(*(range(len(groups[letter].parts)) for letter in sums)):
        yield _with_chosen(groups, dict(zip(sums, chosen, strict=True)))


def _with_chosen(groups: Mapping[str, AxisGroup], chosen: Mapping[str, int]) -> dict[str, AxisGroup]:
    return {x: replace(group, chosen=chosen[x]) if x in chosen else group for x, group in groups.items()}


def taken_part(letters: str, groups: Mapping[str, AxisGroup], part: Sequence[tuple[int, int]]) -> dict[str, AxisGroup]:
    """Choose one part of each axis that is a sum.

    Args:
        letters: of the axes of a leaf, as stored.
        part: (k, n) for each of its sums: the k-th of n parts, counted from 1.

    Raises:
        ValueError: the axes have other sums; the message is the reason.
    """
    sums = sums_of(letters, groups)
    if not sums:
        raise ValueError(
            "`part` of a rule takes a part of the leaf, and none of the leaf's axes is a sum, such as D(F + F)"
        )
    if len(sums) != len(part):
        shown_sums = " and ".join(str(groups[letter]) for letter in sums)
        raise ValueError(
            f"`part` has {len(part)} {'entry' if len(part) == 1 else 'entries'}, and the leaf has the sums {shown_sums}; name a part of each, such as [1 of 2, 1 of 2]"
        )
    for letter, (k, n) in zip(sums, part, strict=True):
        if n != len(groups[letter].parts):
            raise ValueError(f"`part` is {k} of {n}, and {groups[letter]} has {len(groups[letter].parts)} parts")
    return _with_chosen(groups, {letter: k - 1 for letter, (k, _) in zip(sums, part, strict=True)})
