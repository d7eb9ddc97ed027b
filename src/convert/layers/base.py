"""What a rule is: a kind of layer, the source leaves that it consumes and the target tensors that it gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from convert.core.fields import Key, Record
from convert.core.ops import Op
from convert.core.path_pattern import Pattern, parse_pattern
from convert.core.yaml_nodes import Position
from convert.layers.weight_transforms import PARAMETRIZATIONS, Factor, Flattened, Rope

if TYPE_CHECKING:
    from convert.layers.weight_normalization import Normalized


@dataclass(frozen=True)
class Tied:
    """A second name of an embedding's table in the target's state_dict.

    Attributes:
        word: what the table is there: ``linear`` (a head), ``embedding``, or ``parameter``.
        path: the module, or the whole tensor name of a parameter.
    """

    word: str
    path: Pattern

    @property
    def tensor(self) -> Pattern:
        """The tensor's full name."""
        return self.path if self.word == "parameter" else parse_pattern(f"{self.path.text}.weight")


@dataclass(frozen=True)
class TargetLayer:
    """Where a rule's tensors go.

    Attributes:
        path: the module (``layers.{i}.norm``), or the whole tensor name for kinds with one tensor and no module.
        names: role (``weight``, ``bias``) -> name of the parameter within the module, where it is not the role.
        multiplies_by: for norms, the factor that the target's code applies: ``weight`` or ``1+weight``.
        computes: the equation or dimension numbers of the target's code, where it is not PyTorch's own layer.
        part: (k, n) when these rows are the k-th of n parts of the tensor, counted from 1; other rules make the others.
        rope: how the target's code pairs the features that RoPE turns, where the target says so.
        flattened: the order in which the target's code flattens the axes of a map, where the target says so.
        parametrization: how the target keeps a normalised weight's two tensors, where it does.
        packed_in: the torch.nn.MultiheadAttention that it is a projection of, where the rule is an `attention`.
        tied: of an embedding, where else the target has the same table.
        has: which of weight and bias the target's norm has, where the target says so.
    """

    path: Pattern
    names: Mapping[str, str] = field(default_factory=dict)
    multiplies_by: str = "weight"
    computes: Any = None
    part: tuple[int, int] | None = None
    rope: str | None = None
    flattened: str | None = None
    parametrization: str | None = None
    packed_in: Pattern | None = None
    tied: tuple[Tied, ...] = ()
    has: str | None = None


@dataclass(frozen=True)
class Constant:
    """A tensor of the target's module that no leaf holds, as the source does nothing with it.

    Attributes:
        role: of the tensor: ``weight``, ``bias``, or its own name.
        value: of all its elements.
        said: what it is and why, for a plan.
        dtype: of a single number; empty: it has the shape and the dtype of the tensors beside it.
    """

    role: str
    value: float
    said: str
    dtype: str = ""


@dataclass(frozen=True)
class Numbering:
    """How an index of the target follows from several of the source, as the digits of a number follow each other.

    Attributes:
        order: names of the source's indices, the slowest first; the last one counts through first.
        counts: how many values each of them has in the tree, the first (slowest) one left out; filled in when a rule is
            settled for a tree.
        offset: how many values come before, in another place.
        period: how many values the last index has by what the rules declare; None: as many as the tree shows.
    """

    order: tuple[str, ...]
    counts: tuple[int, ...] = ()
    offset: int = 0
    period: int | None = None

    def value(self, indices: Mapping[str, int]) -> int:
        """The target's index."""
        first, *rest = self.order
        number = indices[first]
        for name, count in zip(rest, self.counts, strict=True):
            number = number * count + indices[name]
        return number + self.offset


