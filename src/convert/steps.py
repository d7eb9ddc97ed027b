"""One step per output tensor: which leaves it is made of, and by which primitive operations."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from convert.folds import Operand
from convert.kinds import Recurrent, Rule, TargetLayer
from convert.kinds.conventions import repair, target_pairs, undo, unflattened
from convert.kinds.norm import Norm
from convert.kinds.normalized import kept as kept_apart
from convert.match import Key, Matched
from convert.ops import Cast, Flip, Op, Permute, Reshape, Slice, Take, is_float, out_spec, widens
from convert.sizes import Constraint
from convert.sources.base import Source
from convert.spec import SAFETENSORS_TAGS, TensorSpec
from convert.yamlfile import Position

T = TypeVar("T")


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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

    @property
    def group(self) -> CellLeaves | PathLeaves | None:
        """The leaves of a layer that is only known as a whole."""
        return self.cell or self.spline

    @property
    def layouts(self) -> tuple[str, ...]:
        """The distinct layouts of its parts."""
        return tuple(dict.fromkeys(part.layout for part in self.parts))


def _with(made: T, **changes: Any) -> T:
    """`dataclasses.replace` of a frozen dataclass without checks of its own, in a tenth of the time."""
    other = object.__new__(type(made))
    other.__dict__.update(made.__dict__, **changes)
    return other


class MisfitError(Exception):
    """Leaves that contradict their rule; holds the finding."""


@dataclass(frozen=True)
class _Leaf:
    """A matched leaf with its axes named."""

    name: str
    spec: TensorSpec
    stacked: tuple[tuple[str, int, int], ...]  # index, axis, size
    letters: str | None
    own_shape: tuple[int, ...]


def _stack(rule: Rule, name: str, spec: TensorSpec) -> tuple[tuple[tuple[str, int, int], ...], tuple[int, ...]]:
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


def read_leaf(rule: Rule, role: str, name: str, spec: TensorSpec, variant: str | None) -> _Leaf:
    """Names the axes of a leaf.

    Raises:
        MisfitError: its shape contradicts the rule.
    """
    stacked, own = _stack(rule, name, spec)
    try:
        second = rule.normalized is not None and role == rule.normalized.role
        letters = None if second else rule.kind.letters(role, own, variant)
    except ValueError as error:
        apart = f" ({'x'.join(map(str, own))} without stacked axes)" if stacked else ""
        raise MisfitError(f"{rule.at.line_only}: {name}: {spec}{apart} does not fit: {error}") from None
    return _Leaf(name, spec, stacked, letters, own)


def constraints(matched: Matched, source: Source, variant: str | None) -> Iterator[Constraint]:
    """What the shapes of a rule's leaves say about the sizes of its letters.

    Raises:
        MisfitError: a leaf's shape contradicts the rule.
    """
    for role, of_role in matched.leaves.items():
        for name in of_role.values():
            spec = source.leaves[name].spec
            if matched.rule.kind.shared(role, spec.shape):
                continue
            leaf = read_leaf(matched.rule, role, name, spec, variant)
            shown = f"{spec} as {_source_axes(leaf) or 'stored'}"
            where = matched.rule.at.line_only
            counted = {member for numbering in matched.rule.numbered.values() for member in numbering.order}
            for index, _, size in leaf.stacked:
                if index in counted:  # places need not stack as many: 26 layers in units of 6
                    continue
                yield Constraint(index, size, where, name, shown)
            if isinstance(matched.rule.kind, Recurrent):
                for axis, size in matched.rule.kind.sizes(role, leaf.own_shape):
                    if known := matched.rule.kind.file_letter(axis):
                        yield Constraint(
                            known, size, where, name, f"{spec} as {matched.rule.kind.cell.leaves[role].text}"
                        )
            for letter, size in zip(leaf.letters or "", leaf.own_shape, strict=False):
                if letter != ".":
                    yield Constraint(letter, size, where, name, shown)


def _source_axes(leaf: _Leaf) -> str:
    """The leaf's axes for people: ``i D N H``; an axis without a letter is ``1``."""
    if leaf.letters is None:
        return ""
    names = ["1" if letter == "." else letter for letter in leaf.letters]
    for index, axis, _ in sorted(leaf.stacked, key=lambda s: s[1]):
        names.insert(axis, index)
    return " ".join(names)


