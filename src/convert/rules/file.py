"""The contents of a rule file, after parsing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from convert.core.path_pattern import Pattern, parse_pattern
from convert.core.yaml_nodes import Position, YamlNode
from convert.layers import Rule
from convert.rules.allowed import Allowed
from convert.rules.copies import Copies
from convert.rules.formula import SizeFormula
from convert.rules.path_variants import PathVariants
from convert.rules.placeholders import ASK as ASK
from convert.rules.placeholders import Question, questions


@dataclass(frozen=True)
class Axis:
    """The declaration of an axis letter or an index.

    Attributes:
        meaning: description, in words.
        equals: factors of its size: integers and letters; empty if any size is allowed.
        at: position of the declaration.
        varies: whether its size may differ from layer to layer.
        of_layers: indices of the layers in each of which it has one size, in all rules; empty: the leaves of one rule agree.
        behind: the letter whose size it has in the first layer, and the one whose size of the layer before it has in each other.
        divides: the letter whose size is a multiple of its size; empty: none.
    """

    meaning: str
    equals: tuple[int | str, ...]
    at: Position
    varies: bool = False
    of_layers: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    divides: str = ""

    def in_front(self, layer: int) -> str:
        """Return the letter, with the number of its layer, whose size the axis has in a layer; empty if it is `behind` nothing."""
        return (f"{self.behind[1]}[{layer - 1}]" if layer else self.behind[0]) if self.behind else ""


@dataclass(frozen=True)
class LayerTypes:
    """Types of layers, each recognized by leaves that only layers of this type have.

    Attributes:
        index: index that numbers the layers.
        leaves: type -> pattern of the leaves that only its layers have.
        at: position of the declaration.
    """

    index: str
    leaves: Mapping[str, Pattern]
    at: Position


@dataclass(frozen=True)
class Version:
    """A published model: the sizes by which it is recognized, and the facts that its tree or its PyTorch tensors do not hold.

    Attributes:
        choices: name of a choice -> the variant of its JAX code, which a tree shows and PyTorch's tensors do not.
        needs_confirmation: fact that another published model of these sizes has another value of -> note for the user.
    """

    name: str
    sizes: Mapping[str, int]
    facts: Mapping[str, Any]
    choices: Mapping[str, str] = field(default_factory=dict)
    needs_confirmation: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """A form in which the model's trees are published, for the way back from PyTorch.

    Attributes:
        name: value of ``--layout``.
        root: the prefix below which the leaves are, one of the file's `root`.
        variants: paths of the `path_variants` that it has; of the others it has the part as the rules write it.
        flat: whether the path of a module is one key, as in ``{"transformer/layer_0/attn": {"w": ...}}``.
        leaf: the last key of every leaf, which the rules leave out, such as the ``value`` of flax nnx; empty: none.
        at: position of the declaration; None: the form that follows from the rules alone.
    """

    name: str
    root: str
    variants: tuple[str, ...] = ()
    flat: bool = False
    leaf: str = ""
    at: Position | None = None


@dataclass(frozen=True)
class SidecarConfig:
    """A JSON file next to the checkpoint, or a gin file, that has facts which the tree does not contain.

    Attributes:
        file: name of the file.
        supported: key -> the values that the rules support.
        ignored: key that the source's code does not read -> why.
        adapted: key that the source's code reads in another way than the target's -> why.
        below: keys, one below the other, below which the file holds the facts of code with a configuration of its own, a few beside them;
            nothing of it is copied. Empty: the file has the target's keys.
        at: ``file:line`` of the declaration.
        sizes: numbers of the file as formulas of letters; the letter of each is the key.
        defaults: key -> the value with which the source's code computes where the file lacks the key.
        allowed: the values that a key may have that is no fact. It holds at the top of the file and in each mapping inside it.
    """

    file: str
    supported: Mapping[str, tuple[Any, ...]]
    ignored: Mapping[str, str]
    adapted: Mapping[str, str]
    below: tuple[str, ...]
    at: str
    sizes: tuple[SizeFormula, ...] = ()
    allowed: Mapping[str, Allowed] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_gin(self) -> bool:
        """Whether the file is one of gin: its keys are ``Class.parameter``, and nothing of it is copied."""
        return self.file.endswith(".gin")


@dataclass(frozen=True)
class DistinguishedBy:
    """A word of a text file next to the checkpoint, which distinguishes the model from others with the same tree.

    Attributes:
        file: name of the file.
        word: the word.
        has_word: whether the file of this model has it.
        at: position of the declaration.
    """

    file: str
    word: str
    has_word: bool
    at: str


@dataclass(frozen=True)
class Multiple:
    """A size that a target's code takes only as a multiple of another one.

    Attributes:
        of: the letter whose size divides it.
        because: the reason, in words.
        at: position of the declaration.
    """

    of: str
    because: str
    at: Position


@dataclass(frozen=True)
class Requirement:
    """The only value of a fact that a target's code supports.

    Attributes:
        value: the value.
        because: the reason, in words.
        at: position of the declaration.
    """

    value: Any
    because: str
    at: Position


STEMS = ("model", "diffusion_pytorch_model")  # of the files of weights: transformers' and diffusers'
TORCH = "torch"
FORMATS = (TORCH, "burn")  # layouts of an output; see `convert.planning.target_formats.registry`


@dataclass(frozen=True)
class Target:
    """Code that loads the output.

    Attributes:
        name: value of ``--to``.
        loads: class that loads the output, for people.
        config: contents of ``config.json``, with ``$name`` for sizes and facts; empty if the target has none.
        generation: contents of ``generation_config.json``, in the same way.
        rename_prefixes: prefix of module names in the rules -> prefix in this target.
        requires: fact -> the only value that this target's code supports.
        multiples: letter -> what its size must be a multiple of.
        format: layout of the output, one of `FORMATS`.
        same_tree: classes of other models that may have the same tree, which ``config.json`` or `distinguished_by` tells apart.
        files: name of the files of weights in a directory, without number and ending; one of `STEMS`.
        shared: name of a module or tensor -> its other names in the state_dict, as of a layer that several places use.
        differs: what its code computes otherwise than the source's, and no ``config.json`` can state.
    """

    name: str
    loads: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)
    rename_prefixes: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, Requirement] = field(default_factory=dict)
    format: str = TORCH
    same_tree: tuple[str, ...] = ()
    files: str = "model"
    differs: tuple[str, ...] = ()
    multiples: Mapping[str, Multiple] = field(default_factory=dict)
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def rename(self, path: Pattern) -> Pattern:
        """Return the name of a module in this target."""
        for written in sorted(self.rename_prefixes, key=len, reverse=True):
            if path.text == written or path.text.startswith(f"{written}."):
                return parse_pattern(self.rename_prefixes[written] + path.text.removeprefix(written))
        return path


def further_names(tensor: str, shared: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the other names of a tensor where it, or its module, is `shared` (see `Target`)."""
    for first, others in shared.items():
        if tensor == first or tensor.startswith(f"{first}."):
            yield from (other + tensor.removeprefix(first) for other in others)


