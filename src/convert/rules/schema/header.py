"""The values of the keys above the rules: axes, layer types, versions, layouts, targets, a sidecar, modules, variants, copies."""

from __future__ import annotations

from typing import Any

from convert.core.errors import RuleError
from convert.core.fields import (
    FLAG,
    INTEGER,
    TEXT,
    Anything,
    Choice,
    Field,
    Key,
    ListOf,
    MapOf,
    Record,
    Scalar,
    gather,
)
from convert.core.findings import Finding
from convert.core.path_pattern import parse_pattern
from convert.core.yaml_nodes import YamlNode
from convert.layers.shared_keys import PATTERN, parse_fact, parse_letter
from convert.rules.allowed import ALLOWED
from convert.rules.file import FORMATS, STEMS
from convert.rules.formula import parse_formula
from convert.rules.path_variants import VariantPath


def parse_factors(value: str | int) -> tuple[int | str, ...]:
    """Parse a product of integers and names, such as ``2*P``.

    Raises:
        ValueError: something else.
    """
    factors: list[int | str] = []
    for part in str(value).split("*"):
        text = part.strip()
        if text.isdecimal() and len(text) < 19 and int(text) > 0:
            factors.append(int(text))
        elif text.isidentifier():
            factors.append(text)
        else:
            raise ValueError(f"expected a product of integers and letters such as 2*P, not {value!r}")
    return tuple(factors)


def parse_axis_name(text: str) -> str:
    """Check a letter, or the name of an index such as ``i`` or ``layer``.

    Raises:
        ValueError: something else.
    """
    if not text.isidentifier():
        raise ValueError(f"expected a letter for an axis, or the name of an index, not {text!r}")
    return text


def parse_varying(value: bool | str) -> bool | str:
    """Check the name of an index.

    Raises:
        ValueError: something else.
    """
    return parse_axis_name(value) if isinstance(value, str) else value


