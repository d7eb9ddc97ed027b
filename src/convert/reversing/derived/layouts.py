"""The published forms of a tree: which paths and keys its leaves have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from convert.checkpoints.source import Leaf, Source, Stamp, stamps, tree_order
from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.core.tensor_spec import TensorSpec
from convert.layers import Rule
from convert.rules.copies import resolve_copies
from convert.rules.file import Layout, RuleFile
from convert.rules.path_variants import of_layout
from convert.writing.written import Written

FORMAT = "layout of the rules"


class DerivedSource(Source):
    """A tree of leaves that have names, shapes and dtypes, and no values: those of a layout."""

    format = FORMAT

    def __init__(self, written: Written, leaves: Iterable[Leaf], names: Mapping[tuple[str, ...], str]) -> None:
        in_order = sorted(leaves, key=lambda leaf: tree_order(leaf.keys))
        self.path = self.given_path = written.path
        self.leaves = {names[leaf.keys]: leaf for leaf in in_order}
        self.watched: Mapping[Path, Stamp | None] = stamps({file for file, _ in written.tensors.values()})

    def read(self, name: str) -> np.ndarray:
        raise AssertionError(f"{name} has no values")


def layout_of(rules: RuleFile, name: str | None) -> Layout:
    """Return the layout with this name; None is the first one, or the form in which the rules are written.

    Raises:
        PlanError: the rules have no such layout.
    """
    if name is None:
        return rules.layouts[0] if rules.layouts else Layout("", rules.root[0])
    known = [layout.name for layout in rules.layouts]
    found = next((layout for layout in rules.layouts if layout.name == name), None)
    if found is None:
        raise PlanError(
            Finding(
                "layout-unknown",
                "the rules have no such layout",
                rule=rules.path,
                path=f"--layout {name}",
                expected=f"one of {', '.join(known)}" if known else "none: the rules declare no `layouts`",
                got=name,
                fix=did_you_mean(name, known) or "choose one of them, or give a checkpoint with --like",
            )
        )
    return found


def forms(rules: RuleFile, layout: Layout) -> Iterator[tuple[tuple[Rule, ...], str]]:
    """Yield the rules as this layout writes their paths, and the root of its paths."""
    named, root = resolve_copies(rules.rules, rules.copies, layout.root)
    for form in of_layout(named, rules.path_variants, layout.variants):
        yield form, root


def keys_of(path: str, root: str, layout: Layout) -> tuple[str, ...]:
    """Return the keys of a leaf.

    Args:
        path: as a rule's pattern gives it: from the root, or from the top of the tree with a slash.
    """
    whole = path[1:] if path.startswith("/") else "/".join(filter(None, (root, path)))
    module, _, last = whole.rpartition("/")
    keys = tuple(filter(None, (module, last))) if layout.flat else tuple(whole.split("/"))
    return (*keys, layout.leaf) if layout.leaf else keys


def named(leaves: Mapping[tuple[str, ...], TensorSpec]) -> tuple[list[Leaf], dict[tuple[str, ...], str]]:
    """Return leaves and their names."""
    return [Leaf(keys, spec) for keys, spec in leaves.items()], {keys: "/".join(keys) for keys in leaves}
