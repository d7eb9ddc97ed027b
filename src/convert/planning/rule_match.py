"""Stages 1 and 2: a rule file, the leaves that its rules match, and what their shapes determine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from convert.checkpoints.source import Source
from convert.core.errors import OptionError
from convert.core.findings import Finding
from convert.core.path_index import PathIndex
from convert.core.similarity import did_you_mean
from convert.core.tensor_spec import SAFETENSORS_TAGS, is_float
from convert.planning.adapters.lost import no_pair_is_merged
from convert.planning.adapters.scale import ADAPTER, BASE, SETTINGS
from convert.planning.facts.agreement import (
    contradicted_by_leaves,
    contradicted_formulas,
    layers_without_leaves,
    odd_heads,
    solved_facts,
)
from convert.planning.facts.architectures import class_conflict, of_another_model
from convert.planning.facts.limits import known_values, refused_facts
from convert.planning.facts.settings import check_settings
from convert.planning.facts.sidecar import Sidecar, contradictions, read_sidecar
from convert.planning.facts.values import (
    collect_facts,
    published_version,
    solve_products,
    stated_places,
    unfit_sizes,
    unmet_requirements,
)
from convert.planning.matching.match import Coverage, cover, layers_with, matching_root
from convert.planning.modules.expand import for_class
from convert.planning.modules.not_taken import refused_nulls
from convert.planning.options import DEFAULTS, ConversionOptions
from convert.planning.sizes import solve_sizes
from convert.planning.target_formats.base import TargetFormat
from convert.planning.target_formats.registry import format_of, target_names, with_target
from convert.rules import enclosed
from convert.rules.file import RuleFile, Version

LARGEST_STATE = 4  # the weights are at least this part of a train state: Adam keeps two averages, and there may be one of the weights


@dataclass(frozen=True)
class Sized:
    """Stage 2: what the shapes of the leaves determine.

    Attributes:
        coverage: the matched leaves, without rules that are unfinished.
        sizes: axis letters and indices -> size.
        variants: name of a choice -> variant.
        version: the published version with these sizes.
        sidecar: files next to the checkpoint.
        facts: hyperparameters that no leaf holds.
        confirmed: settings that the tree gives, too.
        refused: facts that `allowed` refuses; what a rule makes of them is no further problem.
    """

    coverage: Coverage
    sizes: Mapping[str, int]
    variants: Mapping[str, str]
    version: Version | None
    sidecar: Sidecar
    facts: Mapping[str, Any]
    confirmed: frozenset[str]
    refused: frozenset[str]


@dataclass(frozen=True)
class RuleMatch:
    """Stage 1: a rule file and the leaves that its rules match.

    Attributes:
        rules: with the layers of the target (see `convert.planning.target_formats.registry.with_target`).
        source: the checkpoint.
        options: of the conversion.
        coverage: which leaf belongs to which rule.
        refused: why the rules cannot be written for the class of the checkpoint.
        below: the key that the rules do not name, and below which they were matched; empty: none.
        also_below: such keys, where there are several: the rules are matched below none of them.
    """

    rules: RuleFile
    source: Source = field(repr=False)
    options: ConversionOptions
    coverage: Coverage = field(repr=False)
    refused: tuple[Finding, ...] = ()
    below: str = ""
    also_below: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.options.to or next(iter(self.rules.targets))

    @property
    def format(self) -> TargetFormat:
        """Layout of the output."""
        return format_of(self.rules.targets[self.target])

    @property
    def adapter_settings(self) -> dict[str, Any]:
        """The settings that are no facts of the rules."""
        return {key: value for key, value in self.options.settings.items() if key not in self.rules.facts}

    @property
    def without_adapters(self) -> bool:
        """Whether the user wants the weights without the LoRA pairs of the tree."""
        return bool(self.coverage.pairs) and self.adapter_settings.get(ADAPTER) == BASE

    @cached_property
    def sized(self) -> tuple[Sized, list[Finding]]:
        """Stage 2."""
        return _size(self)


def match_rules(
    rules: RuleFile, source: Source, options: ConversionOptions = DEFAULTS, index: PathIndex | None = None
) -> RuleMatch:
    """Stage 1: match the leaves with the rules.

    Args:
        index: of the source's leaves; pass one where several rule files are matched with one source.
    """
    index = index or PathIndex(source.leaves)
    match = _match(rules, source, options, index)
    if match.coverage.converted:
        return match
    found = [one for key in _enclosing(rules, source, index) if _holds_the_model(one := _match(rules, source, options, index, key))]  # fmt: skip
    return found[0] if len(found) == 1 else replace(match, also_below=tuple(one.below for one in found))


def _match(rules: RuleFile, source: Source, options: ConversionOptions, index: PathIndex, key: str = "") -> RuleMatch:
    """Match the leaves with the rules, below a key that they do not name."""
    rules, refused = for_class(enclosed.below(rules, key) if key else rules, source)
    rules = with_target(rules, options.to)
    return RuleMatch(rules, source, options, cover(rules, source, index), refused, key)


def _enclosing(rules: RuleFile, source: Source, index: PathIndex) -> Iterator[str]:
    """Yield the keys at the top of a tree below which leaves of the rules may lie: a part as large as the weights in a train state."""
    counts = Counter(name.partition("/")[0] for name in source.leaves)
    for key in (key for key, count in counts.items() if count * LARGEST_STATE >= len(source.leaves)):
        if rules.modules is not None or matching_root(enclosed.below(rules, key), index) is not None:
            yield key


def _holds_the_model(match: RuleMatch) -> bool:
    """Whether most of the leaves below the key are those of the rules."""
    dropped = {drop.leaf for drop in match.coverage.dropped}
    inside = sum(name.startswith(f"{match.below}/") and name not in dropped for name in match.source.leaves)
    return match.coverage.converted * 2 > inside


def check_options(match: RuleMatch) -> None:
    """Check target, dtype and settings against the rules.

    Raises:
        OptionError: one of them does not suit.
    """
    rules, dtype = match.rules, match.options.dtype
    if match.target not in rules.targets:
        known = target_names(rules)
        raise OptionError(
            Finding(
                "target-unknown",
                "the rules have no such target",
                rule=rules.path,
                path=f"--to {match.target}",
                expected=f"one of {', '.join(known)}",
                got=match.target,
                fix=did_you_mean(match.target, known) or "choose one of them",
            )
        )
    if dtype is not None and (SAFETENSORS_TAGS.get(dtype) is None or not is_float(dtype)):
        floats = [name for name, tag in SAFETENSORS_TAGS.items() if tag and is_float(name)]
        raise OptionError(
            Finding(
                "dtype-unknown",
                path=f"--dtype {dtype}",
                expected=f"a floating-point dtype of safetensors ({', '.join(floats)})",
                got=dtype,
                fix=did_you_mean(dtype, floats) or "choose one of them",
            )
        )
    own = [name for name in match.adapter_settings if name in SETTINGS]
    if not match.coverage.pairs and (own or match.source.adapter is not None):
        option = "" if not own else "--adapter" if own[0] == ADAPTER else f"--set {own[0]}"
        dropped = {drop.leaf: drop.reason for drop in match.coverage.dropped}
        half = any(finding.code == "adapter-dropped" for finding in match.coverage.findings)  # it says more
        if not half and (finding := no_pair_is_merged(match.source, dropped, option)) is not None:
            raise OptionError(finding)
    check_settings(rules, {k: v for k, v in match.options.settings.items() if k not in own})


def _size(match: RuleMatch) -> tuple[Sized, list[Finding]]:
    rules, settings = match.rules, match.options.settings
    coverage = replace(match.coverage, matched=tuple(m for m in match.coverage.matched if not m.rule.asked))
    solution, findings = solve_sizes(coverage, match.source, settings)
    sidecar = read_sidecar(rules, match.source)
    version = published_version(rules, solution.sizes)
    facts = {**collect_facts(rules, version, sidecar, solution.sizes, settings), **coverage.types}
    sizes, contradicted = solve_products(rules, solution.sizes, facts, sidecar, settings)
    solved = solved_facts(rules, sizes, facts)
    facts = {**facts, **solved}
    findings += class_conflict(rules, match.target, sidecar)
    findings += of_another_model(rules, match.source)
    findings += contradictions(rules, match.target, sidecar, sizes, settings, solution.of_layers)
    findings += refused_nulls(rules, match.target, sidecar)
    findings += unmet_requirements(rules, match.target, facts, sizes)
    findings += unfit_sizes(rules, match.target, sizes)
    findings += contradicted
    places = stated_places(rules, facts, sidecar, settings)
    findings += contradicted_formulas(rules, sizes, facts, places)
    findings += odd_heads(rules, coverage.matched, sizes)
    shown = layers_with(rules, coverage.matched, match.source.leaves)
    known = known_values(rules, sizes, facts, solution.of_layers, shown)
    stated = {name: place for name, place in places.items() if place != rules.path or name in solved}
    refusals = list(refused_facts(rules, known, facts, stated))
    findings += refusals
    findings += contradicted_by_leaves(coverage.matched, facts, places)
    findings += layers_without_leaves(coverage.matched, coverage.counts, facts, places)
    refused = frozenset(name for refusal in refusals for name in refusal.data["facts"])
    return Sized(coverage, sizes, solution.variants, version, sidecar, facts, solution.confirmed, refused), findings
