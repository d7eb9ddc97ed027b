"""Checks of one rule: its paths, indices and targets fit each other. Each check is a small function that yields findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from convert.core.findings import Finding
from convert.core.path_pattern import Pattern
from convert.core.yaml_nodes import YamlNode
from convert.layers import Rule, TargetLayer
from convert.layers.base import LayerKind
from convert.layers.leaf_sums import role_of_sum
from convert.layers.low_rank import PLUS_FIRST, PLUS_SECOND, SECOND
from convert.layers.transforms.concatenated import check_concatenated
from convert.layers.transforms.rope import check_rope
from convert.layers.transforms.weight_normalization import check_normalized
from convert.layers.transforms.weight_transforms import check_flattened
from convert.layers.weight_keys import BIAS_U, V
from convert.rules.checks.axes import check_parts, check_target_axes
from convert.rules.file import MODULE
from convert.rules.names_used import braces


def _buffer_names_one_tensor(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    for _, layer in rule.layers if not rule.sources and not rule.kind.indexed else []:
        if layer.path.wild or layer.path.indices or layer.path.groups:
            yield Finding(
                "rule-index-mismatch",
                rule=str(node.at),
                expected=f"the name of one tensor, as a `{rule.kind_name}` fills one",
                got=str(layer.path),
                fix="write one rule for each tensor",
            )


def _only_drop_has_wildcards(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    for role, pattern in rule.sources.items() if rule.kind.drop_reason is None else ():
        if pattern.wild:
            yield Finding(
                "rule-wildcard",
                f"{pattern} has a wildcard, which only `drop` takes",
                rule=str(_key_of(role, rule.kind, node)[1].at),
                fix="name the leaves with {i} and {a,b}",
            )
    for name, layer in rule.layers if rule.kind.indexed and not rule.sources else _targets(rule):
        if layer.path.wild:
            yield Finding("rule-wildcard", f"the target {layer.path} has a wildcard{_of(name)}", rule=str(node.at), fix="write the tensor's name with {i} and {a,b}")  # fmt: skip


def _all_roles_have_the_same_indices(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    if rule.kind.drop_reason is not None or not rule.sources:
        return
    lead = "from" if "from" in node.value else _key_of(rule.lead, rule.kind, node)[0]
    for role, pattern in rule.sources.items():
        key, value = _key_of(role, rule.kind, node)
        if pattern.indices != rule.path.indices or _group_sizes(pattern) != _group_sizes(rule.path):
            yield Finding(
                "rule-index-mismatch",
                f"`{key}` and `{lead}` do not have the same indices and alternatives",
                rule=str(value.at),
                expected=f"the indices and the number of alternatives of {rule.path}, in the same order",
                got=str(pattern),
            )


def _each_index_has_its_axis(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    if len(set(rule.stacked.values())) < len(rule.stacked):
        yield Finding(
            "rule-index-mismatch",
            "two indices are stacked on the same axis",
            rule=str(node.value["stacked"].at),
            fix="give each index its own axis",
        )
    for name in sorted(set(rule.stacked) & set(rule.path.indices)) if rule.sources else ():
        yield Finding(
            "rule-index-mismatch",
            f"{{{name}}} is both in the path and in `stacked`",
            rule=str(node.at),
            fix="remove it from one of the two",
        )


def _target_has_the_indices_of_the_source(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    counted = {name for numbering in rule.index_from.values() for name in numbering.order}
    for name, layer in _targets(rule):
        indices = {*rule.path.indices, *rule.stacked}
        if unknown := sorted(counted - indices):
            yield Finding(
                "rule-index-mismatch",
                f"{unknown[0]} of `index_from` is neither an index of the path nor in `stacked`",
                rule=str(node.at),
                expected=f"some of {braces(indices)}",
                got=unknown[0],
            )
            return
        indices = (indices - counted) | set(rule.index_from)
        letters = {letter for axes, _ in rule.kind.weight_axes for letter in axes}
        split = set(layer.path.indices) - indices
        if split and split <= letters and rule.kind.splits and not rule.kind.parts:
            indices |= split
        if set(layer.path.indices) != indices:
            yield Finding(
                "rule-index-mismatch",
                f"the source and the target {layer.path}{_of(name)} have different indices, so several leaves would become "
                "one tensor, or one leaf several",
                rule=str(node.at),
                expected=f"a target with the source's indices: {braces(indices)}",
                got=braces(layer.path.indices),
            )


def _kind_accepts_the_target(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    for name, layer in rule.layers if not rule.sources else ():
        try:
            rule.kind.check_target(layer, layer.path)  # a buffer has no leaf
        except ValueError as error:
            yield Finding("rule-layer-conflict", f"{error}{_of(name)}", rule=str(node.at))
    for name, layer in _targets(rule) if not rule.asked else ():
        try:
            rule.kind.check_target(layer, rule.path)
            check_rope(rule, layer)
            check_flattened(rule)
            check_concatenated(rule, layer)
            check_normalized(rule)
            check_parts(rule, layer)
            check_target_axes(rule, layer)
        except ValueError as error:
            yield Finding("rule-layer-conflict", f"{error}{_of(name)}", rule=str(node.at))


def _alternatives_pair_up(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    for name, layer in _targets(rule) if not rule.asked else ():
        source, target = _group_sizes(rule.path), _group_sizes(layer.path)
        fused = bool(source) and target == source[:-1]
        split = bool(target) and target[:-1] == source
        if fused and not rule.kind.fuses and layer.along is None:
            yield Finding(
                "rule-index-mismatch",
                f"{rule.path} lists more leaves than {layer.path} has tensors{_of(name)}, and a `{rule.kind_name}` cannot be fused",
                rule=str(node.at),
                fix="list as many alternatives in the target",
            )
        elif split and rule.kind.parts not in (0, target[-1]):
            yield Finding(
                "rule-index-mismatch",
                f"the leaf has {rule.kind.parts} parts, and {layer.path} lists {target[-1]} tensors{_of(name)}",
                rule=str(node.at),
                expected="one name for each part, in the order of the parts",
                got=", ".join(layer.path.groups[-1].words),
            )
        elif not (target == source or fused or split):
            yield Finding(
                "rule-index-mismatch",
                f"the alternatives of {rule.path} and {layer.path} do not pair up{_of(name)}",
                rule=str(node.at),
                expected="as many alternatives on both sides, or one group less in the target (fused), or one more (split)",
                got=f"groups of {source} in the source and of {target} in the target",
            )


def _alternatives_differ(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    """Only parts of one leaf may have the same name: they follow each other in its tensor."""
    for path in (*rule.sources.values(), *(layer.path for _, layer in rule.layers)):
        for group in path.groups:
            parts = (
                group is path.groups[-1] and path not in rule.sources.values() and rule.kind.parts and rule.kind.fuses
            )
            if len(set(group.words)) < len(group.words) and not parts:
                yield Finding(
                    "rule-index-mismatch",
                    f"{path} lists the same alternative twice, and only parts of one leaf can follow each other in a tensor",
                    rule=str(node.at),
                    fix="list each once, or write the axis of the leaf as a sum of parts, such as (A + B + C)",
                )


def _absent_if_has_the_indices_of_the_source(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    pattern = rule.absent_if
    if pattern is not None and (pattern.wild or set(pattern.indices) != set(rule.path.indices)):
        yield Finding(
            "rule-index-mismatch",
            "`absent_if` and `from` have different indices, or `absent_if` has a wildcard",
            rule=str(node.value["absent_if"].at),
            expected=f"the indices {braces(rule.path.indices)} and no wildcard",
            got=str(pattern),
        )


def _same_size_names_a_letter_of_the_leaves(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    for letter in rule.same_size:
        if letter not in (used := tuple(dict.fromkeys(rule.kind.letters_used))):
            yield Finding(
                "rule-layer-conflict",
                f"`same_size` names {letter}, which is no axis of these leaves",
                rule=str(node.value["same_size"].at),
                expected=f"one of {', '.join(used) or 'none'}",
                got=letter,
            )


def _module_is_in_every_path(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    paths = [*rule.sources.values(), *(layer.path for _, layer in rule.layers)]
    for path in paths if bool(rule.each) or any(MODULE in path.indices for path in paths) else ():
        if path.indices != (MODULE,) or path.groups or not rule.each:
            yield Finding(
                "rule-index-mismatch",
                rule=str(node.at),
                expected=f"{{{MODULE}}} in each path of a rule with `each`, and no other index or alternatives",
                got=str(path) if rule.each else f"{path} without `each`",
            )


RULE_CHECKS: tuple[Callable[[Rule, YamlNode], Iterator[Finding]], ...] = (
    _buffer_names_one_tensor,
    _only_drop_has_wildcards,
    _all_roles_have_the_same_indices,
    _each_index_has_its_axis,
    _target_has_the_indices_of_the_source,
    _kind_accepts_the_target,
    _alternatives_differ,
    _alternatives_pair_up,
    _absent_if_has_the_indices_of_the_source,
    _same_size_names_a_letter_of_the_leaves,
    _module_is_in_every_path,
)


def _targets(rule: Rule) -> Iterable[tuple[str | None, TargetLayer]]:
    """Return the names and layers of the targets, unless the rule drops its leaves, has none, or leaves its target open."""
    checked = rule.kind.drop_reason is None and rule.sources and rule.kind_name not in rule.asked
    return rule.layers if checked else []


def _of(target: str | None) -> str:
    return f" (target {target})" if target else ""


def _group_sizes(pattern: Pattern) -> list[int]:
    return [len(group.words) for group in pattern.groups]


_KEYS = {SECOND: "times", PLUS_FIRST: "plus: from", PLUS_SECOND: "plus: times"}


def _key_of(role: str, kind: LayerKind, node: YamlNode) -> tuple[str, YamlNode]:
    """Return the key of a rule that gives the path of the leaves of this role, and the path."""
    role = role_of_sum(role)
    if role in (PLUS_FIRST, PLUS_SECOND):
        return _KEYS[role], node.value["plus"].value["from" if role == PLUS_FIRST else "times"]
    if role in (V, BIAS_U):
        key = "v" if role == V else "bias"
        return f"spectral_norm: {key}", node.value["spectral_norm"].value[key]
    word = _KEYS.get(role) or next((key for key, of in (*kind.leaf_keys.items(), (role, role)) if of == role), "from")
    return word, node.value[word if word in node.value else "from"]
