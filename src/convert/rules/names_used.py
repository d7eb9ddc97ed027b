"""What a rule refers to: indices, axis letters and facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from convert.layers import Rule


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
    yield from "".join(part for group in rule.concatenated.values() for part in group.parts)
    yield from rule.same_size.values()
    factor = rule.prescaled_by
    if factor is not None and isinstance(factor.of, str) and factor.fact is None:
        yield factor.of


def facts_of(rule: Rule) -> Iterator[str]:
    """Yield the names of the facts that a rule refers to."""
    if rule.when:
        yield rule.when
    if rule.prescaled_by is not None and rule.prescaled_by.fact is not None:
        yield rule.prescaled_by.fact
    if rule.optional_last is not None:
        yield rule.optional_last
    yield from rule.fact_values
    yield from rule.kind.facts_used
