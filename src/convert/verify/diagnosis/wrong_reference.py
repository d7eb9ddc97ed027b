"""Search for a mistake in the reference itself: what `build` returned, and which value has which name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.numerics.compare import difference
from convert.references.protocol import INPUT, Reference
from convert.verify.diagnosis.compare import Explanation, Search
from convert.verify.diagnosis.site import Site
from convert.verify.diagnosis.whole_model import run_again, values_again
from convert.verify.sides.built_module import built_with

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
State = Callable[[], Mapping[str, "torch.Tensor"]]
DROPOUT = "dropout in eval mode"
TRAINING, NOT_LOADED = "module in training mode", "module does not hold the file's values"
RANDOM = "module that is not deterministic"
EXCHANGED, MISNAMED = "boundary names exchanged", "boundary with another name"


def wrong_reference(site: Site, reference: Reference, state: State, differing: Sequence[str]) -> Search:
    """Search among the mistakes of a reference.

    Args:
        state: gives the weights that `build` was given.
        differing: the boundaries and outputs that differ.
    """
    if (
        differing
        and not set(differing) & set(reference.outputs)
        and (named := _other_names(site, reference, differing))
    ):
        return Search(named)
    return Search(_wrong_build(site, reference, state()))


# ---- what `build` returned


def _wrong_build(site: Site, reference: Reference, state: Mapping[str, torch.Tensor]) -> Explanation | None:
    """Run the module again in eval mode, and then with the values of the file; what restores parity is the mistake."""
    from convert.verify.sides.no_dropout import without_dropout

    built = built_with(site.module, state)
    buffers = {name for name, _ in site.module.named_buffers()}
    if built.training:
        with _in_eval_mode(site.module), _holding(site.module, {n: x for n, x in state.items() if n in buffers}):
            error = site.error(run_again(site, reference))
        if error <= site.enough:
            problem = f"`build` of the reference returned {built.in_training}"
            return Explanation(TRAINING, problem, "", "return module.eval() from `build`", error)
    if built.other:
        with _in_eval_mode(site.module), _holding(site.module, {name: state[name] for name in built.other}):
            error = site.error(run_again(site, reference))
        if error <= site.enough:
            return Explanation(NOT_LOADED, built.problem(state), site.rule(site.name), built.fix, error)
    again = [run_again(site, reference) for _ in range(2)]
    if (apart := site.error(again[0], site.evidence.pick(site.boundary, again[1]))) > site.enough:
        with without_dropout() as lines:
            error = site.error(run_again(site, reference))
        if error <= site.enough:
            problem = f"the module drops elements at random in eval mode, too ({', '.join(dict.fromkeys(lines))})"
            fix = "give `training=self.training` to torch.nn.functional.dropout, whose default is True, or use torch.nn.Dropout"
            return Explanation(DROPOUT, problem, "", fix, error)
        problem = f"two runs of the PyTorch module on the same inputs differ by {apart:.1e} at {site.boundary}"
        fix = "remove what is random from the module in eval mode, or give it a fixed seed"
        return Explanation(RANDOM, problem, "", fix, site.before)
    return None


@contextmanager
def _in_eval_mode(module: torch.nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def _holding(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put values into a module within this context; a tensor that is tied to another one is a tensor of its own there."""
    import torch

    places = []
    for name, value in tensors.items():
        path, _, last = name.rpartition(".")
        part = module.get_submodule(path)
        held: dict[str, Any] = part._parameters if last in part._parameters else part._buffers  # as load_state_dict
        places.append((held, last, held[last]))
        new = value.clone().to(held[last].device)
        held[last] = torch.nn.Parameter(new, requires_grad=False) if held is part._parameters else new
    try:
        yield
    finally:
        for held, last, tensor in places:
            held[last] = tensor


# ---- names of boundaries


def _other_names(site: Site, reference: Reference, differing: Sequence[str]) -> Explanation | None:
    """Return which other place of the module has the value of each boundary that differs; the outputs are equal."""
    names = [name for name, _ in site.module.named_modules() if name]
    values = values_again(site, reference, [*differing, *names, *(name + INPUT for name in names)])
    found: dict[str, str] = {}
    worst = 0.0
    for boundary in differing:
        others = [*(name for name in differing if name != boundary), *values]
        match = next((name for name in others if _error(site, boundary, values.get(name)) <= site.enough), None)
        if match is None:
            return None
        found[boundary] = match
        worst = max(worst, _error(site, boundary, values[match]))
    exchanged = set(found.values()) == set(found)
    said = "; ".join(
        f"under the name {name}, it returns the value of {other}" for name, other in list(found.items())[:4]
    )
    problem = f"the outputs are equal, and `jax` of the reference returns values under other names: {said}"
    fix = "correct the names of the values that the reference's `jax` returns"
    return Explanation(EXCHANGED if exchanged else MISNAMED, problem, "", fix, worst)


def _error(site: Site, boundary: str, value: Array | None) -> float:
    if value is None:
        return float("inf")
    evidence = site.evidence
    try:
        picked = evidence.pick(boundary, value)
    except ValueError:  # of another shape
        return float("inf")
    want = evidence.best_values[boundary]
    if picked.shape != want.shape:
        return float("inf")
    return difference(picked, want, mask=evidence.masks.get(boundary)).relative
