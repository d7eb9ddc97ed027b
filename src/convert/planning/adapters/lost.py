"""Find leaves of adapters that would be lost, while the layers that they belong to are converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from convert.core.findings import Finding
from convert.core.path_index import keys_above
from convert.layers import Rule
from convert.planning.adapters.names import HalfPair, has_word, place_of

PROBLEM = "this leaf is part of an adapter by its name, and the layer beside it would be converted without it"


def lost_adapters(claims: Mapping[str, Rule], halves: Mapping[str, HalfPair]) -> Iterator[Finding]:
    """Yield the first half of a pair that no rule converts, or else the first leaf that a rule drops, as a finding.

    Args:
        claims: leaf -> the rule that matches it.
        halves: halves of LoRA pairs whose weight is converted.
    """
    dropped = {name: rule for name, rule in claims.items() if rule.kind.drop_reason is not None}
    lost = [name for name in halves if name not in claims or name in dropped]
    if lost:
        half = halves[lost[0]]
        yield Finding(
            "adapter-dropped",
            PROBLEM + (f"; so are {len(lost) - 1} more" if len(lost) > 1 else ""),
            rule=dropped.get(lost[0], claims[half.base]).at.line_only,
            path=lost[0],
            expected=f"{half.missing} beside it, the other leaf of the LoRA pair of {half.base}",
            got="no leaf with this path",
            fix="give a checkpoint that has both leaves, or remove this one to convert the weight without the pair",
        )
        return
    suspects = {name: rule for name, rule in dropped.items() if has_word(name)}
    if not suspects:
        return
    places = keys_above(name for name in claims if name not in dropped)
    for name, rule in suspects.items():
        if place_of(name) in places:
            yield Finding(
                "adapter-dropped",
                PROBLEM,
                rule=rule.at.line_only,
                path=name,
                expected="both leaves of a LoRA pair beside their weight, with names that Tunix, qwix, MaxText, gemma, openpi or flax nnx give",
                got=f"a leaf that the rule drops: {rule.kind.drop_reason}",
                fix="merge the adapter in the source's framework first, write a rule with `plus:`, or remove the leaf from the checkpoint",
            )
            return
