"""Compare the numbers that both models choose by, where outputs show the choice alone: they are a boundary of their own.

A distance to the rows of a codebook that is 2 % off changes few choices, and often none of these inputs. Two programs may rightly
choose by other numbers, such as distances and their squares: `convert.programs.choices.forms` has what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.findings import Finding
from convert.numerics.magnitude import relative_error
from convert.planning.plan import Plan
from convert.programs.choices import (
    Kind,
    choices,
    decisive,
    forms,
    is_choice,
    is_hidden,
    kind_of,
    masked,
    name_of,
    numbers,
    rows,
)
from convert.programs.divergence.naming.operations import CONSTANT
from convert.programs.fingerprint import EXACT, ValueTable
from convert.references.protocol import Reference
from convert.verify.diagnosis.diagnose import Diagnosis
from convert.verify.diagnosis.other_operation import departs
from convert.verify.report.facts import JudgedFact, Status
from convert.verify.report.report import Measure
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.records import NOT_RECORDED, record_source, record_target, too_large
from convert.verify.sides.run_torch import exact_state, input_tensors
from convert.writing.written import Written

if TYPE_CHECKING:
    import torch

    from convert.programs.program import Operation, Program

Array = np.ndarray[Any, np.dtype[Any]]
FINEST = 1e-9  # relative error up to which numbers that a choice is made by are equal
FEW = 20  # numbers; from as many on, a function of others is seen to differ from what is scattered around them
NEAR = 0.1  # relative difference up to which they are the same numbers, computed otherwise
ENOUGH = 1e-6  # of the error, that may be left where the operation that departs is replaced
SHOWN = "the outputs show only what is chosen"


@dataclass(frozen=True)
class Choices:
    """The outcome.

    Attributes:
        finding: the first choice that the two sides make by other numbers.
        diagnosis: the operation in front of it that departs, if one is found.
        facts: choices that were not compared.
    """

    finding: Finding | None = None
    diagnosis: Diagnosis | None = None
    facts: tuple[JudgedFact, ...] = ()


def check_choices(
    plan: Plan, written: Written, reference: Reference, evidence: Evidence, measures: Sequence[Measure], device: str
) -> Choices:
    """Record both models and compare their choices.

    Args:
        measures: of the model level, which passed.
    """
    import torch

    from convert.numerics.lift_torch import lifted
    from convert.numerics.precision import torch_pinned

    with torch_pinned(), torch.no_grad(), lifted():
        module = reference.build(exact_state(plan, written, device)).to(device)
    bounds = [measure.float64_tolerance for measure in measures if measure.name in reference.outputs]
    allowed = max((bound.value for bound in bounds if bound is not None), default=EXACT)
    if why := too_large(module, evidence):
        names = _chosen(reference, module, evidence)
        return Choices(facts=tuple(_fact(name, "the target", f"{SHOWN}; {why}") for name in names))
    try:
        target = record_target(reference, module, evidence, [])
    except NOT_RECORDED:
        return Choices()

    def source() -> Program | str:
        if reference.jax is None or not evidence.is_live:
            return "the recording does not have those of the JAX model"
        try:
            return record_source(plan, replace(reference, jax=reference.jax_outputs_side()), evidence, twice=False)
        except NOT_RECORDED:
            return "the JAX model cannot be recorded operation by operation"

    return compare_choices(target, source, module, allowed, list(evidence.masks.values()))


def _chosen(reference: Reference, module: torch.nn.Module, evidence: Evidence) -> Iterator[str]:
    """Yield the operators by which a module chooses a place or a whole number, in a run that is not recorded."""
    import torch

    from convert.numerics.lift_torch import Lift, lifted, tensors_in

    found: dict[str, None] = {}

    class Choosing(Lift):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            name = str(func).split(".")[1] if str(func).startswith("aten.") else ""
            places = any(not x.is_floating_point() and x.dtype is not torch.bool for x in tensors_in(out))
            if any(x.is_floating_point() for x in tensors_in(args)) and is_choice(name, places=places):
                found[name] = None
            return out

    device = next(module.parameters()).device
    with torch.no_grad(), lifted(Choosing()):
        reference.run(module, input_tensors(evidence.inputs, "float64", device))
    yield from found


def compare_choices(
    target: Program,
    source: Callable[[], Program | str],
    module: torch.nn.Module,
    allowed: float,
    masks: Sequence[Array],
) -> Choices:
    """Compare the choices of two runs with the same weights and inputs, and equal outputs.

    Args:
        source: gives the run of the JAX model, or why there is none; called where the target makes a choice.
        module: of the target.
        allowed: the relative error that is allowed for the outputs.
        masks: of the outputs: true where a value counts.
    """
    own = _Side(target, min(max(allowed, FINEST), EXACT))
    if not own.choices:
        return Choices()
    made = source()
    if isinstance(made, str):
        return Choices(facts=tuple(_unknown(own, one, "the target", made) for one in own.choices if own.hides(one)))
    other = _Side(made, own.tolerance)
    unknown: list[JudgedFact] = []
    for side, against, who in ((own, other, "the target"), (other, own, "the JAX model")):
        for one in side.choices:
            if against.has(one) or not side.hides(one):
                continue
            found = _nearest(one, against, side.tolerance, masks)
            if found is None:
                unknown.append(_unknown(side, one, who, "the other side chooses by none that are comparable"))
            elif found.differs:
                pair = (one, found.choice) if side is own else (found.choice, one)
                return _differs(own, other, *pair, found.error, module)
            elif found.undecided:
                unknown.append(
                    _unknown(side, one, who, "the other side chooses by others, in the same order for these inputs")
                )
        if unknown:
            break
    return Choices(facts=tuple(unknown))


class _Side:
    """A run, and the choices that it makes."""

    def __init__(self, program: Program, tolerance: float) -> None:
        self.program, self.tolerance = program, tolerance
        self.choices = list(choices(program))

    @cached_property
    def _users(self) -> Mapping[Any, Sequence[Operation]]:
        return self.program.users

    @cached_property
    def _known(self) -> tuple[ValueTable[int], ValueTable[int]]:
        """Its values, and what its choices compare."""
        values, compared = ValueTable[int](self.tolerance), ValueTable[int](self.tolerance)
        given = (*self.program.parameters.values(), *self.program.inputs.values())
        for value in (*given, *(result for one in self.program.operations for result in one.results)):
            if value.array.dtype.kind == "f":
                values.add(value.array, 0)
        for one in self.choices:
            for form in forms(one):
                compared.add(form, 0)
        return values, compared

    def has(self, choice: Operation) -> bool:
        """Whether this side has the numbers of a choice of the other, or chooses by numbers that choose the same."""
        values, compared = self._known
        return any(map(compared.find, forms(choice))) or all(map(values.find, decisive(choice)))

    def hides(self, choice: Operation) -> bool:
        """Whether no output shows the numbers of a choice."""
        return is_hidden(choice, self.program, self._users)

    def name(self, choice: Operation) -> str:
        """Return the name of a choice, with its number among those of this name."""
        named = [one for one in self.choices if name_of(one) == name_of(choice)]
        k = named.index(choice)
        return f"{name_of(choice)} ({k + 1})" if k else name_of(choice)


@dataclass(frozen=True)
class _Near:
    """The choice of the other side by the nearest numbers.

    Attributes:
        error: relative, between what the two compare.
        differs: whether the two choose by other numbers.
        undecided: whether these may be other numbers, which choose the same.
    """

    choice: Operation
    error: float
    differs: bool = False
    undecided: bool = False


def _nearest(one: Operation, side: _Side, tolerance: float, masks: Sequence[Array]) -> _Near | None:
    """Return the choice of a side by numbers that are nearly those of another choice; None if there is none."""
    found: list[_Near] = []
    mine = rows(one)
    for other in side.choices:
        theirs = rows(other)
        if mine is None or theirs is None or mine.shape != theirs.shape or kind_of(one) is not kind_of(other):
            continue
        if kind_of(one) is Kind.STEP and name_of(one) != name_of(other):
            continue
        counted = _counted(numbers(one)[0].array.shape, len(mine), masks)
        pairs = [(a[counted], b[counted]) for a, b in _pairs(one, other, mine, theirs)]
        errors = [float(np.abs(a - b).max(initial=0)) for a, b in pairs]
        k = int(np.argmin(errors))
        if errors[k] > NEAR:
            continue
        a, b = pairs[k]
        rows_differ = (np.abs(a - b) > tolerance).any(-1)
        if not rows_differ.any():
            found.append(_Near(other, errors[k]))
        elif (
            errors[k] <= EXACT
            or not rows_differ.all()
            or _may_choose_the_same(kind_of(one), mine[counted], theirs[counted], tolerance)
        ):
            found.append(_Near(other, errors[k], undecided=True))
        else:
            found.append(_Near(other, errors[k], differs=True))
    return min(found, key=lambda near: near.error, default=None)


def _pairs(one: Operation, other: Operation, mine: Array, theirs: Array) -> Iterator[tuple[Array, Array]]:
    """Yield what two choices compare, in forms that may be equal."""
    if kind_of(one) is Kind.STEP:
        size = float(np.abs(theirs).max(initial=0)) or 1.0
        yield mine / size, theirs / size
        return
    second = list(forms(other))
    yield from ((a, b) for a in forms(one) for b in second)


def _counted(shape: tuple[int, ...], count: int, masks: Sequence[Array]) -> Array:
    """Return which of the rows of numbers of a shape count: those at padding do not."""
    for mask in masks:
        lead = mask.shape[: mask.ndim - next((k for k, n in enumerate(reversed(mask.shape)) if n != 1), mask.ndim)]
        if lead and shape[: len(lead)] == lead and count % int(np.prod(lead)) == 0:
            return np.repeat(mask.reshape(-1), count // int(np.prod(lead)))
    return np.ones(count, bool)


def _may_choose_the_same(kind: Kind, one: Array, other: Array, tolerance: float) -> bool:
    """Whether numbers are a function of others that keeps or turns their order, so that both may choose the same for all inputs.

    What is left of them without others times a factor and plus a number follows such a function, and is scattered where it is a mistake.
    Of a limit, nothing being left shows that it is another one.
    """
    if kind is Kind.STEP:
        return False
    left = ~(masked(one) | masked(other))
    order = np.argsort(other[left], kind="stable")
    x, y = one[left][order], other[left][order]
    slack = tolerance * float(np.abs(x).max(initial=0))
    steps = np.diff(x)
    if not ((steps >= -slack).all() or (steps <= slack).all()):
        return False
    slope, offset = np.polyfit(y, x, 1)
    rest = x - slope * y - offset
    if np.abs(rest).max(initial=0) <= slack:
        return kind is Kind.PLACE
    around = y[2:] - y[:-2]
    share = (y[1:-1] - y[:-2]) / np.where(around == 0, 1, around)
    scattered = np.abs(rest[1:-1] - (1 - share) * rest[:-2] - share * rest[2:])
    return len(x) < FEW or bool(np.median(scattered) <= NEAR * np.median(np.abs(rest)))


def _differs(
    own: _Side, other: _Side, one: Operation, two: Operation, error: float, module: torch.nn.Module
) -> Choices:
    name = own.name(one)
    diagnosis = _other_limit(name, one, two, own.tolerance) or _in_front(own, other, one, two, module)
    finding = Finding(
        "outputs-differ",
        f"{SHOWN}, which is equal for these inputs, but the two sides choose by other numbers: the target at "
        f"{one.where or name_of(one)}, the JAX model at {two.where or name_of(two)}",
        path=name,
        expected=f"a relative error of at most {own.tolerance:.1e} of what is compared there",
        got=f"{error:.1e}",
        fix="" if diagnosis is not None else "compare both sides in front of the choice",
        data={"first": name, "differing": [name]},
    )
    return Choices(finding, diagnosis)


def _other_limit(name: str, one: Operation, two: Operation, tolerance: float) -> Diagnosis | None:
    """Return that the same numbers are compared with another one."""
    got, want = numbers(one)[0], numbers(two)[0]
    limit, other = ([x for x in choice.operands if x.array.size == 1 and x.constant] for choice in (one, two))
    if kind_of(one) is not Kind.SIDE or relative_error(got.array, want.array) > tolerance or not (limit and other):
        return None
    a, b = float(limit[0].array.flat[0]), float(other[0].array.flat[0])
    problem = f"the target compares with {a:g}, the JAX model compares with {b:g}"
    return Diagnosis(name, CONSTANT, problem, "", f"compare with {b!r} in the target's code", abs(a - b), 0.0, ())


def _in_front(own: _Side, other: _Side, one: Operation, two: Operation, module: torch.nn.Module) -> Diagnosis | None:
    """Return the operation that departs in front of a choice, where both sides choose by the same numbers but for it."""
    name = own.name(one)
    source = replace(other.program, outputs={name: numbers(two)[0]})
    target = replace(own.program, outputs={name: numbers(one)[0]})
    want = source.outputs[name].array
    before = relative_error(target.outputs[name].array, want)
    if not own.tolerance < before <= NEAR:
        return None
    enough = max(FINEST, ENOUGH * before)
    told = departs(module, source, target, name, lambda got: relative_error(got, want), enough)
    if (said := told.explanation) is not None:
        return Diagnosis(name, said.name, said.problem, "", said.fix, before, said.error, ())
    return Diagnosis(name, "", told.known, "", "", before, before, ()) if told.known else None


def _fact(name: str, origin: str, following: str) -> JudgedFact:
    return JudgedFact(name, "chosen by numbers that are not compared", origin, Status.UNVERIFIED, next=following)


def _unknown(side: _Side, one: Operation, who: str, why: str) -> JudgedFact:
    following = f"{SHOWN}; {why}; compare these numbers by hand, or return them as an output of both sides"
    return _fact(side.name(one), f"{who}, {one.where}" if one.where else who, following)
