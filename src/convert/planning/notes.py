"""Remarks of a plan for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from convert.core.tensor_spec import is_float
from convert.layers.base import Step
from convert.planning.adapters.attach import merged_note
from convert.planning.ambiguity import twin_trees
from convert.planning.compile_rules import CompiledPlan
from convert.planning.facts.architectures import unnamed_class
from convert.planning.facts.sidecar import other_settings, other_values
from convert.planning.facts.values import (
    missing_sidecar_note,
    truncation_note,
    unknown_requirements,
)
from convert.planning.merged_leaf import Joined, MergedLeaf
from convert.planning.rule_match import RuleMatch, Sized

MAX_TREES = 6  # of the leaves that a rule drops as the rest, that a note counts


def plan_notes(match: RuleMatch, sized: Sized, compiled: CompiledPlan, steps: Sequence[Step]) -> tuple[str, ...]:
    """Return the notes of a plan.

    Args:
        steps: the tensors of the output.
    """
    rules, target, sidecar = match.rules, match.target, sized.sidecar
    return (
        *([f"the model lies below {match.below}, a key that the rules do not name"] if match.below else []),
        *_fact_notes(match, sized),
        *_dtype_note(match, steps),
        *compiled.notes,
        *missing_sidecar_note(rules, sidecar, match.options.settings),
        *other_settings(rules, sidecar, match.options.settings),
        *other_values(rules, target, sidecar, {**sized.facts, **sized.sizes}),
        *unnamed_class(rules, target, sidecar, match.source),
        *_merge_note(compiled.merges),
        *_rest_notes(match),
        *_twin_notes(match),
        *(note for step in steps for note in step.notes),
    )


def _fact_notes(match: RuleMatch, sized: Sized) -> Iterator[str]:
    if sized.version is None and (note := truncation_note(match.rules, sized.sizes, match.options.settings)):
        yield note
    yield from unknown_requirements(match.rules, match.target, sized.facts)


def _dtype_note(match: RuleMatch, steps: Sequence[Step]) -> Iterator[str]:
    counts = Counter(step.spec.dtype for step in steps if step.parts)
    dtypes = {dtype: count for dtype, count in counts.items() if is_float(dtype)}
    if len(dtypes) > 1 and match.rules.targets[match.target].config:
        first = {
            dtype: next(step.name for step in steps if step.parts and step.spec.dtype == dtype) for dtype in dtypes
        }
        shown = ", ".join(f"{count} in {dtype} ({first[dtype]}, ...)" for dtype, count in dtypes.items())
        yield (
            f"the tensors have several dtypes, {shown}: config.json names none, and from_pretrained loads all of them in one; "
            "--dtype writes one"
        )


def _rest_notes(match: RuleMatch) -> Iterator[str]:
    """Count the leaves that no rule but one with `rest` matches, by their first key."""
    for rule in match.coverage.rules.rules:
        leaves = [drop.leaf for drop in match.coverage.dropped if drop.rest and drop.at == rule.at]
        if leaves:
            depth = 1 + (match.coverage.root.count("/") + 1 if match.coverage.root else 0)
            counts = Counter("/".join(leaf.split("/")[:depth]) for leaf in leaves)
            shown = [f"{tree} ({count:,})" for tree, count in counts.most_common(MAX_TREES)]
            more = f", and {len(counts) - MAX_TREES:,} more" if len(counts) > MAX_TREES else ""
            many = "1 leaf that no other rule matches is" if len(leaves) == 1 else f"{len(leaves):,} leaves that no other rule matches are"  # fmt: skip
            yield f"{many} dropped by {rule.at.line_only}: {', '.join(shown)}{more}"


def _twin_notes(match: RuleMatch) -> Iterator[str]:
    """Say which dropped trees could be converted in place of the tree that is."""
    for twin in twin_trees(match.source.leaves, {drop.leaf for drop in match.coverage.dropped}):
        yield (
            f"{twin.tree} has the paths and shapes of {twin.of or 'the converted tree'} and is dropped: {twin.of or 'the latter'} is "
            "converted; if the other one is meant (an average of the weights, for instance), change `keep` of `copies`, or `root`, of the rules"
        )


def _merge_note(merges: Mapping[str, MergedLeaf]) -> Iterator[str]:
    yield from merged_note(merges)
    merges = {name: merge for name, merge in merges.items() if not (merge.adapter or isinstance(merge, Joined))}
    if merges:
        first, count = next(iter(merges.values())), len(merges)
        yield (
            f"{'1 weight is' if count == 1 else f'{count} weights are'} computed from several leaves, which the output does not "
            f"keep: {first.name}{', ...' if count > 1 else ''}"
        )
