"""All findings about matching: the rules compared with the leaves, in both directions."""

from __future__ import annotations

from convert.core.findings import Finding
from convert.planning.matching.claims import claimed_twice, collisions, without_rule, wrong_parts
from convert.planning.matching.facts import MatchFacts
from convert.planning.matching.layer_gaps import (
    beyond_period,
    index_gaps,
    layers_without_type,
    missing_numbers,
    numbered_gaps,
)
from convert.planning.matching.missing import incomplete_modules, missing_leaves


def match_findings(facts: MatchFacts) -> tuple[Finding, ...]:
    """Compare the rules with the leaves in both directions. Takes a while: names the closest match of what is missing."""
    missing = list(missing_leaves(facts))
    return (
        *collisions(facts),
        *claimed_twice(facts),
        *wrong_parts(facts),
        *index_gaps(facts),
        *missing,
        *incomplete_modules(facts),
        *beyond_period(facts),
        *numbered_gaps(facts),
        *missing_numbers(facts),
        *layers_without_type(facts),
        *without_rule(facts, {(found.rule, found.data["suggested"]) for found in missing if "suggested" in found.data}),
    )
