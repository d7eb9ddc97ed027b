"""The keys of a rule file, and its JSON Schema."""

from __future__ import annotations

from typing import Any

from convert.core.fields import (
    TEXT,
    Anything,
    Key,
    ListOf,
    MapOf,
    Record,
    Scalar,
)
from convert.core.path_pattern import parse_pattern
from convert.layers import KINDS
from convert.layers.shared_keys import parse_letter
from convert.rules import attention_macro
from convert.rules.allowed import ALLOWED
from convert.rules.formula import parse_formula
from convert.rules.schema.header import (
    AXIS,
    COPIES,
    DISTINGUISHED_BY,
    LAYOUT,
    LOADS,
    MODULES,
    SIDECAR,
    TARGET,
    TYPES,
    VERSION,
    Targets,
    Variant,
    parse_axis_name,
    parse_factors,
)
from convert.rules.schema.rule import rule_schema


class _Rules(ListOf):
    """The list of rules. Its schema has one alternative per kind."""

    def schema(self) -> dict[str, Any]:
        return {
            "type": "array",
            "items": {
                "oneOf": [
                    *(rule_schema(word) for word in KINDS),
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
            ListOf(COPIES),
            "Trees with the same paths, of which a model needs one, such as params and ema_params. Default: none.",
        ),
        "leaf_names": Key(
            ListOf(Scalar((str, int), "a path", str)),
            "Names of the leaves in file order, for checkpoints that have no names (Equinox). Default: the checkpoint's names.",
        ),
        "path_variants": Key(
            MapOf(ListOf(Variant(), or_one=True), "a mapping of a part of a path to its variants", parse_pattern),
            "Mapping of a part of a path, as the rules write it, to the other forms that it may have in a tree. Default: paths are as written.",
        ),
        "axes": Key(
            MapOf(AXIS, "a mapping of letters", parse_axis_name),
            "Mapping of each axis letter or index to its meaning. Default: letters without a description.",
        ),
        "facts": Key(
            MapOf(Anything()),
            "Hyperparameters of the source that no weight shows; `ask` if only --set, a version or the sidecar knows the value. Default: none.",
        ),
        "allowed": Key(
            MapOf(ALLOWED, "a mapping of facts to the values that they may have"),
            "Mapping of a fact to the values that a model can have, also by letters and other facts, such as experts_per_token: {at_least: 1, at_most: E}. Another value is refused, whether --set, the sidecar or the config.json of the tensors gives it. Default: values of the kind that the file gives it.",
        ),
        "sidecar": Key(
            SIDECAR,
            "JSON file next to the checkpoint, or T5X's config.gin: facts with the same names are read from it; the other keys of a JSON file are copied to the output's config.json. Default: no file is read.",
        ),
        "distinguished_by": Key(
            DISTINGUISHED_BY,
            "Text file next to the checkpoint, or in the folder above it, of which a word tells the model from others with the same tree: a file that says otherwise is refused. Default: the tree tells.",
        ),
        "modules": Key(
            MODULES, "List of the modules of the target, for rules with `each`. Default: rules name their modules."
        ),
        "products": Key(
            MapOf(
                Scalar(str, "an axis letter", parse_letter),
                "a mapping of products such as heads*H to letters",
                parse_factors,
            ),
            "Mapping of a product of facts and letters to the letter whose size it is, such as num_heads*H: E. A fact that the tree contradicts is refused, and the only unknown letter is computed; heads: N is the size of a letter that no leaf shows. Default: none.",
        ),
        "formulas": Key(
            MapOf(
                Scalar(str, "an axis letter", parse_letter),
                "a mapping of formulas such as int(mlp_ratio*W) to letters",
                parse_formula,
            ),
            "Mapping of a formula of facts and letters to the letter whose size it is, such as int(mlp_ratio*W): M; it may have + - * / //, int() and parentheses, and O[0] or O[-1] of a letter that varies. The size is a whole number. A fact that the tree contradicts is refused; one that is the only unknown has the only whole number that solves it. Default: none.",
        ),
        "needs_confirmation": Key(
            MapOf(TEXT),
            "Mapping of a fact that no checkpoint contains to a note, which the plan prints until --set gives the value. Default: no notes.",
        ),
        "layer_types": Key(
            MapOf(TYPES),
            "Mapping of a list name to the types of layers in it, and the leaves by which each type is recognized. Default: all layers have one type.",
        ),
        "versions": Key(MapOf(VERSION), "Published sizes of the model, by name, with their facts. Default: none."),
        "choices": Key(
            MapOf(TEXT),
            "Mapping of a `choice` of a rule to the variant of every published model, for the way back to JAX, where the tensors do not show it. Default: the versions know it, or --set.",
        ),
        "layouts": Key(
            ListOf(LAYOUT),
            "Published forms of the tree, for the way back from PyTorch (--layout); the first is the default. Default: paths as written, below the first `root`.",
        ),
        "targets": Key(
            Targets(TARGET),
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

# The header that models share may have a part of a target or version; each model adds the rest.
SHARED_HEADER = RULE_FILE.part(targets=MapOf(TARGET.part()), versions=MapOf(VERSION.part()))
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
    target = TARGET.part().schema()
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
    versions = {**header["versions"], "additionalProperties": VERSION.part().schema()}
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
