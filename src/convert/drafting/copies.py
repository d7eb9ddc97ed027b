"""Find copies of a tree in a checkpoint: trees of the same paths and shapes, such as ``params`` and ``ema_params``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from convert.checkpoints.source import Leaf
from convert.planning.ambiguity import MEANING, words_of

TRAINED = ("params", "target")  # names of the weights themselves, whose copy may have any name; `target` is T5X's
# Words that say nothing about which network it is.
_ANY = {
    *(
        "params",
        "param",
        "parameters",
        "variables",
        "weights",
        "state",
        "states",
        "train",
        "training",
        "model",
        "network",
    ),
    *("online", "current", "live", "extra", "value", "opt", "optimizer"),
}

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


def find_copies(leaves: Mapping[str, Leaf], needless: Container[str]) -> tuple[FoundCopies, ...]:
    """Return the copies among the leaves, the outermost first. What no model needs is not compared.

    Two trees are copies if they are networks of several layers with the same paths and shapes, and their names say so: one is
    the other's name with a word such as ``ema``, at any of its keys, or such a word alone, or one is called ``params``.
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
    found: dict[tuple[str, str], list[str]] = defaultdict(list)  # place and trained tree -> its copies
    known: set[str] = set()
    of: set[str] = set()
    originals = _by_signature(signatures)
    order = sorted(signatures, key=lambda tree: (tree.count("/"), tree))
    for named in (True, False):  # a name that says it goes first: `target` is a copy beside `online`, and T5X's weights
        for tree in order:
            if tree in of or any(f"{tree}/".startswith(f"{other}/") for other in known):
                continue
            pair = _original(tree, originals[signatures[tree]]) if named else _trained(tree, signatures, beside)
            if pair is not None:
                known.add(tree)
                of.add("/".join(filter(None, pair)))
                found[pair].append(tree.removeprefix(f"{pair[0]}/") if pair[0] else tree)
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (place, trained), copies in found.items():
        places[trained, *copies].append(place)
    return tuple(
        FoundCopies(of, tuple(within), len(signatures["/".join(filter(None, (within[0], of[0])))]))
        for of, within in places.items()
    )


def _by_signature(signatures: Mapping[str, Signature]) -> Mapping[Signature, list[str]]:
    """Return the trees that a copy may be a copy of."""
    found: dict[Signature, list[str]] = defaultdict(list)
    for tree, signature in signatures.items():
        if all(MEANING.keys().isdisjoint(words_of(key)) for key in tree.split("/")):
            found[signature].append(tree)
    return found


def _original(tree: str, originals: Sequence[str]) -> tuple[str, str] | None:
    """Return the tree of the same name without words such as ``ema`` and ``params``: the path where both lie, and its path there."""
    keys = tree.split("/")
    if all(MEANING.keys().isdisjoint(words_of(key)) for key in keys):
        return None
    near: list[tuple[int, str]] = []
    for other in originals:
        if _own_words(other) == _own_words(tree):
            pairs = zip(keys, other.split("/"), strict=False)
            near.append((next(k for k, (one, two) in enumerate(pairs) if one != two), other))
    if not near:
        return None
    shared, other = max(near, key=lambda one: (one[0], -one[1].count("/")))
    return "/".join(keys[:shared]), "/".join(other.split("/")[shared:])


def _own_words(tree: str) -> list[str]:
    """Return what the name of a tree says besides what all weights and copies are called."""
    return [word for key in tree.split("/") for word in words_of(key) if word not in MEANING and word not in _ANY]


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
