"""Assign letters to the axes of a drafted rule file, one for each role and size."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterable, Iterator
from itertools import count

PREFERRED = {
    "entries": "V",
    "width": "DCEFGKLMABJ",
    "heads": "NK",
    "head": "H",
    "kernel": "PQWUXYZ",
    "one": "O",
    "parts": "CG",
    "rank": "R",
    "positions": "TS",
    "map": "XYZ",
    "own": "LMAB",
    "varying in": "I",
    "varying out": "O",
}
MEANING = {
    "entries": "entries",
    "width": "a width",
    "heads": "heads",
    "head": "width of a head",
    "kernel": "size of a kernel",
    "one": "one channel",
    "parts": "number of fused tensors",
    "rank": "a rank",
    "positions": "positions",
    "map": "size of a map that is flattened",
    "own": "a size that only the target has",
    "varying in": "channels in",
    "varying out": "channels out",
}
ROWS = "RS"  # what the draft calls the rows and columns of a map, whose sizes it does not know
RESERVED = "ijklmnpqstuv"  # what the draft calls indices


class NoLetterError(Exception):
    """All letters are in use."""


class Letters:
    """Assigns letters. The same role and size have the same letter."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], str] = {}
        self.fixed: set[str] = set()
        """Letters whose size no leaf shows on its own: it is declared as a number."""
        self.of_leaves: set[str] = set()
        """Letters that are an axis of a leaf."""
        self.sums: list[tuple[str, ...]] = []
        """Letters of the parts of an axis, of which a file gives all but one."""
        self.of_others: set[str] = set()
        """Letters of the columns of a tensor that are other leaves, whose own letters may be those of several axes."""

    def named(self, role: str, size: int, again: int = 0) -> str:
        """Return the letter of an axis; with `again`, another one for a second axis of the same size in a tensor.

        Raises:
            NoLetterError: there are no more.
        """
        key = (role, size, again)
        if key not in self._known:
            used = set(self._known.values())
            lower = (c for c in string.ascii_lowercase if c not in RESERVED)
            every = (*PREFERRED[role], *string.ascii_uppercase, *lower)
            free = [c for c in every if c not in used and c not in ROWS]
            if not free:
                raise NoLetterError
            self._known[key] = free[0]
        return self._known[key]

    def roles_of(self, size: int) -> set[str]:
        """Return what the axes of leaves are that have this size."""
        return {role for (role, n, _), letter in self._known.items() if n == size and letter in self.of_leaves}

    def of_size(self, size: int, used: Collection[str] = ()) -> str:
        """Return a letter for an axis of which nothing but the size is known: that of leaves, if theirs have one role.

        Otherwise its own letter, which is declared as a number: an axis of leaves may have the same size by chance.

        Args:
            used: other letters of the tensor.

        Raises:
            NoLetterError: there are no more.
        """
        roles = self.roles_of(size)
        role = roles.pop() if len(roles) == 1 else "own"
        letter = next(x for k in count() if (x := self.named(role, size, k)) not in used)
        if role == "own":
            self.fixed.add(letter)
        return letter

    def knows(self, role: str, size: int) -> bool:
        """Whether an axis of this role and size has a letter."""
        return (role, size, 0) in self._known

    def fix_sums(self) -> None:
        """Declare as numbers the sizes of parts that no leaf shows, all but the last of each sum, and those of other leaves."""
        same = {letter: self._known[role, size, 0] for (role, size, again), letter in self._known.items() if again}
        for letters in self.sums:
            known = self.of_leaves | self.fixed
            unknown = [x for x in letters if x not in known and same.get(x) not in known]
            self.fixed |= {*unknown[:-1]} - same.keys() | {same[x] for x in unknown[:-1] if x in same}
        self.fixed |= {x for x in self.of_others if not {x, same.get(x)} & (self.of_leaves | self.fixed)}

    def declared(self, texts: Iterable[str] | None = None) -> Iterator[str]:
        """Yield the lines of ``axes``.

        Args:
            texts: values of rules; letters that none of them names are left out. None: all letters are declared.
        """
        named = set(self._known.values()) if texts is None else self._named_in(texts)
        for (role, size, again), letter in self._known.items():
            if letter not in named:
                continue
            if role.startswith("varying"):
                yield f"{letter}: {{is: {MEANING[role]}, varies: true}}    # they differ from layer to layer"
                continue
            first = self._known.get((role, size, 0))
            equals = f", equals: {first}" if again and first else ""
            equals = f", equals: {size}" if letter in self.fixed else equals
            fixed = "; a model of another size needs its number here" if letter in self.fixed else ""
            yield f"{letter}: {{is: {MEANING[role]}{equals}}}    # {size} in this checkpoint{fixed}"

    @property
    def share_sizes(self) -> bool:
        """Whether axes of one size, which may be other ones in another model, are declared as equal."""
        again = {letter for (_, size, again), letter in self._known.items() if again and size > 1}
        return bool(again - self.fixed)

    def _named_in(self, texts: Iterable[str]) -> set[str]:
        """Return the letters in words that consist of letters alone, and the letters whose sizes these equal."""
        every = set(self._known.values())
        named = {
            letter
            for text in texts
            for word in re.findall(r"[A-Za-z]+", text)
            if every.issuperset(word)
            for letter in word
        }
        first = {
            self._known.get((role, size, 0))
            for (role, size, again), letter in self._known.items()
            if again and letter in named
        }
        return named | {letter for letter in first if letter}
