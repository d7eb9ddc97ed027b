"""Several models in one rule file: each is read as a file of its own, its header over the shared one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from convert.core.errors import RuleError
from convert.core.fields import TEXT, nearest
from convert.core.yaml_nodes import Node
from convert.rules.schema import ONLY, SHARED_HEADER


def _merge(under: Node, over: Node) -> Node:
    """`over` on top of `under`: mappings merge key by key, anything else of `over` stands in place of what is below."""
    if not (under.is_mapping and over.is_mapping):
        return over
    assert under.keys_at is not None and over.keys_at is not None
    merged = {key: _merge(node, over.value[key]) if key in over.value else node for key, node in under.items()}
    return Node(
        {**merged, **{k: n for k, n in over.items() if k not in merged}}, under.at, {**under.keys_at, **over.keys_at}
    )


def _without(node: Node, *keys: str) -> Node:
    assert node.keys_at is not None
    kept = {key: child for key, child in node.items() if key not in keys}
    return Node(kept, node.at, {key: at for key, at in node.keys_at.items() if key in kept})


def _taken_over(node: Node, declared: Node, name: str) -> Node:
    """The header that a model has besides its own: the file's, and that of the model it is `like`."""
    under, own = _without(node, "models"), declared.value[name]
    if "extends" not in own.value:
        return under
    like = TEXT.read(own.value["extends"])
    known = list(itertools.takewhile(lambda other: other != name, declared.value))
    if like not in known:
        raise RuleError(
            f"{own.value['extends'].at}: {like!r} is no model above {name}{nearest(like, known)} (known: {', '.join(known) or 'none'})"
        )
    other = declared.value[like]
    return _merge(_lowered(_taken_over(node, declared, like), other), _above(other))


def _below(own: Node) -> dict[str, str]:
    """Target -> the key of config.json under which what it takes over stands."""
    targets = own.value.get("targets")
    if targets is None or not targets.is_mapping:
        return {}
    return {
        name: TEXT.read(target.value["sidecar_key"])
        for name, target in targets.items()
        if target.is_mapping and "sidecar_key" in target.value
    }


def _lowered(under: Node, own: Node) -> Node:
    """The header that a model takes over, its configs moved below the keys that the model names."""
    for name, key in _below(own).items():
        target = under.value["targets"].value.get(name) if "targets" in under.value else None
        if target is None or "config" not in target.value:
            at = own.value["targets"].value[name].value["sidecar_key"].at
            raise RuleError(
                f"{at}: there is no config of {name!r} to put below {key!r}; the file, or the model it is like, has none"
            )
        config = target.value["config"]
        under = _put(under, ("targets", name, "config"), Node({key: config}, config.at, {key: config.at}))
    return under


def _put(node: Node, path: tuple[str, ...], value: Node) -> Node:
    """The node with another value at a path that it has."""
    if not path:
        return value
    return Node({**node.value, path[0]: _put(node.value[path[0]], path[1:], value)}, node.at, node.keys_at)


def _above(own: Node) -> Node:
    """A model's own header without the words that say what it takes over."""
    own = _without(own, "extends")
    for name in _below(own):
        own = _put(own, ("targets", name), _without(own.value["targets"].value[name], "sidecar_key"))
    return own


def _check_shared(node: Node) -> None:
    """What models lay a mapping over is one, as theirs would just stand in its place otherwise; and the whole can be read, also
    what every model puts something else in place of."""

    def check(under: Node, *keys: str) -> Iterator[Node]:
        for key, found in under.items():
            if not keys or key in keys:
                if not found.is_mapping:
                    raise RuleError(f"{found.at}: expected a mapping, found {found}")
                yield found

    for found in check(
        node,
        "axes",
        "must_divide",
        "facts",
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


def each_model(node: Node) -> Iterator[Node]:
    """A file that declares several models, as a file for each: its header over the shared one, its rules alone."""
    if not node.is_mapping or "models" not in node.value:
        yield node
        return
    declared = node.value["models"]
    if not declared.is_mapping or not declared.value:
        raise RuleError(f"{declared.at}: expected a mapping of model names to what is their own, found {declared}")
    if "model" in node.value:
        raise RuleError(f"{node.keys_at['model']}: a file has `model` or `models`, not both")  # type: ignore[index]
    _check_shared(node)
    rules = node.value.get("rules")
    for rule in rules.value if rules is not None and isinstance(rules.value, tuple) else ():
        for name in ONLY.read(rule.value["only_models"]) if rule.is_mapping and "only_models" in rule.value else ():
            if name not in declared.value:
                raise RuleError(
                    f"{rule.value['only_models'].at}: {name!r} is no model of this file{nearest(name, declared.value)} "
                    f"(known: {', '.join(declared.value)})"
                )
    for name, own in declared.items():
        if not own.is_mapping:
            raise RuleError(f"{own.at}: expected what is {name}'s own (title, facts, versions, ...), found {own}")
        for key in ("model", "models", "rules", "family"):
            if key in own.value:
                raise RuleError(f"{own.keys_at[key]}: `{key}` stands at the top of the file, not in `models`")
        under = _lowered(_taken_over(node, declared, name), own)
        whole = _merge(under, _above(own))
        assert whole.keys_at is not None and declared.keys_at is not None
        kept = {"model": Node(name, declared.keys_at[name]), **whole.value}
        if rules is not None and isinstance(rules.value, tuple):
            mine = [
                r
                for r in rules.value
                if not (r.is_mapping and "only_models" in r.value) or name in ONLY.read(r.value["only_models"])
            ]
            kept["rules"] = Node(tuple(_without(r, "only_models") if r.is_mapping else r for r in mine), rules.at)
        yield Node(kept, node.at, {**whole.keys_at, "model": declared.keys_at[name]})