def group_shown(letters: str) -> str:
    """Letters that are flattened into one axis, in einops notation."""
    return letters if len(letters) == 1 else f"({' '.join(letters)})" if letters else "1"


@lru_cache(maxsize=4096)
def _movement(letters: str, shape: tuple[int, ...], groups: tuple[str, ...]) -> tuple[Op, ...]:
    """Permutes axes called `letters` into `groups`, each flattened into one; axes in no group have size 1 and go."""
    ops: list[Op] = []
    kept = "".join(groups)
    for axis in reversed(range(len(letters))):
        if letters[axis] not in kept:
            ops.append(Take(axis, 0))
    left = [(letter, size) for letter, size in zip(letters, shape, strict=True) if letter in kept]
    order = tuple("".join(letter for letter, _ in left).index(letter) for letter in kept)
    if order != tuple(range(len(order))):
        ops.append(Permute(order))
    sizes = dict(left)
    moved = tuple(sizes[letter] for letter in kept)
    flat = tuple(math.prod(sizes[letter] for letter in group) for group in groups)
    if flat != moved:
        ops.append(Reshape(flat))
    return tuple(ops)


def target_dtype(rule: Rule, spec: TensorSpec, asked: str | None) -> str:
    """What a leaf is written in: the rule's dtype, the user's for floats, else its own or the narrowest that holds it."""
    wanted = rule.dtype or (asked if is_float(spec.dtype) else None) or spec.dtype
    if SAFETENSORS_TAGS[wanted] is not None:
        return wanted
    if wanted == rule.dtype:
        raise MisfitError(f"safetensors cannot hold {wanted}; choose another `dtype:`")
    for wider in ("uint8", "int8", "float16", "bfloat16", "float32"):
        if widens(wanted, wider):
            return wider
    raise MisfitError(f"safetensors cannot hold {wanted}")


