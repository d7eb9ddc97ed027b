"""The tensors that one name of the target stands for, all made from one: thousands of layers and experts differ in names and numbers only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from convert.core.ops import Take
from convert.core.tensor_spec import TensorSpec
from convert.layers import Rule, TargetLayer
from convert.layers.base import Part, Step
from convert.planning.compile.axes import last_first
from convert.planning.compile.named_leaf import NamedLeaf

T = TypeVar("T", Part, Step)
take = lru_cache(maxsize=4096)(Take)
Elements = tuple[int, ...]
Stacked = tuple[tuple[str, int, int], ...]  # index, axis and size of each stacked axis


@dataclass(frozen=True)
class LayerTensor:
    """The tensors of one target name: one for each element of the axes that are split among tensors.

    Attributes:
        step: the step of the first one.
        axes: the axes that are split: indices of stacked ones, then letters.
        elements: of these axes; each is a tensor.
        stacked: the stacked axes of the leaves.
        choices: its alternatives of the target's path.
        sources: its alternatives of the leaves' path.
        own: whether the step depends on more than the shapes of its leaves.
        siblings: element of the stacked axes -> `Step.siblings`.
    """

    step: Step
    axes: tuple[str, ...]
    elements: Sequence[Elements]
    stacked: Stacked
    choices: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]
    own: bool
    siblings: Mapping[Elements, int] = field(default_factory=dict)

    def steps(
        self,
        rule: Rule,
        role: str,
        layer: TargetLayer,
        indices: Mapping[str, int],
        names: Mapping[tuple[int, ...], str | None],
    ) -> Iterator[tuple[Mapping[str, int], Step]]:
        """Yield each tensor with all its indices, for a layer whose leaves `names` have the shapes of the first one's."""
        leaves = [names[choices] or "" for choices in self.sources]
        axes, layers = (*indices, *self.axes), tuple(indices.values())
        for elements in self.elements:
            where = dict(zip(axes, layers + elements, strict=True))
            name = tensor_name(rule, role, layer, where, self.choices)
            parts = tuple([part(leaf, elements) for part, leaf in zip(self._parts, leaves, strict=True)])
            yield where, self._step(name, parts, self.siblings[elements[: len(self.stacked)]])

    @cached_property
    def _step(self) -> Callable[..., Step]:
        return copies(self.step, "name", "parts", "siblings")

    @cached_property
    def _parts(self) -> list[Callable[[str, Elements], Part]]:
        """Functions that make each part from another leaf and other elements."""
        if len(self.elements) > 1:
            return [_of_elements(part, self.axes, self.stacked, self.elements[0]) for part in self.step.parts]
        return [_of_leaf(part) for part in self.step.parts]


def _of_leaf(part: Part) -> Callable[[str, Elements], Part]:
    copy = copies(part, "leaf")
    return lambda leaf, _: copy(leaf)


def _of_elements(part: Part, axes: Sequence[str], stacked: Stacked, first: Elements) -> Callable[[str, Elements], Part]:
    """Return the function for a part of the `first` elements: others are taken by other operations, and `Part.at` says so."""
    opened = part.opening - len(part.taken)  # operations; then come those that take elements of letters
    taken = [(letter, axes.index(letter) if letter in axes else None, k) for letter, k in part.taken]
    slots = [(n, axis, axes.index(index)) for n, (index, axis, _) in enumerate(last_first(stacked))]
    for n, (op, (_, place, _)) in enumerate(zip(part.ops[opened : part.opening], taken, strict=True), opened):
        if place is not None and isinstance(op, Take):
            slots.append((n, op.axis, place))
    shown = [*(index for index, _, _ in stacked), *(letter for letter, place, _ in taken if place is not None)]
    places = [axes.index(name) for name in shown]
    text = ", ".join(
        [f"{index}=%d" for index, _, _ in stacked]
        + [f"{letter}={k if place is None else '%d'}" for letter, place, k in taken]
    )
    text = part.at.removesuffix(text % tuple([first[place] for place in places])).replace("%", "%%") + text
    copy = copies(part, "leaf", "ops", "at", "taken")

    def of(leaf: str, elements: Elements) -> Part:
        ops = list(part.ops)
        for n, axis, place in slots:
            ops[n] = take(axis, elements[place])
        chosen = tuple([(letter, k if place is None else elements[place]) for letter, place, k in taken])
        return copy(leaf, tuple(ops), text % tuple([elements[place] for place in places]), chosen)

    return of


def copies(made: T, *varied: str) -> Callable[..., T]:
    """Return a function that copies a frozen value with slots, with other values of some fields.

    `dataclasses.replace` takes five times as long: for 37,000 tensors, half of the time of a plan.
    """
    of = type(made)
    slots = {one.name: vars(of)[one.name].__set__ for one in fields(of)}
    same = [(slots[name], getattr(made, name)) for name in slots if name not in varied]
    put = [slots[name] for name in varied]

    def copy(*values: object) -> T:
        other = object.__new__(of)
        for write, value in same:
            write(other, value)
        for write, value in zip(put, values, strict=True):
            write(other, value)
        return other

    return copy


def among_siblings(tensors: Sequence[LayerTensor]) -> list[LayerTensor]:
    """Set `LayerTensor.siblings`: how many tensors of a layer have the same spec."""
    many: dict[TensorSpec, Counter[Elements]] = defaultdict(Counter)
    for tensor in tensors:
        many[tensor.step.spec].update([elements[: len(tensor.stacked)] for elements in tensor.elements])
    return [replace(tensor, siblings=many[tensor.step.spec]) for tensor in tensors]


def uniform(leaves: Sequence[NamedLeaf], counts: Mapping[str, int], others: str) -> bool:
    """Whether all elements of the axes that are split give the same tensor of these leaves, but for names and numbers.

    Args:
        counts: number of elements of each of the axes.
        others: letters of axes of which a tensor takes elements by other numbers.
    """
    return counts.keys().isdisjoint(others) and all(
        leaf.stacked == leaves[0].stacked
        and all(counts.get(x, size) == size for x, size in zip(leaf.letters or "", leaf.own_shape, strict=False))
        for leaf in leaves
    )


def tensor_name(rule: Rule, role: str, layer: TargetLayer, indices: Mapping[str, int], choices: tuple[int, ...]) -> str:
    """Return the full name of a target tensor."""
    return rule.kind.tensor_name(layer.path.fill(rule.resolve(indices), choices), role, layer)
