"""Search for a wrong rule with outputs alone: run the whole PyTorch model again with the tensors that each mistake would need.

A rule is wrong for all layers at once, so each trial replaces all tensors of a rule. What the shape does not show comes first:
other orders of axes, and modules with tensors of the same shapes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.core.system import signals
from convert.layers.base import Step
from convert.layers.mistake import Mistake
from convert.layers.step_tensor import expected
from convert.references.protocol import INPUT, Reference
from convert.verify.diagnosis.compare import Explanation, Search
from convert.verify.diagnosis.site import Site, Trial, holder_of
from convert.verify.diagnosis.weight_trials import CONVERT_AGAIN, OTHER_VALUE, OTHER_VALUES, differs
from convert.verify.mistakes.catalogue import own_mistakes
from convert.verify.mistakes.layouts import (
    HEAD_BY_HEAD,
    fused_order_mistakes,
    layout_mistakes,
    stacked_axis_mistakes,
)
from convert.verify.mistakes.orders_of_parts import order_mistakes
from convert.verify.sides.records import USER_FAILS
from convert.verify.sides.replay import Replay
from convert.verify.sides.run_torch import input_tensors, observed

Array = np.ndarray[Any, np.dtype[Any]]
EXCHANGED, REVERSED, OTHER_ORDER = "modules exchanged", "layers in the reverse order", "layers in another order"
MOST_PAIRS = 66  # of layers of a stack: those of 12
DIRECTIONS, BACKWARD = (
    "directions exchanged",
    "_reverse",
)  # the ending of torch's tensors that read a sequence backwards
MAX_RUNS, MIN_RUNS = 256, 16  # of the model
WORK = 10**10  # weights times runs
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def wrong_rule(site: Site, reference: Reference, right: Collection[str]) -> Search:
    """Search among the mistakes that a rule makes in all tensors of the model, where the boundary is no layer of its own.

    Args:
        right: modules in front of the boundary whose values are equal, under the names that the reference gives them.
    """
    steps = _within(site)
    return _tried(site, reference, right, lambda replay: _trials(site, replay, steps)) if steps else Search()


def wrong_file(site: Site, reference: Reference) -> Search:
    """Try the tensors that the rules make in place of all that hold other values: no code is wrong if they restore parity."""
    if not site.evidence.is_live:  # a recording need not have the leaves of other layers
        return Search()
    steps = [step for step in site.plan.steps if step.parts and differs(site, step)]
    return _tried(site, reference, (), lambda replay: _of_file(site, replay, steps))


def exchanged(site: Site, reference: Reference, right: Collection[str]) -> Search:
    """Search for two modules, or two loose parameters, of the same shapes that have each other's weights; in front of the boundary, too.

    Args:
        right: as for `wrong_rule`.
    """
    steps = [step for step in site.plan.steps if step.parts]
    return _tried(site, reference, right, lambda replay: _exchanges(site, replay, steps))


def _tried(
    site: Site, reference: Reference, right: Collection[str], trials: Callable[[Replay], Iterator[Trial]]
) -> Search:
    """Run the model with the tensors of each trial, as often as its size allows; no trial changes a layer that is right."""
    replay = Replay(site.module, lambda: run_again(site, reference), site.places)
    weights = sum(step.spec.size for step in site.plan.steps)
    runs = max(MIN_RUNS, min(MAX_RUNS, WORK // max(1, weights)))
    ruled_out: list[str] = []
    for trial in trials(replay):
        if any(holder_of(site.places.get(tensor, tensor)) in right for tensor in trial.tensors):
            ruled_out.append(trial.name)
            continue
        if not runs:
            break
        runs -= 1
        signals.check()  # a run of a large model takes seconds
        try:
            error = site.error(trial.run())
        except (*USER_FAILS, OverflowError, ConvertError):  # not a tensor that fits, or code that takes no others
            continue
        if error <= site.enough:
            return Search(Explanation(trial.name, trial.problem, trial.rule, trial.fix, error), tuple(ruled_out))
        ruled_out.append(trial.name)
    return Search(ruled_out=tuple(ruled_out))


def _within(site: Site) -> list[Step]:
    """Return the steps of an output, of all that the module at the boundary holds, and of the same rules in other layers."""
    steps = [step for step in site.plan.steps if step.parts]
    if site.name not in {name for name, _ in site.module.named_modules()}:
        return steps
    around = site.name
    if site.boundary.endswith(INPUT) or next(site.module.get_submodule(site.name).children(), None) is None:
        around = site.name.rpartition(".")[0]  # what is in front of the layer is in the module around it
    rules = {step.rule.line_only for step in steps if step.name.startswith(f"{around}." if around else "")}
    return [step for step in steps if step.rule.line_only in rules]


def run_again(site: Site, reference: Reference) -> Array:
    """Run the whole PyTorch model in float64, and return its value at the boundary."""
    return values_again(site, reference, [site.boundary])[site.boundary]


def values_again(
    site: Site, reference: Reference, names: Iterable[str], inputs: Mapping[str, Array] | None = None
) -> Mapping[str, Array]:
    """Run the whole PyTorch model in float64, and return its values at these boundaries, and its outputs.

    Args:
        inputs: in place of those of the evidence.
    """
    import torch

    from convert.numerics.lift_torch import lifted

    device = next(site.module.parameters()).device
    with torch.no_grad(), lifted():
        tensors = input_tensors(site.evidence.inputs if inputs is None else inputs, "float64", device)
        return observed(reference, site.module, tensors, names)


def _trials(site: Site, replay: Replay, steps: Sequence[Step]) -> Iterator[Trial]:
    source = site.plan.source
    yield from _of_file(site, replay, steps)
    yield from _of_rules(
        replay,
        steps,
        lambda step: itertools.chain(
            layout_mistakes(step, source),
            fused_order_mistakes(step, source),
            stacked_axis_mistakes(step, source),
            order_mistakes(step, site.plan),
        ),
    )
    yield from _reversals(site, replay, steps)
    yield from _of_rules(replay, steps, lambda step: own_mistakes(step, site.plan))
    yield from _rope_of_two(site, replay, steps)
    yield from _other_orders(site, replay, steps)


def _of_file(site: Site, replay: Replay, steps: Sequence[Step]) -> Iterator[Trial]:
    """Yield the trial in which every tensor that is not what the rules make is what they make."""
    right = {step.name: expected(step, site.plan.source) for step in steps if step.name in site.seen.weights}
    wrong = {name: x for name, x in right.items() if not np.array_equal(x, site.seen.weights[name], equal_nan=True)}
    if wrong:
        first = next(step for step in steps if step.name in wrong)
        more = f", and {len(wrong) - 1} more," if len(wrong) > 1 else ""
        problem = f"{first.name}{more} in the file is not what the rules make of the checkpoint"
        name = OTHER_VALUES if len(wrong) > 1 else OTHER_VALUE
        yield Trial(name, problem, first.rule.line_only, CONVERT_AGAIN, lambda: replay.with_tensors(wrong))


def _of_rules(
    replay: Replay, steps: Sequence[Step], mistakes_of: Callable[[Step], Iterable[Mistake]]
) -> Iterator[Trial]:
    """Yield the trials in which a rule makes one mistake in all its tensors."""
    groups: dict[tuple[str, str, str], dict[Step, Mistake]] = {}
    for step in steps:
        for mistake in mistakes_of(step):
            if not mistake.rounding:
                key = (step.rule.line_only, mistake.name, mistake.key or mistake.gives)
                groups.setdefault(key, {}).setdefault(step, mistake)
    for made in groups.values():
        (first, mistake), *others = made.items()
        rule, more = first.rule.line_only, f" and {len(others)} more tensors" if others else ""
        fix = f"correct the rule at {rule}: it does not describe what the source computes"
        if mistake.name == HEAD_BY_HEAD:  # the order is that of the target
            fix = f"name this order in the target of the rule at {rule}, or correct the code that takes the parts apart"
        yield Trial(
            mistake.converse,
            f"by {rule} {first.name}{more}: expected {mistake.gives} (the JAX model), got {mistake.instead} (the rule)",
            rule,
            fix,
            lambda made=made: replay.with_tensors({step.name: m.make() for step, m in made.items()}),  # type: ignore[misc]
            [step.name for step in made],
        )


def _rope_of_two(site: Site, replay: Replay, steps: Sequence[Step]) -> Iterator[Trial]:
    """Yield the trials in which two modules of a block both have a mistake with the pairs of RoPE: queries and keys.

    Neither alone restores parity, and a rule that also makes the values is wrong about the keys only.
    """
    found: dict[str, dict[str, dict[Step, Mistake]]] = {}  # name of the mistake -> module without numbers -> mistakes
    for step in steps:
        for mistake in own_mistakes(step, site.plan):
            if "RoPE" in mistake.name and step.role == "weight":
                family = NUMBER.sub("#", f"{holder_of(step.name)}.")[:-1]
                found.setdefault(mistake.key or mistake.name, {}).setdefault(family, {}).setdefault(step, mistake)
    for families in found.values():
        for one, two in itertools.combinations(families, 2):
            if one.rpartition(".")[0] != two.rpartition(".")[0]:
                continue
            made = {**families[one], **families[two]}
            (first, mistake), (other, _) = (next(iter(families[name].items())) for name in (one, two))
            rules = " and ".join(dict.fromkeys((first.rule.line_only, other.rule.line_only)))
            yield Trial(
                mistake.converse,
                f"by {rules} {first.name} and {other.name}, in all layers: expected both {mistake.gives} (the JAX model), "
                f"got {mistake.instead} (the rules)",
                first.rule.line_only,
                f"give `rope` to the rules of both at {rules}, or rotate the same pairs in the target as the source does",
                lambda made=made: replay.with_tensors({step.name: m.make() for step, m in made.items()}),  # type: ignore[misc]
                [step.name for step in made],
            )


def _exchanges(site: Site, replay: Replay, steps: Sequence[Step]) -> Iterator[Trial]:
    """Yield the trials in which two modules or parameters of the same shapes are exchanged, in all layers; near ones first."""
    yield from _directions(site, replay, steps)
    families: dict[str, dict[tuple[str, ...], dict[str, Step]]] = {}  # unit without numbers -> numbers -> last name
    for step in steps:
        for unit in _units(step):
            numbers = tuple(NUMBER.findall(f"{unit}."))
            last = step.name.removeprefix(unit)
            families.setdefault(NUMBER.sub("#", f"{unit}.")[:-1], {}).setdefault(numbers, {})[last] = step
    pairs = [
        (one, two)
        for one, two in itertools.combinations(families, 2)
        if _shapes(families[one]) == _shapes(families[two])
    ]
    tried: set[frozenset[str]] = set()  # a module and the one module within it are the same trial
    for one, two in sorted(pairs, key=lambda pair: -_shared_start(*pair)):
        tensors: dict[str, Step] = {}
        for numbers, held in families[one].items():
            for last, step in held.items():
                other = families[two][numbers][last]
                tensors |= {step.name: other, other.name: step}
        if frozenset(tensors) in tried:
            continue
        tried.add(frozenset(tensors))
        numbers, last = next((numbers, last) for numbers, held in families[one].items() for last in held)
        one_unit, other_unit = (families[unit][numbers][last].name.removesuffix(last) for unit in (one, two))
        yield _moved(
            EXCHANGED,
            f"{one_unit} has the weights of {other_unit}, and the other way round",
            site,
            replay,
            tensors,
        )


def _directions(site: Site, replay: Replay, steps: Sequence[Step]) -> Iterator[Trial]:
    """Yield the trials in which the two directions of a recurrent module have each other's weights, in all its layers."""
    by_name = {step.name: step for step in steps}
    modules: dict[str, dict[str, Step]] = {}
    for name, step in by_name.items():
        forward = by_name.get(name.removesuffix(BACKWARD))
        if forward is not None and forward is not step and forward.spec == step.spec:
            modules.setdefault(holder_of(name), {}).update({name: forward, forward.name: step})
    for module, tensors in modules.items():
        problem = f"the forward direction of {module} has the weights of the backward one, and the other way round"
        yield _moved(DIRECTIONS, problem, site, replay, tensors)