MODULE = "module"  # the index of a rule with `each`: {module} is the path of a module


@dataclass(frozen=True)
class ModulesOfClass:
    """Where the modules of the target are listed, for rules with `each`.

    Attributes:
        table: name of the file, beside the rule file.
        key: key of the sidecar that names the class.
        classes: name of a class in the sidecar -> its name in the table, where they differ.
        renamed: keys of a path -> keys of the module's name, where they differ.
        renamed_with: keys of `renamed` -> what the sidecar states of the trees that have them.
        at: position of the declaration.
    """

    table: str
    key: str
    classes: Mapping[str, str]
    renamed: Mapping[str, str]
    renamed_with: Mapping[str, Mapping[str, str]]
    at: Position


@dataclass(frozen=True)
class SizeProduct:
    """A product of facts, letters and integers that is the size of an axis.

    Attributes:
        factors: names and numbers.
        letter: of the axis.
        at: position of the product in the rule file.
    """

    factors: tuple[int | str, ...]
    letter: str
    at: Position

    def __str__(self) -> str:
        return "*".join(map(str, self.factors))

    @property
    def names(self) -> tuple[str, ...]:
        """The facts and letters among the factors."""
        return tuple(factor for factor in self.factors if isinstance(factor, str))


@dataclass(frozen=True)
class RuleFile:
    """The rules of one model, after all checks. A file with several models gives several of these.

    Attributes:
        path: the file.
        model: name of the model.
        families: names that it shares with other models, of which the tree chooses one; the first is its own family.
        title: name for people.
        reference: ``module:function`` that builds the JAX and the PyTorch model for a check; empty without one.
        root: prefixes below which the leaves may be.
        leaf_names: names of the leaves in file order, for a checkpoint without names (Equinox).
        axes: letter or index -> its declaration.
        facts: hyperparameters that no leaf contains; ``ask`` if the rules do not know the value.
        layer_types: name of a list of types, one per layer -> the types.
        versions: published models.
        targets: name -> target; the first is the default.
        rules: the rules, in file order.
        text: text of the file.
        node: the parsed YAML of this model, with positions.
        copies: trees of which one is kept.
        path_variants: parts of paths that may have another form in a tree.
        sidecar: JSON file next to the checkpoint from which facts are read.
        distinguished_by: text file next to the checkpoint that tells this model from others of its tree.
        needs_confirmation: fact that no checkpoint contains -> note for the user.
        products: products of facts and letters that are the size of an axis.
        formulas: arithmetic with facts and letters that gives the size of an axis.
        modules: where the modules are listed that rules with `each` hold for.
        layouts: published forms of the tree; the first is the usual one.
        usual_variants: name of a choice -> the variant of a published model whose version names none.
        allowed: fact -> the values that it may have.
    """

    path: str
    model: str
    families: tuple[str, ...]
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
    node: YamlNode = field(repr=False, compare=False)
    copies: tuple[Copies, ...] = ()
    path_variants: tuple[PathVariants, ...] = ()
    sidecar: SidecarConfig | None = None
    distinguished_by: DistinguishedBy | None = None
    needs_confirmation: Mapping[str, str] = field(default_factory=dict)
    products: tuple[SizeProduct, ...] = ()
    formulas: tuple[SizeFormula, ...] = ()
    reference: str = ""
    modules: ModulesOfClass | None = None
    layouts: tuple[Layout, ...] = ()
    usual_variants: Mapping[str, str] = field(default_factory=dict)
    allowed: Mapping[str, Allowed] = field(default_factory=dict)

    @property
    def family(self) -> str | None:
        """Name that it shares with the other models of its kind."""
        return next(iter(self.families), None)

    @property
    def sha256(self) -> str:
        """Checksum of the text, for the provenance in the output."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def questions(self) -> tuple[Question, ...]:
        """Open questions, in file order. Rules with questions cannot convert anything."""
        open_copies = (Question(one.keep_at, "keep", " and ".join(one.of)) for one in self.copies if one.keep is None)
        of_rules = questions(
            (rule.at, str(rule.path) if rule.sources else rule.kind_name, rule.open_keys) for rule in self.rules
        )
        return (*open_copies, *of_rules)

    def supports(self, target: str) -> bool:
        """Whether every rule that matches leaves has a place for them in this target."""
        return all(rule.layer(target) for rule in self.rules if rule.sources and rule.kind.drop_reason is None)

    @property
    def supported_targets(self) -> tuple[str, ...]:
        """Names of the targets that these rules support; a target of a shared header may be of another model."""
        return tuple(name for name in self.targets if self.supports(name))

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """Names for which ``--set`` may choose a variant, and the variants."""
        return {rule.choice: rule.kind.variants for rule in self.rules if rule.choice}


_REFERENCE = re.compile(r"\$(?P<name>\w+(?:\[(?:0|-1)\])?)(?P<more>[+-][0-9]{1,18})?")


def parse_reference(value: Any) -> tuple[str, int] | None:
    """Return the name in a reference in `config`, and the number added to its value; None for any other value.

    >>> parse_reference("$window+1"), parse_reference("$H[-1]")
    (('window', 1), ('H[-1]', 0))
    """
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return (found["name"], int(found["more"] or 0)) if found else None


def references(value: Any) -> Iterator[str]:
    """Yield the names of all references in a value of `config`."""
    if isinstance(value, str) and value.startswith("$"):
        found = parse_reference(value)
        yield found[0] if found else value[1:]
    elif isinstance(value, dict):
        for child in value.values():
            yield from references(child)
    elif isinstance(value, list):
        for child in value:
            yield from references(child)
