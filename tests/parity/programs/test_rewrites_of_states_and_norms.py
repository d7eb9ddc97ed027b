"""States that are read at another time, or cut, and norms over other axes: the target's record is run without the mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch

from convert.numerics.compare import difference
from convert.programs.program import Program
from convert.programs.rewrites.norm_axes import NORMED, norm_axes
from convert.programs.rewrites.positions.relative_positions import FARTHEST, TURNED
from convert.programs.rewrites.positions.rows import OTHER, rows
from convert.programs.rewrites.recurrences.cut_states import CUT, cut_states
from convert.programs.rewrites.recurrences.direction import REVERSED, direction
from convert.programs.rewrites.recurrences.updates import NEW, OLD, updates
from convert.programs.rewrites.rewrite import Goal, Rewrite
from support.small_faults import Arrays, records

STEPS = 10


def of(x: Any) -> Any:
    return torch if isinstance(x, torch.Tensor) else jnp


def first(x: Any) -> Any:
    return of(x).zeros_like(x[:, 0])


def space(p: Arrays, x: Any, real: Any, reads: str = "new", every: int = 0, factor: float | None = None) -> Any:
    """A state space of one layer: the output of a step reads the state before its update or behind it."""
    u, c, h, found = x @ p["w"], x @ p["v"], first(x), []
    for k in range(STEPS):
        new = 0.5 * p["g"] * h + u[:, k]
        found.append((new if reads == "new" else h) * c[:, k])
        h = new
        if every and k % every == every - 1:
            h = of(x).zeros_like(h) if factor is None else h * factor
    return of(x).stack(found, 1) @ p["v"]


def peephole(p: Arrays, x: Any, real: Any, reads: str = "new") -> Any:
    """A cell whose last gate sees the cell."""
    c, found = first(x), []
    for k in range(STEPS):
        new = 0.5 * c + of(x).tanh(x[:, k] @ p["w"] + c @ p["v"])
        found.append(of(x).tanh(x[:, k] + p["g"] * (new if reads == "new" else c)) * new)
        c = new
    return of(x).stack(found, 1) @ p["w"]


def masked(p: Arrays, x: Any, real: Any, steps: Any = range(STEPS - 1, -1, -1), turned: bool = False) -> Any:
    """A loop from the end that keeps its state where there is no token."""
    h, found = first(x), {}
    for k in steps:
        new = of(x).tanh(x[:, k] @ p["w"] + h @ p["v"])
        h = of(x).where(real[:, STEPS - 1 - k if turned else k, None], new, h)
        found[k] = h
    return of(x).stack([found[k] for k in range(STEPS)], 1) @ p["v"]


def grouped(p: Arrays, x: Any, real: Any, axes: tuple[int, ...] = (3,), shape: tuple[int, ...] = (2, 4)) -> Any:
    y = (x @ p["w"]).reshape(3, 10, *shape)
    keep = {"keepdim" if isinstance(x, torch.Tensor) else "keepdims": True}
    y = y - y.mean(axes, **keep)
    y = y / of(x).sqrt((y * y).mean(axes, **keep) + 1e-5)
    return of(x).tanh(y.reshape(3, 10, 8) * p["g"]) @ p["v"]


def by_torch(p: Arrays, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The groups of a group norm have all positions in them."""
    y = torch.nn.functional.group_norm((x @ p["w"]).transpose(1, 2), 2, eps=1e-5).transpose(1, 2)
    return torch.tanh(y * p["g"]) @ p["v"]


def layer_normed(p: Arrays, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.nn.functional.layer_norm(x @ p["w"], (8,)) * p["g"]) @ p["v"]


def buckets(p: Arrays, x: Any, real: Any, farthest: float = 6.0, sign: int = 1, n: int = 4) -> Any:
    """Rows of w by distances: one for each near one, then by their logarithm."""
    k = of(x).arange(STEPS)
    distances = sign * (k[None] - k[:, None])
    size = abs(distances)
    far = of(x).log(of(x).clip(size, 1, 99) / (n / 2)) / math.log(farthest / (n / 2)) * (n / 2) + n / 2
    far = far.long() if isinstance(x, torch.Tensor) else far.astype(int)
    which = of(x).where(distances > 0, n, 0) + of(x).where(size < n / 2, size, of(x).clip(far, 0, n - 1))
    return of(x).einsum("tsd,bsd->btd", p["w"][which], x)


def found_in(
    right: Callable[..., Any], wrong: Callable[..., Any], how: Callable[..., Rewrite | None]
) -> Rewrite | None:
    source, target = records(right, wrong)
    want = source.outputs["y"].array
    goal = Goal("y", lambda got: difference(got, want).relative, 1e-9)
    return how(source, target, goal)


def of_target(how: Callable[[Program, Goal], Rewrite | None]) -> Callable[..., Rewrite | None]:
    return lambda source, target, goal: how(target, goal)


def changed(model: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    return lambda p, x, real: model(p, x, real, **given)


MISTAKES: dict[str, tuple[Any, Any, Any, str, str]] = {
    "an output of the state before its update": (space, changed(space, reads="old"), of_target(updates), OLD, "the state before its update"),
    "an output of the state behind its update": (changed(space, reads="old"), space, of_target(updates), NEW, "the state behind its update"),
    "a peephole of the old cell": (peephole, changed(peephole, reads="old"), of_target(updates), OLD, "multiplies by g"),
    "a peephole of the new cell": (changed(peephole, reads="old"), peephole, of_target(updates), NEW, "multiplies by g"),
    "a state that is zeros again": (space, changed(space, every=3), of_target(cut_states), CUT, "at 3 of the steps"),
    "a state times zero": (space, changed(space, every=4, factor=0.0), of_target(cut_states), CUT, "at 2 of the steps"),
    "a masked loop from the first step on": (masked, changed(masked, steps=range(STEPS)), of_target(direction), REVERSED, "the input real"),
    "a loop whose mask is turned round": (masked, changed(masked, turned=True), of_target(direction), REVERSED, "reads the input real"),
    "moments of a group over the positions, too": (grouped, changed(grouped, axes=(1, 3)), norm_axes, NORMED, "over axes 1 and 3"),
    "a group norm of torch": (grouped, by_torch, norm_axes, NORMED, "within groups of 4 (every 10th)"),
    "a layer norm for a group norm": (grouped, layer_normed, norm_axes, NORMED, "within groups of 4 (neighbours)"),
    "groups of every second feature": (grouped, changed(grouped, axes=(2,), shape=(4, 2)), norm_axes, NORMED, "(every 2nd)"),
    "another largest distance": (buckets, changed(buckets, farthest=9.0), rows, FARTHEST, "up to a distance of 3, both take the same rows"),
    "distances the other way round": (buckets, changed(buckets, sign=-1), rows, TURNED, "for the opposite one"),
    "another number of buckets": (buckets, changed(buckets, n=2), rows, OTHER, "for the distances 1, 2"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str) -> None:
    right, wrong, how, name, says = MISTAKES[mistake]
    found = found_in(right, wrong, how)
    assert found is not None and found.name.startswith(name) and found.fix
    assert says in found.problem


@pytest.mark.parametrize("how", [of_target(updates), of_target(cut_states), of_target(direction), norm_axes, rows])
def test_a_factor_is_none_of_them(how: Callable[..., Rewrite | None]) -> None:
    for model in (space, peephole, masked, grouped, buckets):
        assert found_in(model, lambda p, x, real, model=model: 1.5 * model(p, x, real), how) is None
