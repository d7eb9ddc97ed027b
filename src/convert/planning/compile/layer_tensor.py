"""The tensors that one name of the target stands for, all made from one: thousands of layers and experts differ in names and numbers only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import groupby, repeat
from typing import Any, TypeVar

from convert.core.ops import Op, Take
from convert.core.path_pattern import Pattern
from convert.core.tensor_spec import TensorSpec
from convert.layers import Rule, TargetLayer
from convert.layers.base import Part, Step
from convert.planning.compile.axes import last_first
from convert.planning.compile.named_leaf import NamedLeaf

T = TypeVar("T", Part, Step)
take = lru_cache(maxsize=4096)(Take)
Elements = tuple[int, ...]
Taken = tuple[list[tuple[Op, ...]], list[str]]  # `Part.ops` and `Part.at` for each element
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
    ) -> Iterator[Step]:
        """Return each tensor, for a layer whose leaves `names` have the shapes of the first one's."""
        leaves = [names[choices] or "" for choices in self.sources]
        named = [rule.kind.tensor_name(path, role, layer) for path in self.paths(rule, layer.path, indices)]
        each_part = [
            map(copy, repeat(leaf, len(named)), *own) for leaf, (copy, own) in zip(leaves, self._parts, strict=True)
        ]
        return map(self._step, named, zip(*each_part, strict=True), self._siblings)

    def paths(self, rule: Rule, pattern: Pattern, indices: Mapping[str, int]) -> list[str]:
        """Return the path of the target for each element, in a layer of these indices.

        Numbers that are computed from several indices are those of whole layers, which have many elements each.
        """
        count = len(self.stacked)
        letters, found = self.axes[count:], []
        for numbers, same in groupby(self.elements, lambda elements: elements[:count]):
            where = rule.resolve({**indices, **dict(zip(self.axes, numbers, strict=False))})
            found += pattern.fill_each(where, letters, [elements[count:] for elements in same], self.choices)
        return found

    @cached_property
    def _siblings(self) -> list[int]:
        return [self.siblings[elements[: len(self.stacked)]] for elements in self.elements]

    @cached_property
    def _step(self) -> Callable[..., Step]:
        return copies(self.step, "name", "parts", "siblings")

    @cached_property
    def _parts(self) -> list[tuple[Callable[..., Part], Taken | tuple[()]]]:
        """For each part: a function that makes it for another leaf, and how it takes each of the elements; nothing: as the first."""
        if len(self.elements) == 1:
            return [(copies(part, "leaf"), ()) for part in self.step.parts]
        return [
            (copies(part, "leaf", "ops", "at"), taken(part, self.axes, self.stacked, self.elements))
            for part in self.step.parts
        ]


def taken(part: Part, axes: Sequence[str], stacked: Stacked, every: Sequence[Elements]) -> Taken:
    """Return `Part.ops` and `Part.at` for each of the elements, for a part of the first ones."""
    slots = [(n, axis, axes.index(index)) for n, (index, axis, _) in enumerate(last_first(stacked))]
    shown = [(index, "%d") for index, _, _ in stacked]
    for n, letter in enumerate(part.taken, part.opening - len(part.taken)):
        op = part.ops[n]
        assert isinstance(op, Take)
        if letter in axes:
            slots.append((n, op.axis, axes.index(letter)))
        shown.append((letter, "%d" if letter in axes else str(op.index)))
    places = [axes.index(name) for name, number in shown if number == "%d"]
    text = ", ".join(map("=".join, shown))
    text = part.at.removesuffix(text % tuple([every[0][place] for place in places])).replace("%", "%%") + text
    along = list(zip(*every, strict=True))  # for each axis: the number that each tensor takes
    ops: list[Iterable[Op]] = [repeat(op, len(every)) for op in part.ops]
    for n, axis, place in slots:
        ops[n] = map(take, repeat(axis), along[place])
    return list(zip(*ops, strict=True)), [text % numbers for numbers in zip(*[along[k] for k in places], strict=True)]


def copies(made: T, *varied: str) -> Callable[..., T]:
    """Return a function that copies a frozen value with slots, with other values of some fields.

    `dataclasses.replace` takes ten times as long: for 37,000 tensors, two thirds of the time of a plan.
    """
    of: Any = type(made)
    return _copier(of, varied)(*[getattr(made, one.name) for one in fields(of)])


@lru_cache
def _copier(of: type[Any], varied: tuple[str, ...]) -> Callable[..., Callable[..., Any]]:
    """Write the assignments out and compile them, as `dataclasses` does for `__init__`: a loop over the fields takes twice as long."""
    names: list[str] = [one.name for one in fields(of)]
    lines = [
        f"def bind({', '.join(names)}):",
        f"    def copy({', '.join(varied)}):",
        "        made = new(of)",
        *(f"        set_{name}(made, {name})" for name in names),
        "        return made",
        "    return copy",
    ]
    known: dict[str, Any] = {
        "new": object.__new__,
        "of": of,
        **{f"set_{name}": vars(of)[name].__set__ for name in names},
    }
    exec("\n".join(lines), known)
    bind: Callable[..., Callable[..., Any]] = known["bind"]
    return bind


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
