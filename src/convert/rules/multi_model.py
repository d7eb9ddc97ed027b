"""Split a rule file with several models into one file per model: its header merged over the shared one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from convert.core.errors import RuleError
from convert.core.fields import TEXT, wrong_value
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.core.yaml_nodes import YamlNode
from convert.rules.schema import ONLY, SHARED_HEADER


def _merge(under: YamlNode, over: YamlNode) -> YamlNode:
    """Merge `over` into `under`: mappings merge key by key, any other value of `over` replaces that of `under`."""
    if not (under.is_mapping and over.is_mapping):
        return over
    assert under.keys_at is not None and over.keys_at is not None
    merged = {key: _merge(node, over.value[key]) if key in over.value else node for key, node in under.items()}
    return YamlNode(
        {**merged, **{k: n for k, n in over.items() if k not in merged}}, under.at, {**under.keys_at, **over.keys_at}
    )


def _without(node: YamlNode, *keys: str) -> YamlNode:
    assert node.keys_at is not None
    kept = {key: child for key, child in node.items() if key not in keys}
    return YamlNode(kept, node.at, {key: at for key, at in node.keys_at.items() if key in kept})


def _taken_over(node: YamlNode, declared: YamlNode, name: str) -> YamlNode:
    """Return the header that a model inherits: that of the file, and that of the model it `extends`."""
    under, own = _without(node, "models"), declared.value[name]
    if "extends" not in own.value:
        return under
    base = TEXT.read(own.value["extends"])
    known = list(itertools.takewhile(lambda other: other != name, declared.value))
    if base not in known:
        raise RuleError(_unknown_model(own.value["extends"], base, f"a model declared above {name}", known))
    other = declared.value[base]
    return _merge(_lowered(_taken_over(node, declared, base), other), _above(other))


def _unknown_model(node: YamlNode, name: str, expected: str, known: Iterable[str]) -> Finding:
    names = list(known)
    return Finding(
        "rule-unknown-name",
        rule=str(node.at),
        expected=f"{expected} ({', '.join(names) or 'none'})",
        got=repr(name),
        fix=did_you_mean(name, names),
    )


def _below(own: YamlNode) -> dict[str, str]:
    """Return target -> key of config.json below which the inherited config is put."""
    targets = own.value.get("targets")
    if targets is None or not targets.is_mapping:
        return {}
    return {
        name: TEXT.read(target.value["sidecar_key"])
        for name, target in targets.items()
        if target.is_mapping and "sidecar_key" in target.value
    }


def _lowered(under: YamlNode, own: YamlNode) -> YamlNode:
    """Return an inherited header, with its configs moved below the keys that the model names in `sidecar_key`."""
    for name, key in _below(own).items():
        targets = under.value.get("targets")
        target = targets.value.get(name) if targets is not None and targets.is_mapping else None
        if target is None or not target.is_mapping or "config" not in target.value:
            at = own.value["targets"].value[name].value["sidecar_key"].at
            raise RuleError(
                Finding(
                    "rule-unknown-name",
                    f"`sidecar_key: {key}` needs a config of the target {name!r} to extend",
                    rule=str(at),
                    expected="a `config` of this target in the file, or in the model that this one extends",
                    got="none",
                )
            )
        config = target.value["config"]
        under = _put(under, ("targets", name, "config"), YamlNode({key: config}, config.at, {key: config.at}))
    return under


def _put(node: YamlNode, path: tuple[str, ...], value: YamlNode) -> YamlNode:
    """Return the node with another value at a path that it has."""
    if not path:
        return value
    return YamlNode({**node.value, path[0]: _put(node.value[path[0]], path[1:], value)}, node.at, node.keys_at)


def _above(own: YamlNode) -> YamlNode:
    """Return the header of a model without `extends` and `sidecar_key`."""
    own = _without(own, "extends")
    for name in _below(own):
        own = _put(own, ("targets", name), _without(own.value["targets"].value[name], "sidecar_key"))
    return own


def _with_own_facts(whole: YamlNode, own: YamlNode) -> YamlNode:
    """Return a header without what `allowed` of the file says of facts that other models have."""
    if "allowed" not in whole.value or not whole.value["allowed"].is_mapping:
        return whole
    allowed = whole.value["allowed"]
    stated = (whole.value.get("facts"), whole.value.get("layer_types"), own.value.get("allowed"))
    has = [name for node in stated if node is not None and node.is_mapping for name in node.value]
    others = [name for name in allowed.value if name not in has]
    return _put(whole, ("allowed",), _without(allowed, *others))


def _check_shared(node: YamlNode) -> None:
    """Check the shared header by itself.

    Values that models merge into must be mappings, or the models would replace them; and a value is read even if every
    model replaces it.
    """

    def check(under: YamlNode, *keys: str) -> Iterator[YamlNode]:
        for key, found in under.items():
            if not keys or key in keys:
                if not found.is_mapping:
                    raise wrong_value(found, "a mapping")
                yield found

    for found in check(
        node,
        "axes",
        "products",
        "formulas",
        "facts",
        "allowed",
        "path_variants",
        "targets",
        "layer_types",
        "needs_confirmation",
        "versions",
    ):
        if found is node.value.get("targets"):
            for target in check(found):
                list(check(target, "config", "generation", "rename_prefixes"))
    SHARED_HEADER.read(_without(node, "models", "rules"))
    models = [one for one in node.value["models"].value.values() if one.is_mapping]
    facts = [
        one.value["facts"].value for one in (node, *models) if "facts" in one.value and one.value["facts"].is_mapping
    ]
    known = list(dict.fromkeys(name for one in facts for name in one))
    for name in node.value["allowed"].value if "allowed" in node.value else ():
        if name not in known:
            at = node.value["allowed"].keys_at[name]
            raise RuleError(
                Finding(
                    "rule-unknown-name",
                    f"`allowed` refers to {name!r}, which is a fact of no model",
                    rule=str(at),
                    expected=f"one of {', '.join(known)}",
                    fix=did_you_mean(name, known) or "declare it in `facts`",
                )
            )


def each_model(node: YamlNode) -> Iterator[YamlNode]:
    """Yield one file for each model of a file: the merged header, and the rules for this model."""
    if not node.is_mapping or "models" not in node.value:
        yield node
        return
    declared = node.value["models"]
    if not declared.is_mapping or not declared.value:
        raise wrong_value(declared, "a mapping of model names to their headers")
    if "model" in node.value:
        at = str(node.keys_at["model"])  # type: ignore[index]
        raise RuleError(
            Finding("rule-name-clash", "a file has `model` or `models`, not both", rule=at, fix="remove one")
        )
    _check_shared(node)
    rules = node.value.get("rules")
    for rule in rules.value if rules is not None and isinstance(rules.value, tuple) else ():
        for name in ONLY.read(rule.value["only_models"]) if rule.is_mapping and "only_models" in rule.value else ():
            if name not in declared.value:
                raise RuleError(_unknown_model(rule.value["only_models"], name, "a model of this file", declared.value))
    for name, own in declared.items():
        if not own.is_mapping:
            raise wrong_value(own, f"the header of {name} (title, facts, versions, ...)")
        for key in ("model", "models", "rules"):
            if key in own.value:
                problem = f"`{key}` belongs at the top of the file, not in `models`"
                raise RuleError(Finding("rule-unknown-key", problem, rule=str(own.keys_at[key]), fix="move it"))
        under = _lowered(_taken_over(node, declared, name), own)
        whole = _with_own_facts(_merge(under, _above(own)), own)
        assert whole.keys_at is not None and declared.keys_at is not None
        kept = {"model": YamlNode(name, declared.keys_at[name]), **whole.value}
        if rules is not None and isinstance(rules.value, tuple):
            mine = [
                r
                for r in rules.value
                if not (r.is_mapping and "only_models" in r.value) or name in ONLY.read(r.value["only_models"])
            ]
            kept["rules"] = YamlNode(tuple(_without(r, "only_models") if r.is_mapping else r for r in mine), rules.at)
        yield YamlNode(kept, node.at, {**whole.keys_at, "model": declared.keys_at[name]})
