"""One step per output tensor: which leaves it is made of, and by which primitive operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from convert.core.ops import Op
from convert.core.tensor_spec import TensorSpec
from convert.core.yaml_nodes import Position
from convert.layers import Rule

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """A leaf's share of an output tensor.

    Attributes:
        leaf: name of the source leaf.
        ops: from the leaf to the rows.
        rows: first and last+1 element of an axis of the output that it fills; None: the whole tensor.
        layout: einops notation of the leaf's axes, stacked ones included.
        at: what was taken from the leaf, such as ``i=3``; empty when all of it.
        axes: letters and sizes of the axes that take part, as stored.
        groups: the same letters as they are flattened into the result's axes.
        stored: names and sizes of all axes of the leaf, as stored: those that were taken apart (stacked layers, members of
            a split) included.
        apart: names of the axes that were taken apart, in the order in which `layout` lists them.
        rule: the rule that it is made by, as settled for this tree.
        axis: of the output, which `rows` are along: 0, or -1 where leaves are concatenated along the last one.
    """

    leaf: str
    ops: tuple[Op, ...]
    rows: tuple[int, int] | None
    layout: str
    at: str
    axes: tuple[tuple[str, int], ...]
    groups: tuple[str, ...]
    stored: tuple[tuple[str, int], ...] = ()
    apart: tuple[str, ...] = ()
    rule: Rule | None = field(default=None, repr=False, compare=False)
    axis: int = 0

    def share(self, whole: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What this part fills of the output tensor: a view of it."""
        if self.rows is None:
            return whole
        taken = slice(*self.rows)
        return whole[taken] if self.axis == 0 else whole[..., taken]

    def to_dict(self) -> dict[str, Any]:
        return {
            "leaf": self.leaf,
            "layout": self.layout,
            "at": self.at,
            "ops": [str(op) for op in self.ops],
            "rows": list(self.rows) if self.rows else None,
            **({"axis": self.axis} if self.axis else {}),
        }


