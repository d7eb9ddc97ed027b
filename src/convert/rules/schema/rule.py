"""The keys of a rule, by its kind."""

from __future__ import annotations

from typing import Any

from convert.core.fields import (
    Either,
    Key,
    ListOf,
    MapOf,
    Record,
)
from convert.layers import KINDS
from convert.layers.leaf_sums import SUM
from convert.layers.shared_keys import CONCATENATED, FROM_SEVERAL, FROM_SUM, PATTERN, SHARED
from convert.rules.placeholders import ASK, OPTIONAL_WITHOUT_TARGET, REPLACEMENTS


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
        field, doc = SHARED["from"].field, SHARED["from"].doc
        if kind.adds:
            field, doc = SUM, f"{doc.removesuffix('.')}{FROM_SUM}."
        if kind.joins:
            field, doc = ListOf(PATTERN, or_one=True), f"{doc.removesuffix('.')}{FROM_SEVERAL}."
        shared["from"] = Key(field, doc, required=True, example="layers_{i}/dense/kernel")
    if kind.target is not None and "concatenated" in kind.target.keys:
        shared["concatenated"] = CONCATENATED
    return Record({word: _target_keys(word), **kind.keys, **shared}, f"a `{word}` rule", kind.hints)


def rule_schema(word: str) -> dict[str, Any]:
    """Return the JSON Schema of a rule of this kind."""
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
