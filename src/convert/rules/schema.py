"""The keys of a rule file, what each may hold, and the JSON Schema that follows from them."""

from __future__ import annotations

from typing import Any

from convert.core.fields import INTEGER, TEXT, Anything, Choice, Either, Field, Key, ListOf, MapOf, Record, Scalar
from convert.core.path_pattern import parse_pattern
from convert.core.yaml_nodes import Node
from convert.layers import KINDS
from convert.layers.shared_keys import PATTERN, SHARED, parse_fact, parse_letter
from convert.rules import attention_macro
from convert.rules.file import CONVENTIONS
from convert.rules.path_variants import VariantPath
from convert.rules.placeholders import ASK, LEFT_TO_THE_TARGET, STAND_INS


def _parse_factors(value: str | int) -> tuple[int | str, ...]:
    factors: list[int | str] = []
    for part in str(value).split("*"):
        text = part.strip()
        if text.isdecimal() and int(text) > 0:
            factors.append(int(text))
        elif text.isidentifier():
            factors.append(text)
        else:
            raise ValueError(f"expected a product of integers and letters such as 2*P, not {value!r}")
    return tuple(factors)


def parse_axis_name(text: str) -> str:
    """A letter, or the name of an index such as ``i`` or ``layer``.

    Raises:
        ValueError: something else.
    """
    if not text.isidentifier():
        raise ValueError(f"an axis is called by a letter (or an index by its name), not {text!r}")
    return text


_AXIS = Record(
    {
        "is": Key(TEXT, "what the axis means", required=True),
        "equals": Key(
            Scalar((str, int), "a product such as 2*P", _parse_factors),
            "its size, as a product of integers and letters",
        ),
    },
    "an axis",
)
_TYPES = Record(
    {
        "of": Key(Scalar(str, "the name of an index", parse_axis_name), "index of the layers", required=True),
        "leaves": Key(
            MapOf(PATTERN, "a mapping of a type to the leaves that only layers of this type have"),
            "type -> leaves that every layer of this type has, and no other",
            required=True,
        ),
    },
    "layer types",
)
_VERSION = Record(
    {
        "sizes": Key(
            MapOf(Scalar(int, "an integer")), "sizes by which the published model is recognised", required=True
        ),
        "facts": Key(MapOf(Anything()), "facts that hold for it"),
    },
    "a version",
)
_REQUIREMENT = Record(
    {
        "is": Key(Anything(), "the only value that the target's code computes with", required=True),
        "because": Key(TEXT, "why", required=True),
    },
    "a need of a target",
)
_TARGET = Record(
    {
        "loads": Key(TEXT, "the class that loads the result", required=True),
        "config": Key(MapOf(Anything()), "contents of config.json; $name is a size or a fact, $name+1 one more"),
        "generation": Key(MapOf(Anything()), "contents of generation_config.json, likewise"),
        "rename_prefixes": Key(
            MapOf(Scalar(str, "the beginning of a module's name")),
            "beginning of a module's name as the rules write it -> as this target has it",
        ),
        "conventions": Key(
            Choice(CONVENTIONS),
            "whose layers this target has: PyTorch's (the default), Burn's own, or Burn's for its PyTorchToBurnAdapter",
        ),
        "requires": Key(MapOf(_REQUIREMENT), "fact -> the only value that this target's code computes with, and why"),
    },
    "a target",
)


_SIDECAR = Record(
    {
        "file": Key(TEXT, "its name, such as config.json", required=True),
        "supported": Key(
            MapOf(ListOf(Anything())), "key -> the values of which these rules are true; any other is refused"
        ),
    },
    "a file beside the checkpoint",
)


