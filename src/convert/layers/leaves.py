"""The leaves of a layer: their stacked axes, and which leaves form one layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from convert.core.findings import Finding
from convert.core.ops import Take
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import Matched, Rule
from convert.layers.target import TargetLayer


class MisfitError(Exception):
    """Leaves contradict their rule, or the target cannot hold them. Holds the finding, whose text is the error's."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding


def shape_mismatch(rule: Rule, leaf: str, *, problem: str = "", expected: str, got: str, fix: str) -> MisfitError:
    """Return the error of a leaf whose shape contradicts its rule, or another leaf of the rule."""
    return MisfitError(
        Finding("shape-mismatch", problem, rule=rule.at.line_only, path=leaf, expected=expected, got=got, fix=fix)
    )


def dtype_mismatch(rule: Rule, tensor: str, dtypes: Iterable[str], problem: str) -> MisfitError:
    """Return the error of a tensor, or a layer, whose leaves are written in several dtypes."""
    return MisfitError(
        Finding(
            "dtype-mismatch",
            problem,
            rule=rule.at.line_only,
            path=tensor,
            expected="one dtype",
            got=" and ".join(dtypes),
            fix="give the rule a `dtype:`",
        )
    )


def not_convertible(rule: Rule, leaf: str, spec: TensorSpec, tensor: str, reason: object) -> MisfitError:
    """Return the error of a leaf that cannot become the tensor that the rule names."""
    return MisfitError(
        Finding("leaf-not-convertible", f"{spec} -> {tensor}: {reason}", rule=rule.at.line_only, path=leaf)
    )


def unstacked(rule: Rule, name: str, spec: TensorSpec) -> tuple[tuple[tuple[str, int, int], ...], tuple[int, ...]]:
    """Return index, axis and size of each stacked axis, and the shape of one layer's leaf.

    Raises:
        MisfitError: the leaf has no such axis, or the axis is empty.
    """
    for index, axis in rule.stacked.items():
        if not 0 <= axis < len(spec.shape):
            raise shape_mismatch(
                rule,
                name,
                expected=f"an axis {axis} that stacks the layers (`stacked: {{{index}: {axis}}}`)",
                got=str(spec),
                fix="correct `stacked`, or leave it out if the checkpoint does not stack its layers",
            )
        if spec.shape[axis] == 0:
            raise shape_mismatch(
                rule,
                name,
                expected=f"at least one layer on the stacked axis {axis}",
                got=str(spec),
                fix="give the leaf a `drop:` rule with the reason",
            )
    stacked = tuple((index, axis, spec.shape[axis]) for index, axis in rule.stacked.items())
    taken = {axis for _, axis, _ in stacked}
    return stacked, tuple(size for axis, size in enumerate(spec.shape) if axis not in taken)


@dataclass(frozen=True)
class LeafGroup:
    """The leaves of one layer.

    Attributes:
        leaves: role -> name of the leaf, and the operations that select this layer in a stack.
        where: the indices of the target.
        choices: which alternatives of the rule's path.
    """

    leaves: Mapping[str, tuple[str, tuple[Take, ...]]]
    where: Mapping[str, int]
    choices: tuple[int, ...]


def leaf_groups(
    matched: Matched,
    layer: TargetLayer,
    spec: Callable[[str], TensorSpec],
    needed: Collection[str],
    shared: Callable[[str, tuple[int, ...]], bool] = lambda role, shape: False,
) -> Iterator[LeafGroup]:
    """Yield the layers for which the tree has all `needed` leaves; `convert.planning.matching.match` reports what is missing.

    Args:
        spec: returns shape and dtype of a leaf.
        shared: returns whether a leaf, by its role and shape, belongs to all layers of a stack.

    Raises:
        MisfitError: the leaves stack different numbers of layers, or none.
    """
    rule = matched.rule
    for values in matched.indices:
        indices = dict(zip(rule.path.indices, values, strict=True))
        for choices in layer.path.all_choices():
            found = {role: name for role, of_role in matched.leaves.items() if (name := of_role.get((values, choices)))}
            if not found.keys() >= set(needed):
                continue
            specs = {role: spec(name) for role, name in found.items()}
            own = [role for role in found if not shared(role, specs[role].shape)]
            counts = _counts(matched, {found[role]: specs[role] for role in own})
            axes = sorted(rule.stacked.items(), key=lambda item: -item[1])
            for elements in itertools.product(*(range(counts[index]) for index, _ in axes)):
                stack = {index: k for (index, _), k in zip(axes, elements, strict=True)}
                takes = tuple(Take(axis, stack[index]) for index, axis in axes)
                leaves = {role: (name, takes if role in own else ()) for role, name in found.items()}
                yield LeafGroup(leaves, rule.resolve({**indices, **stack}), choices)


def _counts(matched: Matched, specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Return the number of stacked layers for each index; it is the same in all leaves."""
    rule = matched.rule
    sizes = {name: {index: size for index, _, size in unstacked(rule, name, spec)[0]} for name, spec in specs.items()}
    (first, counts), *others = sizes.items()
    for name, other in others:
        for index, axis in rule.stacked.items():
            if other[index] != counts[index]:
                raise shape_mismatch(
                    rule,
                    name,
                    expected=f"{counts[index]} layers on the stacked axis {axis}, as {first}: {specs[first]} has",
                    got=str(specs[name]),
                    fix="correct one of the two paths, or `stacked`",
                )
    return counts
