"""The leaves of a layer: what is stacked in them, and which of them make a layer together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from convert.core.ops import Take
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import Matched, Rule
from convert.layers.target import TargetLayer


class MisfitError(Exception):
    """Leaves that contradict their rule; holds the finding."""


def unstacked(rule: Rule, name: str, spec: TensorSpec) -> tuple[tuple[tuple[str, int, int], ...], tuple[int, ...]]:
    """Index, axis and size of what is stacked, and the shape of one leaf of the stack.

    Raises:
        MisfitError: it has no such axis, or nothing is stacked there.
    """
    for index, axis in rule.stacked.items():
        if not 0 <= axis < len(spec.shape):
            raise MisfitError(
                f"{rule.at.line_only}: {name}: {spec} has no axis {axis} to be stacked along ({{{index}: {axis}}}); "
                "correct `stacked`, or the checkpoint is not stacked"
            )
        if spec.shape[axis] == 0:
            raise MisfitError(
                f"{rule.at.line_only}: {name}: {spec} stacks no {{{index}}} at all on axis {axis}; drop it, with the reason"
            )
    stacked = tuple((index, axis, spec.shape[axis]) for index, axis in rule.stacked.items())
    taken = {axis for _, axis, _ in stacked}
    return stacked, tuple(size for axis, size in enumerate(spec.shape) if axis not in taken)


@dataclass(frozen=True)
class LeafGroup:
    """The leaves of one layer.

    Attributes:
        leaves: role -> name, and what takes the layer out of the stack that the leaf is.
        where: the indices that the target has.
        choices: which of the rule's alternatives.
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
    """The layers that a rule has all of the `needed` leaves for; what is missing is a finding of `convert.planning.match`.

    Args:
        spec: gives shape and dtype of a leaf.
        shared: whether a leaf, by its role and shape, belongs to all layers of a stack.

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
    """How many layers are stacked, for each index; the same in all leaves."""
    rule = matched.rule
    sizes = {name: {index: size for index, _, size in unstacked(rule, name, spec)[0]} for name, spec in specs.items()}
    (first, counts), *others = sizes.items()
    for name, other in others:
        for index, axis in rule.stacked.items():
            if other[index] != counts[index]:
                raise MisfitError(f"{rule.at.line_only}: {first} ({specs[first]}) and {name} ({specs[name]}) stack different numbers of layers on axis {axis}")  # fmt: skip
    return counts
