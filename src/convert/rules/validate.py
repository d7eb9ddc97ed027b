"""Check that a parsed rule file makes sense, before any checkpoint is read.

Each check is a small function that yields findings: those in `RULE_CHECKS` look at one rule, those in `FILE_CHECKS` at
the whole file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from convert.core.findings import Finding
from convert.core.path_pattern import Pattern
from convert.core.similarity import did_you_mean
from convert.core.yaml_nodes import Position, YamlNode
from convert.layers import Rule, TargetLayer
from convert.layers.base import LayerKind
from convert.layers.low_rank import PLUS_FIRST, PLUS_SECOND, SECOND
from convert.layers.transforms.rope import check_rope, expand_product
from convert.layers.transforms.weight_normalization import check_normalized
from convert.layers.transforms.weight_transforms import check_flattened
from convert.layers.weight_keys import BIAS_U, V
from convert.rules.check_axes import check_parts, check_target_axes, users_of_sizes
from convert.rules.file import MODULE, RuleFile, references
from convert.rules.placeholders import ASK


@dataclass(frozen=True)
class WrittenRule:
    """A rule, and the node that it was read from, which has the positions of its keys."""

    rule: Rule
    node: YamlNode


def validate(rules: RuleFile, written: Iterable[WrittenRule]) -> Iterator[Finding]:
    """Yield every problem of a rule file. Of one rule, later checks run only if the earlier ones pass."""
    for one in written:
        yield from next(filter(None, (list(check(one.rule, one.node)) for check in RULE_CHECKS)), ())
    for check in FILE_CHECKS:
        yield from check(rules)


# --- one rule -------------------------------------------------------------------------------------------------------


def _buffer_names_one_tensor(rule: Rule, node: YamlNode) -> Iterator[Finding]:
    for _, layer in rule.layers if not rule.sources else []:
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
    for name, layer in _targets(rule):
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
    for name, layer in _targets(rule) if not rule.asked else ():
        try:
            rule.kind.check_target(layer, rule.path)
            check_rope(rule, layer)
            check_flattened(rule)
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
        if fused and not rule.kind.fuses:
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
    _alternatives_pair_up,
    _absent_if_has_the_indices_of_the_source,
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
    if role in (PLUS_FIRST, PLUS_SECOND):
        return _KEYS[role], node.value["plus"].value["from" if role == PLUS_FIRST else "times"]
    if role in (V, BIAS_U):
        key = "v" if role == V else "bias"
        return f"spectral_norm: {key}", node.value["spectral_norm"].value[key]
    word = _KEYS.get(role) or next((key for key, of in (*kind.leaf_keys.items(), (role, role)) if of == role), "from")
    return word, node.value[word if word in node.value else "from"]


# --- the file -------------------------------------------------------------------------------------------------------


def _has_targets_and_rules(rules: RuleFile) -> Iterator[Finding]:
    for key in ("targets", "rules"):
        if not rules.node.value[key].value:
            at = rules.node.value[key].at
            yield Finding(
                "rule-missing-key", f"`{key}` is empty", rule=str(at), expected="at least one entry", got="none"
            )


def _modules_are_listed(rules: RuleFile) -> Iterator[Finding]:
    for rule in rules.rules:
        if rule.each and (rules.modules is None or rules.sidecar is None):
            lacks = "modules" if rules.modules is None else "sidecar"
            yield Finding("rule-missing-key", "a rule with `each` needs the list of modules, and the file that names the class", rule=str(rule.at), expected=f"`{lacks}` in the header", got="none")  # fmt: skip


def _axis_factors_are_declared(rules: RuleFile) -> Iterator[Finding]:
    for name in rules.node.value["axes"].value if "axes" in rules.node.value else ():
        axis = rules.axes[name]
        for factor in axis.equals:
            if isinstance(factor, str) and factor not in rules.axes:
                yield _undeclared(axis.at, f"`equals` of {name}", factor, axes=rules.axes)


def _rope_rotates_one_head(rules: RuleFile) -> Iterator[Finding]:
    """Refuse RoPE on an axis of all heads: pairs lie within one head, so its features would change places with those of others."""
    products = {letter: axis.equals for letter, axis in rules.axes.items()}
    for rule in rules.rules:
        if rule.rope is None:
            continue
        factors = expand_product(rule.rope.axis, products)
        letters = [factor for factor in factors if isinstance(factor, str)]
        is_located = rule.rope.axis not in rule.rope.leaf_axes  # then 2*P are the pairs of a head
        if len(factors) > 1 and (len(letters) > 1 or not is_located):
            head = f"write `rope: {{{factors[-1]}: {rule.rope.pairs}}}`"
            unknown = f"if {rule.rope.axis} is one head, remove its `equals`; otherwise write it as a product that ends with the letter of a head, such as N*H, and `rope: {{H: {rule.rope.pairs}}}`"  # fmt: skip
            yield Finding(
                "rule-layer-conflict",
                "RoPE rotates the features of one head",
                rule=str(rule.at),
                expected="the axis of one head",
                got=f"{rule.rope.axis} = {'*'.join(map(str, factors))}",
                fix=head if len(letters) > 1 and isinstance(factors[-1], str) else unknown,
            )


def _facts_of_rules_are_declared(rules: RuleFile) -> Iterator[Finding]:
    for rule in rules.rules:
        for fact in facts_of(rule):
            if fact not in rules.facts:
                yield _undeclared(rule.at, f"this `{rule.kind_name}` rule", fact, facts=rules.facts)


def _facts_have_values_that_their_rules_take(rules: RuleFile) -> Iterator[Finding]:
    known = {name: value for name, value in rules.facts.items() if value != ASK}
    for rule in rules.rules:
        try:
            rule.kind.check_facts(known)
        except ValueError as error:
            yield Finding("rule-wrong-value", str(error), rule=str(rule.at))


def _layer_types_are_distinct(rules: RuleFile) -> Iterator[Finding]:
    known: dict[str, Position] = {}
    for name, entry in rules.layer_types.items():
        at = str(entry.at)
        if name in rules.facts:
            problem = f"{name!r} is in `layer_types` and in `facts`"
            yield Finding(
                "rule-name-clash", problem, rule=at, fix="remove the fact: layer types are read from the tree"
            )
        if len(entry.leaves) < 2:
            yield Finding("rule-layer-types", rule=at, expected="at least two types", got=str(len(entry.leaves)), fix=f"remove {name!r}: layers of one type need no `layer_types`")  # fmt: skip
        for word, pattern in entry.leaves.items():
            if word in known:
                problem = f"the type {word!r} is declared twice, first in line {known[word].line}"
                yield Finding("rule-name-clash", problem, rule=at, fix="rename one of the two")
            known[word] = entry.at
            if pattern.indices != (entry.index,):
                expected = f"a path with the index {{{entry.index}}} and no other"
                yield Finding("rule-layer-types", rule=at, expected=expected, got=str(pattern))


def _layer_types_of_rules_are_declared(rules: RuleFile) -> Iterator[Finding]:
    index_of = {word: entry.index for entry in rules.layer_types.values() for word in entry.leaves}
    for rule in rules.rules:
        if rule.layer_type is None:
            continue
        if rule.layer_type not in index_of:
            yield _undeclared(rule.at, "`layer_type`", rule.layer_type, layer_types=index_of)
        elif index_of[rule.layer_type] not in rule.path.indices:
            yield Finding(
                "rule-layer-types",
                f"{rule.layer_type!r} is a type of the layers {{{index_of[rule.layer_type]}}}",
                rule=str(rule.at),
                expected=f"a path with the index {{{index_of[rule.layer_type]}}}",
                got=str(rule.path),
            )


def _versions_use_declared_names(rules: RuleFile) -> Iterator[Finding]:
    for version in rules.versions:
        at = rules.node.value["versions"].value[version.name].at
        for fact in version.facts:
            if fact not in rules.facts:
                yield _undeclared(at, f"version {version.name}", fact, facts=rules.facts)
        for letter in version.sizes:
            if letter not in rules.axes:
                yield _undeclared(at, f"version {version.name}", letter, axes=rules.axes)


def _header_uses_declared_facts(rules: RuleFile) -> Iterator[Finding]:
    header = rules.node.value
    used = [(f"`{key}`", header[key]) for key in ("needs_confirmation",) if key in header]
    for name, target in header["targets"].items():
        used += [(f"`requires` of {name}", target.value["requires"])] if "requires" in target.value else []
    for key, node in used:
        for fact in node.value:
            if fact not in rules.facts:
                yield _undeclared(node.keys_at[fact], key, fact, facts=rules.facts)
    for product in rules.products:
        for name in product.factors:
            if isinstance(name, str) and name not in rules.facts and name not in rules.axes:
                yield _undeclared(product.at, "`products`", name, facts=rules.facts, axes=rules.axes)
        if product.letter not in rules.axes:
            yield _undeclared(product.at, "`products`", product.letter, axes=rules.axes)


def _lengths_of_facts_are_declared(rules: RuleFile) -> Iterator[Finding]:
    for name, fact in rules.facts.items():
        if isinstance(fact, dict) and set(fact) == {"repeat", "length"}:
            letter = str(fact["length"])[1:]
            if letter not in rules.axes:
                yield _undeclared(
                    rules.node.value["facts"].value[name].at, f"`length` of {name}", letter, axes=rules.axes
                )


def _path_variants_count_by_one_index(rules: RuleFile) -> Iterator[Finding]:
    for variants in rules.path_variants:
        paths = [path for variant in variants.variants[1:] for path in variant]
        if len(variants.indices) > 1 or (not variants.indices and any(path.order for path in paths)):
            yield Finding(
                "rule-path-variants",
                rule=str(variants.at),
                expected="one index, by which layers are counted",
                got=f"{braces(variants.indices)} in {variants.written}",
            )
            continue
        for path in paths:
            counted = set(path.order) if path.order else set(variants.indices)
            if path.indices != counted or len(set(path.order)) < len(path.order):
                yield Finding(
                    "rule-path-variants",
                    f"{path.path} does not have the indices that {variants.written} is counted by",
                    rule=str(variants.at),
                    expected=braces(counted),
                    got=braces(path.indices),
                    fix="list in `order` the indices of the path and of `stacked`, each once",
                )
            if path.period is not None and not path.order:
                problem = f"{path.path} has a `period` and no `order`"
                yield Finding("rule-path-variants", problem, rule=str(variants.at), fix="add `order`: the period is that of its last index")  # fmt: skip
            if isinstance(path.period, str):
                expected = "a fact of the form {repeat: [...], length: $letter}"
                yield Finding(
                    "rule-path-variants", rule=str(variants.at), expected=expected, got=f"the period ${path.period}"
                )


def _letters_are_not_indices(rules: RuleFile) -> Iterator[Finding]:
    indices = {
        name: rule for rule in reversed(rules.rules) for name in indices_of(rule) if rule.kind.drop_reason is None
    }
    for rule in rules.rules:
        for letter in dict.fromkeys(letters_of(rule)) if not rule.asked else ():
            if letter in indices:
                problem = f"{letter} is an axis here and the index {{{letter}}} in line {indices[letter].at.line}"
                fix = "rename the index, for example to {layer}"
                yield Finding("rule-name-clash", problem, rule=str(rule.at), fix=fix)


def _axes_that_vary_have_no_size(rules: RuleFile) -> Iterator[Finding]:
    """Refuse the use of a size that differs from layer to layer where one number is needed."""
    varying = {name for name, axis in rules.axes.items() if axis.varies}
    for at, user, names in users_of_sizes(rules) if varying else ():
        for name in dict.fromkeys(name for name in names if name in varying):
            yield Finding(
                "rule-layer-conflict",
                f"{name} varies from layer to layer, and {user} needs one size",
                rule=str(at),
                fix=f"give this axis another letter, or remove `varies` of {name}",
            )


def _strides_are_declared(rules: RuleFile) -> Iterator[Finding]:
    letters = dict.fromkeys(letter for rule in rules.rules for letter in letters_of(rule))
    for rule in rules.rules:
        for name in rule.kind.sizes_named:
            if name not in letters and name not in rules.axes and name not in rules.facts:
                yield _undeclared(rule.at, "`strides`", name, axes={**letters, **rules.axes}, facts=rules.facts)


def _choices_have_the_same_variants(rules: RuleFile) -> Iterator[Finding]:
    first_of: dict[str, Rule] = {}
    for rule in rules.rules:
        first = first_of.setdefault(rule.choice, rule) if rule.choice else rule
        if first.kind.variants != rule.kind.variants:
            yield Finding(
                "rule-name-clash",
                f"the choice {rule.choice!r} has other variants in line {first.at.line}",
                rule=str(rule.at),
                expected=", ".join(first.kind.variants),
                got=", ".join(rule.kind.variants),
                fix="name the variants the same way, or rename one of the two choices",
            )


def _configs_use_declared_names(rules: RuleFile) -> Iterator[Finding]:
    for target in rules.targets.values():
        for name in dict.fromkeys((*references(target.config), *references(target.generation))):
            if name not in rules.facts and name not in rules.axes and name not in rules.layer_types:
                at = rules.node.value["targets"].value[target.name].at
                yield _undeclared(
                    at, "`config`", name, facts=rules.facts, axes=rules.axes, layer_types=rules.layer_types
                )


def _sidecar_is_a_file_name(rules: RuleFile) -> Iterator[Finding]:
    name = rules.sidecar.file if rules.sidecar is not None else "config.json"
    if "/" in name or "\\" in name or name in ("", ".", ".."):
        at = rules.node.value["sidecar"].value["file"].at
        yield Finding("rule-wrong-value", rule=str(at), expected="a file name without a folder, such as config.json", got=repr(name))  # fmt: skip


FILE_CHECKS: tuple[Callable[[RuleFile], Iterator[Finding]], ...] = (
    _has_targets_and_rules,
    _modules_are_listed,
    _axis_factors_are_declared,
    _rope_rotates_one_head,
    _facts_of_rules_are_declared,
    _facts_have_values_that_their_rules_take,
    _layer_types_are_distinct,
    _layer_types_of_rules_are_declared,
    _versions_use_declared_names,
    _header_uses_declared_facts,
    _lengths_of_facts_are_declared,
    _path_variants_count_by_one_index,
    _letters_are_not_indices,
    _axes_that_vary_have_no_size,
    _strides_are_declared,
    _choices_have_the_same_variants,
    _configs_use_declared_names,
    _sidecar_is_a_file_name,
)


def _undeclared(at: Position, user: str, name: str, **known: Iterable[str]) -> Finding:
    """Make the finding for a name that `user` refers to and no header key of `known` declares."""
    names = [name for declared in known.values() for name in declared]
    keys = " or ".join(f"`{key}`" for key in known)
    return Finding(
        "rule-unknown-name",
        f"{user} refers to {name!r}, which is not declared in {keys}",
        rule=str(at),
        expected=f"one of {', '.join(names)}" if names else "",
        fix=did_you_mean(name, names) or f"declare it in {keys}",
    )


# --- what a rule refers to ------------------------------------------------------------------------------------------


def braces(names: Iterable[str]) -> str:
    """Write names of indices as a path has them: ``{i}, {layer}``."""
    return ", ".join(f"{{{name}}}" for name in sorted(names)) or "none"


def indices_of(rule: Rule) -> Iterator[str]:
    """Yield the names of the indices of a rule's leaves."""
    for pattern in rule.sources.values():
        yield from pattern.indices
    yield from rule.stacked


def letters_of(rule: Rule) -> Iterator[str]:
    """Yield the letters of the axes that a rule names."""
    yield from rule.kind.letters_used
    yield from rule.flattened.order if rule.flattened else ""
    factor = rule.prescaled_by
    if factor is not None and isinstance(factor.of, str) and factor.fact is None:
        yield factor.of


def facts_of(rule: Rule) -> Iterator[str]:
    """Yield the names of the facts that a rule refers to."""
    if rule.when:
        yield rule.when
    if rule.prescaled_by is not None and rule.prescaled_by.fact is not None:
        yield rule.prescaled_by.fact
    yield from rule.kind.facts_used
