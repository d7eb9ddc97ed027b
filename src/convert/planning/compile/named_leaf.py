"""Names the axes of a leaf as its rule declares them, which gives the letters their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from convert.checkpoints.source import Source
from convert.core.axis_groups import AxisGroup, open_axes, shown
from convert.core.findings import Finding
from convert.core.ops import Op
from convert.core.path_pattern import Index
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import Matched, MatchKey, Rule
from convert.layers.leaf_sums import role_of_sum
from convert.layers.leaves import MisfitError, shape_mismatch, unstacked
from convert.layers.target import TargetLayer
from convert.planning.constraints import Constraint, SumConstraint


@dataclass(frozen=True)
class NamedLeaf:
    """A matched leaf with named axes.

    Attributes:
        stacked: index, axis and size of each stacked axis.
        letters, own_shape: of the axes that are not stacked.
        groups: what an axis is made of, by its letter.
        opening: operations that open the groups; of the leaf without stacked axes. The letters are then those of the opened axes.
    """

    name: str
    spec: TensorSpec
    stacked: tuple[tuple[str, int, int], ...]
    letters: str | None
    own_shape: tuple[int, ...]
    groups: Mapping[str, AxisGroup] = field(default_factory=dict)
    as_stored: str = ""
    opening: tuple[Op, ...] = ()

    @property
    def axes(self) -> str:
        """Its axes as stored, as text: ``i D N H``; an axis without a letter is ``1``."""
        if self.letters is None:
            return ""
        names = shown(self.as_stored or self.letters, self.groups)
        for index, axis, _ in sorted(self.stacked, key=lambda s: s[1]):
            names.insert(axis, index)
        return " ".join(names)

    def stored(self, letters: str, shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        """Return names and sizes of all axes as stored, but those of size 1 without a letter."""
        named = list(zip(letters, shape, strict=False))
        for index, axis, size in sorted(self.stacked, key=lambda s: s[1]):
            named.insert(axis, (index, size))
        return tuple((name, size) for name, size in named if name != ".")

    def opened(self, rule: Rule, sizes: Mapping[str, int]) -> NamedLeaf:
        """Return the leaf with the axes that its groups are made of.

        Raises:
            MisfitError: a size is unknown, or contradicts the shape.
        """
        if not self.groups or self.letters is None:
            return self
        try:
            opening, letters, shape = open_axes(self.letters, self.own_shape, self.groups, sizes)
        except ValueError as error:
            code = "size-unknown" if "nothing gives" in str(error) else "shape-mismatch"
            raise MisfitError(
                Finding(code, f"{self.spec} as {self.axes}: {error}", rule=rule.at.line_only, path=self.name)
            ) from None
        return replace(self, letters=letters, own_shape=shape, as_stored=self.letters, opening=tuple(opening))


def read_leaf(rule: Rule, role: str, name: str, spec: TensorSpec, variant: str | None) -> NamedLeaf:
    """Name the axes of a leaf; the leaves of a sum have those of the sum.

    Raises:
        MisfitError: its shape contradicts the rule.
    """
    stacked, own = unstacked(rule, name, spec)
    try:
        second = rule.normalized is not None and role in rule.normalized.paths
        kind = rule.kind.of_leaf(role)
        letters = None if second else kind.letters(role_of_sum(role), own, variant)
    except ValueError as error:
        apart = f" ({'x'.join(map(str, own))} without stacked axes)" if stacked else ""
        raise MisfitError(
            Finding("shape-mismatch", f"{spec}{apart} does not fit: {error}", rule=rule.at.line_only, path=name)
        ) from None
    groups = kind.axis_groups(variant)
    return NamedLeaf(name, spec, stacked, letters, own, {x: of for x, of in groups.items() if x in (letters or "")})


def check_names(rule: Rule, layer: TargetLayer, leaf: NamedLeaf, counts: Mapping[str, int]) -> None:
    """Check that the target's path has a name for each element of the axes that are split among targets.

    Args:
        counts: number of elements of each axis.

    Raises:
        MisfitError: it has more names, or fewer.
    """
    for piece in layer.path.pieces:
        if isinstance(piece, Index) and piece.name in counts and counts[piece.name] != (len(piece.words) or max(counts[piece.name], 1)):  # fmt: skip
            named = f"{len(piece.words)} elements" if piece.words else "at least one element"
            raise MisfitError(
                Finding(
                    "shape-mismatch",
                    f"{piece.name} is split among the targets {layer.path}",
                    rule=rule.at.line_only,
                    path=leaf.name,
                    expected=f"{piece.name} with {named}",
                    got=f"{counts[piece.name]}: {leaf.spec} as {leaf.axes or 'stored'}",
                    fix="name one target for each element",
                )
            )


ONE_SIZE: Mapping[str, Sequence[str]] = {}  # no letter varies


def constraints(
    matched: Matched, source: Source, variant: str | None, every: bool, varying: Mapping[str, Sequence[str]] = ONE_SIZE
) -> Iterator[Constraint | SumConstraint]:
    """Yield the sizes that the shapes of a rule's leaves give to its letters.

    Args:
        every: whether every leaf is read; otherwise one leaf of each shape, since equal shapes give equal sizes.
        varying: letters whose sizes may differ from layer to layer -> the indices of these layers, in each of which they have one
            size; none: the leaves of the rule agree.

    Raises:
        MisfitError: a leaf's shape contradicts the rule.
    """
    numbers = matched.rule.path.indices if matched.rule.sources else ()
    used = {x: of for x, of in varying.items() if x in matched.rule.kind.letters_used}
    numbered = {x: numbers.index(index) for x, of in used.items() for index in of if index in numbers}
    for role, of_role in matched.leaves.items():
        seen: set[tuple[TensorSpec, tuple[int, ...]]] = set()
        last: TensorSpec | None = None
        for (indices, _), name in of_role.items():
            spec = source.leaves[name].spec
            of_layer = (spec, indices if numbered else ())
            if not every and ((spec is last and not numbered) or of_layer in seen):
                continue
            seen.add(of_layer)
            last = spec
            if matched.rule.kind.shared(role_of_sum(role), spec.shape):
                continue
            leaf = read_leaf(matched.rule, role, name, spec, variant)
            text = f"{spec} as {leaf.axes or 'stored'}"
            where = matched.rule.at.line_only
            counted = {member for numbering in matched.rule.index_from.values() for member in numbering.order}
            for index, _, size in leaf.stacked:
                if index in counted:  # places need not stack as many: 26 layers in units of 6
                    continue
                yield Constraint(index, size, where, name, text)
            implied = [*matched.rule.kind.implied_sizes(role_of_sum(role), leaf.own_shape)]
            for letter, size, held in implied:
                yield Constraint(letter, size, where, name, f"{spec} as {held}")
            axes = dict(zip(leaf.letters or "", leaf.own_shape, strict=False)) | {x: size for x, size, _ in implied}
            for axis, parts in matched.rule.concatenated.items():
                if axis in axes and not {*axis, *"".join(parts.parts)} & varying.keys():
                    made = f"{text}, {axis} = {' + '.join(map(' '.join, parts.parts))}"
                    yield SumConstraint(parts.terms, axes[axis], where, name, made)
            for letter, size in zip(leaf.letters or "", leaf.own_shape, strict=False):
                if letter in leaf.groups:
                    yield SumConstraint(leaf.groups[letter].terms, size, where, name, text)
                elif letter in numbered:
                    yield Constraint(f"{letter}[{indices[numbered[letter]]}]", size, where, name, text)
                elif letter != "." and letter not in varying:
                    yield Constraint(letter, size, where, name, text)
                if letter in matched.rule.same_size:
                    yield Constraint(matched.rule.same_size[letter], size, where, name, text)
    yield from _counted_targets(matched, variant)
    if apart := used.keys() - numbered.keys():
        _check_varying(matched, source, variant, apart)


def _check_varying(matched: Matched, source: Source, variant: str | None, varying: Set[str]) -> None:
    """Check that the leaves of a rule agree in each layer in the sizes that differ from layer to layer.

    Raises:
        MisfitError: they do not.
    """
    rule = matched.rule
    known: dict[tuple[MatchKey, str], tuple[int, str]] = {}
    for role, of_role in matched.leaves.items():
        for key, name in of_role.items():
            leaf = read_leaf(rule, role, name, source.leaves[name].spec, variant)
            for letter, size in zip(leaf.letters or "", leaf.own_shape, strict=False):
                if letter not in varying:
                    continue
                first, of = known.setdefault((key, letter), (size, name))
                if first != size:
                    raise shape_mismatch(
                        rule,
                        name,
                        problem=f"{letter} differs within one layer",
                        expected=f"{letter} = {first}, as in {of}: {source.leaves[of].spec}",
                        got=f"{letter} = {size}: {leaf.spec} as {leaf.axes}",
                        fix="correct the two paths, or the letters of the rule",
                    )


def sizes_of_layers(matched: Matched, source: Source, variant: str | None, letter: str) -> dict[tuple[int, ...], int]:
    """Return the size of a letter in each layer of a rule, by the values of the layer's indices.

    Raises:
        MisfitError: a leaf's shape contradicts the rule.
    """
    found: dict[tuple[int, ...], int] = {}
    for role, of_role in matched.leaves.items():
        for (indices, _), name in of_role.items():
            leaf = read_leaf(matched.rule, role, name, source.leaves[name].spec, variant)
            if letter in (leaf.letters or ""):
                found[indices] = dict(zip(leaf.letters or "", leaf.own_shape, strict=False))[letter]
    return found


def _counted_targets(matched: Matched, variant: str | None) -> Iterator[Constraint]:
    """Yield the sizes of axes of which the targets' names list the elements, where no leaf has the axis itself."""
    rule = matched.rule
    groups = rule.kind.axis_groups(variant)
    inside = "".join(group.letters or "" for group in groups.values())
    for _, layer in rule.layers if inside and any(matched.leaves.values()) else ():
        named = [
            (piece.name, len(piece.words)) for piece in layer.path.pieces if isinstance(piece, Index) and piece.words
        ]
        if len(layer.path.groups) > len(rule.path.groups) and not rule.kind.parts:
            named.append((rule.kind.split_axis("weight", inside, variant), len(layer.path.groups[-1].words)))
        for letter, count in named:
            if letter in inside:
                other = next((x for x in reversed(inside) if x != letter), letter)
                names = f"one name for each element of {letter} in {layer.path} (another axis is named as in {{{other}:a,b}})"
                yield Constraint(letter, count, rule.at.line_only, "", names)
