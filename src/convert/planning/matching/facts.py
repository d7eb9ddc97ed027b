"""What matching found, as far as findings follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from convert.checkpoints.source import Leaf
from convert.core.path_index import path_template
from convert.core.path_pattern import Pattern
from convert.layers import Rule
from convert.layers.base import Matched
from convert.planning.adapters.names import HalfPair, half_pairs
from convert.rules.file import RuleFile


@dataclass(frozen=True)
class LayerNumbers:
    """Layers that one leaf pattern of a rule with `index_from` provides.

    Attributes:
        matched: the rule and its leaves.
        name: the index of the target.
        role: of the leaves.
        numbers: values of the index for which there is a leaf.
    """

    matched: Matched
    name: str
    role: str
    numbers: frozenset[int]


@dataclass(frozen=True)
class MatchFacts:
    """The outcome of matching, as far as findings follow from it.

    Attributes:
        rules: the rule file, with the path variants of this tree.
        root: the prefix under which the paths of the rules were matched.
        leaves: all leaves of the checkpoint.
        matched: one for each rule that is not a `drop`.
        claims: leaf -> the first rule that matches it.
        rivals: leaf -> all rules that match it, where there are several.
        collisions: two leaves that match one rule with the same indices.
        domain: index name -> its values in the tree.
        types: list name -> layer -> types whose leaves the layer has.
        numbers: layers numbered through `index_from`.
        counts: index name -> number of its values.
    """

    rules: RuleFile
    root: str
    leaves: Mapping[str, Leaf]
    matched: Sequence[Matched]
    claims: Mapping[str, Rule]
    rivals: Mapping[str, Sequence[Rule]]
    collisions: Sequence[tuple[Rule, Pattern, str, str]]
    domain: Mapping[str, set[int]]
    types: Mapping[str, Mapping[int, set[str]]]
    numbers: Sequence[LayerNumbers]
    counts: Mapping[str, int]

    def full(self, path: Pattern | str) -> str:
        """Return a rule's path from the top of the tree."""
        return full_path(self.root, path)

    @cached_property
    def of_type(self) -> dict[str, tuple[str, set[int]]]:
        """Type of layers -> the index that numbers them, and the layers of this type."""
        return {
            word: (entry.index, {k for k, words in self.types[name].items() if word in words})
            for name, entry in self.rules.layer_types.items()
            for word in entry.leaves
        }

    @cached_property
    def halves(self) -> dict[str, HalfPair]:
        """Leaves of LoRA pairs whose other leaf is missing, while their weight is converted."""
        found = half_pairs(self.leaves).items()
        return {
            leaf: half for leaf, half in found if (rule := self.claims.get(half.base)) and not rule.kind.drop_reason
        }

    @cached_property
    def unclaimed(self) -> list[str]:
        """One leaf of each path template among those that no rule matches."""
        return sorted({path_template(name): name for name in self.leaves if name not in self.claims}.values())


def full_path(root: str, path: Pattern | str) -> str:
    """Return a rule's path from the top of the tree."""
    text = str(path)
    return text.removeprefix("/") if text.startswith("/") or not root else f"{root}/{text}"
