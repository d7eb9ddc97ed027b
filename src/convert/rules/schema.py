"""Declare the keys of a rule file and their values, from which the JSON Schema follows."""

from __future__ import annotations

from typing import Any

from convert.core.errors import RuleError
from convert.core.fields import (
    FLAG,
    INTEGER,
    TEXT,
    Anything,
    Choice,
    Either,
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
from convert.layers import KINDS
from convert.layers.shared_keys import PATTERN, SHARED, parse_fact, parse_letter
from convert.rules import attention_macro
from convert.rules.file import FORMATS
from convert.rules.path_variants import VariantPath
from convert.rules.placeholders import ASK, OPTIONAL_WITHOUT_TARGET, REPLACEMENTS


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


_AXIS = Record(
    {
        "is": Key(TEXT, "Meaning of the axis, in words.", required=True, example="model width"),
        "equals": Key(
            Scalar((str, int), "a product such as 2*P", parse_factors),
            "Size of the axis, as a product of integers and letters such as 2*P. Default: any size.",
        ),
        "varies": Key(
            FLAG,
            "Whether the size may differ from layer to layer, as the channels of a ResNet do; the leaves of one layer agree. Default: false, and the letter is one size in the whole file.",
        ),
    },
    "an axis",
)
_TYPES = Record(
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
_VERSION = Record(
    {
        "sizes": Key(
            MapOf(Scalar(int, "an integer")),
            "Sizes of axes by which this published model is recognized.",
            required=True,
        ),
        "facts": Key(MapOf(Anything()), "Facts of this published model. Default: none."),
        "choices": Key(
            MapOf(TEXT),
            "Mapping of a `choice` of a rule to the variant that this published model has, for the way back to JAX. Default: that of the header's `choices`.",
        ),
    },
    "a version",
)
_LAYOUT = Record(
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
LOADS = "my_package.Model"
_TARGET = Record(
    {
        "loads": Key(TEXT, "Class that loads the output, for people.", required=True, example=LOADS),
        "config": Key(
            MapOf(Anything()),
            "Contents of config.json; $name is replaced by a size or a fact, $name+1 by one more. Default: no config.json.",
        ),
        "generation": Key(
            MapOf(Anything()), "Contents of generation_config.json, as in `config`. Default: no such file."
        ),
        "rename_prefixes": Key(
            MapOf(Scalar(str, "the beginning of a module's name")),
            "Mapping of a prefix of module names, as the rules write them, to the prefix that this target uses. Default: the same names.",
        ),
        "format": Key(Choice(FORMATS), "Layout of the output: that of PyTorch or of Burn. Default: torch."),
        "requires": Key(
            MapOf(_REQUIREMENT),
            "Mapping of a fact to the only value that this target's code supports, with the reason. Default: any value.",
        ),
        "same_tree": Key(
            ListOf(Scalar(str, "the name of a class"), or_one=True),
            "Classes of other models that may have the same tree; `architectures` in the sidecar says which one a checkpoint is. Default: none.",
        ),
    },
    "a target",
)


class _Targets(MapOf):
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


_SIDECAR = Record(
    {
        "file": Key(TEXT, "File name, such as config.json.", required=True, example="config.json"),
        "supported": Key(
            MapOf(ListOf(Anything())),
            "Mapping of a key to the values that these rules support; other values are rejected. Default: any value.",
        ),
        "ignored": Key(
            MapOf(TEXT),
            "Mapping of a key that the source's code does not read to the reason, for the user. The key is no fact and is not copied. Default: none.",
        ),
        "below": Key(
            TEXT,
            "Key below which the file holds the facts, in the words of the source's code; nothing is copied to the output. Default: the file is a config.json of the target's, whose other keys are copied.",
        ),
        "adapted": Key(
            MapOf(TEXT),
            "Mapping of a key that the source's code reads in another way than the target's to the reason, for the user. Default: none.",
        ),
    },
    "a sidecar file",
)


_MODULES = Record(
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
        "absent": Key(
            MapOf(TEXT, "a mapping of a path to a reason", parse_pattern),
            "Mapping of modules that the tree need not have to the reason. Default: none.",
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
    },
    "a path variant",
)
_TREE = Scalar((str, type(None)), "a path from the top of the tree", lambda v: (v or "").strip("/"))
_COPIES = Record(
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


class _Variant(Field):
    """A variant: a path alone, a path with more keys, or a list of paths whose layers are numbered one after the other."""

    def read(self, node: YamlNode) -> tuple[VariantPath, ...]:
        if isinstance(node.value, tuple):
            return tuple(place for child in node.value for place in self.read(child))
        if not node.is_mapping:
            return (VariantPath(PATTERN.read(node).text, {}),)
        values = _VARIANT_PATH.read(node)
        return (
            VariantPath(values["path"].text, values.get("stacked", {}), values.get("order", ()), values.get("period")),
        )

    def schema(self) -> dict[str, Any]:
        one = {"anyOf": [PATTERN.schema(), _VARIANT_PATH.schema()]}
        return {"anyOf": [*one["anyOf"], {"type": "array", "items": one}]}


class _Rules(ListOf):
    """The list of rules. Its schema has one alternative per kind."""

    def schema(self) -> dict[str, Any]:
        return {
            "type": "array",
            "items": {
                "oneOf": [
                    *(_rule_schema(word) for word in KINDS),
                    {"title": attention_macro.WORD, **attention_macro.RECORD.schema()},
                ]
            },
        }


RULE_FILE = Record(
    {
        "model": Key(
            Scalar(str, "a name"), "Name of the rules, as given on the command line.", required=True, example="my-model"
        ),
        "family": Key(
            ListOf(Scalar(str, "a name"), or_one=True),
            "Name that several models share, or several such names; the tree decides which of the models is used. Default: none.",
        ),
        "title": Key(TEXT, "Name of the model, for people.", required=True, example="My model"),
        "reference": Key(
            TEXT,
            "`module:function` that builds the JAX and the PyTorch model for `convert check`. Default: none, so the model level needs --reference.",
        ),
        "root": Key(
            ListOf(Scalar((str, type(None)), "a path", lambda v: v or ""), or_one=True),
            "Prefix of all paths in the rules, or several prefixes to try in order. Default: none.",
        ),
        "copies": Key(
            ListOf(_COPIES),
            "Trees with the same paths, of which a model needs one, such as params and ema_params. Default: none.",
        ),
        "leaf_names": Key(
            ListOf(Scalar((str, int), "a path", str)),
            "Names of the leaves in file order, for checkpoints that have no names (Equinox). Default: the checkpoint's names.",
        ),
        "path_variants": Key(
            MapOf(ListOf(_Variant(), or_one=True), "a mapping of a part of a path to its variants", parse_pattern),
            "Mapping of a part of a path, as the rules write it, to the other forms that it may have in a tree. Default: paths are as written.",
        ),
        "axes": Key(
            MapOf(_AXIS, "a mapping of letters", parse_axis_name),
            "Mapping of each axis letter or index to its meaning. Default: letters without a description.",
        ),
        "facts": Key(
            MapOf(Anything()),
            "Hyperparameters of the source that no weight shows; `ask` if only --set, a version or the sidecar knows the value. Default: none.",
        ),
        "sidecar": Key(
            _SIDECAR,
            "JSON file next to the checkpoint: facts with the same names are read from it, and its other keys are copied to the output's config.json. Default: no file is read.",
        ),
        "modules": Key(
            _MODULES, "List of the modules of the target, for rules with `each`. Default: rules name their modules."
        ),
        "products": Key(
            MapOf(
                Scalar(str, "an axis letter", parse_letter),
                "a mapping of products such as heads*H to letters",
                parse_factors,
            ),
            "Mapping of a product of facts and letters to the letter whose size it is, such as num_heads*H: E. A fact that the tree contradicts is refused, and the only unknown letter is computed. Default: none.",
        ),
        "needs_confirmation": Key(
            MapOf(TEXT),
            "Mapping of a fact that no checkpoint contains to a note, which the plan prints until --set gives the value. Default: no notes.",
        ),
        "layer_types": Key(
            MapOf(_TYPES),
            "Mapping of a list name to the types of layers in it, and the leaves by which each type is recognized. Default: all layers have one type.",
        ),
        "versions": Key(MapOf(_VERSION), "Published sizes of the model, by name, with their facts. Default: none."),
        "choices": Key(
            MapOf(TEXT),
            "Mapping of a `choice` of a rule to the variant of every published model, for the way back to JAX, where the tensors do not show it. Default: the versions know it, or --set.",
        ),
        "layouts": Key(
            ListOf(_LAYOUT),
            "Published forms of the tree, for the way back from PyTorch (--layout); the first is the default. Default: paths as written, below the first `root`.",
        ),
        "targets": Key(
            _Targets(_TARGET),
            "Code that loads the output, by the name for --to; the first target is the default.",
            required=True,
            example=f"{{mine: {{loads: {LOADS}}}}}",
        ),
        "rules": Key(
            _Rules(Anything()), "List of rules, one for each layer or group of similar layers.", required=True
        ),
    },
    "a rule file",
)


def _target_keys(word: str) -> Key:
    kind = KINDS[word]
    if kind.target is None:
        return Key(PATTERN, "Path pattern of the leaves that are not converted; may have wildcards.", required=True)
    layer = Either(PATTERN, kind.target)
    return Key(
        Either(PATTERN, MapOf(layer)),
        f"Target of the rule: one for all targets of the file, or one for each. {kind.doc}",
        required=True,
    )


def rule_record(word: str) -> Record:
    """Return the keys of a rule of this kind."""
    kind = KINDS[word]
    shared = dict(SHARED)
    if kind.from_key == "none":
        shared = {}
    elif kind.from_key == "required":
        shared["from"] = Key(SHARED["from"].field, SHARED["from"].doc, required=True, example="layers_{i}/dense/kernel")
    return Record({word: _target_keys(word), **kind.keys, **shared}, f"a `{word}` rule", kind.hints)


def _rule_schema(word: str) -> dict[str, Any]:
    schema = rule_record(word).schema()
    kind = KINDS[word]
    keys = schema["properties"]
    pair = keys["plus"]["properties"] if "plus" in keys else {}
    for where, key in [*((keys, key) for key in keys if key in REPLACEMENTS), *((pair, key) for key in pair if key == "scale")]:  # fmt: skip
        constraint = where[key]
        doc = constraint.pop("description")
        where[key] = {
            "description": doc,
            "anyOf": [constraint, {"const": ASK, "description": "Open question: not answered yet."}],
        }
    if kind.target is not None:  # one target for all, in short or long form, or one for each
        one = Either(PATTERN, kind.target).schema()
        copies = {
            "description": "Several targets, which all get the leaves.",
            "type": "array",
            "items": one,
            "minItems": 1,
        }
        layer = {"anyOf": [*one["anyOf"], copies]}
        several = {
            "type": "object",
            "additionalProperties": layer,
            "propertyNames": {"not": {"enum": [*kind.target.keys]}},
        }
        schema["properties"][word] = {
            "description": f"Target of the rule: one for all targets of the file, or one for each. {kind.doc}",
            "anyOf": [layer, several],
        }
    schema |= kind.schema()
    if (left := OPTIONAL_WITHOUT_TARGET.get(word)) is not None:  # the answer decides what the layer computes
        schema["required"] = [key for key in schema["required"] if key != left]
        schema["anyOf"] = [{"required": [left]}, {"properties": {word: {"const": ASK}}}]
    return {"title": word, **schema}


# The header that models share may have a part of a target or version; each model adds the rest.
SHARED_HEADER = RULE_FILE.part(targets=MapOf(_TARGET.part()), versions=MapOf(_VERSION.part()))
ONLY = ListOf(Scalar(str, "the name of a model"), or_one=True)


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a rule file, for editors."""
    file = RULE_FILE.schema()
    header = {key: value for key, value in file["properties"].items() if key not in ("model", "rules")}
    for rule in file["properties"]["rules"]["items"]["oneOf"]:
        rule["properties"]["only_models"] = {
            "description": "Models that the rule is for, in a file with `models`. Default: all.",
            **ONLY.schema(),
        }
    target = _TARGET.part().schema()
    header["targets"] = {"type": "object", "additionalProperties": target}
    file["properties"]["targets"] = {**file["properties"]["targets"], "additionalProperties": target}
    below = {
        "type": "string",
        "description": "Key of config.json below which the config of the extended model is put. Default: it is merged at the top.",
    }
    targets = {
        "type": "object",
        "additionalProperties": {**target, "properties": {**target["properties"], "sidecar_key": below}},
    }
    taken = {"type": "string", "description": "Model declared above whose header this one extends. Default: none."}
    versions = {**header["versions"], "additionalProperties": _VERSION.part().schema()}
    own = {**header, "extends": taken, "targets": {**header["targets"], **targets}, "versions": versions}
    model = {"type": "object", "additionalProperties": False, "properties": own}
    file["properties"]["models"] = {
        "description": "Several models in one file: mapping of a name to the header keys that this model adds or replaces.",
        "type": "object",
        "additionalProperties": model,
    }
    del file["required"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ckpt-convert rule file",
        "description": "Generated by `convert rules schema`; do not edit.",
        **file,
        "oneOf": [
            {
                "required": ["model", "title", "targets", "rules"],
                "properties": {"targets": {"additionalProperties": {"required": ["loads"]}}},
            },
            {"required": ["models", "rules"]},
        ],
    }
