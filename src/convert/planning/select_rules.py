"""Which rules of several fit a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from convert.checkpoints.source import Source
from convert.core.errors import PlanError
from convert.core.path_index import PathIndex
from convert.planning.burn.modules import with_burn
from convert.planning.match import Coverage, cover
from convert.planning.options import DEFAULTS, ConversionOptions
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.planning.settings import settable
from convert.rules.file import RuleFile


def choose_plan(
    candidates: tuple[RuleFile, ...],
    source: Source,
    options: ConversionOptions = DEFAULTS,
) -> Plan:
    """The plan of the rule file that fits the checkpoint; arguments as in `make_plan`.

    Where several fit, it is the one that drops fewest leaves: the model with a vision tower, for a tree that has one.

    Raises:
        PlanError: none fits (the findings are those of the nearest), or several do.
    """
    candidates = tuple(with_burn(rules, options.to) for rules in candidates)
    if len(candidates) == 1:
        return make_plan(candidates[0], source, options)
    index = PathIndex(source.leaves)
    coverages = {rules.model: cover(rules, source, index) for rules in candidates}
    shares = {model: share(coverage, source) for model, coverage in coverages.items()}
    best = sorted(candidates, key=lambda rules: -shares[rules.model])
    misspelt = set(options.settings) - {key for rules in candidates for key in settable(rules)}
    errors: dict[str, PlanError] = {}
    fitting: list[Plan] = []
    left_out = {
        model: len(source.leaves) - coverage.claimed + len(coverage.dropped) for model, coverage in coverages.items()
    }
    for rules in sorted(best, key=lambda rules: left_out[rules.model]):
        whole = any(not plan.dropped for plan in fitting)  # then none that leaves some out can be meant
        if shares[rules.model] == 0 or (whole and (left_out[rules.model] or coverages[rules.model].findings)):
            continue
        own = {k: v for k, v in options.settings.items() if k in settable(rules)}
        only = options.settings if rules is best[0] and misspelt else own  # which is an error of the nearest file
        try:
            fitting.append(make_plan(rules, source, replace(options, settings=only), coverage=coverages[rules.model]))
        except PlanError as error:
            errors[rules.model] = error
    fewest = min((len(plan.dropped) for plan in fitting), default=0)
    fitting = [plan for plan in fitting if len(plan.dropped) == fewest]
    for rules in best if fitting else ():  # a damaged tower is no reason to leave it out
        knows_more = (
            len(coverages[rules.model].dropped) < fewest and shares[rules.model] >= shares[fitting[0].rules.model]
        )
        if rules.model in errors and knows_more and rules.supports(fitting[0].target):
            raise PlanError(
                f"{errors[rules.model]}\nName {fitting[0].rules.model} in place of {best[0].family} to go without the leaves "
                "that it leaves out",
                errors[rules.model].findings,
            )
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = " and ".join(plan.rules.model for plan in fitting)
        raise PlanError(f"{source.called} fits {names} alike; name one of them in place of {best[0].family}")
    said = ", ".join(f"{rules.model} knows {round(100 * shares[rules.model])} % of the leaves" for rules in best)
    able = [
        rules for rules in best if options.to is None or options.to not in rules.targets or rules.supports(options.to)
    ]  # the others would say only that
    first = next((rules for rules in able if rules.model in errors and shares[rules.model] > 0.5), best[0])
    nearest_error = errors.get(first.model)
    if nearest_error is None:
        found = next(iter(source.leaves), "no leaves")
        raise PlanError(
            f"{source.called} ({source.format}) fits none of {', '.join(rules.model for rules in best)}: none of its "
            f"{len(source.leaves)} leaves matches a rule; the first is {found}. See the tree with `convert inspect`, and the "
            "models that are known with `convert rules list`"
        )
    if not coverages[first.model].findings:  # the model is known; the mistake is another
        raise nearest_error
    raise PlanError(
        f"{nearest_error}\nThat is the nearest of {best[0].family or best[0].model}: {said}", nearest_error.findings
    )


def share(coverage: Coverage, source: Source) -> float:
    """The share of leaves that rules know, from 0 to 1; leaves that they only drop do not count."""
    dropped = {claim.leaf for claim in coverage.dropped}
    rest = len(source.leaves) - len(dropped)
    return (coverage.claimed - len(dropped)) / rest if rest else 0.0