def assemble(parts: tuple[Part, ...], made: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The output tensor, from what each of its parts makes."""
    return made[0] if len(made) == 1 else np.concatenate(made, axis=parts[0].axis)


@dataclass(frozen=True)
class CellLeaves:
    """What a recurrent layer is made of, in one direction.

    Attributes:
        rule: as settled for this tree.
        module: name of the target's module.
        suffix: of its tensors' names: ``l0``, ``l1_reverse``.
        leaves: path below the cell -> name of the leaf, and what takes this layer out of a stack.
        inputs, hidden: widths.
    """

    rule: Rule
    module: str
    suffix: str
    leaves: Mapping[str, tuple[str, tuple[Op, ...]]]
    inputs: int
    hidden: int


@dataclass(frozen=True)
class Sinusoids:
    """A table of sines and cosines by position.

    Attributes:
        first: the largest factor of a position (upstream calls it the shortest timescale); step: logarithm of the factor between two.
        interleaved: whether each sine lies beside its cosine, and not all sines before all cosines.
    """

    first: float
    step: float
    interleaved: bool


@dataclass(frozen=True)
class PathLeaves:
    """What a path through data is made of.

    Attributes:
        rule: as settled for this tree.
        module: name of the target's module, or of its tensor of coefficients.
        leaves: role -> name of the leaf, and what takes this path out of a stack.
        suffix: nothing; as `CellLeaves` has it.
    """

    rule: Rule
    module: str
    leaves: Mapping[str, tuple[str, tuple[Op, ...]]]
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """An output tensor.

    Attributes:
        name: in the state_dict.
        spec: shape and dtype as written.
        parts: what it is made of, in the order of its rows.
        word: the kind of layer.
        rule: where the rule stands.
        arithmetic: what is computed on the values, in words; empty when they are only moved.
        loses: what a cast loses, in words; empty when nothing.
        value: for a tensor that no leaf holds: the first timescale and the logarithm of the factor between two; a number that
            all its values have; or a table of positions.
        role: ``weight`` or ``bias``; of a recurrent layer, ``weight_ih`` and so on.
        siblings: how many tensors of this spec its rule makes for the same layer, by alternatives in the target's name;
            itself included.
        part: (k, n): its rows are the k-th of n parts of the tensor; `join` puts the parts together.
        notes: what a person should know, such as rows left out.
        cell: for a recurrent layer: the cell whose tensors belong together.
        spline: for a path through data: likewise.
        tied: of an embedding's table under another name: the name of the tensor that it equals; `word` says what it is there.
    """

    name: str
    spec: TensorSpec
    parts: tuple[Part, ...]
    word: str
    rule: Position
    arithmetic: str = ""
    loses: str = ""
    value: tuple[float, float] | float | Sinusoids | None = None
    role: str = "weight"
    siblings: int = 1
    part: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    cell: CellLeaves | None = field(default=None, repr=False, compare=False)
    spline: PathLeaves | None = field(default=None, repr=False, compare=False)
    tied: str = ""

    @property
    def group(self) -> CellLeaves | PathLeaves | None:
        """The leaves of a layer that is only known as a whole."""
        return self.cell or self.spline

    @property
    def layouts(self) -> tuple[str, ...]:
        """The distinct layouts of its parts."""
        return tuple(dict.fromkeys(part.layout for part in self.parts))

    def renamed(self, name: str, leaves: Sequence[str]) -> Step:
        """The same under another name, its parts of other leaves."""
        parts = tuple([_copy(part, leaf) for part, leaf in zip(self.parts, leaves, strict=True)])
        return _copy(self, name, self.spec, parts)


def _copy(made: T, *first: object) -> T:
    """`dataclasses.replace` of the first fields, in a fifth of the time."""
    other = object.__new__(type(made))
    read, write = _ACCESS[type(made)]
    for put, value in zip(write, (*first, *read(made)[len(first) :]), strict=True):
        put(other, value)
    return other


def _access(of: type) -> tuple[Callable[[Any], tuple[Any, ...]], list[Callable[[Any, Any], None]]]:
    """What reads all fields of a class with slots, and what writes each."""
    names = [one.name for one in fields(of)]
    return attrgetter(*names), [vars(of)[name].__set__ for name in names]


_ACCESS: dict[type, tuple[Callable[[Any], tuple[Any, ...]], list[Callable[[Any, Any], None]]]] = {
    of: _access(of) for of in (Part, Step)
}


def join(steps: list[Step]) -> tuple[list[Step], list[str]]:
    """Puts the parts of tensors together whose rows several rules make.

    Returns:
        The steps, each tensor where its first part stood, and what does not fit.
    """
    parts: dict[str, list[Step]] = {}
    for step in steps:
        if step.part:
            parts.setdefault(step.name, []).append(step)
    findings: list[str] = []
    joined: dict[str, Step] = {}
    for name, found in parts.items():
        found.sort(key=lambda step: step.part or (0, 0))
        first = found[0]
        wanted = [(k + 1, (first.part or (0, 0))[1]) for k in range((first.part or (0, 0))[1])]
        if [step.part for step in found] != wanted:
            have = ", ".join(f"{step.part[0]} of {step.part[1]} ({step.rule.line_only})" for step in found if step.part)
            findings.append(
                f"{first.rule.line_only}: {name} is made of {wanted[0][1]} parts, each by one rule, and there is {have}; "
                "a leaf or a rule is missing, or two rules make the same part"
            )
            continue
        odd = next(
            (s for s in found if s.spec.shape[1:] != first.spec.shape[1:] or s.spec.dtype != first.spec.dtype), None
        )
        if odd is not None:
            findings.append(
                f"{odd.rule.line_only}: {name} cannot hold {odd.spec} as rows beside {first.spec} ({first.rule.line_only}); "
                "give them one dtype with `dtype:`, or correct one of the equations"
            )
            continue
        row, moved = 0, []
        for step in found:
            for part in step.parts:
                start, stop = part.rows or (0, step.spec.shape[0])
                moved.append(replace(part, rows=(row + start, row + stop)))
            row += step.spec.shape[0]
        joined[name] = replace(
            first,
            spec=TensorSpec((row, *first.spec.shape[1:]), first.spec.dtype),
            parts=tuple(moved),
            arithmetic=", ".join(dict.fromkeys(step.arithmetic for step in found if step.arithmetic)),
            loses=", ".join(dict.fromkeys(step.loses for step in found if step.loses)),
            part=None,
        )
    whole = [joined.pop(step.name, None) if step.part else step for step in steps]
    return [step for step in whole if step is not None], findings
