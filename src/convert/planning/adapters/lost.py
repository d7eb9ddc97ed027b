"""Find leaves of adapters that would be lost, while the layers that they belong to are converted."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.core.nnx_names import VALUE
from convert.core.path_index import keys_above
from convert.layers import Drop, Rule
from convert.planning.adapters.names import HalfPair, find_pairs, is_of_adapter, place_of, weights_of

PROBLEM = "this leaf is part of an adapter by its name, and the layer beside it would be converted without it"


def lost_adapters(claims: Mapping[str, Rule], halves: Mapping[str, HalfPair], root: str) -> Iterator[Finding]:
    """Yield the first half of a pair that no rule converts, or else the first leaf that a rule drops, as a finding.

    Args:
        claims: leaf -> the rule that matches it.
        halves: halves of LoRA pairs whose weight is converted.
        root: the prefix of the paths of the rules.
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
    suspects = {name: rule for name, rule in dropped.items() if is_of_adapter(name)}
    if not suspects:
        return
    converted = [name for name in claims if name not in dropped]
    if (orphan := _orphan(suspects, claims, converted, f"{root}/" if root else "")) is not None:
        yield Finding(
            "adapter-dropped",
            "this leaf is part of a LoRA pair by its name, and the tree has no weight that the pair is added to",
            rule=suspects[orphan].at.line_only,
            path=orphan,
            expected=f"{next(weights_of(orphan))}, the weight of the layer",
            got="no leaf with this path",
            fix="give the checkpoint of the model that the pairs were trained on, or remove the leaf",
        )
        return
    places = keys_above(converted)
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


def _orphan(suspects: Mapping[str, Rule], known: Collection[str], converted: Iterable[str], root: str) -> str | None:
    """Return a leaf of a pair without a weight that only a rule for the rest drops, such as that of a layer which the model lacks.

    Outside of the model it may be a moment: the optimizer has none of the weights that were not trained.
    """
    first_keys = {_first_key(name) for name in converted}
    for name, rule in suspects.items():
        beside = _first_key(name) in first_keys or "/" not in place_of(name)
        rest = isinstance(rule.kind, Drop) and rule.kind.rest
        weights = tuple(weights_of(name))
        found = any(weight in known or f"{weight}{VALUE}" in known for weight in weights)
        if rest and weights and not found and (name.startswith(root) if root else beside):
            return name
    return None


def _first_key(name: str) -> str:
    """Return the first key of a path, any number in it as 0."""
    return re.sub("[0-9]+", "0", name.partition("/")[0])


def no_pair_is_merged(source: Source, dropped: Mapping[str, str], setting: str) -> Finding | None:
    """Explain that a setting for LoRA pairs has no effect, or, without one, that no pair of the adapter's checkpoint is merged.

    Args:
        dropped: leaf -> why a rule drops it.
        setting: its option; empty: none was given.
    """
    pairs = find_pairs(source.leaves)
    lost = next((pair for base, pair in pairs.items() if base in dropped), None)
    if lost is not None:
        problem = f"the LoRA pairs of this tree belong to leaves that the rules drop ({dropped[lost.base]}), so that none is merged"
        fix = "convert with the rules of the whole model"
        return Finding(
            "adapter-dropped",
            problem,
            path=setting or lost.first,
            fix=f"{fix}, or leave {'it' if setting else '--lora'} out",
        )
    if not setting:
        return None
    problem = "the rules name the LoRA pairs of this tree themselves" if pairs else "the tree has no LoRA pair"
    return Finding("setting-has-no-effect", problem, path=setting, fix="leave it out")
