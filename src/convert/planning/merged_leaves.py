"""Puts the leaves of a pair, and of what it is added to, together as one leaf, so that all that follows sees one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.core.ops import is_float, widens
from convert.core.tensor_spec import TensorSpec
from convert.layers import Rule
from convert.layers.base import Matched
from convert.layers.low_rank import Pair
from convert.planning.low_rank_source import Merge
from convert.planning.match import Coverage


def merge(
    coverage: Coverage, source: Source, sizes: Mapping[str, int], facts: Mapping[str, Any]
) -> tuple[Coverage, dict[str, Merge], list[Finding]]:
    """Merge every low-rank pair: return the coverage of the merged leaves, the merges by leaf name, and findings."""
    merges: dict[str, Merge] = {}
    matched: list[Matched] = []
    findings: list[Finding] = []
    for one in coverage.matched:
        kind = one.rule.kind
        if kind.pair is None:
            matched.append(one)
            continue
        try:
            made = _merges(one, kind.pair, source, sizes, facts)
        except ValueError as error:
            findings.append(Finding("low-rank-mismatch", str(error), rule=one.rule.at.line_only))
            made = {}
        merges |= {m.name: m for m in made.values()}
        leaves = {"weight": {key: m.name for key, m in made.items()}}
        if "bias" in one.leaves:
            leaves["bias"] = one.leaves["bias"]
        matched.append(Matched(_merged(one.rule), leaves))
    if not merges and not findings:
        return coverage, {}, []
    return replace(coverage, matched=tuple(matched)), merges, findings


def _merged(rule: Rule) -> Rule:
    kept = {role: path for role, path in rule.sources.items() if role in ("weight", "bias")}
    return replace(rule, kind=rule.kind.merged, sources=kept)


def _merges(one: Matched, pair: Pair, source: Source, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> dict[Any, Merge]:  # fmt: skip
    scale = pair.scale.value(sizes, facts)
    firsts, seconds = (one.leaves.get(role, {}) for role in pair.roles)
    letters = one.rule.kind.weight_axes[0][0]
    stacked = tuple(sorted(one.rule.stacked.values()))
    made = {}
    for key, first in firsts.items():
        base = one.leaves["weight"].get(key) if pair.added else None
        if key not in seconds or (base is None and pair.added):
            continue  # reported by match.cover
        names = [name for name in (base, first, seconds[key]) if name is not None]
        specs = [source.leaves[name].spec for name in names]
        for name, spec in zip(names, specs, strict=True):
            if not is_float(spec.dtype):
                raise ValueError(f"{name}: {spec} is multiplied and added, which needs floating-point values")
        shapes = [(name, tuple(spec.shape[axis] for axis in stacked if axis < len(spec.shape))) for name, spec in zip(names, specs, strict=True)]  # fmt: skip
        for name, layers in shapes[1:]:
            if layers != shapes[0][1]:
                raise ValueError(f"{shapes[0][0]} stacks {shapes[0][1]} layers and {name} {layers}; a pair has as many as its weight")  # fmt: skip
        own = iter(sizes.get(letter, 0) for letter in letters)
        layers_of = dict(zip(stacked, shapes[0][1], strict=True))
        shape = tuple(
            layers_of[axis] if axis in layers_of else next(own) for axis in range(len(letters) + len(stacked))
        )
        wide = "float64" if any(spec.dtype == "float64" for spec in specs) else "float32"
        dtype = specs[0].dtype if base or widens(specs[1].dtype, specs[0].dtype) else specs[1].dtype
        made[key] = Merge(
            first, seconds[key], base, pair.product, letters, stacked, scale, TensorSpec(shape, wide), dtype
        )
    return made
