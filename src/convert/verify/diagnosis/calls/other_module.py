"""Search for a module that the target never calls: run the whole model with it in the place of another one, or behind the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from convert.numerics.lift_torch import tensors_in
from convert.references.protocol import Reference
from convert.verify.diagnosis.compare import Explanation, Search
from convert.verify.diagnosis.site import Site
from convert.verify.diagnosis.whole_model import run_again
from convert.verify.sides.records import USER_FAILS

IN_PLACE, LEFT_OUT = "module called in the place of another", "module left out"
MOST_RUNS = 12
LISTED = 3


@dataclass(frozen=True)
class Calls:
    """Other calls of modules.

    Attributes:
        name, problem: the mistake, and what is wrong in words.
        replaced: module -> number of its call -> the module that is called there.
        appended: module -> the module that is called on what it gives.
        idle: the first module that the target never calls.
    """

    name: str
    problem: str
    idle: str
    replaced: Mapping[torch.nn.Module, Mapping[int, torch.nn.Module]]
    appended: Mapping[torch.nn.Module, torch.nn.Module]


def other_module(site: Site, reference: Reference) -> Search:
    """Search for calls of modules that are never called, all at once, with which the outputs are the JAX model's."""
    modules = {name: one for name, one in site.module.named_modules() if name and _shapes(one)}
    counts = dict.fromkeys(modules, 0)

    def counted(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            counts[name] += 1

        return count

    handles = [one.register_forward_hook(counted(name)) for name, one in modules.items()]
    try:
        run_again(site, reference)
    finally:
        for handle in handles:
            handle.remove()
    idle = _idle(modules, counts)
    runs = 0
    for calls in (*_in_place(modules, counts, idle), *_left_out(modules, counts, idle)):
        if runs >= MOST_RUNS:
            break
        runs += 1
        try:
            with _called(calls):
                error = site.error(run_again(site, reference))
        except USER_FAILS:  # it takes no such input
            continue
        if error <= site.enough:
            fix = f"call {calls.idle} in the target's code, or correct the reference"
            return Search(Explanation(calls.name, calls.problem, site.rule(calls.idle), fix, error))
    return Search(ruled_out=(IN_PLACE, LEFT_OUT) if runs else ())


def _shapes(module: torch.nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(x.shape)) for name, x in module.state_dict().items())


def _idle(modules: Mapping[str, torch.nn.Module], counts: Mapping[str, int]) -> list[str]:
    """Return the outermost modules that are never called, nor any module within them; but no lists, which are never called."""
    containers = (torch.nn.ModuleList, torch.nn.ModuleDict)
    never = [
        name
        for name, one in modules.items()
        if not isinstance(one, containers)
        and not any(n for other, n in counts.items() if other == name or other.startswith(f"{name}."))
    ]
    return [name for name in never if not any(name.startswith(f"{other}.") for other in never)]


def _in_place(
    modules: Mapping[str, torch.nn.Module], counts: Mapping[str, int], idle: Sequence[str]
) -> Iterator[Calls]:
    """Yield the calls of modules that are called more than once in which one of the same tensors, never called, is meant."""
    others: dict[
        str, dict[str, list[str]]
    ] = {}  # a name beside a module that is never called -> the module called -> those
    for name in idle:
        for other, n in counts.items():
            same = type(modules[other]) is type(modules[name]) and _shapes(modules[other]) == _shapes(modules[name])
            if n > 1 and same and other.rpartition(".")[0] == name.rpartition(".")[0]:
                others.setdefault(other.rpartition(".")[2], {}).setdefault(other, []).append(name)
    for chosen in others.values():
        for first in (False, True):  # the last calls, or the first
            replaced = {
                modules[one]: {
                    (k if first else counts[one] - len(missing) + k): modules[m] for k, m in enumerate(missing)
                }
                for one, missing in chosen.items()
                if len(missing) < counts[one]
            }
            if replaced:
                said = ", ".join(list(chosen)[:LISTED]) + (", ..." if len(chosen) > LISTED else "")
                missing = [name for of in chosen.values() for name in of]
                meant = ", ".join(missing[:LISTED]) + (", ..." if len(missing) > LISTED else "")
                problem = (
                    f"the target calls {said} more than once, and {meant} never; its outputs are equal when "
                    f"{'the first' if first else 'a later'} call is one of {meant}"
                )
                yield Calls(IN_PLACE, problem, missing[0], replaced, {})


def _left_out(
    modules: Mapping[str, torch.nn.Module], counts: Mapping[str, int], idle: Sequence[str]
) -> Iterator[Calls]:
    """Yield the calls of members of a list, never called, on what the member before them gives."""
    appended: dict[torch.nn.Module, torch.nn.Module] = {}
    for name in idle:
        parent, _, number = name.rpartition(".")
        before = f"{parent}.{int(number) - 1}" if number.isdecimal() and int(number) else ""
        if before in modules and (counts[before] or modules[before] in appended.values()):
            appended[modules[before]] = modules[name]
    if appended:
        names = {one: name for name, one in modules.items()}
        missing = [names[one] for one in appended.values()]
        said = ", ".join(missing[:LISTED]) + (", ..." if len(missing) > LISTED else "")
        problem = (
            f"the target never calls {said}; its outputs are equal when it calls each on what the one before it gives"
        )
        yield Calls(LEFT_OUT, problem, missing[0], {}, appended)


@contextmanager
def _called(calls: Calls) -> Iterator[None]:
    """Call other modules within this context."""
    count: dict[torch.nn.Module, int] = {}

    def instead(called: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        count[called] = count.get(called, -1) + 1
        other = calls.replaced[called].get(count[called])
        return result if other is None else other(*args, **kwargs)

    def behind(called: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        given = tensors_in(result)[0]
        if args:
            return calls.appended[called](given, *args[1:], **kwargs)
        return calls.appended[called](**{**kwargs, next(iter(kwargs)): given})

    handles = [one.register_forward_hook(instead, with_kwargs=True) for one in calls.replaced]
    handles += [one.register_forward_hook(behind, with_kwargs=True) for one in calls.appended]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
