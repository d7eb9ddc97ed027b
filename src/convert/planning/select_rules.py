"""Select the rule file that fits a checkpoint among those of a family: score, pick, explain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from convert.checkpoints.source import Source
from convert.core.errors import OptionError, PlanError
from convert.core.findings import Finding
from convert.core.path_index import PathIndex
from convert.planning.adapters.attach import adapter_alone
from convert.planning.adapters.names import alone
from convert.planning.distance import contradictions, distance, lacking, with_words_of
from convert.planning.facts.architectures import class_conflict, loaded_classes, names_class
from convert.planning.facts.settings import settable
from convert.planning.matching.match import cover
from convert.planning.options import DEFAULTS, ConversionOptions
from convert.planning.planner import misfit_error, plan_match, several_trees
from convert.planning.rule_match import RuleMatch, check_options, match_rules
from convert.rules.file import RuleFile

CLOSEST = 4  # rule files that an error names
SAME_MODEL = 0.5  # share of the leaves that rules match which are of the same model


@dataclass(frozen=True)
class Ambiguous:
    """Several rule files fit equally well."""

    matches: tuple[RuleMatch, ...]


@dataclass(frozen=True)
class NoMatch:
    """No rule file fits.

    Attributes:
        nearest: the match to report.
        matches: all, those that match most leaves first.
        smaller: a match that fits but drops leaves which `nearest` converts.
    """

    nearest: RuleMatch
    matches: tuple[RuleMatch, ...]
    smaller: RuleMatch | None = None


def score(candidates: Sequence[RuleFile], source: Source, options: ConversionOptions = DEFAULTS) -> list[RuleMatch]:
    """Match each rule file with the checkpoint; the file that matches the largest fraction of the leaves comes first.

    Each is matched with the settings that it knows, and with those that none of them knows.
    """
    index, own = PathIndex(source.leaves), own_options(candidates, options)
    matches = [match_rules(rules, source, own[rules.model], index) for rules in candidates]
    return sorted(matches, key=lambda match: -match.coverage.fraction)


def own_options(candidates: Sequence[RuleFile], options: ConversionOptions) -> dict[str, ConversionOptions]:
    """Return model -> the options with the settings that its rules know, and with those that no rules know."""
    known = {rules.model: settable(rules) for rules in candidates}
    known_to_any = {key for names in known.values() for key in names}
    return {
        model: replace(
            options,
            settings={
                key: value
                for key, value in options.settings.items()
                if len(candidates) == 1 or key in names or key not in known_to_any
            },
        )
        for model, names in known.items()
    }


def select(
    candidates: Sequence[RuleFile],
    of_more_classes: Sequence[RuleFile],
    source: Source,
    options: ConversionOptions = DEFAULTS,
) -> RuleMatch | Ambiguous | NoMatch:
    """Pick among the candidates. Where they know neither tree nor class, take rules of more classes if these fit, or say which key contradicts the tree.

    Raises:
        OptionError: as `check_taken`.
    """
    choice = _select(candidates, of_more_classes, source, options)
    if isinstance(choice, RuleMatch):
        check_taken(choice.rules, (*candidates, *of_more_classes), options)
    return choice


def check_taken(rules: RuleFile, candidates: Sequence[RuleFile], options: ConversionOptions) -> None:
    """Check that the rules that are picked know each setting that rules of their family know.

    Raises:
        OptionError: others know it, and these do not.
    """
    known = settable(rules)
    for key, value in options.settings.items():
        others = [] if key in known else [other.model for other in candidates if key in settable(other)]
        if not others:
            continue
        more = f" and {len(others) - CLOSEST} more" if len(others) > CLOSEST else ""
        raise OptionError(
            Finding(
                "setting-has-no-effect",
                f"the tree is that of {rules.model} ({rules.title}), which has no such setting; it is one of "
                f"{', '.join(others[:CLOSEST])}{more}",
                rule=rules.path,
                path=f"--set {key}={value}",
                expected=f"one of {', '.join(known)}",
                got=key,
                fix="leave it out",
            )
        )


def _select(
    candidates: Sequence[RuleFile], of_more_classes: Sequence[RuleFile], source: Source, options: ConversionOptions
) -> RuleMatch | Ambiguous | NoMatch:
    choice = pick(score(candidates, source, options))
    if not of_more_classes or not _of_another_class(choice):
        return choice
    others = score(of_more_classes, source, options)
    if fitting := next((match for match in others if _fits(match)), None):
        return fitting
    nearest = choice.nearest if isinstance(choice, NoMatch) else choice
    known = isinstance(nearest, RuleMatch) and nearest.coverage.fits
    return choice if known else next((match for match in others if _contradicts_the_tree(match)), choice)


def _contradicts_the_tree(match: RuleMatch) -> bool:
    """Whether the rules know each leaf, and the sidecar has keys of a class without some of them."""
    return match.coverage.fits and {finding.code for finding in match.refused} == {"config-conflict"}


def _of_another_class(choice: RuleMatch | Ambiguous | NoMatch) -> bool:
    """Whether the tree, or the class that the sidecar names, is not that of the rules; a wrong value alone is no other class."""
    if isinstance(choice, Ambiguous):
        return False
    match = choice.nearest if isinstance(choice, NoMatch) else choice
    if match.target not in match.rules.targets:
        return False
    return not match.coverage.fits or any(class_conflict(match.rules, match.target, match.sized[0].sidecar))


def pick(matches: Sequence[RuleMatch]) -> RuleMatch | Ambiguous | NoMatch:
    """Pick the match that fits and drops the fewest leaves, unless one that does not fit converts more. A single candidate is picked in any case."""
    if len(matches) == 1:
        return matches[0]
    if any(match.coverage.converted and not match.below for match in matches):
        matches = [match for match in matches if not match.below]  # a part of the tree is no model of its own
    fitting = [match for match in matches if _fits(match)]
    taken = _without_second_classes(fitting)
    fewest = min((match.coverage.left_out for match in taken), default=0)
    best = [match for match in taken if match.coverage.left_out == fewest]
    if not best:
        return NoMatch(_nearest(matches), tuple(matches))
    # A part that is damaged, has an adapter or a leaf of another release is no reason to leave the part out.
    fuller = [m for m in matches if _keeps_more(m, best[0]) and _has_target(m)]
    if misfits := [m for m in fuller if not any(m is fits for fits in fitting)]:
        nearest = min(misfits, key=distance)
        return NoMatch(nearest, tuple(matches), smaller=best[0])
    return best[0] if len(best) == 1 else Ambiguous(tuple(best))


def _keeps_more(match: RuleMatch, fitting: RuleMatch) -> bool:
    """Whether rules convert more leaves than those that fit; or as many, and have a part of which no leaf is known, where the others drop leaves.

    The latter is a tower with other names: it is a part of the model nevertheless.
    """
    found, other = match.coverage, fitting.coverage
    if found.converted != other.converted:
        return found.converted > other.converted
    lacks_a_part = any(not any(one.leaves.values()) for one in found.matched)
    return match.rules.path == fitting.rules.path and len(found.dropped) < len(other.dropped) and lacks_a_part


def _has_target(match: RuleMatch) -> bool:
    return match.target in match.rules.targets and match.rules.supports(match.target)


def _fits(match: RuleMatch) -> bool:
    """Whether leaves, sizes, facts and options suit the rules."""
    if match.coverage.fraction == 0 or not match.coverage.fits or match.refused:
        return False
    try:
        check_options(match)
    except OptionError:
        return False
    return match.rules.supports(match.target) and not match.sized[1]


def _without_second_classes(fitting: Sequence[RuleMatch]) -> list[RuleMatch]:
    """Leave out rules of a class whose tree is also that of another class which fits, unless the sidecar names the class."""
    second = {
        name
        for match in fitting
        if not names_class(match.sized[0].sidecar)
        for name in match.rules.targets[match.target].same_tree
    }
    return [match for match in fitting if not second.intersection(loaded_classes(match.rules, match.target))]


def _nearest(matches: Sequence[RuleMatch]) -> RuleMatch:
    """Return the match with the least `distance` of those that convert most of the leaves and support the target, or the first one.

    One that fits the tree, and not the sidecar or the settings, comes first, with the fewest contradictions. If only rules without the target fit the tree, their error says which targets they have.
    """
    supporting = [m for m in matches if m.target not in m.rules.targets or m.rules.supports(m.target)]
    most = [match for match in supporting if match.coverage.fraction > SAME_MODEL]
    whole_tree = [match for match in most if match.coverage.fits]
    with_target = [match for match in whole_tree if match.target in match.rules.targets]
    fitting = min(with_target, key=lambda match: len(match.sized[1]), default=next(iter(whole_tree), None))
    whole = (m for m in matches if m not in supporting and m.coverage.fits)
    return fitting or next(whole, None) or min(most, key=distance, default=matches[0])


def explain(outcome: Ambiguous | NoMatch) -> PlanError:
    """Return the error that says why no rule file could be picked."""
    if isinstance(outcome, Ambiguous):
        first = outcome.matches[0]
        names = [match.rules.model for match in outcome.matches]
        return PlanError(
            Finding(
                "rules-ambiguous",
                f"{first.source.display_path} fits {' and '.join(names)}",
                fix=f"name one of them in place of {first.rules.family}",
            )
        )
    nearest = outcome.nearest
    if nearest.coverage.fraction < SAME_MODEL and (refused := [match for match in outcome.matches if match.refused]):
        return misfit_error(refused[0], refused[0].refused)
    if nearest.coverage.fraction == 0:
        return PlanError(_no_match(outcome))
    error = _plan_error(nearest)
    if outcome.smaller is not None:
        return error.with_hint(
            f"Name {outcome.smaller.rules.model} in place of {nearest.rules.family} to convert without the leaves that it drops"
        )
    if isinstance(error, OptionError) or nearest.coverage.fits:
        return error  # the model is recognized; the problem is another
    shares = ", ".join(f"{m.rules.model} matches {round(100 * m.coverage.fraction)} %{lacks}" for m, lacks in _closest(outcome))  # fmt: skip
    return error.with_hint(
        f"{nearest.rules.model} is the closest of {nearest.rules.family or nearest.rules.model}: {shares}"
    )


def _closest(outcome: NoMatch) -> list[tuple[RuleMatch, str]]:
    """Return the nearest match and the ones after it that lack other leaves, with the first of these."""
    found, known = [(outcome.nearest, " of the leaves")], {tuple(lacking(outcome.nearest.coverage))}
    for match in sorted((m for m in outcome.matches if m.coverage.fraction), key=distance):
        missing = tuple(lacking(match.coverage))
        if match is not outcome.nearest and missing not in known:
            lacks = f" and lacks {missing[0]}" if missing and match.coverage.fraction > SAME_MODEL else ""
            known.add(missing)
            found.append((match, lacks))
    return found[:CLOSEST]


def _plan_error(match: RuleMatch) -> PlanError:
    try:
        plan_match(match)
    except PlanError as error:
        return error
    raise AssertionError(f"{match.rules.model} does not fit and can be planned")


BACK = "if these are PyTorch's, they go back to JAX with --to orbax, msgpack or npz; "


def _no_match(outcome: NoMatch) -> Finding:
    source = outcome.nearest.source
    if alone(source.leaves):
        return adapter_alone(source)
    return Finding(
        "rules-of-another-model",
        f"{source.display_path} ({source.format}) fits none of {', '.join(match.rules.model for match in outcome.matches)}: no rule "
        f"matches any of its {len(source.leaves)} leaves",
        got=f"leaves such as {next(iter(source.leaves))}" if source.leaves else "no leaves",
        fix=next(filter(None, map(several_trees, outcome.matches)), "")
        or (BACK if source.format.startswith("safetensors") else "")
        + "list the leaves with `convert inspect`, and the known models with `convert rules list`",
    )


def suggest_other(nearest: RuleMatch, others: Iterable[RuleFile], named: str) -> str:
    """Suggest a model of another family whose tree is nearer to the checkpoint's; empty without one.

    Args:
        nearest: the match of which the error tells.
        others: the models of other families.
        named: what the user named.
    """
    if nearest.coverage.fits and all(finding.code != "shape-mismatch" for finding in contradictions(nearest)):
        return ""
    source, index, least = nearest.source, PathIndex(nearest.source.leaves), distance(nearest)
    found: RuleMatch | None = None
    for rules in with_words_of(source, others):
        match = match_rules(rules, source, index=index)
        if match.coverage.fraction > SAME_MODEL and not match.refused and (far := distance(match)) < least:
            found, least = match, far
    if found is None:
        return ""
    name, percent = f"{found.rules.model} ({found.rules.title})", round(100 * found.coverage.fraction)
    said = f"The tree is that of {name}" if found.coverage.fits else f"{name} is nearer: it matches {percent} % of the leaves"  # fmt: skip
    return f"{said}: name {found.rules.model} in place of {named}"


def suggest_relative(named: RuleMatch, family: Sequence[RuleFile]) -> str:
    """Suggest another model of the family for a checkpoint that the named model does not fit; empty without one.

    Args:
        family: the other models.
    """
    rules, to = named.rules, named.options.to
    fitting = [relative for relative in family if cover(relative, named.source).fits]
    if not named.coverage.fits and len(fitting) == 1:
        relative = fitting[0]
        return (
            f"The tree is that of {relative.model} ({relative.title}): name {relative.model} in place of {rules.model}, or "
            f"{relative.family} to have it recognized"
        )
    if to in rules.targets and to is not None and not rules.supports(to):
        able = [relative for relative in fitting if to in relative.targets and relative.supports(to)]
        if len(able) == 1:
            return f"Name {able[0].model} in place of {rules.model} to convert without the leaves that it drops"
    return ""