@dataclass(frozen=True)
class Compiler:
    """Turns a rule and its leaves into steps.

    Attributes:
        source: the leaves' specs.
        target: name of the target.
        dtype: what floating-point tensors are written in; None keeps each leaf's.
        facts: what is no weight, as far as it is known.
        set_by_hand: names of the facts that the user gave.
        sizes: of the letters.
    """

    source: Source
    target: str
    dtype: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    set_by_hand: Collection[str] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    _made: dict[Hashable, Step] = field(default_factory=dict, init=False, repr=False, compare=False)

    def steps(self, matched: Matched, layer: TargetLayer, variant: str | None) -> Iterator[Step]:
        """The output tensors of a rule, in the order of its leaves.

        Raises:
            MisfitError: they cannot be made; the message is a finding.
        """
        rule = matched.rule
        if isinstance(rule.kind, Norm):
            self._same_shapes(rule, matched)
        second = rule.normalized.role if rule.normalized else ""
        beside = matched.leaves.get(second, {}) if not kept_apart(rule, layer) else {}
        for role, of_role in matched.leaves.items():
            if role == second and not kept_apart(rule, layer):
                continue  # it is folded into the weight
            pattern = rule.sources[role]
            for values in sorted({indices for indices, _ in of_role}):
                indices = dict(zip(pattern.indices, values, strict=True))
                made = [
                    tensor
                    for choices in layer.path.all_choices()
                    for tensor in self._tensor(rule, role, layer, variant, of_role, indices, values, choices, beside)
                ]
                alike = Counter((elements, step.spec) for elements, step in made)
                for elements, step in made:
                    siblings = alike[elements, step.spec]
                    yield step if siblings == 1 else _with(step, siblings=siblings)
                if role == "weight":
                    yield from (_counter(rule, name, step) for _, step in made for name in rule.kind.counters)

    def _same_shapes(self, rule: Rule, matched: Matched) -> None:
        """A norm's bias and statistics have the shape of its scale, whether the rule names their axes or not."""
        leaves = self.source.leaves
        for role, of_role in matched.leaves.items():
            for key, other in of_role.items():
                scale = matched.leaves["weight"].get(key)
                if scale is not None and leaves[scale].spec.shape != leaves[other].spec.shape:
                    raise MisfitError(
                        f"{rule.at.line_only}: {other}: {leaves[other].spec} is no {role} for {scale}: {leaves[scale].spec}; a norm's "
                        f"scale and {role} have one shape, so one of the two paths is wrong"
                    )

    def _tensor(
        self,
        rule: Rule,
        role: str,
        layer: TargetLayer,
        variant: str | None,
        of_role: Mapping[Key, str],
        indices: Mapping[str, int],
        values: tuple[int, ...],
        choices: tuple[int, ...],
        beside: Mapping[Key, str],
    ) -> Iterator[tuple[tuple[int, ...], Step]]:
        """The tensors of one target name: one for each element of the stacked axes, with those elements."""
        groups = rule.sources[role].groups
        split = len(choices) > len(groups)
        fused = len(groups[-1].words) if len(choices) < len(groups) else 0
        sources = [(*choices, k) for k in range(fused)] if fused else [choices[: len(groups)]]
        leaves = []
        for choice in sources:
            name = of_role.get((values, choice))
            if name is None:
                return  # reported by match.cover
            leaves.append(read_leaf(rule, role, name, self.source.leaves[name].spec, variant))
        member = (choices[-1], len(layer.path.groups[-1].words)) if split else None
        stack_sizes = [range(size) for _, _, size in leaves[0].stacked]
        for elements in itertools.product(*stack_sizes):
            stack = dict(zip((index for index, _, _ in leaves[0].stacked), elements, strict=True))
            path = layer.path.fill(rule.resolve({**indices, **stack}), choices)
            name = rule.kind.tensor_name(path, role, layer)
            second = beside.get((values, sources[0])) if role == "weight" else None
            yield elements, self._step(rule, role, layer, variant, leaves, stack, member, name, second)

    def _step(
        self,
        rule: Rule,
        role: str,
        layer: TargetLayer,
        variant: str | None,
        leaves: list[_Leaf],
        stack: Mapping[str, int],
        member: tuple[int, int] | None,
        name: str,
        second: str | None = None,
    ) -> Step:
        # Layers and experts are made alike by the ten thousand: all but the names is worked out once.
        alike: Hashable = (
            id(rule),
            role,
            variant,
            tuple(stack.values()),
            member,
            tuple((x.spec, x.letters) for x in leaves),
        )
        if second is None and alike in self._made and not any(self.source.merge(leaf.name) for leaf in leaves):
            known = self._made[alike]
            parts_ = tuple(_with(part, leaf=leaf.name) for part, leaf in zip(known.parts, leaves, strict=True))
            return _with(known, name=name, parts=parts_)
        fold = self._fold(rule, second, stack) if second is not None else ()
        try:
            compute = (*undo(rule, self.sizes), *fold, *rule.kind.compute(role, layer))
        except ValueError as error:
            raise MisfitError(f"{rule.at.line_only}: {name}: {error}; correct the letter") from None
        parts, specs, row = [], [], 0
        sums: list[str] = []
        notes: list[str] = []
        for leaf in leaves:
            moved = self._move(rule, role, layer, variant, leaf, stack, member)
            try:
                merged = self.source.merge(leaf.name)
                dtype = target_dtype(rule, replace(leaf.spec, dtype=merged.dtype) if merged else leaf.spec, self.dtype)
                if merged is not None and merged.said not in sums:
                    sums.append(merged.said)
                cut, at = self._cut(rule, out_spec(moved.ops, leaf.spec), moved.at)
                if cut:
                    notes.append(f"{name} keeps {at} of {leaf.name}; {self._left_out(rule, leaf, moved)}")
                ops = (*moved.ops, *cut, *computing(compute, leaf.spec, dtype))
                spec = out_spec(ops, leaf.spec)
            except (ValueError, MisfitError) as error:
                raise MisfitError(f"{rule.at.line_only}: {leaf.name}: {leaf.spec} -> {name}: {error}") from None
            rows = (row, row + spec.shape[0]) if len(leaves) > 1 else None
            row += spec.shape[0] if spec.shape else 0
            parts.append(replace(moved, ops=ops, rows=rows, at=at, rule=rule))
            specs.append(spec)
        for leaf, spec in zip(leaves, specs, strict=True):
            if spec.dtype != specs[0].dtype or spec.shape[1:] != specs[0].shape[1:]:
                raise MisfitError(
                    f"{rule.at.line_only}: {name} cannot hold {leaves[0].name} ({specs[0]}) and {leaf.name} ({spec}) as its rows; "
                    "give them one dtype with `dtype:`, or write them as separate tensors"
                )
        whole = specs[0] if len(specs) == 1 else TensorSpec((row, *specs[0].shape[1:]), specs[0].dtype)
        loses = losses([leaf.spec.dtype for leaf in leaves], whole.dtype, bool(compute or sums))
        step = Step(
            name,
            whole,
            tuple(parts),
            rule.word,
            rule.at,
            ", ".join(filter(None, (*sums, _words(compute, rule)))),
            loses,
            role=role,
            part=layer.part,
            notes=tuple(notes),
        )
        if second is None and not notes and not sums:
            self._made[alike] = step
        return step

    def _fold(self, rule: Rule, name: str, stack: Mapping[str, int]) -> tuple[Op, ...]:
        """What makes one weight of a leaf and the one beside it."""
        assert rule.normalized is not None
        spec = self.source.leaves[name].spec
        stacked, own = _stack(rule, name, spec)
        takes = tuple(Take(axis, stack[index]) for index, axis, _ in sorted(stacked, key=lambda s: -s[1]))
        try:
            out_spec(takes, spec)
        except ValueError as error:
            raise MisfitError(
                f"{rule.at.line_only}: {name}: {error}; it is stacked otherwise than the weight"
            ) from None
        return (rule.normalized.op(Operand(name, takes, math.prod(own), self.source.read)),)

    def _left_out(self, rule: Rule, leaf: _Leaf, moved: Part) -> str:
        """Why rows of a table are not kept: what the source pads to is known, anything else is the user's word."""
        rows = out_spec(moved.ops, leaf.spec).shape[0]
        if rows in getattr(rule.kind, "padded", ()):
            return "the others are padding, which no entry has"
        fact = getattr(rule.kind, "rows", "")
        return f"the others are left out whatever they hold, as --set {fact}={self.facts.get(fact)} says"

    def _cut(self, rule: Rule, spec: TensorSpec, at: str) -> tuple[tuple[Op, ...], str]:
        """Leaves out rows that the rule calls padding; says which are kept."""
        if not spec.shape:
            return (), at
        kept = rule.kind.kept_rows(spec.shape[0], self.facts, self.set_by_hand)
        if kept == spec.shape[0]:
            return (), at
        shown = f"rows 0 to {kept - 1} of {spec.shape[0]}"
        return (Slice(0, 0, kept),), f"{at}, {shown}" if at else shown

    def _move(
        self,
        rule: Rule,
        role: str,
        layer: TargetLayer,
        variant: str | None,
        leaf: _Leaf,
        stack: Mapping[str, int],
        member: tuple[int, int] | None,
    ) -> Part:
        """The movements of one leaf, without arithmetic and dtype."""
        ops: list[Op] = [Take(axis, stack[index]) for index, axis, _ in sorted(leaf.stacked, key=lambda s: -s[1])]
        taken = [f"{index}={stack[index]}" for index, _, _ in leaf.stacked]
        if leaf.letters is None:
            if member:
                raise MisfitError(
                    f"{rule.at.line_only}: {leaf.name} has fewer sources than targets, and a `{rule.word}` cannot be split"
                )
            layout = (
                "as stored" if not leaf.stacked else f"stacked on axis {', '.join(str(a) for _, a, _ in leaf.stacked)}"
            )
            if rule.normalized is not None and role == rule.normalized.role:  # kept: the scale, beside the direction
                rank = 2 + len(getattr(getattr(rule.kind, "numbers", None), "spatial", ""))
                size = math.prod(leaf.own_shape)
                ops.append(Reshape((size, *[1] * (rank - 1))))
            unnamed = tuple(zip(_UNNAMED, leaf.own_shape, strict=False))
            groups = tuple(x for x, _ in unnamed)
            stored = _stored(leaf, "".join(groups), leaf.own_shape)
            apart = tuple(index for index, _, _ in leaf.stacked)
            return Part(leaf.name, tuple(ops), None, layout, ", ".join(taken), unnamed, groups, stored, apart)
        letters, shape = leaf.letters, leaf.own_shape
        before = _source_axes(leaf)
        try:
            if member:
                axis = rule.kind.split_axis(role, letters, variant)
                at = letters.index(axis)
                if shape[at] != member[1]:
                    raise ValueError(f"{axis} has {shape[at]} elements and the rule {member[1]} targets")
                ops.append(Take(at, member[0]))
                taken.append(f"{axis}={member[0]}")
                letters, shape = letters[:at] + letters[at + 1 :], shape[:at] + shape[at + 1 :]
            paired = repair(rule, layer, letters)
            whole, outer = shape, letters
            letters, shape = rule.kind.inner_axes(role, letters, shape, self.sizes)
            groups = rule.kind.groups(role, letters, variant, layer)
            letters, shape, groups = unflattened(rule, layer, letters, shape, groups, self.sizes)
            inner = rule.kind.inner_axes(role, leaf.letters, leaf.own_shape, self.sizes)
            full = unflattened(rule, layer, *inner, (), self.sizes)[:2]
        except ValueError as error:
            raise MisfitError(f"{rule.at.line_only}: {leaf.name}: {leaf.spec} as {before}: {error}") from None
        turned = rule.kind.turned(role, layer)
        apart_ = (Reshape(shape),) if shape != whole else ()
        ops += (*paired, *apart_, *_movement(letters, shape, groups), *turned)
        if rule.flattened is not None and rule.flattened.axis in outer:
            before = " ".join(
                group_shown(rule.flattened.order) if x == rule.flattened.axis else x for x in before.split()
            )
        split = sorted({letter for letter in full[0] if letter not in letters})
        apart = (*(index for index, _, _ in leaf.stacked), *split)
        kept = tuple((x, size) for x, size in zip(letters, shape, strict=True) if any(x in group for group in groups))
        layout = f"{before} -> {' '.join([*apart, *map(group_shown, groups)])}"
        if paired and rule.rope is not None:
            layout += f", {rule.rope.axis} from {rule.rope.pairs} to {target_pairs(layer)} pairs"
        if turned:
            axes = [group_shown(groups[axis]) for op in turned if isinstance(op, Flip) for axis in op.axes]
            layout += f", {' and '.join(axes)} turned round"
        return Part(leaf.name, tuple(ops), None, layout, ", ".join(taken), kept, groups, _stored(leaf, *full), apart)


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


