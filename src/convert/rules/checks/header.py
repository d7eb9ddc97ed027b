"""Checks of a whole rule file: its header declares what the rules use. Each check is a small function that yields findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.core.yaml_nodes import Position
from convert.layers import Rule
from convert.layers.transforms.rope import expand_product
from convert.rules.checks.allowed import allowed_names_are_declared, facts_have_allowed_values
from convert.rules.checks.axes import users_of_sizes
from convert.rules.checks.layouts import choices_have_such_variants, layouts_are_of_these_rules
from convert.rules.file import RuleFile, references
from convert.rules.names_used import braces, facts_of, indices_of, letters_of
from convert.rules.path_variants import VariantPath, has_part


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
        if axis.divides and axis.divides not in rules.axes:
            yield _undeclared(axis.at, f"`divides` of {name}", axis.divides, axes=rules.axes)
    for rule in rules.rules:
        for letter, other in rule.same_size.items():
            if other not in rules.axes:
                yield _undeclared(rule.at, f"`same_size` of {letter}", other, axes=rules.axes)


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
            part = next((one.written for one in rules.path_variants if has_part(pattern, one.written)), None)
            if part and not any(rule.layer_type == word and rule.path.text == pattern.text for rule in rules.rules):
                expected = f"the path of a rule with `layer_type: {word}`, as a tree may have another than {part}"
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
        for fact in version.needs_confirmation:
            if fact not in rules.facts:
                yield _undeclared(at, f"`needs_confirmation` of version {version.name}", fact, facts=rules.facts)


def _header_uses_declared_facts(rules: RuleFile) -> Iterator[Finding]:
    header = rules.node.value
    known: dict[str, Iterable[str]] = {"facts": rules.facts}
    used = [(f"`{key}`", header[key], known) for key in ("needs_confirmation",) if key in header]
    known = {**known, "layer_types": rules.layer_types}
    for name, target in header["targets"].items():
        used += [(f"`requires` of {name}", target.value["requires"], known)] if "requires" in target.value else []
    for name, target in rules.targets.items():
        for letter, multiple in target.multiples.items():
            for undeclared in {letter, multiple.of}.difference(rules.axes):
                yield _undeclared(multiple.at, f"`multiples` of {name}", undeclared, axes=rules.axes)
    for key, node, names in used:
        for fact in node.value:
            if not any(fact in declared for declared in names.values()):
                yield _undeclared(node.keys_at[fact], key, fact, **names)
    ends = {f"{letter}[{end}]" for letter, axis in rules.axes.items() if axis.of_layers for end in (0, -1)}
    for key, listed in (("`products`", rules.products), ("`formulas`", rules.formulas)):
        for one in listed:
            for name in one.names:
                if name not in rules.facts and name not in rules.axes and name not in ends:
                    yield _undeclared(one.at, key, name, facts=rules.facts, axes=rules.axes)
            if one.letter not in rules.axes:
                yield _undeclared(one.at, key, one.letter, axes=rules.axes)
    for size in rules.sidecar.sizes if rules.sidecar is not None else ():
        for name in size.names:
            if name not in rules.axes and name not in ends:
                yield _undeclared(size.at, "`sizes`", name, axes=rules.axes)


def _lengths_of_facts_are_declared(rules: RuleFile) -> Iterator[Finding]:
    for name, fact in rules.facts.items():
        if isinstance(fact, dict) and set(fact) == {"repeat", "length"}:
            letter = str(fact["length"]).removeprefix("$")
            if letter not in rules.axes:
                yield _undeclared(
                    rules.node.value["facts"].value[name].at, f"`length` of {name}", letter, axes=rules.axes
                )


def _are_positions(path: VariantPath) -> bool:
    places = set(path.positions)
    return isinstance(path.period, str) or (
        len(places) == len(path.positions) and places <= set(range(path.period or 0))
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
            if path.indices | path.left_out != counted or len(set(path.order)) < len(path.order):
                yield Finding(
                    "rule-path-variants",
                    f"{path.path} does not have the indices that {variants.written} is counted by",
                    rule=str(variants.at),
                    expected=braces(counted),
                    got=braces(path.indices),
                    fix="list in `order` the indices of the path and of `stacked`, each once",
                )
            if path.positions and not _are_positions(path):
                yield Finding(
                    "rule-path-variants",
                    f"`positions` of {path.path}",
                    rule=str(variants.at),
                    expected="a `period`, and different positions in it",
                    got=f"{list(path.positions)} of {path.period}",
                )
            if path.period is not None and not path.order and not path.positions:
                problem = f"{path.path} has a `period` and no `order`"
                yield Finding("rule-path-variants", problem, rule=str(variants.at), fix="add `order`: the period is that of its last index")  # fmt: skip
            if isinstance(path.period, str):
                expected = "a fact of the form {repeat: [...], length: $letter}"
                yield Finding(
                    "rule-path-variants", rule=str(variants.at), expected=expected, got=f"the period ${path.period}"
                )


def _axes_vary_by_an_index(rules: RuleFile) -> Iterator[Finding]:
    indices = {name: "" for rule in rules.rules for name in indices_of(rule)}
    for name, axis in rules.axes.items():
        for index in axis.of_layers:
            if index not in indices:
                yield _undeclared(axis.at, f"`varies` of {name}", index, indices=indices)


def _rows_are_behind_two_letters(rules: RuleFile) -> Iterator[Finding]:
    for name, axis in rules.axes.items():
        for letter in axis.behind:
            if letter not in rules.axes:
                yield _undeclared(axis.at, f"`behind` of {name}", letter, axes=rules.axes)
        known = [rules.axes[letter] for letter in axis.behind if letter in rules.axes]
        if axis.behind and (
            len(axis.behind) != 2
            or not axis.of_layers
            or (len(known) == 2 and not {*axis.of_layers} <= {*known[1].of_layers})
        ):
            yield Finding(
                "rule-layer-conflict",
                f"`behind` of {name}",
                rule=str(axis.at),
                expected=f"two letters, and `varies: i` with the same index of both {name} and the second",
                got=", ".join(axis.behind),
                fix="name what the first layer follows, then the axis behind each layer",
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


def _axes_are_not_indices_of_variants(rules: RuleFile) -> Iterator[Finding]:
    """A letter that only path variants count has no other meaning: its size is the number of copies."""
    counted = {
        name: path.path
        for variants in reversed(rules.path_variants)
        for path in (path for variant in variants.variants[:0:-1] for path in variant)
        for name in (*path.order, *path.indices)
        if name not in variants.indices
    }
    for name in counted:
        if name in rules.axes:
            problem = f"{name} is an axis here ({rules.axes[name].meaning}) and an index of {counted[name]}"
            fix = "give the axis another letter"
            yield Finding("rule-name-clash", problem, rule=str(rules.axes[name].at), fix=fix)


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
    ends = {f"{letter}[{end}]" for letter, axis in rules.axes.items() if axis.varies for end in (0, -1)}
    for target in rules.targets.values():
        for name in dict.fromkeys((*references(target.config), *references(target.generation))):
            if name not in {*rules.facts, *rules.axes, *rules.layer_types, *ends}:
                at = rules.node.value["targets"].value[target.name].at
                yield _undeclared(
                    at, "`config`", name, facts=rules.facts, axes=rules.axes, layer_types=rules.layer_types
                )


def _files_beside_are_file_names(rules: RuleFile) -> Iterator[Finding]:
    for key, declared in {"sidecar": rules.sidecar, "distinguished_by": rules.distinguished_by}.items():
        if declared is not None and ({"/", "\\"} & {*declared.file} or declared.file in ("", ".", "..")):
            at = rules.node.value[key].value["file"].at
            yield Finding("rule-wrong-value", rule=str(at), expected="a file name without a folder, such as config.json", got=repr(declared.file))  # fmt: skip


HEADER_CHECKS: tuple[Callable[[RuleFile], Iterator[Finding]], ...] = (
    _has_targets_and_rules,
    _modules_are_listed,
    _axis_factors_are_declared,
    _rope_rotates_one_head,
    _facts_of_rules_are_declared,
    allowed_names_are_declared,
    facts_have_allowed_values,
    _layer_types_are_distinct,
    _layer_types_of_rules_are_declared,
    _versions_use_declared_names,
    _header_uses_declared_facts,
    _lengths_of_facts_are_declared,
    _path_variants_count_by_one_index,
    _letters_are_not_indices,
    _axes_are_not_indices_of_variants,
    _axes_vary_by_an_index,
    _rows_are_behind_two_letters,
    _axes_that_vary_have_no_size,
    _strides_are_declared,
    _choices_have_the_same_variants,
    _configs_use_declared_names,
    _files_beside_are_file_names,
    layouts_are_of_these_rules,
    choices_have_such_variants,
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
