"""A rule, the kind of its layer, and the steps that it compiles to. These types refer to each other, so they share a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from convert.core.axis_groups import AxisGroup
from convert.core.ops import Op
from convert.core.path_pattern import Pattern
from convert.core.tensor_spec import TensorSpec
from convert.core.yaml_nodes import Position
from convert.layers.declaration import Declaration
from convert.layers.draft import DraftContext, DraftEntry, Layer
from convert.layers.leaf_reader import LeafReader
from convert.layers.mistake import Mistake
from convert.layers.probe import LowRankPair, Probe, probe_of_values
from convert.layers.target import Numbering, Numbers, Sinusoids, TargetLayer
from convert.layers.weight_keys import Factor, Flattened, Normalized, Rope

Array = np.ndarray[Any, np.dtype[Any]]
MatchKey = tuple[tuple[int, ...], tuple[int, ...]]  # values of the pattern's indices, and choices of its alternatives


@dataclass(frozen=True)
class Rule:
    """One entry of a rule file.

    Attributes:
        at: its position in the rule file.
        kind_name: key of its kind in `convert.layers.KINDS`.
        kind: the kind of layer, with the values of its keys.
        sources: role -> pattern of the leaves; each leaf of a sum has a role (`convert.layers.leaf_sums`), until the plan adds them up.
        stacked: index name -> axis of the leaf that enumerates it.
        targets: target name (None: all targets) -> layer.
        optional: whether some or all of its leaves may be absent.
        optional_last: fact that counts the last layers that may be without its leaves; then `optional` holds as well.
        fact_values: fact -> the values that it may have where the tree has the leaves.
        layer_type: the type of layers that the rule applies to, one of the file's `layer_types`; None: all layers.
        when: of a buffer: the fact that must be true for the target to have it.
        dtype: dtype of its tensors; overrides ``--dtype``.
        choice: the name that ``--set`` uses to choose one of `kind.variants`.
        absent_if: a leaf that replaces these leaves: where it exists, they may be absent.
        same_size: letter -> another one that has its size where the tree has the leaves.
        index_from: index of the target -> how it is computed from indices of the source.
        prescaled_by: a factor that the source has multiplied into the weight.
        rope: the axis that RoPE rotates after this layer, and which features form a pair.
        flattened: an axis that the source makes by flattening a map.
        concatenated: letter of an axis -> its parts, in the order in which the source's code concatenates them.
        normalized: weight norm or spectral norm of the weight.
        asked: key -> position of its value ``ask``; only the leaves of such a rule are known (`convert.rules.placeholders`).
        also: target name (None: all targets) -> further layers that get the same leaves.
        macro: the key of the macro that expanded to this rule, such as ``attention``; empty: none.
        each: types of the target's modules that the rule holds for, each in place of ``{module}``; empty: its paths are whole.
        part: (k, n) for each axis of its leaves that is a sum: it takes the k-th of n parts; empty: it takes whole leaves.
        numbers: role -> the number that the source adds to each element of its leaf.
    """

    at: Position
    kind_name: str
    kind: LayerKind
    sources: Mapping[str, Pattern]
    stacked: Mapping[str, int]
    targets: Mapping[str | None, TargetLayer]
    optional: bool = False
    optional_last: str | None = None
    fact_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    layer_type: str | None = None
    when: str | None = None
    dtype: str | None = None
    choice: str | None = None
    absent_if: Pattern | None = None
    same_size: Mapping[str, str] = field(default_factory=dict)
    index_from: Mapping[str, Numbering] = field(default_factory=dict)
    prescaled_by: Factor | None = None
    rope: Rope | None = None
    flattened: Flattened | None = None
    concatenated: Mapping[str, AxisGroup] = field(default_factory=dict)
    normalized: Normalized | None = None
    asked: Mapping[str, Position] = field(default_factory=dict)
    also: Mapping[str | None, tuple[TargetLayer, ...]] = field(default_factory=dict)
    macro: str = ""
    each: tuple[str, ...] = ()
    part: tuple[tuple[int, int], ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def open_keys(self) -> dict[str, Position]:
        """Keys whose value is ``ask``, by their names in the file."""
        return {self.macro if self.macro and key == self.kind_name else key: at for key, at in self.asked.items()}

    def resolve(self, indices: Mapping[str, int]) -> Mapping[str, int]:
        """Add the indices of the target that are computed from these indices of the source."""
        if not self.index_from:
            return indices
        return {**indices, **{name: numbering.value(indices) for name, numbering in self.index_from.items()}}

    def holds(self, indices: Mapping[str, int]) -> bool:
        """Whether the layer with these indices of the source is one of the rule's, as far as they tell."""
        return all(n.holds(n.value(indices)) for n in self.index_from.values() if n.positions and n.is_known(indices))

    @property
    def lead(self) -> str:
        """Role of the first leaves: ``weight``, but for a norm without a scale."""
        return next(iter(self.sources))

    @property
    def path(self) -> Pattern:
        """Pattern of the first leaves; it has the indices and alternatives of all others."""
        return self.sources[self.lead]

    def split_axes(self, layer: TargetLayer) -> tuple[str, ...]:
        """Return the letters of the leaf's axes that the target's path has as indices: each element is a tensor."""
        own = {*self.path.indices, *self.stacked, *self.index_from}
        return tuple(name for name in layer.path.indices if name not in own) if self.sources else ()

    def layer(self, target: str) -> TargetLayer | None:
        """Return where the tensors of the rule go in this target."""
        return self.targets.get(target) or self.targets.get(None)

    def each_layer(self, target: str) -> list[Rule]:
        """Return the rule once for each layer of this target that gets its leaves; without one, nothing."""
        first = self.layer(target)
        others = self.also.get(target if target in self.targets else None, ())
        return [] if first is None else [self, *(replace(self, targets={None: layer}, also={}) for layer in others)]

    @property
    def layers(self) -> list[tuple[str | None, TargetLayer]]:
        """All layers that get the leaves, of all targets, each with the name of its target."""
        return [*self.targets.items(), *((name, layer) for name, others in self.also.items() for layer in others)]