AXIS = Record(
    {
        "is": Key(TEXT, "Meaning of the axis, in words.", required=True, example="model width"),
        "equals": Key(
            Scalar((str, int), "a product such as 2*P", parse_factors),
            "Size of the axis, as a product of integers and letters such as 2*P. Default: any size.",
        ),
        "varies": Key(
            ListOf(Scalar((bool, str), "true, or the index of the layers", parse_varying), or_one=True),
            "Whether the size may differ from layer to layer, as the channels of a ResNet do; the leaves of one rule agree in a layer. With the index of the layers such as i, or a list of such, those of all rules agree. Default: false, and the letter is one size in the whole file.",
        ),
        "behind": Key(
            ListOf(Scalar(str, "the letter of an axis", parse_letter)),
            "Two letters, for rows that follow one another: the first layer has the size of the one, and each other layer that of the other in the layer before. Default: any size.",
        ),
        "divides": Key(
            Scalar(str, "the letter of an axis", parse_letter),
            "Letter whose size must be a multiple of the size of this axis, as query heads are of key heads. Default: any size.",
        ),
    },
    "an axis",
)
TYPES = Record(
    {
        "of": Key(
            Scalar(str, "the name of an index", parse_axis_name), "Index that numbers the layers.", required=True
        ),
        "leaves": Key(
            MapOf(PATTERN, "a mapping of a type to the leaves that only layers of this type have"),
            "Mapping of each type to a path that every layer of this type has, and no layer of another type.",
            required=True,
        ),
    },
    "layer types",
)
VERSION = Record(
    {
        "sizes": Key(
            MapOf(Scalar(int, "an integer")),
            "Sizes of axes by which this published model is recognized.",
            required=True,
        ),
        "facts": Key(MapOf(Anything()), "Facts of this published model. Default: none."),
        "needs_confirmation": Key(
            MapOf(TEXT),
            "As `needs_confirmation` of the file, for this published model: where another one has the same sizes, it says which facts differ. Default: that of the file.",
        ),
        "choices": Key(
            MapOf(TEXT),
            "Mapping of a `choice` of a rule to the variant that this published model has, for the way back to JAX. Default: that of the header's `choices`.",
        ),
    },
    "a version",
)
LAYOUT = Record(
    {
        "name": Key(Scalar(str, "a name"), "Name, for --layout.", required=True, example="NESTED"),
        "root": Key(
            Scalar((str, type(None)), "a path", lambda v: v or ""),
            "Prefix of the leaves, one of `root`. Default: the first.",
        ),
        "variants": Key(
            ListOf(PATTERN),
            "Paths of the `path_variants` that this layout has; of a list of paths the first. Default: paths are as written.",
        ),
        "flat": Key(
            FLAG,
            "Whether the path of a module is one key, with slashes, and a leaf's name the next. Default: false, each part is a key.",
        ),
        "leaf": Key(
            Scalar(str, "a key"),
            "Last key of every leaf, which the rules leave out: `value` in flax nnx. Default: none.",
        ),
    },
    "a layout",
)
_REQUIREMENT = Record(
    {
        "is": Key(Anything(), "The only value that the target's code supports.", required=True),
        "because": Key(TEXT, "Reason, in words.", required=True),
    },
    "a requirement of a target",
)
_MULTIPLE = Record(
    {
        "of": Key(Scalar(str, "the letter of an axis", parse_letter), "Letter whose size divides it.", required=True),
        "because": Key(TEXT, "Reason, in words.", required=True),
    },
    "a multiple of a target",
)
LOADS = "my_package.Model"
TARGET = Record(
    {
        "loads": Key(TEXT, "Class that loads the output, for people.", required=True, example=LOADS),
        "config": Key(
            MapOf(Anything()),
            "Contents of config.json; $name is replaced by a size or a fact, $name+1 by one more, $name[0] and $name[-1] by the size of an axis that varies in the first and the last layer. Default: no config.json.",
        ),
        "generation": Key(
            MapOf(Anything()), "Contents of generation_config.json, as in `config`. Default: no such file."
        ),
        "rename_prefixes": Key(
            MapOf(Scalar(str, "the beginning of a module's name")),
            "Mapping of a prefix of module names, as the rules write them, to the prefix that this target uses. Default: the same names.",
        ),
        "format": Key(Choice(FORMATS), "Layout of the output: that of PyTorch or of Burn. Default: torch."),
        "files": Key(
            Choice(STEMS),
            "Name of the files of weights in a directory, without number and ending. Default: model, as transformers has it.",
        ),
        "requires": Key(
            MapOf(_REQUIREMENT),
            "Mapping of a fact, or of a list in `layer_types`, to the only value that this target's code supports, with the reason. Default: any value.",
        ),
        "multiples": Key(
            MapOf(_MULTIPLE),
            "Mapping of a letter to the letter whose size must divide its size in this target's code, with the reason. Default: any size.",
        ),
        "shared": Key(
            MapOf(ListOf(Scalar(str, "the name of a module or tensor"))),
            "Mapping of a module or tensor to its other names in the state_dict, as of one layer that stands in several places. The output has the tensors under each name. A table that is tied to a head has `tied` in its rule. Default: each has one name.",
        ),
        "differs": Key(
            ListOf(TEXT, or_one=True),
            "What this target's code computes otherwise than the source's: notes of the plan, the summary and the model card. Default: nothing is known.",
        ),
        "same_tree": Key(
            ListOf(Scalar(str, "the name of a class"), or_one=True),
            "Classes of other models that may have the same tree; `architectures` in the sidecar says which one a checkpoint is. Default: none.",
        ),
    },
    "a target",
)


class Targets(MapOf):
    """The targets by name."""

    def read(self, node: YamlNode) -> dict[str, Any]:
        if not node.is_mapping:
            return super().read(node)
        wrong = {name: child for name, child in node.items() if not child.is_mapping}
        findings = [
            Finding(
                "rule-wrong-value",
                rule=str(child.at),
                path=f"targets: {name}",
                expected="a mapping",
                got=str(child),
                fix=f"write `{name}: {{loads: {LOADS}}}`",
            )
            for name, child in wrong.items()
        ]
        with gather(findings):
            values = super().read(
                YamlNode({name: child for name, child in node.items() if name not in wrong}, node.at, node.keys_at)
            )
        if findings:
            raise RuleError(*findings)
        return values


def _formula(text: str) -> str:
    parse_formula(text)
    return text