_UNNAMED = "abcdefghijklmnopqrstuvwxyz"  # letters for axes that a rule does not name


def _counter(rule: Rule, name: str, weight: Step) -> Step:
    """An integer of the module that the source does not have, such as the batches that a batch norm has seen: 0."""
    module = weight.name.rpartition(".")[0]
    said = "zero: the source does not count, and torch needs no count where `momentum` is a number"
    return Step(f"{module}.{name}", TensorSpec((), "int64"), (), rule.word, rule.at, said, value=0.0, role=name)


def _stored(leaf: _Leaf, letters: str, shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Names and sizes of all axes as stored; those of size 1 without a letter are left out."""
    named = list(zip(letters, shape, strict=False))
    for index, axis, size in sorted(leaf.stacked, key=lambda s: s[1]):
        named.insert(axis, (index, size))
    return tuple((name, size) for name, size in named if name != ".")


def computing(compute: tuple[Op, ...], spec: TensorSpec, dtype: str) -> tuple[Op, ...]:
    """Arithmetic in float32 or wider between two casts; casts that change nothing are left out."""
    if not compute:
        return (Cast(dtype),) if dtype != spec.dtype else ()
    if not is_float(spec.dtype):
        raise MisfitError(f"{_words(compute)} needs floating-point values")
    wide = "float64" if spec.dtype == "float64" else "float32"
    before = (Cast(wide),) if spec.dtype != wide else ()
    after = (Cast(dtype),) if dtype != wide else ()
    return (*before, *compute, *after)


def _words(compute: tuple[Op, ...], rule: Rule | None = None) -> str:
    said = [str(op) for op in compute]
    if rule is not None and rule.carries is not None:
        said[0] += f", as the source's weight carries {rule.carries.text}"
    return ", ".join(said)


def losses(sources: list[str], target: str, computed: bool) -> str:
    for source in sources:
        wide = ("float64" if source == "float64" else "float32") if computed else source
        if not widens(wide, target):
            return f"rounded from {wide} to {target}"
    return ""