def _shared_start(one: str, two: str) -> int:
    return next((k for k, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _shapes(family: Mapping[tuple[str, ...], Mapping[str, Step]]) -> Any:
    return {numbers: {last: step.spec for last, step in held.items()} for numbers, held in family.items()}


def _units(step: Step) -> Iterator[str]:
    """Yield what may be exchanged with the tensor in it: a loose parameter, its module, and the modules around that."""
    if step.kind_name == "parameter":
        yield step.name
    unit = holder_of(step.name)
    while unit:
        yield unit
        unit = unit.rpartition(".")[0]


def _reversals(site: Site, replay: Replay, steps: Sequence[Step]) -> Iterator[Trial]:
    """Yield the trials in which the layers of a stack have the weights of those in the reverse order."""
    for before, numbers, layers in _stacks(steps):
        problem = f"{before}{numbers[0]} has the weights of {before}{numbers[-1]}, and so on"
        yield _moved(REVERSED, problem, site, replay, _of_layers(layers, numbers, numbers[::-1]))


def _other_orders(site: Site, replay: Replay, steps: Sequence[Step]) -> Iterator[Trial]:
    """Yield the trials in which two layers of a stack have each other's weights, near ones first, or all have those of the next one."""
    for before, numbers, layers in _stacks(steps):
        for step in (1, -1) if len(numbers) > 2 else ():
            turned = [*numbers[step:], *numbers[:step]]
            problem = f"{before}{numbers[0]} has the weights of {before}{turned[0]}, {before}{numbers[1]} those of {before}{turned[1]}, and so on"
            yield _moved(OTHER_ORDER, problem, site, replay, _of_layers(layers, numbers, turned))
        pairs = sorted(itertools.combinations(numbers, 2), key=lambda pair: pair[1] - pair[0])
        for one, two in pairs[:MOST_PAIRS]:
            problem = f"{before}{one} has the weights of {before}{two}, and the other way round"
            yield _moved(OTHER_ORDER, problem, site, replay, _of_layers(layers, (one, two), (two, one)))


def _of_layers(
    layers: Mapping[int, Mapping[str, Step]], numbers: Sequence[int], others: Sequence[int]
) -> Mapping[str, Step]:
    """Return name of a tensor of the first layers -> the step of the same tensor in the others."""
    return {
        step.name: layers[other][behind]
        for k, other in zip(numbers, others, strict=True)
        for behind, step in layers[k].items()
    }


def _stacks(steps: Sequence[Step]) -> Iterator[tuple[str, list[int], Mapping[int, Mapping[str, Step]]]]:
    """Yield the stacks of layers of the same shapes: what stands in front of the number, the numbers, number -> behind it -> step."""
    stacks: dict[str, dict[int, dict[str, Step]]] = {}  # in front of the number -> number -> behind it
    for step in steps:
        if found := NUMBER.search(step.name):
            before, behind = step.name[: found.start()], step.name[found.end() :]
            stacks.setdefault(before, {}).setdefault(int(found[0]), {})[behind] = step
    for before, layers in stacks.items():
        numbers = sorted(layers)
        shapes = [{behind: step.spec for behind, step in layers[k].items()} for k in numbers]
        if len(numbers) > 1 and all(shape == shapes[0] for shape in shapes):
            yield before, numbers, layers


def _moved(name: str, problem: str, site: Site, replay: Replay, tensors: Mapping[str, Step]) -> Trial:
    """Return the trial in which each tensor holds what another step makes."""
    rules = list(dict.fromkeys(step.rule.line_only for step in tensors.values()))
    return Trial(
        name,
        f"the outputs are equal when {problem}: the paths are exchanged at {' and '.join(rules[:2])}, or in the target's code",
        rules[0],
        "compare the names on both sides of the rule, and the order in which the target's code uses these modules",
        lambda: replay.with_tensors({name: expected(step, site.plan.source) for name, step in tensors.items()}),
        list(tensors),
    )
