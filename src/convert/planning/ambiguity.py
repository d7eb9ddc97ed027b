"""Find tensors that a shape check cannot protect.

Another order of the same axes, of the parts of a fused tensor, of the tensors of one layer that differ only in their names, or of
the features that RoPE rotates as pairs, has the same shape.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from convert.checkpoints.source import Leaf
from convert.layers.base import Part, Step
from convert.layers.transforms.rope import rotated_heads

MAX_AXES = 6  # 720 orders; no known projection has more axes
# Keys of an optimizer's state (optax, T5X, paxml), whose moments have the paths and shapes of the weights, and are not meant.
OPTIMIZER_KEYS = frozenset(
    ("opt_state", "opt_states", "optimizer", "optimizer_state", "opt", "param_states", "mu", "nu")
)
# Words in names of copies that follow the weights -> what such a copy is.
MEANING = {
    **dict.fromkeys(("ema", "avg", "mavg", "average", "averaged", "averages", "moving", "exponential", "smoothed", "polyak", "swa", "shadow", "slow"), "an average of the weights"),
    **dict.fromkeys(("target", "targets", "targ", "tgt", "teacher"), "a target network, which follows the weights"),
    **dict.fromkeys(("old", "prev", "previous", "lagged", "delayed", "behavior", "behaviour"), "earlier weights"),
    **dict.fromkeys(("init", "initial", "anchor", "best", "backup", "copy", "frozen"), "weights that were set aside"),
}  # fmt: skip
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@dataclass(frozen=True)
class ShapeAmbiguity:
    """A group of tensors whose shape a wrong layout has, too.

    Attributes:
        rule: ``file:line``.
        names: the tensors.
        layout: the layout that the rule gives.
        others: other orders of the axes that give the same shape, in einops notation; at most three. None: there are more
            than `MAX_AXES` axes, and the orders were not searched.
        parts: leaves of one shape that are fused into the tensor; the shape does not show their order.
        siblings: number of tensors of one layer that have this shape, such as q, k, v; 1 when there is no other.
        rope_axis: letter of the features that RoPE rotates as pairs, whose order the shape does not show; empty: no RoPE.
        sum_of_parts: an axis of the leaf that holds several parts, such as ``(N H + K H + K H)`` or ``D = A + B``, whose order the
            shape does not show; empty: there is none.
    """

    rule: str
    names: tuple[str, ...]
    layout: str
    others: tuple[str, ...] | None
    parts: tuple[str, ...]
    siblings: int
    rope_axis: str = ""
    sum_of_parts: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "tensors": list(self.names),
            "layout": self.layout,
            "others": None if self.others is None else list(self.others),
            "interchangeable_parts": list(self.parts),
            "interchangeable_siblings": self.siblings,
            "rope_axis": self.rope_axis or None,
            "sum_of_parts": self.sum_of_parts or None,
        }


@lru_cache(maxsize=4096)
def other_layouts(
    axes: tuple[tuple[str, int], ...], groups: tuple[tuple[str, ...], ...]
) -> tuple[tuple[tuple[str, ...], ...], ...] | None:
    """Return the other orders of the axes that flatten to the same shape as `groups`.

    >>> found = other_layouts((("N", 4), ("H", 8), ("D", 32)), (("D",), ("N", "H")))
    >>> [layout_text(groups) for groups in found]
    ['(N H) D', '(H N) D', 'D (H N)']

    The stored order comes first if it fits (a forgotten transpose). With more than `MAX_AXES` axes the search would take too long;
    the result is then None.
    """
    sizes = dict(axes)
    target = tuple(math.prod(sizes[x] for x in group) for group in groups)
    letters = [letter for letter, _ in axes]
    if 0 in sizes.values():
        return ()
    if len(letters) > MAX_AXES:
        return None
    seen = [
        [x for group in groups for x in group if sizes[x] > 1]
    ]  # the correct order; axes of size 1 may stand anywhere
    found = []
    for order in itertools.permutations(letters):
        moving = [x for x in order if sizes[x] > 1]
        cut = _cut(order, sizes, target)
        if cut is not None and moving not in seen:
            seen.append(moving)
            found.append(cut)
    return tuple(found)


def layout_text(groups: Iterable[tuple[str, ...]]) -> str:
    """Write groups of axes as einops does: ``(N H) D``; a group without an axis is ``1``."""
    return " ".join((group[0] if len(group) == 1 else f"({' '.join(group)})") if group else "1" for group in groups)


def _cut(order: tuple[str, ...], sizes: dict[str, int], target: tuple[int, ...]) -> tuple[tuple[str, ...], ...] | None:
    """Cut axes in this order into groups with the sizes of `target`; None if that is impossible."""
    groups, at = [], 0
    for k, size in enumerate(target):
        first, product = at, 1
        last = k == len(target) - 1
        while at < len(order) and (last or product < size):
            product *= sizes[order[at]]
            at += 1
        if product != size:
            return None
        groups.append(order[first:at])
    return tuple(groups) if at == len(order) else None


@lru_cache(maxsize=4096)
def _others(
    stored: tuple[tuple[str, int], ...], apart: tuple[str, ...], groups: tuple[str, ...]
) -> tuple[str, ...] | None:
    """Return `other_layouts` of a part with its stacked axes: a stack on another axis of the same size fits, too."""
    found = other_layouts(stored, (*((name,) for name in apart), *map(tuple, groups)))
    return None if found is None else tuple(map(layout_text, found))


def shape_ambiguities(steps: tuple[Step, ...]) -> tuple[ShapeAmbiguity, ...]:
    """Group the tensors whose shape fits another layout, or another order of parts, by rule and layout."""
    groups: dict[tuple[str, str, tuple[str, ...] | None, int, int, str, str], list[Step]] = {}
    for step in steps:
        if not step.parts:
            continue
        part = step.parts[0]
        others = _others(part.stored, part.split_axes, part.groups) if part.stored else ()
        same_shape = len(step.parts) > 1 and len({(p.axes, p.groups) for p in step.parts}) == 1
        rope, summed = _rope_axis(part), _sum_of_parts(part)
        if others is None or others or same_shape or step.siblings > 1 or rope or summed:
            fused = len({part.leaf for part in step.parts}) if same_shape else 0
            key = (step.rule.line_only, str(part.layout), others, fused, step.siblings, rope, summed)
            groups.setdefault(key, []).append(step)
    return tuple(
        ShapeAmbiguity(
            rule=rule,
            names=tuple(step.name for step in members),
            layout=layout,
            others=others and others[:3],
            parts=tuple(dict.fromkeys(part.leaf for part in members[0].parts)) if fused > 1 else (),
            siblings=siblings,
            rope_axis=rope,
            sum_of_parts=summed,
        )
        for (rule, layout, others, fused, siblings, rope, summed), members in groups.items()
    )


def _sum_of_parts(part: Part) -> str:
    """Return the axis of the leaf that is a sum of parts; empty: none is."""
    if part.rule is None:
        return ""
    letters = {letter for letter, _ in part.axes} or {part.rule.kind.concatenable if "I" in part.groups else ""}
    found = [f"{axis} = {str(group)[1:-1]}" for axis, group in part.rule.concatenated.items() if axis in letters]
    if found:
        return " and of ".join(found)
    variants = part.rule.kind.variants or (None,)
    sums = (group for one in variants for group in part.rule.kind.axis_groups(one).values() if len(group.parts) > 1)
    return next((str(group) for group in sums), "")


def _rope_axis(part: Part) -> str:
    """Return the letter of the features that RoPE rotates as pairs; empty: it rotates none of this leaf."""
    if part.rule is None or part.rule.rope is None:
        return ""
    letters = "".join(letter for letter, _ in part.axes)
    variants = part.rule.kind.variants or (None,)
    return part.rule.rope.axis if any(any(rotated_heads(part.rule, letters, one)) for one in variants) else ""


@dataclass(frozen=True)
class TwinTree:
    """A dropped tree that has the paths and shapes of the converted one, such as ``ema_params`` and ``params``.

    Attributes:
        tree: its path.
        of: the path of the converted tree.
        leaves: pairs of a dropped leaf and the converted leaf in the same place.
    """

    tree: str
    of: str
    leaves: tuple[tuple[str, str], ...]


def twin_trees(leaves: Mapping[str, Leaf], dropped: Collection[str]) -> tuple[TwinTree, ...]:
    """Return the dropped trees that have the paths and shapes of a tree with most of the converted leaves.

    The state of an optimizer is none of them; see `OPTIMIZER_KEYS`.

    Args:
        leaves: of the checkpoint, by path.
        dropped: the leaves that are not converted.
    """
    if not dropped:
        return ()
    found: list[TwinTree] = []
    for of, inner in _converted_trees([name for name in leaves if name not in dropped]):
        first = f"/{inner[0]}"
        for tree in sorted(name.removesuffix(first) for name in dropped if name.endswith(first)):
            keys = tree.split("/")
            pairs = tuple((f"{tree}/{path}", f"{of}/{path}" if of else path) for path in inner)
            known = any(keys[: len(twin.tree.split("/"))] == twin.tree.split("/") for twin in found)
            if known or not OPTIMIZER_KEYS.isdisjoint(keys):
                continue
            if all(twin in dropped and leaves[twin].spec.shape == leaves[leaf].spec.shape for twin, leaf in pairs):
                found.append(TwinTree(tree, of, pairs))
    known_leaves = {leaf for twin in found for leaf, _ in twin.leaves}
    return (*found, *_named_copies(leaves, dropped, known_leaves))


def _named_copies(leaves: Mapping[str, Leaf], dropped: Collection[str], known: Collection[str]) -> Iterator[TwinTree]:
    """Yield the dropped leaves that are, by a word such as ``ema`` in their paths, copies of converted leaves.

    They may be single leaves beside the weights, and need not be copies of all. A shape that differs shows that they are others.
    """
    kept = [name for name in leaves if name not in dropped]
    converted: dict[str, str] = {}
    for name in kept:
        converted.setdefault(_without_words(name)[1], name)
    for of, inner in _converted_trees(kept):  # a copy may lie outside of it: `ema_params` beside `model/params`
        for path in inner:
            converted.setdefault(_below_params(path.split("/")), f"{of}/{path}" if of else path)
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in leaves:
        word, plain = _without_words(name)
        if name in dropped and name not in known and word:
            found = next((converted[path] for path in (plain, _below_word(name, word)) if path in converted), None)
            if found is not None:
                groups.setdefault(word, []).append((name, found))
    for pairs in groups.values():
        if all(leaves[one].spec.shape == leaves[other].spec.shape for one, other in pairs):
            one, other = (name.split("/") for name in pairs[0])
            while len(one) > 1 and len(other) > 1 and one[-1] == other[-1]:
                one, other = one[:-1], other[:-1]
            yield TwinTree("/".join(one), "/".join(other), tuple(pairs))


def _without_words(path: str) -> tuple[str, str]:
    """Return the word of a path that says that it is a copy, and the path without the word and without ``params``.

    Below the key of an optimizer only an average counts, not ``exp_avg``: all else there is its own state.
    """
    keys = path.split("/")
    state = next((k for k, key in enumerate(keys) if key in OPTIMIZER_KEYS), None)
    for k, key in enumerate(keys):
        words = key.split("_")
        left = [word for word in words if word.lower() not in MEANING]
        below_state = state is not None and k > state
        if len(left) == len(words) or (below_state and (key == "target" or not {*left} <= {"params"})):
            continue
        path_left = (*keys[: state if below_state else k], "_".join(left), *keys[k + 1 :])
        return next(word for word in words if word not in left), _below_params(path_left)
    return "", _below_params(keys)


def _below_word(path: str, word: str) -> str:
    """Return what follows the key with a word, without ``params``."""
    keys = path.split("/")
    return _below_params(keys[1 + next(k for k, key in enumerate(keys) if word in key.split("_")) :])


def _below_params(keys: Iterable[str]) -> str:
    return "/".join(key for key in keys if key not in ("", "params"))


def words_of(key: str) -> list[str]:
    """Return the words of a key, in lower case."""
    return [word.lower() for word in _WORD.findall(key)]


def _converted_trees(leaves: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of each tree with most of the leaves, and their paths in it; the outermost tree first."""
    keys = [name.split("/") for name in leaves]
    prefix: list[str] = []
    while True:
        inside = [path[len(prefix) :] for path in keys if path[: len(prefix)] == prefix]
        if len(inside) < 2 or 2 * len(inside) <= len(leaves):
            return
        yield "/".join(prefix), ["/".join(path) for path in inside]
        [(key, _)] = Counter(path[0] for path in inside).most_common(1)
        if any(path == [key] for path in inside):
            return
        prefix.append(key)
