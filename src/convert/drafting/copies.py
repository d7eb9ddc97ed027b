"""Find copies of a tree in a checkpoint: trees of the same paths and shapes, such as ``params`` and ``ema_params``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from convert.checkpoints.source import Leaf
from convert.planning.ambiguity import MEANING, words_of

TRAINED = ("params", "target")  # names of the weights themselves, whose copy may have any name; `target` is T5X's

Signature = frozenset[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class FoundCopies:
    """Trees of the same paths and shapes, of which a model needs one.

    Attributes:
        of: their paths below each of `within`; the first is the one that is trained, by its name.
        within: paths from the top of the tree.
        leaves: number of leaves of each tree.
    """

    of: tuple[str, ...]
    within: tuple[str, ...]
    leaves: int

    @property
    def others(self) -> tuple[str, ...]:
        """Paths of the trees other than the first, from the top of the tree."""
        return tuple("/".join(filter(None, (place, one))) for place in self.within for one in self.of[1:])

    @staticmethod
    def meaning(tree: str) -> str:
        """Return what a copy is, by its name; empty if the name does not tell."""
        return next((MEANING[word] for key in tree.split("/") for word in words_of(key) if word in MEANING), "")


def find_copies(leaves: Mapping[str, Leaf], needless: Collection[str]) -> tuple[FoundCopies, ...]:
    """Return the copies among the leaves, the outermost first. What no model needs is not compared.

    Two trees are copies if they are networks of several layers with the same paths and shapes, and their names say so: one is
    the other's name with a word such as ``ema``, or such a word alone, or one is called ``params``.
    """
    trees: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for name, leaf in leaves.items():
        keys = name.split("/")
        for k in range(1, len(keys)) if name not in needless else ():
            trees["/".join(keys[:k])].append(("/".join(keys[k:]), leaf.spec.shape))
    signatures = {
        tree: frozenset(inner)
        for tree, inner in trees.items()
        if len(inner) > 1 and any("/" in path for path, _ in inner)
    }
    beside: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        above, _, key = tree.rpartition("/")
        beside[above].add(key)
    known: set[str] = set()
    found: dict[tuple[str, str], list[str]] = defaultdict(list)  # place and trained tree -> its copies
    for tree in sorted(signatures, key=lambda tree: (tree.count("/"), tree)):
        if any(tree == other or tree.startswith(f"{other}/") for other in known):
            continue
        pair = _trained(tree, signatures, beside)
        if pair is not None:
            known.add(tree)
            found[pair].append(tree.removeprefix(f"{pair[0]}/") if pair[0] else tree)
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (place, trained), copies in found.items():
        places[trained, *copies].append(place)
    return tuple(
        FoundCopies(of, tuple(within), len(signatures["/".join(filter(None, (within[0], of[0])))]))
        for of, within in places.items()
    )


def _trained(
    tree: str, signatures: Mapping[str, Signature], beside: Mapping[str, Collection[str]]
) -> tuple[str, str] | None:
    """Return the tree that this one is a copy of: the path where both lie, and the other's path there."""
    keys = tree.split("/")
    for k, key in enumerate(keys):
        words = words_of(key)
        left = [word for word in words if word not in MEANING]
        above, below = keys[:k], keys[k + 1 :]
        near = sorted(other for other in beside["/".join(above)] if other != key)
        if len(left) == len(words):
            others = [other for other in TRAINED if other in near and key not in TRAINED]
        elif left:
            others = [other for other in near if words_of(other) == left]
        else:  # the word alone: the other is beside it under any name, or one level higher
            if below and signatures.get("/".join([*above, *below])) == signatures[tree]:
                return "/".join(above), "/".join(below)
            free = [other for other in near if MEANING.keys().isdisjoint(words_of(other))]
            others = sorted(free, key=lambda other: other not in TRAINED)
        for other in others:
            if signatures.get("/".join([*above, other, *below])) == signatures[tree]:
                return "/".join(above), "/".join([other, *below])
    return None
