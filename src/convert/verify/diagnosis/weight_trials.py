"""Search for a wrong tensor: run the layer again with the tensors that each known mistake would need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.layers.base import Step
from convert.layers.mistake import Mistake
from convert.layers.step_tensor import expected
from convert.numerics.compare import epsilon
from convert.planning.plan import Plan
from convert.references.protocol import INPUT
from convert.verify.diagnosis.compare import Explanation, Search
from convert.verify.diagnosis.site import Site, Trial
from convert.verify.mistakes.catalogue import group_mistakes, known_mistakes
from convert.verify.mistakes.named import in_words, mistake_in
from convert.verify.sides.records import USER_FAILS
from convert.verify.sides.replay import Replay
from convert.writing.execute import computed

Array = np.ndarray[Any, np.dtype[Any]]
PAIRED_ROLES = (
    ("weight", "bias"),
    ("running_mean", "running_var"),
)  # tensors about which a rule is wrong in the same way
EXCHANGED = "leaves of two rules exchanged"
OTHER_VALUE, OTHER_VALUES = "another value in the file", "other values in the file"
CONVERT_AGAIN = "convert again, or back again with --to if the checkpoint was made of the file; the weights level says which values differ"
ROUNDINGS = 2  # by which the file may differ from values in float64
MAX_PAIRS = 64  # of one mistake with a weight and one with its bias


def wrong_tensor(site: Site) -> Search:
    """Search for a mistake in the layer's tensors."""
    return _first(site, weight_trials(site))


def wrong_rules(site: Site) -> Search:
    """Search for a mistake that several rules make together in the tensors of one layer, such as the gates of a recurrence."""
    return _first(site, _together(site))


def _first(site: Site, trials: Iterator[Trial]) -> Search:
    """Return the first trial that restores the value at the boundary."""
    ruled_out: list[str] = []
    for trial in trials:
        try:
            error = site.error(trial.run())
        except (*USER_FAILS, ConvertError):  # the layer does not take this shape
            continue
        if error <= site.enough:
            return Search(Explanation(trial.name, trial.problem, trial.rule, trial.fix, error), tuple(ruled_out))
        ruled_out.append(trial.name)
    return Search(ruled_out=tuple(ruled_out))


def weight_trials(site: Site) -> Iterator[Trial]:
    """Yield mistakes in the tensors of the layer at the boundary, then in those of the module around it."""
    parent = site.name.rpartition(".")[0]
    for holder in [parent] if site.boundary.endswith(INPUT) else [site.name, parent]:
        replay = site.replay(holder)
        if replay is not None:
            yield from _of_file(site, replay, site.steps(holder))
            yield from _of_rules(site, replay, [step for step in site.steps(holder) if step.parts])


def _together(site: Site) -> Iterator[Trial]:
    """Yield trials in which two rules have each other's leaves, and those in which several are wrong about their tensors in the same way."""
    parent = site.name.rpartition(".")[0]
    for holder in [parent] if site.boundary.endswith(INPUT) else [site.name, parent]:
        replay = site.replay(holder)
        if replay is None:
            continue
        rules: dict[str, dict[str, Step]] = {}
        for step in site.steps(holder):
            if step.parts and step.group is None:
                rules.setdefault(step.rule.line_only, {})[step.role] = step
        for one, two in itertools.combinations(rules.values(), 2):
            if {k: x.spec for k, x in one.items()} == {k: x.spec for k, x in two.items()}:
                yield _exchanged(site, replay, one, two)
        kinds: dict[tuple[str, tuple[int, ...]], list[Step]] = {}
        for step in (step for steps in rules.values() for step in steps.values()):
            kinds.setdefault((step.role, step.spec.shape), []).append(step)
        for same in kinds.values():
            found = [{(h.name, h.key, h.gives): h for h in _visible(step, site.plan)} for step in same]
            for key in found[0] if len(same) > 1 else ():
                if all(key in one for one in found):
                    yield _of_rule(replay, {step: one[key] for step, one in zip(same, found, strict=True)})


def _exchanged(site: Site, replay: Replay, one: Mapping[str, Step], two: Mapping[str, Step]) -> Trial:
    """Return the trial in which two rules have each other's leaves."""
    other = {a.name: b for role in one for a, b in ((one[role], two[role]), (two[role], one[role]))}
    first, second = (next(iter(steps.values())) for steps in (one, two))
    lines = f"{first.rule.line_only} and {second.rule.line_only}"
    problem = f"by {lines}, {first.name} has the values of {second.name}, and the other way round; with them exchanged, the layer gives the JAX model's value"
    fix = f"compare the leaves of the two rules at {lines} with the names in the source's code"
    return Trial(
        EXCHANGED,
        problem,
        first.rule.line_only,
        fix,
        lambda: replay.with_tensors({name: expected(step, site.plan.source) for name, step in other.items()}),
    )


