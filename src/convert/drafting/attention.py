"""Recognize the attention layers of known libraries by the names and shapes of their leaves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convert.drafting.axis_letters import Letters
from convert.layers.draft import Group, PathKey
from convert.rules.attention_macro import LIBRARIES, Library


@dataclass(frozen=True)
class AttentionLeaves:
    """An attention layer of a library.

    Attributes:
        layer: the library's name for it.
        sizes: of its axes: X, the heads', and those of keys and values where they have widths of their own.
        biased: whether it has biases.
        leaves: names of its leaves.
        whole: whether `torch.nn.MultiheadAttention` has all that lies there, and the widths that it needs.
        shown: shape of its queries' kernel.
    """

    layer: str
    sizes: tuple[int, ...]
    biased: bool
    leaves: frozenset[str]
    whole: bool
    shown: str

    @property
    def library(self) -> Library:
        return LIBRARIES[self.layer]

    def axes(self, letters: Letters) -> str:
        """Return its axes as letters.

        Raises:
            NoLetterError: there are no more.
        """
        count = len(self.library.heads)
        roles = ["width", *(("heads", "head") if count == 2 else ("width",)), "width", "width"]
        again = [sum(r == role and n == size for r, n in list(zip(roles, self.sizes, strict=False))[:k]) for k, (role, size) in enumerate(zip(roles, self.sizes, strict=False))]  # fmt: skip
        return "".join(letters.named(role, n, k) for role, n, k in zip(roles, self.sizes, again, strict=False))


def find_attention(groups: Sequence[Group]) -> dict[tuple[PathKey, ...], AttentionLeaves]:
    """Return path -> attention layer. Other leaves of the layer (norms of queries and keys) are not included."""
    below: dict[tuple[PathKey, ...], dict[str, Group]] = {}
    for g in groups:
        for k in range(1, len(g.steps)):
            if any(step.stem is not None for step in g.steps[k:]):
                continue
            for words in itertools.product(*(step.words for step in g.steps[k:])):
                below.setdefault(g.steps[:k], {})["/".join(words)] = g
    found = {}
    for prefix, leaves in below.items():
        fitting = next((a for name in LIBRARIES if (a := _fitting(name, leaves)) is not None), None)
        if fitting is not None:
            found[prefix] = fitting
    return found


def _fitting(name: str, leaves: Mapping[str, Group]) -> AttentionLeaves | None:
    library = LIBRARIES[name]
    biased = all(path in leaves for path in library.biases)
    if not all(path in leaves for path in library.kernels) or any(p in leaves for p in library.biases) != biased:
        return None
    bound: list[dict[str, int]] = []
    for path, equation in zip(library.kernels, (library.inward,) * 3 + (library.outward,), strict=True):
        letters = equation.split(",")[1].split("->")[0]
        shape = leaves[path].shape
        if len(shape) != len(letters):
            return None
        bound.append(dict(zip(letters, shape, strict=True)))
    heads = [tuple(sizes[letter] for letter in library.heads) for sizes in bound]
    width = bound[0]["X"]
    if len(set(heads)) > 1 or bound[3]["Y"] != width:
        return None
    if biased:
        shapes = [leaves[path].shape for path in library.biases]
        if shapes != [heads[0]] * 3 + [(width,)]:
            return None
    own = (bound[1]["X"], bound[2]["X"])
    apart = own if own != (width, width) else ()
    used = {*library.kernels, *(library.biases if biased else ())}
    return AttentionLeaves(
        name,
        (width, *heads[0], *apart),
        biased,
        frozenset(leaf for path in used for leaf in leaves[path].leaves),
        len(used) == len(leaves) and math.prod(heads[0]) == width,
        leaves[library.kernels[0]].shown,
    )
