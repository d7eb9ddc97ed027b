"""What a rule file says, once it is read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from convert.core.path_pattern import Pattern, parse_pattern
from convert.core.yaml_nodes import Node, Position
from convert.layers import Rule
from convert.rules.path_variants import PathVariants
from convert.rules.placeholders import ASK as ASK
from convert.rules.placeholders import Question, questions


@dataclass(frozen=True)
class Axis:
    """What an axis letter (or an index) means.

    Attributes:
        meaning: in words.
        equals: factors whose product is its size: integers and letters; empty when it is free.
        at: where it is declared.
    """

    meaning: str
    equals: tuple[int | str, ...]
    at: Position


@dataclass(frozen=True)
class LayerTypes:
    """Layers of several types, told apart by the leaves that they have.

    Attributes:
        index: of the layers.
        leaves: type -> leaves that only layers of this type have.
        at: where it is declared.
    """

    index: str
    leaves: Mapping[str, Pattern]
    at: Position


@dataclass(frozen=True)
class Version:
    """A published size: how to recognise it, and the facts that its tree does not hold."""

    name: str
    sizes: Mapping[str, int]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class SidecarConfig:
    """A file beside the checkpoint that says what the tree does not hold.

    Attributes:
        file: its name.
        supported: key -> the values of which these rules are true.
        at: ``file:line`` where it is declared.
    """

    file: str
    supported: Mapping[str, tuple[Any, ...]]
    at: str


@dataclass(frozen=True)
class Requirement:
    """A fact that a target's code cannot compute otherwise.

    Attributes:
        value: what the fact must be.
        because: why, in words.
        at: where it is declared.
    """

    value: Any
    because: str
    at: Position


TORCH = "torch"
CONVENTIONS = (TORCH, "burn", "burn_pytorch")  # whose layers a target has; see `convert.planning.burn.modules`


@dataclass(frozen=True)
class Target:
    """Code that loads the result: PyTorch's, or Burn's.

    Attributes:
        name: as given to ``--to``.
        loads: which class loads it, for people.
        config: contents of ``config.json``, with ``$name`` for sizes and facts; empty when the target has none.
        generation: contents of ``generation_config.json``, likewise.
        rename_prefixes: first keys of a module's name as the rules write it -> as this target has them.
        requires: fact -> the only value that this target's code computes with.
        conventions: one of `CONVENTIONS`.
    """

    name: str
    loads: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)
    rename_prefixes: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, Requirement] = field(default_factory=dict)
    conventions: str = TORCH

    def rename(self, path: Pattern) -> Pattern:
        """What this target calls a module."""
        for written in sorted(self.rename_prefixes, key=len, reverse=True):
            if path.text == written or path.text.startswith(f"{written}."):
                return parse_pattern(self.rename_prefixes[written] + path.text.removeprefix(written))
        return path


@dataclass(frozen=True)
class RuleFile:
    """The rules of one model, checked. A file that declares several gives one of these for each.

    Attributes:
        path: the file.
        model: its name; family: a name that it shares with files of which one is chosen by the tree.
        title: for people.
        reference: ``module:function`` that builds the JAX and the PyTorch model for a check; empty without one.
        root: prefixes below which the leaves may lie.
        layer_types: name of a list, one word for each layer -> what tells the types apart.
        leaf_names: names of the leaves, in the order of the file, for a checkpoint that holds no names (Equinox).
        path_variants: where the leaves of a layer lie, when the model comes in several layouts.
        sidecar: a file beside the checkpoint from which facts are read.
        must_divide: fact -> letter of a size that it must_divide: of attention heads that share a width, which no leaf shows.
        needs_confirmation: fact of the configuration -> what a person should know of it, as no tree tells its value.
        text: what the file says.
        node: the same with the line of every word, for this model.
    """

    path: str
    model: str
    family: str | None
    title: str
    root: tuple[str, ...]
    leaf_names: tuple[str, ...]
    axes: Mapping[str, Axis]
    facts: Mapping[str, Any]
    layer_types: Mapping[str, LayerTypes]
    versions: tuple[Version, ...]
    targets: Mapping[str, Target]
    rules: tuple[Rule, ...]
    text: str = field(repr=False)
    node: Node = field(repr=False, compare=False)
    path_variants: tuple[PathVariants, ...] = ()
    sidecar: SidecarConfig | None = None
    needs_confirmation: Mapping[str, str] = field(default_factory=dict)
    must_divide: Mapping[str, str] = field(default_factory=dict)
    reference: str = ""

    @property
    def sha256(self) -> str:
        """Checksum of the text, for the provenance."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def questions(self) -> tuple[Question, ...]:
        """What the rules leave open, in the order of the file; a file with questions converts nothing."""
        return questions(
            (rule.at, str(rule.path) if rule.sources else rule.word, rule.open_keys) for rule in self.rules
        )

    def supports(self, target: str) -> bool:
        """Whether every rule that takes leaves says where they go for this target."""
        return all(rule.layer(target) for rule in self.rules if rule.sources and rule.word != "drop")

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """Names that ``--set`` may give a variant for, and the variants."""
        return {rule.choice: rule.kind.variants for rule in self.rules if rule.choice}


_REFERENCE = re.compile(r"\$(?P<name>\w+)(?P<more>[+-]\d+)?")


def parse_reference(value: Any) -> tuple[str, int] | None:
    """The name in a value of `config`, and the number added to what it stands for; None when it is no reference.

    >>> parse_reference("$window+1")
    ('window', 1)
    """
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return (found["name"], int(found["more"] or 0)) if found else None


def references(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.startswith("$"):
        found = parse_reference(value)
        yield found[0] if found else value[1:]
    elif isinstance(value, dict):
        for child in value.values():
            yield from references(child)
    elif isinstance(value, list):
        for child in value:
            yield from references(child)
