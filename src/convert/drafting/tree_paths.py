"""Group the leaves of a tree for drafting: patterns of paths, stacks of layers, and leaves that are not weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace

from convert.checkpoints.source import Leaf
from convert.drafting.path_groups import Names, group, keys_of
from convert.drafting.recurrent_cells import find_cells
from convert.drafting.stacked_axes import stacks
from convert.layers.draft import DraftEntry, Group, PathKey

ROOTS = ("mdl_vars/params", "params/params", "state/params", "model/params", "params", "target")
SILENT = (
    "vars",
    "~",
)  # keys that name nothing: Keras has its arrays below the one, Haiku its submodules below the other


class Paths:
    """Leaves of a checkpoint in groups, and their paths as rules write them.

    Args:
        leaves: those to be grouped.
        root: a prefix of all of them that the rules shall have; empty: it is guessed.
        needless: leaves that no model needs.
        widths_vary: as for `group`.

    Attributes:
        groups: of the leaves that a model may need, each with the shape that one layer of its stack has.
        unneeded: groups of the others.
        root: a prefix below which all leaves lie but those that no model needs.
    """

    def __init__(
        self, leaves: Mapping[str, Leaf], root: str, needless: Container[str], *, widths_vary: bool = False
    ) -> None:
        wanted = {name: leaf for name, leaf in leaves.items() if name not in needless}
        cells = find_cells([Group(_steps(name), x.spec.shape, x.spec.dtype, (name,)) for name, x in wanted.items()])
        found = group(wanted, [tuple(step.words[0] for step in steps) for steps in cells], widths_vary=widths_vary)
        self._shapes = {name: leaf.spec.shape for name, leaf in leaves.items()}
        self._names = Names()
        self._stacks = stacks(list(found))
        self.groups = tuple(self._unstacked(g) for g in found)
        self.unneeded = group({name: leaf for name, leaf in leaves.items() if name in needless})
        self.root = root or self._root()

    def take_apart(self, names: Collection[str]) -> None:
        """Split the groups that have one of these leaves, and the groups of the same dict, into groups of one leaf."""
        dicts = {g.steps[:-1] for g in self.groups if len(g.leaves) > 1 and not set(g.leaves).isdisjoint(names)}
        self.groups = tuple(
            single
            for g in self.groups
            for single in ([self._alone(g, name) for name in g.leaves] if g.steps[:-1] in dicts else [g])
        )

    def _alone(self, g: Group, name: str) -> Group:
        shape = self._shapes[name] if g.varies else g.shape
        return replace(g, steps=_steps(name), leaves=(name,), shape=shape, varies=frozenset())

    def _root(self) -> str:
        for root in ROOTS:
            inside = [g for g in self.groups if g.leaves[0].startswith(f"{root}/")]
            if inside and len(inside) == len(self.groups):
                return root
        return ""

    def _stack(self, steps: Sequence[PathKey]) -> tuple[int, str, int] | None:
        """Return the number of keys above the stack that a path is in, its index and its axis; None if it is in no stack."""
        for prefix, (index, axis) in self._stacks.items():
            if tuple(steps[: len(prefix)]) == prefix:
                return len(prefix), index, axis
        return None

    def _unstacked(self, g: Group) -> Group:
        stack = self._stack(g.steps)
        if stack is None:
            return g
        at = stack[2]
        varies = frozenset(axis - (axis > at) for axis in g.varies if axis != at)
        return replace(g, shape=g.shape[:at] + g.shape[at + 1 :], varies=varies)

    def say_stacked(self, entry: DraftEntry, steps: Sequence[PathKey]) -> None:
        """Add the key `stacked` to a rule whose leaves are stacked."""
        if stack := self._stack(steps):
            remark = "guess: all leaves here have this axis, the norms' scales too"
            entry.say("stacked", f"{{{stack[1]}: {stack[2]}}}", remark)

    def path(self, steps: Sequence[PathKey]) -> str:
        """Return the path as a rule writes it."""
        text = self._names.text(steps)
        if self.root and text.startswith(f"{self.root}/"):
            return text.removeprefix(f"{self.root}/")
        return f"/{text}" if self.root else text

    def module(self, steps: Sequence[PathKey]) -> str:
        """Return the name of the module if PyTorch's names were those of the tree."""
        keys = self.path(steps).removeprefix("/").split("/")
        if stack := self._stack(steps):
            at = stack[0] - (self.root.count("/") + 1 if self.root else 0)
            keys.insert(at, f"{{{stack[1]}}}")
        kept = [key for k, key in enumerate(keys) if key not in SILENT and not (k == 0 and key in ("params", "target"))]
        return ".".join(kept) or "module"

    def drop(self, g: Group) -> str:
        """Return a pattern for a `drop` rule of leaves that no model needs."""
        return re.sub(r"\{[a-z][a-z0-9]*\}", "*", self.path(g.steps))


def _steps(name: str) -> tuple[PathKey, ...]:
    return tuple(PathKey((key,)) for key in keys_of(name))