def _of_file(site: Site, replay: Replay, steps: list[Step]) -> Iterator[Trial]:
    """Yield trials in which the rule is right, and the file does not hold what the rule makes."""
    source = site.plan.source
    constants = [step for step in steps if isinstance(step.value, float)]
    from_leaves = [step for step in steps if step.parts and differs(site, step)]

    def trial(name: str, problem: str, rule: str, tensors: Callable[[], dict[str, Array]]) -> Trial:
        return Trial(name, problem, rule, CONVERT_AGAIN, lambda: replay.with_tensors(tensors()))

    for step in constants:
        rule = step.rule.line_only
        problem = f"{step.name} in the file is not the constant {step.value:g} that {rule} makes it"
        yield trial(OTHER_VALUE, problem, rule, lambda step=step: {step.name: computed(step)})  # type: ignore[misc]
    for step in from_leaves:
        rule = step.rule.line_only
        problem = f"{step.name} in the file is not what {rule} makes of the checkpoint{_called(site, [step])}"
        yield trial(OTHER_VALUE, problem, rule, lambda step=step: {step.name: expected(step, source)})  # type: ignore[misc]
    if len(from_leaves) > 1:
        rules = list(dict.fromkeys(step.rule.line_only for step in from_leaves))
        names = " and ".join(step.name for step in from_leaves)
        made = f"{rules[0]} makes" if len(rules) == 1 else f"{' and '.join(rules)} make"
        problem = f"{names} in the file are not what {made} of the checkpoint{_called(site, from_leaves)}"
        yield trial(
            OTHER_VALUES, problem, rules[0], lambda: {step.name: expected(step, source) for step in from_leaves}
        )


def _called(site: Site, steps: list[Step]) -> str:
    """Name the known mistakes that give the values of these tensors, each once."""
    dtype = site.evidence.rounded or site.evidence.precision
    found = (
        mistake_in(step, site.seen.weights[step.name], site.plan, dtype)
        for step in steps
        if step.name in site.seen.weights
    )
    words = dict.fromkeys(in_words(mistake) for mistake in found if mistake is not None)
    return f": {'; '.join(words)}" if words else ""


def differs(site: Site, step: Step) -> bool:
    """Whether the module has other values than the rule makes, by more than the roundings of the file."""
    got = site.seen.weights.get(step.name)
    if got is None:
        return True
    want = expected(step, site.plan.source)
    if got.shape != want.shape:
        return True
    coarse = site.evidence.rounded or site.evidence.precision
    slack = ROUNDINGS * max(epsilon(site.evidence.precision), epsilon(coarse))
    with np.errstate(invalid="ignore"):
        return not bool(np.all(np.abs(got - want) <= slack * np.abs(want)))


def _of_rules(site: Site, replay: Replay, steps: list[Step]) -> Iterator[Trial]:
    """Yield trials in which the file holds what the rule makes, and the rule is wrong."""
    yield from _of_cells(replay, steps, site.plan)
    for step in steps:
        for h in _visible(step, site.plan):
            yield _of_rule(replay, {step: h})
    pairs = [(w, b) for one, two in PAIRED_ROLES for w in steps if w.role == one for b in steps if b.role == two]
    for weight, bias in pairs:
        # A rule that is wrong about a layer is wrong about both of its tensors, in the same way.
        others = list(_visible(bias, site.plan))
        same = ((h, o) for h in _visible(weight, site.plan) for o in others if (h.name, h.key) == (o.name, o.key))
        for h, o in itertools.islice(same, MAX_PAIRS):
            yield _of_rule(replay, {weight: h, bias: o})


def _of_cells(replay: Replay, steps: list[Step], plan: Plan) -> Iterator[Trial]:
    """Yield mistakes that are made in all tensors of a recurrent layer together, in both directions."""
    groups: dict[tuple[str, str], dict[Step, Mistake]] = {}
    for step in steps:
        for h in group_mistakes(step, plan) if step.group is not None else ():
            if h.key:
                groups.setdefault((h.name, h.key), {})[step] = h
    # A forget bias is in one tensor; any other mistake of a rule shows in several.
    yield from (_of_rule(replay, made) for (_, key), made in groups.items() if len(made) > 1 or key == "f")


def _visible(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Return the mistakes whose effect an output can show."""
    return (mistake for mistake in known_mistakes(step, plan) if not mistake.rounding)


def _of_rule(replay: Replay, mistakes: Mapping[Step, Mistake]) -> Trial:
    """Return the trial in which the rule makes these mistakes."""
    (step, first), *_ = mistakes.items()
    rule = step.rule.line_only
    tensors = [
        f"{step.name}: expected {h.gives} (the JAX model), got {h.instead} (the rule)" for step, h in mistakes.items()
    ]
    return Trial(
        first.converse,
        f"by {rule} {'; '.join(tensors)}",
        rule,
        f"correct the rule at {rule}: it does not describe what the source computes",
        lambda: replay.with_tensors({step.name: h.make() for step, h in mistakes.items()}),
    )