class PartLayout(NamedTuple):
    """The axes of a leaf and of what becomes of it, in einops notation, for people: ``i D N H -> i (N H) D, H flipped``.

    Attributes:
        stored: the leaf's axes, stacked axes included; or words in place of axes, such as ``as stored``.
        written: the result's axes; empty if they are not named.
        remark: what the letters do not show; may be empty.
    """

    stored: str
    written: str = ""
    remark: str = ""

    def __str__(self) -> str:
        arrow = f"{self.stored} -> {self.written}" if self.written else self.stored
        return f"{arrow}, {self.remark}" if self.remark else arrow


@dataclass(frozen=True, slots=True)
class Part:
    """What one leaf contributes to an output tensor.

    Attributes:
        leaf: name of the source leaf.
        ops: operations from the leaf to this part.
        rows: start and stop of the part along an axis of the output; None: it is the whole tensor.
        layout: the leaf's axes and the result's.
        at: which element of the leaf is used, such as ``i=3``; empty: the whole leaf.
        axes: letters and sizes of the axes that remain, as stored.
        groups: the same letters, one group per axis of the result.
        stored: names and sizes of all axes of the leaf, as stored, including the axes in `split_axes`.
        split_axes: names of the axes along which the leaf is split (stacked layers, several targets), in the order of `layout`.
        rule: the rule that makes it, with the path variants of this tree.
        axis: the axis of the output that `rows` refers to; -1 is the last one, along which leaves may also alternate.
        opening: number of the first operations, which select a layer, open composite axes, and select an element.
        taken: letters of the axes of which it is one element; the last operations of the opening take it, one each.
        every: distance of two of its elements along that axis; above 1, the parts of a tensor alternate.
    """

    leaf: str
    ops: tuple[Op, ...]
    rows: tuple[int, int] | None
    layout: PartLayout
    at: str
    axes: tuple[tuple[str, int], ...]
    groups: tuple[str, ...]
    stored: tuple[tuple[str, int], ...] = ()
    split_axes: tuple[str, ...] = ()
    rule: Rule | None = field(default=None, repr=False, compare=False)
    axis: int = 0
    opening: int = 0
    taken: tuple[str, ...] = ()
    every: int = 1

    @property
    def place(self) -> str:
        """Where it is along the axis, for people: ``0:4``, or ``1:8:2``; empty: it is the whole tensor."""
        if self.rows is None:
            return ""
        return ":".join(map(str, (*self.rows, self.every) if self.every > 1 else self.rows))

    def length(self, size: int) -> int:
        """Return its number of elements along the axis, which has `size` in the output."""
        return size if self.rows is None else len(range(*self.rows, self.every))

    def share(self, whole: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a view of what this part fills of the output tensor."""
        if self.rows is None:
            return whole
        taken = slice(*self.rows, self.every)
        return whole[..., taken] if self.axis < 0 else whole[(*[slice(None)] * self.axis, taken)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "leaf": self.leaf,
            "layout": str(self.layout),
            "at": self.at,
            "ops": [str(op) for op in self.ops],
            "rows": list(self.rows) if self.rows else None,
            **({"axis": self.axis} if self.axis else {}),
            **({"every": self.every} if self.every > 1 else {}),
        }


@dataclass(frozen=True)
class LayerLeaves:
    """The leaves of one layer whose tensors are computed, probed and diagnosed together, such as a recurrent layer.

    Attributes:
        rule: the rule, with the path variants of this tree.
        module: name of the target's module; of its tensor where the target has no module.
        leaves: role -> name of the leaf, and the operations that select this layer in a stack.
        suffix: suffix of the tensors' names in the module: ``l0``, ``l1_reverse``; may be empty.
        sizes: widths by the letters of the kind: ``I`` and ``H`` of a recurrent layer.
        inputs: of a recurrent layer: which element of the source's input each element of the target's is; empty: the same.
    """

    rule: Rule
    module: str
    leaves: Mapping[str, tuple[str, tuple[Op, ...]]]
    suffix: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """An output tensor.

    Attributes:
        name: name in the state_dict.
        spec: shape and dtype as written.
        parts: the leaves that it is made of, in the order of its rows; empty: no leaf holds it, see `value`.
        kind_name: the kind of layer.
        rule: position of the rule.
        arithmetic: what is computed on the values, as text; empty: the values are only moved.
        loses: what a cast loses, as text; empty: nothing.
        value: of a tensor without parts: one number for all elements; numbers in order; a table of positions; numbers of the
            rule; or the first inverse timescale and the logarithm of the factor between two.
        role: ``weight`` or ``bias``; of a recurrent layer ``weight_ih`` and so on.
        siblings: number of tensors with this spec that the rule makes for one layer, this one included.
        part: (k, n): its rows are the k-th of n parts of the tensor; `convert.planning.outputs` joins the parts.
        notes: notes for the user, such as rows that are left out.
        group: all leaves of the layer, where its tensors belong together, as those of a recurrent layer do.
        tied: of a tied table: name of the tensor that it equals; `kind_name` is then the kind of layer that uses it.
    """

    name: str
    spec: TensorSpec
    parts: tuple[Part, ...]
    kind_name: str
    rule: Position
    arithmetic: str = ""
    loses: str = ""
    value: tuple[float, float] | float | range | Sinusoids | Numbers | None = None
    role: str = "weight"
    siblings: int = 1
    part: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    group: LayerLeaves | None = field(default=None, repr=False, compare=False)
    tied: str = ""

    @property
    def layouts(self) -> tuple[str, ...]:
        """The different layouts of its parts."""
        return tuple(dict.fromkeys(str(part.layout) for part in self.parts))


@dataclass
class Matched:
    """The leaves that one rule claims: role -> (indices, choices) -> leaf name."""

    rule: Rule
    leaves: dict[str, dict[MatchKey, str]] = field(default_factory=dict)

    @property
    def indices(self) -> list[tuple[int, ...]]:
        """Values of the path's indices that have a leaf, sorted."""
        return sorted({indices for found in self.leaves.values() for indices, _ in found})


@dataclass(frozen=True)
class CompiledRule:
    """What a rule compiles to: its output tensors, and notes that belong to no tensor."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()


class CompileContext(Protocol):
    """What a kind may use to compile a rule; `convert.planning.compile.compiler.Compiler` implements it."""

    @property
    def dtype(self) -> str | None:
        """Dtype of floating-point tensors in the output; None keeps each leaf's."""

    @property
    def usual_dtype(self) -> str:
        """Dtype of the output's tensors that no leaf holds."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Hyperparameters that no leaf holds, as far as they are known."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of each axis letter of the rule file."""

    @property
    def custom_cells(self) -> bool:
        """Whether a recurrent cell that torch lacks may be written, for a module of this package."""

    def spec(self, leaf: str) -> TensorSpec:
        """Return shape and dtype of a leaf."""

    def tensors(self, matched: Matched, layer: TargetLayer, variant: str | None) -> Iterator[Step]:
        """Derive the output tensors from what the kind declares: one leaf, or several as rows, for each tensor."""


class PlanView(Protocol):
    """What a probe or a mistake may know of a plan and its checkpoint."""

    @property
    def target(self) -> str:
        """Name of the target."""

    @property
    def steps(self) -> Sequence[Step]:
        """All output tensors."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of each axis letter of the rule file."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Hyperparameters that no leaf holds."""

    @property
    def source(self) -> LeafReader:
        """The leaves that the steps read."""


@dataclass(frozen=True)
class ProbeSample:
    """One tensor of a converted file, and the weight in the checkpoint that it comes from.

    Attributes:
        plan: the plan that made it.
        step: the tensor.
        part: its share that is probed.
        rule, layer: the rule of the part, and the target of the rule.
        variant: of the rule's equation, where it has several.
        stored: the leaf, without stacked axes.
        operands: other leaves that the source computes the weight with (weight norm, spectral norm), without stacked axes.
        pair: the leaves of a low-rank pair that the plan merges into the weight; None: it merges none.
        written: what the part fills of the tensor in the file.
        precision: dtype of the second run; the first one is in float64.
        device: where torch runs.
        rng: for inputs.
        leaf: reads the leaf of another tensor of this layer, by the tensor's role, without stacked axes.
        tensor: reads another tensor of the file, by its name in the module.
    """

    plan: PlanView
    step: Step
    part: Part
    rule: Rule
    layer: TargetLayer
    variant: str | None
    stored: Array
    operands: tuple[Array, ...]
    pair: LowRankPair | None
    written: Array
    precision: str
    device: str
    rng: np.random.Generator
    leaf: Callable[[str], Array]
    tensor: Callable[[str], Array]


class LayerKind(Declaration):
    """A kind of layer: what it declares, how it compiles, how it is probed, which mistakes are known, how it is drafted.

    Subclasses are frozen dataclasses, one for each key in `convert.layers.KINDS`.
    """

    # Whether each row of the weight is used alone, so that some rows can be probed for all.
    rowwise: ClassVar[bool] = False
    # Whether the tensor may have whole numbers, truth values and complex numbers: no layer computes with it.
    any_dtype: ClassVar[bool] = False

    def compile(
        self, context: CompileContext, matched: Matched, layer: TargetLayer, variant: str | None
    ) -> CompiledRule:
        """Derive the output tensors of a rule, in the order of its leaves.

        Raises:
            MisfitError: the leaves contradict the rule, or the target cannot hold them.
        """
        return CompiledRule(tuple(context.tensors(matched, layer, variant)))

    @classmethod
    def draft(
        cls, context: DraftContext, layer: Layer, main: str | None, bias: str | None, either: bool = False
    ) -> DraftEntry:
        """Write the rule of a layer that is guessed to be of this kind.

        Args:
            context: the tree.
            layer: the module and its leaves.
            main, bias: the keys of the leaves; None where there is none.
            either: whether `main` may be the bias as well, as its name does not tell.
        """
        entry = DraftEntry(next(iter(layer.leaves.values())).leaves[0])
        if main is not None:
            context.say_leaves(entry, layer, main, bias)
        elif bias is not None:
            context.say_bias(entry, layer, bias, "")
        context.ask_target(entry, layer, {cls.kind_name: "guess: by its name"})
        return entry

    def probe(self, sample: ProbeSample) -> Probe:
        """Return the declared JAX operation with the stored weight, and torch's layer with the written one, ready to be run.

        A kind without an operation of its own compares the values.
        """
        return probe_of_values(sample.written, sample.stored)

    def probe_group(
        self, leaves: Mapping[str, Array], tensors: Mapping[str, Array], *, device: str, rng: np.random.Generator
    ) -> Probe:
        """Return the probe of a layer whose tensors belong together (`Step.group`).

        Args:
            leaves: role of the leaf -> values, without stacked axes.
            tensors: role of the tensor -> written values.
        """
        raise NotImplementedError

    def random_leaf(self, role: str, leaf: Array, rng: np.random.Generator) -> Array:
        """Return random values for a leaf of such a layer: those of the checkpoint may hide a difference, as zeros do."""
        return np.asarray(rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        """Yield the mistakes known for a tensor of this kind, the most frequent first.

        A step without a group has one part.
        """
        return iter(())

    def layout_mistake(self, right: tuple[str, ...], wrong: tuple[str, ...], stored: str) -> str:
        """Return the name of another order of the axes of a weight; empty where this kind has none.

        Args:
            right, wrong: letters of each axis of the target tensor.
            stored: letters of the leaf's axes.
        """
        return ""
