"""What a rule file must be to make sense, whatever the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from convert.core.errors import RuleError
from convert.core.fields import nearest
from convert.core.yaml_nodes import Node
from convert.layers import Rule
from convert.layers.annotations import BIAS_U, V
from convert.layers.base import LayerKind
from convert.layers.low_rank import PLUS_FIRST, PLUS_SECOND, SECOND
from convert.layers.weight_normalization import check_normalized
from convert.layers.weight_transforms import check_flattened, check_rope
from convert.rules.file import LayerTypes

ROLES = {SECOND: "times", PLUS_FIRST: "plus: from", PLUS_SECOND: "plus: times"}


def _key_of(role: str, kind: LayerKind, node: Node) -> tuple[str, Node]:
    """What the path of the leaves of this role is called in a rule, and the path."""
    if role in (PLUS_FIRST, PLUS_SECOND):
        return ROLES[role], node.value["plus"].value["from" if role == PLUS_FIRST else "times"]
    if role in (V, BIAS_U):
        key = "v" if role == V else "bias"
        return f"spectral_norm: {key}", node.value["spectral_norm"].value[key]
    word = ROLES.get(role) or next((key for key, of in (*kind.leaf_keys.items(), (role, role)) if of == role), "from")
    return word, node.value[word if word in node.value else "from"]


def check_rule(rule: Rule, node: Node) -> None:
    """Everything about one rule that needs no checkpoint.

    Raises:
        RuleError: it contradicts itself.
    """
    _check_leaves(rule, node)
    _check_absent_if(rule, node)


def _check_leaves(rule: Rule, node: Node) -> None:
    if not rule.sources:
        for layer in rule.targets.values():
            if layer.path.wild or layer.path.indices or layer.path.groups:
                raise RuleError(f"{node.at}: {layer.path} is not the name of one tensor; a `{rule.word}` fills one")
    if rule.word == "drop" or not rule.sources:
        return
    weight = rule.path
    lead = "from" if "from" in node.value else _key_of(rule.lead, rule.kind, node)[0]
    for role, pattern in rule.sources.items():
        said, key = _key_of(role, rule.kind, node)
        if pattern.wild:
            raise RuleError(
                f"{key.at}: {pattern} has a wildcard; name the leaves with {{i}} and {{a,b}} (only `drop` takes wildcards)"
            )
        if pattern.indices != weight.indices or [len(g.words) for g in pattern.groups] != [
            len(g.words) for g in weight.groups
        ]:
            raise RuleError(
                f"{key.at}: `{said}` must have the same indices and as many alternatives as `{lead}`, in the same order"
            )
    if len(set(rule.stacked.values())) < len(rule.stacked):
        raise RuleError(f"{node.value['stacked'].at}: two indices are stacked on one axis; each has an axis of its own")
    clash = sorted(set(weight.indices) & set(rule.stacked))
    if clash:
        raise RuleError(f"{node.at}: {clash[0]} is both in the path and stacked on an axis")
    sizes = [len(g.words) for g in weight.groups]
    for name, layer in rule.targets.items() if rule.word not in rule.asked else ():
        of = f" (target {name})" if name else ""
        counted = {name for numbering in rule.index_from.values() for name in numbering.order}
        known = {*weight.indices, *rule.stacked}
        if strange := sorted(counted - known):
            raise RuleError(f"{node.at}: {strange[0]} of `index_from` is neither in the path nor stacked on an axis")
        known = (known - counted) | set(rule.index_from)
        if layer.path.wild:
            raise RuleError(f"{node.at}: the target {layer.path} has a wildcard{of}")
        if set(layer.path.indices) != known:
            raise RuleError(
                f"{node.at}: the source has the indices {braces(known)} and the target {braces(layer.path.indices)}{of}; "
                "each index of the source must be in the target, or two leaves would become one tensor"
            )
        if rule.asked:
            continue  # what is asked for would be needed
        try:
            rule.kind.check_target(layer, weight)
            check_rope(rule)
            check_flattened(rule)
            check_normalized(rule)
        except ValueError as error:
            raise RuleError(f"{node.at}: {error}{of}") from None
        to = [len(g.words) for g in layer.path.groups]
        fused = bool(sizes) and to == sizes[:-1]
        split = bool(to) and to[:-1] == sizes
        if fused and not rule.kind.fuses:
            raise RuleError(
                f"{node.at}: {weight} lists more leaves than {layer.path} has tensors, and a `{rule.word}` cannot be fused{of}"
            )
        if not (to == sizes or fused or split):
            raise RuleError(
                f"{node.at}: the alternatives of {weight} and {layer.path} do not pair up{of}: as many on both sides, "
                "or one group less on the target to fuse its members, or one more to split"
            )


def braces(names: object) -> str:
    """Names of indices for a message, as a path has them."""
    return ", ".join(f"{{{name}}}" for name in sorted(names)) or "none"  # type: ignore[call-overload]


def _check_absent_if(rule: Rule, node: Node) -> None:
    if rule.absent_if is None:
        return
    if rule.absent_if.wild or set(rule.absent_if.indices) != set(rule.path.indices):
        raise RuleError(
            f"{node.value['absent_if'].at}: `absent_if` must have the indices of `from`, {braces(rule.path.indices)}, "
            f"and no wildcard; {rule.absent_if} has {braces(rule.absent_if.indices)}"
        )


def indices_of(rule: Rule) -> Iterator[str]:
    """Names of the indices of a rule's leaves."""
    for pattern in rule.sources.values():
        yield from pattern.indices
    yield from rule.stacked


def letters_of(rule: Rule) -> Iterator[str]:
    """Letters of the axes that a rule names."""
    yield from rule.kind.letters_used
    yield from rule.flattened.order if rule.flattened else ""
    yield from rule.prescaled_by.of if rule.prescaled_by and isinstance(rule.prescaled_by.of, str) else ""


def facts_of(rule: Rule) -> Iterator[str]:
    """Names of the facts that a rule refers to."""
    if rule.when:
        yield rule.when
    yield from rule.kind.facts_used


def check_types(types: Mapping[str, LayerTypes], rules: tuple[Rule, ...], facts: Mapping[str, Any]) -> None:
    """Everything about the types of layers that needs no checkpoint.

    Raises:
        RuleError: a type is told twice or is none, or what a rule names is none.
    """
    known: dict[str, LayerTypes] = {}
    for name, entry in types.items():
        if name in facts:
            raise RuleError(f"{entry.at}: {name!r} is in `facts` too; the types of the layers are read off the tree")
        if len(entry.leaves) < 2:
            raise RuleError(f"{entry.at}: layers of one type need no `layer_types`")
        for word, pattern in entry.leaves.items():
            if word in known:
                raise RuleError(f"{entry.at}: {word!r} is a type in line {known[word].at.line} already")
            known[word] = entry
            if pattern.indices != (entry.index,):
                raise RuleError(f"{entry.at}: {pattern} must have the index {{{entry.index}}}, and no other")
    for rule in rules:
        if rule.layer_type is None:
            continue
        if rule.layer_type not in known:
            raise RuleError(f"{rule.at}: no type of layers is called {rule.layer_type!r}{nearest(rule.layer_type, known)} (known: {', '.join(known) or 'none'})")  # fmt: skip
        if known[rule.layer_type].index not in rule.path.indices:
            raise RuleError(
                f"{rule.at}: {rule.layer_type!r} is a type of the layers {{{known[rule.layer_type].index}}}, which "
                f"{rule.path} does not have"
            )
