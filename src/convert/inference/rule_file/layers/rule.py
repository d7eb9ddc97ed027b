"""What the rules say of one layer, before it is joined with others and printed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from convert.inference.derivation import Grade
from convert.inference.rule_file.layers.layout import Layout
from convert.layers import KINDS as LAYER_KINDS
from convert.layers.norm.layer_rms import Norm

NORMS = tuple(name for name, kind in LAYER_KINDS.items() if issubclass(kind, Norm))
WITH_BOTH = tuple(
    name for name, kind in LAYER_KINDS.items() if issubclass(kind, Norm) and kind.biased
)  # weight and bias, by default
TRANSPOSED = "conv_transpose"
CONVOLUTIONS = ("conv", TRANSPOSED)
SCALE = "weight_norm.scale"  # of a transposed convolution: torch has a number for each channel that comes in
ATTENTION = "attention"
PRESCALED = "prescaled_by"
PARAMETERS = "parameters"
IN_TURNS = "in turns"  # no key: the rows of each leaf in a head or group, where leaves lie in turns
BESIDE = "side by side"  # no key: how many leaves stand side by side, and along which axis
ALTERNATING = "alternating"  # no key: how many leaves alternate along the last axis
ORDERS = "orders"  # no key: of each of the columns that one leaf is, its start along the leaf's axis, and in which order it has the axes that the part is made of
COLUMNS = "columns"  # no key: how many columns each of several leaves has that stand side by side
ZEROS = "zeros before"  # no key: the axis along which a tensor begins with zeros, and how many
TAPS = "taps"  # no key: how many of the last axes are the sizes of a kernel
ADDED = " + number"  # no key, behind one that names a leaf: the number that the source adds to it
TERM_AXES = "axes of terms"  # no key: which axes of a sum each of its leaves has, as `Part.term_axes`
LOW_RANK = "low_rank"  # no key: how the two matrices of the equation are stored


COMPUTED = "it is computed from"  # why a tensor has no rule


def computed_from(leaves: Collection[str]) -> str:
    """Say of what leaves the source computes a tensor."""
    return f"{COMPUTED} {next(iter(leaves)) if len(set(leaves)) == 1 else 'several leaves'}"


class NoWordsError(Exception):
    """The rule language has no words for a tensor; the message says why."""


@dataclass(frozen=True)
class Source:
    """Where a tensor, or a block of its rows, comes from.

    Attributes:
        leaf: its name.
        layout: of the leaf in the block.
        contracted: axes of the leaf that a product sums over.
    """

    leaf: str
    layout: Layout
    contracted: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerRule:
    """What a rule says of one module.

    Attributes:
        kind_name: of the rule.
        module: of the target; the full name of the tensor for a parameter.
        sources: key of the rule (``from``, ``bias``, ...) -> the sources, of a fused tensor several, one block of rows each.
        names: role -> name of the tensor in the module, where it is another one.
        keys: what else the rule says of the source (``epsilon``, ``activation``, ...), as YAML.
        target_keys: what else it says of the target, as YAML.
        geometry: of a convolution: what it was given, and what was found of it.
        evidence: why it is believed, in one line.
        grade: the weakest of its tensors.
        leaves: of a cell, whose one source is the path that they lie below: their names.
        also: further modules that are made of the same leaves.
        also_as: of a parameter: the layouts of `also`; empty: that of the first.
        computed_from: of a weight that the source computes: the leaves beside the main one, until `computed` says how.
    """

    kind_name: str
    module: str
    sources: tuple[tuple[str, tuple[Source, ...]], ...]
    names: tuple[tuple[str, str], ...] = ()
    keys: tuple[tuple[str, str], ...] = ()
    target_keys: tuple[tuple[str, str], ...] = ()
    geometry: tuple[tuple[str, str], ...] = ()
    evidence: str = ""
    grade: Grade = Grade.DERIVED
    leaves: tuple[str, ...] = ()
    computed_from: tuple[str, ...] | None = None
    also: tuple[str, ...] = ()
    also_as: tuple[Layout, ...] = ()

    @property
    def main(self) -> tuple[Source, ...]:
        """The sources of the first key."""
        return self.sources[0][1]


def bias_apart(layer: LayerRule) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return the keys of a layer without those of its bias, and those that a `parameter` rule of the bias alone has."""
    own = f"bias{ADDED}"
    numbers = tuple((f"from{ADDED}", value) for key, value in layer.keys if key == own)
    factors = tuple(item for item in layer.keys if item[0] == PRESCALED)
    return tuple(item for item in layer.keys if item[0] != own), (*numbers, *factors)
