"""Check what a rule file says for the way back to JAX: its layouts, and the variants of published models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.core.yaml_nodes import Position
from convert.rules.file import RuleFile


def layouts_are_of_these_rules(rules: RuleFile) -> Iterator[Finding]:
    """Check that every layout has a name of its own, and the roots and path variants that the file declares."""
    paths = [path[0].path for variants in rules.path_variants for path in variants.variants]
    seen: set[str] = set()
    for layout in rules.layouts:
        assert layout.at is not None
        if layout.name in seen:
            yield Finding(
                "rule-name-clash", f"two layouts are called {layout.name!r}", rule=str(layout.at), fix="rename one"
            )
        seen.add(layout.name)
        if layout.root not in rules.root:
            yield _unknown(layout.at, f"the root of the layout {layout.name}", layout.root, rules.root, "root")
        for path in layout.variants:
            if path not in paths:
                yield _unknown(layout.at, f"the layout {layout.name}", path, paths, "path_variants")


def choices_have_such_variants(rules: RuleFile) -> Iterator[Finding]:
    """Check the variants of `choices`, in the header and of versions."""
    header = rules.node.value
    said = [("`choices`", rules.usual_variants, header["choices"].at)] if rules.usual_variants else []
    said += [
        (f"version {version.name}", version.choices, header["versions"].value[version.name].at)
        for version in rules.versions
        if version.choices
    ]
    for user, choices, at in said:
        yield from _wrong_choices(rules, user, choices, at)


def _wrong_choices(rules: RuleFile, user: str, choices: Mapping[str, str], at: Position) -> Iterator[Finding]:
    for name, variant in choices.items():
        if name not in rules.choices:
            yield _unknown(at, user, name, list(rules.choices), "choice")
        elif variant not in rules.choices[name]:
            yield _unknown(at, f"{user}, {name}", variant, rules.choices[name], "einsum")


def _unknown(at: Position, user: str, name: str, known: tuple[str, ...] | list[str], key: str) -> Finding:
    return Finding(
        "rule-unknown-name",
        f"{user} refers to {name!r}, which is not declared in `{key}`",
        rule=str(at),
        expected=f"one of {', '.join(map(repr, known))}" if known else "",
        fix=did_you_mean(name, known) or f"declare it in `{key}`",
    )
