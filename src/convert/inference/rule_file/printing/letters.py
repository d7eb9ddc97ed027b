"""Letters for the axes of one tensor, and the letters of its leaf's axes as stored."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from convert.drafting.axis_letters import Letters
from convert.inference.rule_file.joining.patterns import Taken
from convert.inference.rule_file.layers.layout import Axis, Layout
from convert.inference.rule_file.layers.rule import NoWordsError
from convert.layers.draft import flow

ROLES = {1: ("width",), 2: ("heads", "head"), 3: ("parts", "heads", "head")}  # of the axes that a group is made of


CONCATENATED = "concatenated"
ZEROS_BEFORE = "zeros_before"
AS_WRITTEN = (CONCATENATED, ZEROS_BEFORE, "padding")  # keys with a mapping or a list
ALONE = "\N{CIRCLED DIGIT ONE}\N{CIRCLED DIGIT TWO}\N{CIRCLED DIGIT THREE}\N{CIRCLED DIGIT FOUR}\N{CIRCLED DIGIT FIVE}\N{CIRCLED DIGIT SIX}"  # for a part of one element, by the axis


def with_keys(keys: Sequence[tuple[str, str]]) -> str:
    """Return the further keys of a target, as they stand within braces behind the first one."""
    return "".join(f", {key}: {value if key in AS_WRITTEN else flow(value)}" for key, value in keys)


class Named:
    """The letters of the axes of one tensor."""

    def __init__(self, letters: Letters) -> None:
        self.letters = letters
        self.count: dict[tuple[str, int], int] = defaultdict(int)
        self.of: dict[tuple[int, int], str] = {}
        self.whole: dict[int, str] = {}  # of an axis that is a flattened map
        self.sums: dict[str, str] = {}  # letters of the part of an axis that a rule takes -> the sum that the axis is
        self.parts: dict[int, list[tuple[str, ...]]] = {}  # axis -> the letters of its parts, of which one has several
        self.given: dict[tuple[int, int], str] = {}

    def take(self, role: str, size: int) -> str:
        self.letters.of_leaves.add(letter := self.another(role, size))
        return letter

    def another(self, role: str, size: int) -> str:
        """Return a letter that no axis of the tensor has yet."""
        again = self.count[role, size]
        self.count[role, size] += 1
        return self.letters.named(role, size, again)

    def concatenated(self, layout: Layout) -> dict[str, tuple[str, str]]:
        """Name the parts of the axes that have them in another order; return them by the axis, as the source and the target have them."""
        found = {}
        for axis in sorted((axis for axis in layout.axes if axis.parts), key=lambda axis: axis.of):
            single = sum(length == 1 for _, length in axis.parts) == 1
            of = {
                part: "1" if part[1] == 1 and single else self.another("width", part[1]) for part in sorted(axis.parts)
            }
            self.letters.sums.append(tuple(x for x in of.values() if x != "1"))
            named = self.of[axis.of, axis.place]
            found[named] = (" + ".join(of.values()), " + ".join(of[part] for part in axis.parts))
        return found

    def sum(self, sizes: Sequence[int], first: str) -> str:
        """Return the letters of an axis that is made of parts of these sizes; `first` is that of the first size.

        All but one of them must be known: they are declared.
        """
        of = {sizes[0]: first}
        for size in sizes:
            if size not in of:
                of[size] = self.take("width", size)
                self.letters.fixed.add(of[size])
        return f"({' + '.join(of[size] for size in sizes)})"

    def name(self, group: Sequence[Axis], roles: Sequence[str] | None = None) -> str:
        """Name the axes of a group; return their letters in the order of the target.

        Args:
            roles: what each is; None: what such a group usually is.
        """
        usual = ROLES.get(len(group), ("width",) * len(group))
        for axis, role in zip(group, roles or usual, strict=True):
            self.name_one(axis, role)
        return "".join(self.of[axis.of, axis.place] for axis in group)

    def name_one(self, axis: Axis, role: str = "width") -> None:
        """Name an axis."""
        self.of[axis.of, axis.place] = self.given.get((axis.of, axis.place)) or self.take(role, axis.size)

    def fix(self, axes: Iterable[Axis]) -> None:
        """Give the letters of axes their sizes in the file, where an axis of the leaf is made of them: no other leaf need have them."""
        self.letters.fixed.update(self.of[axis.of, axis.place] for axis in axes if axis.place)

    def divided(
        self, layout: Layout, taken: Sequence[Taken], stacked: Collection[int], taps: Collection[Axis] = ()
    ) -> None:
        """Give letters to the parts of the axes of a leaf of which a rule takes one each. They are the same in all rules of the leaf.

        Args:
            taps: the axes that are sizes of a kernel.
        """
        of_kernel = {axis.of for axis in taps}
        of_axis = {one.axis: one for one in taken}
        for axis, size in enumerate(layout.leaf_shape) if taken else ():
            one = of_axis.get(axis)
            if axis in stacked or (one is None and (size == 1 or len(layout.made_of(axis)) > 1)):
                continue
            sizes = one.sizes if one is not None else (size,)
            role = "kernel" if axis in of_kernel else "width"
            if one is not None and any(len(of) > 1 for of in one.made_of):
                self._divided_in_groups(one)
                continue
            letters = {n: self.another(role, n) for n in dict.fromkeys(sizes) if n > 1}
            if one is None:
                self.given[axis, 0] = letters[size]
                self.letters.of_leaves.add(letters[size])
                continue
            self.letters.sums.append(tuple(letters.values()))
            own = letters.get(sizes[one.at], ALONE[axis])
            self.given[axis, 0] = self.of[axis, 0] = own
            self.sums[own] = f"({' + '.join(letters.get(n, '1') for n in sizes)})"

    def _divided_in_groups(self, one: Taken) -> None:
        """Give letters to the parts of an axis where one of them is made of several axes, and all sizes."""
        alone = {n: self.another("width", n) for n in dict.fromkeys(n for n, *more in one.made_of if not more) if n > 1}
        self.parts[one.axis] = [
            tuple(self.another("width", n) for n in of) if len(of) > 1 else (alone.get(of[0], "1"),)
            for of in one.made_of
        ]
        self.letters.fixed |= {letter for of in self.parts[one.axis] for letter in of} - {"1"}
        own = self.parts[one.axis][one.at]
        own = (ALONE[one.axis],) if own == ("1",) else own
        for place, letter in enumerate(own):
            self.given[one.axis, place] = self.of[one.axis, place] = letter
        self.sums[" ".join(own)] = f"({' + '.join(' '.join(of) for of in self.parts[one.axis])})"

    def as_stored(self, text: str) -> str:
        """Return letters of a leaf with the sums that its axes are."""
        parts = "|".join(rf"\({own}\)|{own}" if " " in own else own for own in self.sums)
        return re.sub(parts, lambda found: self.sums[found[0].strip("()")], text) if parts else text

    def flattened(self, axis: int, parts: Sequence[Axis]) -> str:
        """Name an axis of the leaf that is a flattened map, whose axes the file gives sizes; return ``D: HWC``."""
        for part in parts:
            self.of[part.of, part.place] = letter = self.take("map" if part is not parts[-1] else "width", part.size)
            self.letters.fixed.add(letter)
        self.whole[axis] = self.take("width", math.prod(part.size for part in parts))
        return f"{self.whole[axis]}: {''.join(self.of[part.of, part.place] for part in parts)}"


def in_stored_order(axes: Sequence[Axis], layout: Layout) -> list[Axis]:
    """Return axes of a layout with those of one axis of the leaf next to each other, as the leaf has them."""
    stored = {axis: at for at, of in enumerate(layout.stored) for axis in of}
    first = list(dict.fromkeys(stored[axis.of] for axis in axes))
    return sorted(axes, key=lambda axis: (first.index(stored[axis.of]), axis.of, axis.place))


def is_flattened(axes: Sequence[Axis]) -> bool:
    """Whether axes are a map that the source flattens with the channels last, and the target with the channels first."""
    places = [axis.place for axis in axes]
    return len(axes) > 1 and len({axis.of for axis in axes}) == 1 and places == [len(axes) - 1, *range(len(axes) - 1)]


def leaf_letters(
    layout: Layout, named: Named, stacked: Collection[int] = (), split: tuple[int, str] | None = None
) -> str:
    """Return the letters of the leaf's axes as stored, without the stacked ones.

    Raises:
        NoWordsError: the block has one element of an axis, and no rule says which.
    """
    found = []
    for axes in layout.stored:
        texts = [_letters_of_axis(layout, named, axis, split) for axis in axes if axis not in stacked]
        if len(axes) > 1:
            named.letters.fixed.update(text for text in texts[:-1] if text.isascii() and text.isalpha())
            texts = [f"({' '.join(text if '+' in text else text.strip('()') for text in texts)})"]
        found += texts
    return "".join(found)


def _letters_of_axis(layout: Layout, named: Named, axis: int, split: tuple[int, str] | None) -> str:
    """Return the letters of one axis of a leaf.

    Raises:
        NoWordsError: the block has one element of it, and no rule says which.
    """
    if split is not None and axis == split[0]:
        return split[1]
    if axis in named.whole:
        return named.whole[axis]
    of = [named.of[a.of, a.place] for a in layout.made_of(axis)] or [x for x in [named.of.get((axis, 0))] if x]
    if not of and (size := layout.leaf_shape[axis]) > 1:
        stored = next(k for k, axes in enumerate(layout.stored) if axis in axes)
        raise NoWordsError(
            f"it is made of part {dict(layout.fixed).get(axis, 0)} of the {size} along axis {stored} of the leaf, as one layer of a stack; "
            f"a rule makes the tensors of all {size} parts at once, and those of the others are open, of another kind, or have names that no pattern joins with these"
        )
    return "." if not of else of[0] if len(of) == 1 else f"({' '.join(of)})"


def one_after_another(axes: str, count: int) -> str:
    """Return the letters of a tensor's axes, the first of which leaves follow each other along, or have one element each.

    >>> one_after_another("(N H)D", 3), one_after_another(".VD", 2)
    ('(N H + N H + N H)D', '(1 + 1)VD')
    """
    end = axes.index(")") + 1 if axes.startswith("(") else 1
    first = axes[:end].strip("()")
    return f"({' + '.join(['1' if first == '.' else first] * count)}){axes[end:]}"


def axes_in_groups(layout: Layout, named: Named) -> list[str]:
    """Return the letters of each axis of the target's tensor; a dot is an axis of size 1."""
    texts = ("".join(named.of[axis.of, axis.place] for axis in group) for group in layout.groups or ())
    return ["." if not text else text if len(text) == 1 else f"({' '.join(text)})" for text in texts]


def target_axes(layout: Layout, named: Named) -> str:
    """Return the letters of the axes of the target's tensor."""
    return "".join(axes_in_groups(layout, named))