DISTINGUISHED_BY = Record(
    {
        "file": Key(TEXT, "File name, such as config.gin.", required=True, example="config.gin"),
        "with": Key(TEXT, "Word that the file of this model has. One of `with` and `without` is given."),
        "without": Key(TEXT, "Word that the file of this model does not have."),
    },
    "a file that tells a model from others",
)
SIDECAR = Record(
    {
        "file": Key(TEXT, "File name, such as config.json.", required=True, example="config.json"),
        "supported": Key(
            MapOf(ListOf(Anything())),
            "Mapping of a key to the values that these rules support; other values are rejected. An empty list takes that of `extends` back: `allowed` says the rest. Default: any value.",
        ),
        "ignored": Key(
            MapOf(TEXT),
            "Mapping of a key that the source's code does not read to the reason, for the user. The key is no fact and is not copied. Default: none.",
        ),
        "below": Key(
            ListOf(TEXT, or_one=True),
            "Key below which the file holds the facts (some may stand beside it), in the words of the source's code; nothing is copied to the output. Of several, each lies below the one before, where the file has it, and what lies deeper counts. Default: the file is a config.json of the target's, whose other keys are copied.",
        ),
        "adapted": Key(
            MapOf(TEXT),
            "Mapping of a key that the source's code reads in another way than the target's to the reason, for the user. Default: none.",
        ),
        "defaults": Key(
            MapOf(Anything()),
            "Mapping of a key to the value with which the source's code computes where the file lacks the key. Default: the file then says nothing.",
        ),
        "allowed": Key(
            MapOf(ALLOWED, "a mapping of keys to the values that they may have"),
            "Mapping of a key that is no fact to the values that it may have, as in `allowed` of the header; names in a bound are other keys, or letters. It also holds in the configurations inside the file. Default: any value.",
        ),
        "sizes": Key(
            MapOf(Scalar(str, "a formula of letters such as 2*F", _formula)),
            "Mapping of a key to the formula of letters whose value it states, such as hidden_dim: D; another number is refused. Default: the keys that `config` of a target has.",
        ),
    },
    "a sidecar file",
)


MODULES = Record(
    {
        "table": Key(
            TEXT,
            "File beside the rule file that lists the modules of each class.",
            required=True,
            example="transformers-classes.json",
        ),
        "key": Key(TEXT, "Key of the sidecar that names the class.", required=True, example="architectures"),
        "classes": Key(
            MapOf(TEXT),
            "Mapping of a class that the sidecar names to the class that loads the output. Default: the same name.",
        ),
        "renamed": Key(
            MapOf(TEXT, "a mapping of a key of paths to a key of names", parse_pattern),
            "Mapping of a key of paths to the key of the module's name. Default: names are paths.",
        ),
        "renamed_with": Key(
            MapOf(MapOf(TEXT)),
            "Mapping of a key of `renamed` to what the sidecar states of the trees that have it; the others have the key of the name. Default: every tree.",
        ),
    },
    "a list of modules",
)


def _parse_period(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError(f"expected a period of at least 1, not {value}")
    return value if isinstance(value, int) else parse_fact(value)


_VARIANT_PATH = Record(
    {
        "path": Key(PATTERN, "Path in the tree that replaces the key.", required=True),
        "stacked": Key(
            MapOf(INTEGER), "Mapping of an index to the axis of the leaf that stacks it. Default: nothing is stacked."
        ),
        "order": Key(
            ListOf(Scalar(str, "the name of an index")),
            "Indices that number the layers, the slowest first: [s, p] counts p within s. Default: the path has the index itself.",
        ),
        "period": Key(
            Scalar((int, str), "a number, or a reference to a fact that repeats, such as $pattern", _parse_period),
            "Number of values of the last index in `order`, or $name of a fact that repeats a list. Default: as many as the tree has.",
        ),
        "positions": Key(
            ListOf(INTEGER),
            "Which of the `period` values of the last index this path has: [5] of a path for each sixth layer, which need not have the index. Default: all.",
            example="[0, 1, 2]",
        ),
    },
    "a path variant",
)
_TREE = Scalar((str, type(None)), "a path from the top of the tree", lambda v: (v or "").strip("/"))
COPIES = Record(
    {
        "of": Key(
            ListOf(_TREE),
            "Paths of the trees. The rules name the first.",
            required=True,
            example="[params, ema_params]",
        ),
        "keep": Key(
            _TREE,
            "The tree that is converted; the others are dropped. `ask`: not decided yet.",
            required=True,
            example="params",
        ),
        "in": Key(
            ListOf(_TREE, or_one=True),
            "Paths of the networks that each have these trees. Default: the top of the tree.",
        ),
    },
    "copies of a tree",
)


class Variant(Field):
    """A variant: a path alone, a path with more keys, or a list of paths whose layers are numbered one after the other."""

    def read(self, node: YamlNode) -> tuple[VariantPath, ...]:
        if isinstance(node.value, tuple):
            return tuple(place for child in node.value for place in self.read(child))
        if not node.is_mapping:
            return (VariantPath(PATTERN.read(node).text, {}),)
        values = _VARIANT_PATH.read(node)
        return (
            VariantPath(
                values["path"].text,
                values.get("stacked", {}),
                values.get("order", ()),
                values.get("period"),
                tuple(values.get("positions", ())),
            ),
        )

    def schema(self) -> dict[str, Any]:
        one = {"anyOf": [PATTERN.schema(), _VARIANT_PATH.schema()]}
        return {"anyOf": [*one["anyOf"], {"type": "array", "items": one}]}