def _parse_period(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError(f"a period is 1 or more, not {value}")
    return value if isinstance(value, int) else parse_fact(value)


_VARIANT_PATH = Record(
    {
        "path": Key(PATTERN, "what stands in the tree in place of the key", required=True),
        "stacked": Key(MapOf(INTEGER), "index -> axis of the leaf that stacks it"),
        "order": Key(
            ListOf(Scalar(str, "the name of an index")),
            "the indices that the layers are counted by, the slowest first: [s, p] counts p within s",
        ),
        "period": Key(
            Scalar((int, str), "a number, or a reference to a fact that repeats, such as $pattern", _parse_period),
            "how many values the last index of `order` has in every tree: a number, or the fact whose list repeats",
        ),
    },
    "a place",
)


class _Variant(Field):
    """A place: its path alone, with more, or several that are counted one after the other."""

    def read(self, node: Node) -> tuple[VariantPath, ...]:
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
    """The list of rules; its schema has one alternative per kind."""

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
        "model": Key(Scalar(str, "a name"), "the name to call these rules by", required=True),
        "family": Key(Scalar(str, "a name"), "a name shared by files of which the tree chooses one"),
        "title": Key(TEXT, "the model's name, for people", required=True),
        "reference": Key(
            TEXT, "`module:function` that builds the JAX and the PyTorch model which `convert check` compares"
        ),
        "root": Key(
            ListOf(Scalar((str, type(None)), "a path", lambda v: v or ""), or_one=True),
            "prefixes below which the leaves may lie",
        ),
        "leaf_names": Key(
            ListOf(Scalar((str, int), "a path", str)),
            "names of the leaves in the order of the file, where the checkpoint has none (Equinox)",
        ),
        "path_variants": Key(
            MapOf(ListOf(_Variant(), or_one=True), "a mapping of a part of a path to its variants", parse_pattern),
            "part of a path, as the rules write it -> what else may stand there in a tree",
        ),
        "axes": Key(MapOf(_AXIS, "a mapping of letters", parse_axis_name), "what each axis letter and index means"),
        "facts": Key(
            MapOf(Anything()), "what the source computes that is no weight; `ask` when only --set or a version knows"
        ),
        "sidecar": Key(
            _SIDECAR,
            "a JSON file beside the checkpoint: facts of the same names are read from it, and the rest of it goes over to the "
            "output's config.json",
        ),
        "must_divide": Key(
            MapOf(Scalar(str, "an axis letter", parse_letter)),
            "fact -> letter of a size of which it is a divisor, such as a number of heads that share a width; another is refused",
        ),
        "needs_confirmation": Key(
            MapOf(TEXT),
            "fact of the configuration -> what to know of it, as no tree tells its value; said until it is --set",
        ),
        "layer_types": Key(
            MapOf(_TYPES),
            "layers of several types: a name for the list of their types, and how to tell them apart",
        ),
        "versions": Key(MapOf(_VERSION), "published sizes"),
        "targets": Key(MapOf(_TARGET), "PyTorch code that loads the result; the first is the default", required=True),
        "rules": Key(_Rules(Anything()), "one entry per layer, or per group of layers that are alike", required=True),
    },
    "a rule file",
)


def _target_keys(word: str) -> Key:
    kind = KINDS[word]
    if kind.target is None:
        return Key(PATTERN, "paths of the leaves to leave out", required=True)
    layer = Either(PATTERN, kind.target)
    return Key(Either(PATTERN, MapOf(layer)), f"where it goes. {kind.doc}", required=True)


def rule_record(word: str) -> Record:
    """The keys of a rule of the kind that this word names."""
    kind = KINDS[word]
    shared = dict(SHARED)
    if kind.from_key == "none":
        shared = {}
    elif kind.from_key == "required":
        shared["from"] = Key(SHARED["from"].field, SHARED["from"].doc, required=True)
    return Record({word: _target_keys(word), **kind.keys, **shared}, f"a `{word}` rule", kind.hints)


def _rule_schema(word: str) -> dict[str, Any]:
    schema = rule_record(word).schema()
    kind = KINDS[word]
    keys = schema["properties"]
    pair = keys["plus"]["properties"] if "plus" in keys else {}
    for where, key in [*((keys, key) for key in keys if key in STAND_INS), *((pair, key) for key in pair if key == "scale")]:  # fmt: skip
        said = where[key]
        doc = said.pop("description")
        where[key] = {"description": doc, "anyOf": [said, {"const": ASK, "description": "left open"}]}
    if kind.target is not None:  # either one target for all, in short or long form, or one for each of several
        layer = Either(PATTERN, kind.target).schema()
        several = {
            "type": "object",
            "additionalProperties": layer,
            "propertyNames": {"not": {"enum": [*kind.target.keys]}},
        }
        schema["properties"][word] = {"description": f"where it goes. {kind.doc}", "anyOf": [layer, several]}
    schema |= kind.schema()
    if (left := LEFT_TO_THE_TARGET.get(word)) is not None:  # what it computes follows from the answer
        schema["required"] = [key for key in schema["required"] if key != left]
        schema["anyOf"] = [{"required": [left]}, {"properties": {word: {"const": ASK}}}]
    return {"title": word, **schema}


# A model may add to a target or to a version that the file describes, and the reverse.
SHARED_HEADER = RULE_FILE.part(targets=MapOf(_TARGET.part()), versions=MapOf(_VERSION.part()))
ONLY = ListOf(Scalar(str, "the name of a model"), or_one=True)


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a rule file, for editors."""
    file = RULE_FILE.schema()
    header = {key: value for key, value in file["properties"].items() if key not in ("model", "family", "rules")}
    for rule in file["properties"]["rules"]["items"]["oneOf"]:
        rule["properties"]["only_models"] = {
            "description": "models that the rule is for (with `models`)",
            **ONLY.schema(),
        }
    target = _TARGET.part().schema()
    header["targets"] = {"type": "object", "additionalProperties": target}
    file["properties"]["targets"] = {**file["properties"]["targets"], "additionalProperties": target}
    below = {"type": "string", "description": "key of config.json under which the config that is taken over stands"}
    targets = {
        "type": "object",
        "additionalProperties": {**target, "properties": {**target["properties"], "sidecar_key": below}},
    }
    taken = {"type": "string", "description": "a model above, whose header this one takes over"}
    versions = {**header["versions"], "additionalProperties": _VERSION.part().schema()}
    own = {**header, "extends": taken, "targets": {**header["targets"], **targets}, "versions": versions}
    model = {"type": "object", "additionalProperties": False, "properties": own}
    file["properties"]["models"] = {
        "description": "several models in one file: name -> what its header has besides, or instead of, the file's",
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
