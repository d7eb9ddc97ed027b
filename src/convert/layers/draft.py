"""What a kind of layer drafts a rule from, and the lines of that rule.

`convert.drafting` groups the leaves of a tree and guesses what each layer is; the kind then writes its rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from convert.core.yaml_nodes import parse_scalar
from convert.layers.shared_keys import ASK

KERNELS = ("kernel", "w", "weight", "weights")  # names of a weight's leaf
NAME = "what is the module called in PyTorch?"
Siblings = tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True)
class PathKey:
    """One key of a path, or several keys whose leaves are grouped.

    Attributes:
        words: the key, or the keys in order.
        stem: what is in front of the index, when the keys are ``stem0`` to ``stem(n-1)``; None when they are no index.
        tail: what is behind the index.
    """

    words: tuple[str, ...]
    stem: str | None = None
    tail: str = ""


@dataclass(frozen=True)
class Group:
    """Leaves of one dtype and one shape, or of shapes that differ only in some sizes.

    Attributes:
        steps: their path.
        shape: of each; of the first where they differ.
        dtype: of each.
        leaves: their names, the last index or alternative running fastest.
        siblings: last key, shape and dtype of the leaves in the same dict; or path, shape and dtype of all leaves of the
            layer, if they lie in several dicts.
        varies: the axes whose sizes differ.
    """

    steps: tuple[PathKey, ...]
    shape: tuple[int, ...]
    dtype: str
    leaves: tuple[str, ...]
    siblings: Siblings = ()
    varies: frozenset[int] = frozenset()

    @property
    def shown(self) -> str:
        """``float32[12,3,4]``; ``*`` for sizes that differ."""
        sizes = ("*" if axis in self.varies else str(size) for axis, size in enumerate(self.shape))
        return f"{self.dtype}[{','.join(sizes)}]"


@dataclass(frozen=True)
class Layer:
    """The leaves of one dict of the tree, or of several dicts with the same structure.

    Attributes:
        steps: path of the dict.
        leaves: last key -> the leaves.
    """

    steps: tuple[PathKey, ...]
    leaves: Mapping[str, Group]

    @property
    def _last(self) -> PathKey | None:
        """The step that says what the layer is called."""
        return next((step for step in reversed(self.steps) if step.words[0] not in ("vars", "cell")), None)

    @property
    def hint(self) -> str:
        """What the layer is called, in small letters and without its number."""
        last = self._last
        word = "" if last is None else last.stem + last.tail if last.stem else last.words[0]
        return re.sub(r"[_0-9]+$", "", word).lower()

    @property
    def name(self) -> str:
        """What the layer is called, with the first of its numbers."""
        last = self._last
        if last is None:
            return ""
        return f"{last.stem}0{last.tail}" if last.stem is not None else last.words[0]

    @property
    def around(self) -> tuple[PathKey, ...]:
        """Path of what the layer is part of."""
        steps = self.steps[:-1] if self.steps and self.steps[-1].words == ("vars",) else self.steps
        return steps[:-1]

    def find(self, names: Sequence[str], axes: Sequence[int]) -> str | None:
        """The first of these keys whose leaf has one of these numbers of axes."""
        return next((n for n in names if n in self.leaves and len(self.leaves[n].shape) in axes), None)


# Alternatives for a rule, each a line (or several lines) with a remark.
Lines = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class DraftLine:
    """A line of a rule.

    Attributes:
        key, value, remark: of the line; without a key it is only what is below.
        below: alternatives.
        same: what the question is about: where several rules ask the same, the first asks, and the others refer to it.
        once: whether the alternatives are listed in the first rule that has them, and in no other.
        asks: whether it is a question, which the remark is.
    """

    key: str
    value: str
    remark: str
    below: tuple[tuple[str, str], ...] = ()
    same: Hashable = None
    once: bool = False
    asks: bool = False


@dataclass
class DraftEntry:
    """One rule of the draft: its lines, each a key with its value and a remark, and the alternatives below it.

    Attributes:
        first: the leaf that it stands at in the order of the tree; rules without one come last.
    """

    first: str = ""
    lines: list[DraftLine] = field(default_factory=list)

    def say(self, key: str, value: str, remark: str = "") -> None:
        self.lines.append(DraftLine(key, value, remark))

    def ask(self, key: str, question: str, alternatives: Lines, same: Hashable = None, value: str = ASK) -> None:
        """A question: `alternatives` are lines that could stand in its place.

        Questions of equal `key`, `alternatives` and `same` (if not None) are asked once. `value` has an ``ask`` in it.
        """
        self.lines.append(DraftLine(key, value, question, tuple(alternatives), same, asks=True))

    def offer(self, alternatives: Lines, once: bool = False) -> None:
        """Lines that could be added; with `once` only in the first rule that has them."""
        self.lines.append(DraftLine("", "", "", tuple(alternatives), once=once))


class AxisLetters(Protocol):
    """Letters for the axes of the drafted rules."""

    def named(self, role: str, size: int, again: int = 0) -> str:
        """Return the letter of an axis, by its role and size; with `again` another one of the same size."""


class DraftContext(Protocol):
    """What a kind may know of the tree, and what all rules have in common."""

    widths: set[int]  # sizes of vectors in the tree, such as norm scales
    channels: set[int]  # of the results of convolutions
    queried: set[tuple[PathKey, ...]]  # paths of modules that have a projection for queries, keys or values

    @property
    def letters(self) -> AxisLetters:
        """Letters for the axes."""

    def spec(self, group: Group) -> str:
        """Return shape and dtype of a leaf."""

    def module(self, steps: Sequence[PathKey]) -> str:
        """Return the name of a module if PyTorch's names were those of the tree."""

    def partner(self, layer: Layer, role: str) -> str | None:
        """Return the path of a leaf of the layer that lies elsewhere in the tree, such as ``mean`` of a batch norm."""

    def partner_shape(self, layer: Layer, role: str) -> tuple[int, ...] | None:
        """Return the shape of such a leaf."""

    def say_leaves(self, entry: DraftEntry, layer: Layer, main: str, bias: str | None, remark: str = "") -> None:
        """Write the keys `from`, `bias` and `stacked`."""

    def say_from(self, entry: DraftEntry, group: Group, remark: str) -> None:
        """Write the keys `from` and `stacked`, for a leaf alone."""

    def say_bias(self, entry: DraftEntry, layer: Layer, bias: str, remark: str) -> None:
        """Write the keys `bias` and `stacked`, for a layer that has no other leaf."""

    def say_normalized(self, entry: DraftEntry, layer: Layer) -> None:
        """Write the weight norm or spectral norm of the layer."""

    def ask_target(
        self, entry: DraftEntry, layer: Layer, words: Mapping[str, str], question: str = "", name: str = ""
    ) -> None:
        """Ask for the target: its name, and which of several kinds it is; the first is the guess."""


def plain(text: str) -> str:
    """A YAML scalar that reads as this text."""
    word = r"[A-Za-z0-9_./][A-Za-z0-9_./{},*\\~-]*"
    safe = re.fullmatch(rf"{word}( \+ {word})*", text) and isinstance(parse_scalar(text), str)
    return text if safe and text != ASK else json.dumps(text)


def flow(text: str) -> str:
    """A YAML scalar that reads as this text within braces."""
    return json.dumps(text) if re.search(r"[{}\[\],]", text) else plain(text)
