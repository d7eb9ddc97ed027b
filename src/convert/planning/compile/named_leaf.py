"""Names the axes of a leaf as its rule declares them, which gives the letters their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import Matched, Rule
from convert.layers.leaves import MisfitError, unstacked
from convert.planning.constraints import Constraint


@dataclass(frozen=True)
class NamedLeaf:
    """A matched leaf with named axes."""

    name: str
    spec: TensorSpec
    stacked: tuple[tuple[str, int, int], ...]  # index, axis, size
    letters: str | None
    own_shape: tuple[int, ...]

    @property
    def axes(self) -> str:
        """Its axes as text: ``i D N H``; an axis without a letter is ``1``."""
        if self.letters is None:
            return ""
        names = ["1" if letter == "." else letter for letter in self.letters]
        for index, axis, _ in sorted(self.stacked, key=lambda s: s[1]):
            names.insert(axis, index)
        return " ".join(names)

    def stored(self, letters: str, shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        """Return names and sizes of all axes as stored, but those of size 1 without a letter."""
        named = list(zip(letters, shape, strict=False))
        for index, axis, size in sorted(self.stacked, key=lambda s: s[1]):
            named.insert(axis, (index, size))
        return tuple((name, size) for name, size in named if name != ".")


def read_leaf(rule: Rule, role: str, name: str, spec: TensorSpec, variant: str | None) -> NamedLeaf:
    """Name the axes of a leaf.

    Raises:
        MisfitError: its shape contradicts the rule.
    """
    stacked, own = unstacked(rule, name, spec)
    try:
        second = rule.normalized is not None and role in rule.normalized.paths
        letters = None if second else rule.kind.letters(role, own, variant)
    except ValueError as error:
        apart = f" ({'x'.join(map(str, own))} without stacked axes)" if stacked else ""
        raise MisfitError(
            Finding("shape-mismatch", f"{spec}{apart} does not fit: {error}", rule=rule.at.line_only, path=name)
        ) from None
    return NamedLeaf(name, spec, stacked, letters, own)


def constraints(matched: Matched, source: Source, variant: str | None, every: bool) -> Iterator[Constraint]:
    """Yield the sizes that the shapes of a rule's leaves give to its letters.

    Args:
        every: whether every leaf is read; otherwise one leaf of each shape, since equal shapes give equal sizes.

    Raises:
        MisfitError: a leaf's shape contradicts the rule.
    """
    for role, of_role in matched.leaves.items():
        seen: set[TensorSpec] = set()
        last: TensorSpec | None = None
        for name in of_role.values():
            spec = source.leaves[name].spec
            if not every and (spec is last or spec in seen):
                continue
            seen.add(last := spec)
            if matched.rule.kind.shared(role, spec.shape):
                continue
            leaf = read_leaf(matched.rule, role, name, spec, variant)
            shown = f"{spec} as {leaf.axes or 'stored'}"
            where = matched.rule.at.line_only
            counted = {member for numbering in matched.rule.index_from.values() for member in numbering.order}
            for index, _, size in leaf.stacked:
                if index in counted:  # places need not stack as many: 26 layers in units of 6
                    continue
                yield Constraint(index, size, where, name, shown)
            for letter, size, held in matched.rule.kind.implied_sizes(role, leaf.own_shape):
                yield Constraint(letter, size, where, name, f"{spec} as {held}")
            for letter, size in zip(leaf.letters or "", leaf.own_shape, strict=False):
                if letter != ".":
                    yield Constraint(letter, size, where, name, shown)
