"""What a kind of layer declares: the keys of its rule, and how the axes of its leaves lie in the target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Self

from convert.core.axis_groups import AxisGroup, AxisNames
from convert.core.einsum import Projection
from convert.core.fields import Key, Record
from convert.core.ops import Op
from convert.core.path_pattern import Pattern
from convert.layers.low_rank import Pair
from convert.layers.target import Constant, TargetLayer, Tied
from convert.layers.weight_keys import PARAMETRIZATIONS


class Declaration(ABC):
    """What a layer computes on both sides, without any code that runs it.

    `convert.planning.compile.compiler` derives the operations from it.
    """

    kind_name: ClassVar[str]  # the key that names the kind in a rule
    doc: ClassVar[str]
    guide: ClassVar[str] = "layers"  # page of docs/guides that describes the kind
    module_names: ClassVar[str] = ""  # regular expression: lower-case names of this layer in JAX libraries
    keys: ClassVar[Mapping[str, Key]]  # keys of a rule; `shared_keys.SHARED` has those of all kinds
    hints: ClassVar[tuple[tuple[str, str], ...]] = ()  # word of another library -> which key to write instead
    target: ClassVar[Record | None]  # keys of the long form of the target; None: the rule has no target
    fuses: ClassVar[bool] = False  # whether several sources may become the rows of one target
    splits: ClassVar[bool] = False  # whether an axis of the leaf may be split among targets that its letter names
    packed: ClassVar[bool] = (
        False  # whether the axes of leaves have no letters, and the tensors other shapes, as a recurrent cell's
    )
    unit_axes: ClassVar[bool] = False  # whether the `axes` of a target may leave out axes of size 1
    from_key: ClassVar[str] = "required"  # the key `from`: required; optional; or none, where no leaf is matched
    adds: ClassVar[bool] = False  # whether `from` may be a sum of leaves
    joins: ClassVar[bool] = False  # whether `from` may be several leaves that stand one after the other along an axis
    indexed: ClassVar[bool] = False  # of a kind without leaves: whether its target may have indices and alternatives
    burn_config: ClassVar[str] = ""  # of a norm: the config struct of its module in Burn, if it only takes an epsilon
    settings: ClassVar[tuple[str, ...]] = ()  # names that --set knows because of this kind
    leaf_keys: ClassVar[Mapping[str, str]] = {"bias": "bias"}  # key of a rule that holds a path -> role of its leaves

    @classmethod
    @abstractmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Read the kind from the keys of its rule.

        Raises:
            ValueError: the keys contradict each other; the message is the reason.
        """

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Return constraints of the kind's keys on each other, as JSON Schema."""
        return {}

    @classmethod
    def layer(cls, values: Mapping[str, Any]) -> TargetLayer:
        """Read where the tensors go from the keys of the long form of the target."""
        named = values.get("axes")
        groups = named.groups if named is not None else {}
        letter, rows = next(((x, group) for x, group in groups.items() if group.letters is None), ("", None))
        axis = None if named is None or rows is None else _axis_of(letter, named)
        alternate = rows is not None and bool(rows.before) and not any((*rows.parts, rows.after))
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
            axes=named.opened if named is not None else None,
            rows=rows,
            along=None if axis == 0 and cls.fuses and not alternate else axis,
            has=values.get("parameters"),
            concatenated=values.get("concatenated", {}),
            zeros_before=values.get("zeros_before", {}),
            padding=values.get("padding", ()),
        )

    def patterns(self, start: Pattern) -> dict[str, Pattern]:
        """Return role -> pattern of the leaves but the bias: `from` itself, or leaves below it."""
        return {"weight": start}

    def shared(self, role: str, shape: tuple[int, ...]) -> bool:
        """Return whether a leaf with this role and shape belongs to all layers of a stack and has no stacked axis."""
        return False

    @property
    def may_lack(self) -> frozenset[str]:
        """Roles whose leaves may be absent."""
        return frozenset()

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants among which the sizes, or the user, choose; empty: there is one."""
        return ()

    @property
    def drop_reason(self) -> str | None:
        """Why the leaves are left out of the output; None: they are not."""
        return None

    @property
    def weight_axes(self) -> tuple[tuple[str, str], ...]:
        """For each variant: the letters of the weight's axes as stored, and those of its outputs; none where they have no letters."""
        return ()

    def rows_of_torch(self, outputs: str) -> str:
        """Return the letters of the first axis of the weight in torch, of whose elements its weight norm takes the norms.

        Args:
            outputs: letters of the outputs.
        """
        return outputs

    def linear_map(self, variant: str | None) -> Projection | None:
        """Return the equation of the weight, with a letter for each axis as stored; None where the layer is not linear in it.

        A convolution has that of one position, with its spatial axes as inputs.
        """
        return None

    @property
    def letters_used(self) -> str:
        """All letters of the file that the kind names; a dot is an axis of size 1."""
        return "".join(weight for weight, _ in self.weight_axes)

    @property
    def concatenable(self) -> str:
        """The letters of the axes whose parts may have another order in the target."""
        return "".join(weight for weight, _ in self.weight_axes)

    @property
    def facts_used(self) -> tuple[str, ...]:
        """Names of the facts that the kind refers to."""
        return ()

    def resolved(self, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> Self:
        """Return the kind with the numbers of the sizes and facts that its keys name.

        Raises:
            ValueError: one is unknown; the message is the reason.
        """
        return self

    @property
    def sizes_named(self) -> tuple[str, ...]:
        """Names of sizes or facts that `resolved` looks up."""
        return ()

    @property
    def pair(self) -> Pair | None:
        """The low-rank pair of leaves that is merged into the weight before it is compiled."""
        return None

    @property
    def merged(self) -> Self:
        """The kind of the rule once its pair is merged, or leaves whose axes differ are one."""
        return self

    def of_leaf(self, role: str) -> Self:
        """Return the kind with the axes of one leaf, where `from` has several whose axes differ."""
        return self

    @property
    def term_axes(self) -> tuple[str, ...]:
        """The letters of each leaf of a sum, where they are not those of the sum; a dot is an axis of size 1."""
        return ()

    @property
    def weight_rank(self) -> int:
        """Number of axes of the target's weight."""
        return 2

    def check_normalized(self, role: str) -> None:  # noqa: B027 - most kinds have nothing to check
        """Check that a weight norm or spectral norm (`role`) of the weight can be computed.

        Raises:
            ValueError: it cannot; the message is the reason.
        """

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        """Return the letters of the axes of a leaf, stacked axes excluded; None: unnamed, kept as stored.

        A dot is an axis of size 1 without a letter.

        Raises:
            ValueError: a leaf of this shape cannot have this role; the message is the reason.
        """
        return None

    def rank(self, role: str, variant: str | None) -> int | None:
        """Return how many axes a leaf has in JAX code, stacked axes excluded; None: `letters` accepts one number only."""
        return None

    def axis_groups(self, variant: str | None) -> Mapping[str, AxisGroup]:
        """Return the letters of `letters` that stand for a composite axis, and what it is made of."""
        return {}

    @property
    def parts(self) -> int:
        """Number of parts that a leaf holds one after the other, where an axis is a sum of parts; 0: none is."""
        return 0

    def part(self, k: int) -> Self:
        """Return the kind of the k-th of `parts`."""
        raise NotImplementedError

    def implied_sizes(self, role: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int, str]]:
        """Yield the sizes that a leaf of this shape implies for letters that are none of its axes: letter, size, what the leaf holds."""
        return iter(())

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:  # noqa: B027 - most kinds have nothing to check
        """Check that the target can hold what the source has, as far as the rule alone shows.

        Raises:
            ValueError: it cannot; the message is the reason.
        """

    def groups(self, role: str, letters: str, variant: str | None, layer: TargetLayer) -> tuple[str, ...]:
        """Return the axes of the target tensor, each as the group of letters that are flattened into it, outermost first.

        An empty group is an axis of size 1.
        """
        return tuple(letter for letter in letters if letter != ".")

    def split_axis(self, role: str, letters: str, variant: str | None) -> str:
        """Return the axis whose elements go to different targets, where a rule names more targets than sources.

        Raises:
            ValueError: this kind has none.
        """
        raise ValueError("it has fewer sources than targets, and this kind of layer cannot be split")

    def inner_axes(
        self, role: str, letters: str, shape: tuple[int, ...], sizes: Mapping[str, int]
    ) -> tuple[str, tuple[int, ...]]:
        """Split stored axes into the axes that `groups` uses, where it splits one.

        Raises:
            ValueError: a size does not divide; the message is the reason.
        """
        return letters, shape

    def turned(self, role: str, layer: TargetLayer) -> tuple[Op, ...]:
        """Return operations that move values along the target's axes."""
        return ()

    def compute(self, role: str, layer: TargetLayer) -> tuple[Op, ...]:
        """Return arithmetic on the values; it is computed in float32 or wider."""
        return ()

    def kept_rows(self, rows: int, facts: Mapping[str, Any], set_by_hand: Collection[str]) -> tuple[int, str]:
        """Return how many of the `rows` of the target tensor are written, and why the others are not.

        Raises:
            ValueError: the number of rows is not one that the rule knows; the message is the reason.
        """
        return rows, ""

    def constants(self, layer: TargetLayer) -> tuple[Constant, ...]:
        """Return the tensors of the target's module that no leaf holds."""
        return ()

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        """Return hyperparameters: activation, epsilon, the factor on either side."""
        return {}

    def sized_facts(self, layer: TargetLayer, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return more hyperparameters, which depend on the sizes of the letters."""
        return {}

    def leaf_shape(self, role: str, tensor: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a leaf whose axes have no letters, without stacked axes, from that of the first tensor it is in.

        Raises:
            KeyError, IndexError: no leaf has such a tensor.
        """
        return tensor

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        """Return the full name of the target tensor."""
        return f"{path}.{layer.names.get(role, role)}"


def _axis_of(letter: str, names: AxisNames) -> int:
    """Return the number of the axis with this letter; -1 of the last one."""
    axis = list(names.letters).index(letter)
    return -1 if 0 < axis == len(names.letters) - 1 else axis
