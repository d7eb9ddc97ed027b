"""A rule, the kind of its layer, and the steps that it compiles to. These types refer to each other, and so share a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from convert.core.ops import Op
from convert.core.path_pattern import Pattern
from convert.core.tensor_spec import TensorSpec
from convert.core.yaml_nodes import Position
from convert.layers.annotations import Factor, Flattened, Normalized, Rope
from convert.layers.declaration import Declaration
from convert.layers.draft import DraftContext, Entry, Layer
from convert.layers.leaf_reader import LeafReader
from convert.layers.mistake import Mistake
from convert.layers.probe import LowRankPair, Probe, probe_of_values
from convert.layers.target import Numbering, Sinusoids, TargetLayer

Array = np.ndarray[Any, np.dtype[Any]]
MatchKey = tuple[tuple[int, ...], tuple[int, ...]]  # values of the pattern's indices, and choices of its alternatives


@dataclass(frozen=True)
class Rule:
    """One entry of a rule file.

    Attributes:
        at: where it stands.
        word: its key in `KINDS`.
        kind: what the layer is.
        sources: role -> pattern of the leaves.
        stacked: index name -> axis of the leaf that enumerates it.
        targets: target name (None: all) -> layer.
        optional: whether some or all of its leaves may be absent.
        layer_type: the type of layers that it holds for, of those that the file's `layer_types` tell apart; None: every layer.
        when: for buffers, a fact that must be true for the target to have it.
        dtype: what its tensors are written in, whatever ``--dtype`` says.
        choice: name under which `kind.variants` is chosen.
        absent_if: a leaf in whose place these leaves stand: where it is, they may be absent.
        index_from: index of the target -> how it follows from indices of the source.
        prescaled_by: a factor that the source folds into the weight.
        rope: the axis that the source turns by RoPE next, and its pairs.
        flattened: an axis that the source makes of the axes of a map.
        normalized: what the source does to the weight at every call.
        asked: key -> where it says ``ask``; such a rule has its leaves and nothing else that is true (`convert.rules.placeholders`).
        short: kind of the rule that the file has in place of this one and of others, such as ``attention``.
    """

    at: Position
    word: str
    kind: LayerKind
    sources: Mapping[str, Pattern]
    stacked: Mapping[str, int]
    targets: Mapping[str | None, TargetLayer]
    optional: bool = False
    layer_type: str | None = None
    when: str | None = None
    dtype: str | None = None
    choice: str | None = None
    absent_if: Pattern | None = None
    index_from: Mapping[str, Numbering] = field(default_factory=dict)
    prescaled_by: Factor | None = None
    rope: Rope | None = None
    flattened: Flattened | None = None
    normalized: Normalized | None = None
    asked: Mapping[str, Position] = field(default_factory=dict)
    short: str = ""

    @property
    def open_keys(self) -> dict[str, Position]:
        """What it leaves open, by the keys that the file has."""
        return {self.short if self.short and key == self.word else key: at for key, at in self.asked.items()}

    def resolve(self, indices: Mapping[str, int]) -> dict[str, int]:
        """The indices of the source, and those of the target that follow from them."""
        return {**indices, **{name: numbering.value(indices) for name, numbering in self.index_from.items()}}

    @property
    def lead(self) -> str:
        """The role of its first leaves: ``weight``, or of a norm without a scale that of the first leaf that it has."""
        return next(iter(self.sources))

    @property
    def path(self) -> Pattern:
        """The pattern of its first leaves, which has the indices and alternatives of them all."""
        return self.sources[self.lead]

    def layer(self, target: str) -> TargetLayer | None:
        """Where the rule's tensors go for this target."""
        return self.targets.get(target) or self.targets.get(None)


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


@dataclass(frozen=True)
class LayerLeaves:
    """The leaves of one layer whose tensors are computed, probed and diagnosed together, such as a recurrent layer.

    Attributes:
        rule: as settled for this tree.
        module: name of the target's module, or of its tensor where there is no module.
        leaves: role -> name of the leaf, and the operations that take this layer out of a stack.
        suffix: of the tensors' names in the module: ``l0``, ``l1_reverse``; empty where there is none.
        sizes: widths by their letters in the kind: ``I`` and ``H`` of a recurrent layer.
    """

    rule: Rule
    module: str
    leaves: Mapping[str, tuple[str, tuple[Op, ...]]]
    suffix: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)


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
        group: for a layer whose tensors belong together, such as a recurrent one: all of its leaves.
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
    group: LayerLeaves | None = field(default=None, repr=False, compare=False)
    tied: str = ""

    @property
    def layouts(self) -> tuple[str, ...]:
        """The distinct layouts of its parts."""
        return tuple(dict.fromkeys(part.layout for part in self.parts))


@dataclass
class Matched:
    """The leaves that one rule claims: role -> (indices, choices) -> leaf name."""

    rule: Rule
    leaves: dict[str, dict[MatchKey, str]] = field(default_factory=dict)

    @property
    def indices(self) -> list[tuple[int, ...]]:
        """The values of the path's indices for which there is a leaf, sorted."""
        return sorted({indices for found in self.leaves.values() for indices, _ in found})


@dataclass(frozen=True)
class Compiled:
    """What a rule compiles to: its output tensors, and notes for the user that belong to none of them."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()


class CompileContext(Protocol):
    """What a kind may use to compile a rule; `convert.planning.compile.compiler.Compiler` implements it."""

    @property
    def dtype(self) -> str | None:
        """Dtype of floating-point tensors in the output; None keeps each leaf's."""

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

    def compile(self, context: CompileContext, matched: Matched, layer: TargetLayer, variant: str | None) -> Compiled:
        """Derive the output tensors of a rule, in the order of its leaves.

        Raises:
            MisfitError: the leaves contradict the rule, or the target cannot hold them.
        """
        return Compiled(tuple(context.tensors(matched, layer, variant)))

    @classmethod
    def draft(
        cls, context: DraftContext, layer: Layer, main: str | None, bias: str | None, either: bool = False
    ) -> Entry:
        """Write the rule of a layer that is guessed to be of this kind.

        Args:
            context: the tree.
            layer: the module and its leaves.
            main, bias: the keys of the leaves; None where there is none.
            either: whether `main` may be the bias as well, as its name does not tell.
        """
        entry = Entry(next(iter(layer.leaves.values())).leaves[0])
        if main is not None:
            context.say_leaves(entry, layer, main, bias)
        elif bias is not None:
            context.say_bias(entry, layer, bias, "")
        context.ask_target(entry, layer, {cls.word: "guess: by its name"})
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