class Kind(ABC):
    """What a layer computes on both sides. Subclasses are frozen dataclasses, one for each key in `KINDS`.

    A kind only declares; `convert.planning.compile.compiler` derives the operations from what it declares.
    """

    doc: ClassVar[str]
    keys: ClassVar[Mapping[str, Key]]  # of a rule, besides those in SHARED
    hints: ClassVar[tuple[tuple[str, str], ...]] = ()  # for words of other libraries in place of `keys`
    target: ClassVar[Record | None]  # the long form of the target; None: the rule has no target
    fuses: ClassVar[bool] = False  # several sources may become the rows of one target
    leaf_keys: ClassVar[Mapping[str, str]] = {"bias": "bias"}  # key of a rule that is a path -> role of its leaves

    @classmethod
    @abstractmethod
    def read(cls, values: Mapping[str, Any]) -> Kind:
        """The kind, from the keys of its rule.

        Raises:
            ValueError: the keys contradict each other; the message is the bare fact.
        """

    @classmethod
    def layer(cls, values: Mapping[str, Any]) -> TargetLayer:
        """Where the rule's tensors go, from the keys of the long form of its target."""
        return TargetLayer(
            path=values.get("module") or values["name"],
            names={
                **{role: values[role] for role in ("weight", "bias") if role in values},
                **PARAMETRIZATIONS.get(values.get("parametrization", ""), {}),
            },
            multiplies_by=values.get("multiplies_by", "weight"),
            computes=values.get("einsum") or values.get("dimension_numbers"),
            part=values.get("part"),
            rope=values.get("rope"),
            flattened=values.get("flattened"),
            parametrization=values.get("parametrization"),
            tied=tuple(Tied(word, path) for word, paths in values.get("tied", {}).items() for path in paths),
            has=values.get("parameters"),
        )

    def patterns(self, start: Pattern) -> dict[str, Pattern]:
        """Role -> pattern of the leaves, but for the bias: `from` itself, or leaves below it."""
        return {"weight": start}

    def shared(self, role: str, shape: tuple[int, ...]) -> bool:
        """Whether a leaf with this role and shape serves all layers of a stack, and has no stacked axis itself."""
        return False

    @property
    def may_lack(self) -> frozenset[str]:
        """Roles whose leaves may be absent."""
        return frozenset()

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants that sizes, or the user, choose from; empty when there is nothing to choose."""
        return ()

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        """Letters of the axes of a leaf with this role and shape (stacked axes left out); None: unnamed, kept as stored.

        A dot stands for an axis of size 1 that has no letter.

        Raises:
            ValueError: a leaf of this shape cannot have this role; the message is the bare fact.
        """
        return None

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:  # noqa: B027 - most kinds have nothing to check
        """Whether the target can hold what the source has, as far as rules alone tell.

        Raises:
            ValueError: it cannot; the message is the bare fact.
        """

    def groups(self, role: str, letters: str, variant: str | None, layer: TargetLayer) -> tuple[str, ...]:
        """The axes of the target tensor, each a group of letters that are flattened into it, outermost first.

        A group without letters is an axis of size 1.
        """
        return tuple(letter for letter in letters if letter != ".")

    def split_axis(self, role: str, letters: str, variant: str | None) -> str:
        """The axis whose elements go to different targets, when a rule names more targets than sources.

        Raises:
            ValueError: this kind has none.
        """
        raise ValueError("it has fewer sources than targets, and this kind of layer cannot be split")

    def inner_axes(
        self, role: str, letters: str, shape: tuple[int, ...], sizes: Mapping[str, int]
    ) -> tuple[str, tuple[int, ...]]:
        """The axes that the stored ones are made of, where `groups` tears one apart.

        Raises:
            ValueError: a size does not divide; the message is the bare fact.
        """
        return letters, shape

    def turned(self, role: str, layer: TargetLayer) -> tuple[Op, ...]:
        """Movements on the target's axes."""
        return ()

    def compute(self, role: str, layer: TargetLayer) -> tuple[Op, ...]:
        """Arithmetic on the values, done in float32 or wider."""
        return ()

    def kept_rows(self, rows: int, facts: Mapping[str, Any], set_by_hand: Collection[str]) -> int:
        """How many of the `rows` of the target tensor are written; the others are padding that the rule lets go.

        Raises:
            ValueError: the number of rows is not one that the rule knows; the message is the bare fact.
        """
        return rows

    def constants(self, layer: TargetLayer) -> tuple[Constant, ...]:
        """Tensors that the target's module has and no leaf holds."""
        return ()

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        """What is no weight: activation, epsilon, the factor on either side."""
        return {}

    def sized_facts(self, layer: TargetLayer, sizes: Mapping[str, int]) -> dict[str, Any]:
        """More facts, which follow from the sizes of the file's letters."""
        return {}

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        """Full name of the target tensor."""
        return f"{path}.{layer.names.get(role, role)}"


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
    kind: Kind
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
