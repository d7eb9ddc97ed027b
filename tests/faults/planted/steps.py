"""Faults in the code of states, biases by distance, norms of groups and codes, with outputs alone."""

from __future__ import annotations

import torch
from torch.nn import functional

from faults.expected import Fault
from faults.planted.small import NOT_GIVEN, REVERSED, fault
from support.small_model import STEPS
from support.step_models import GROUPS, NEAR, Distant, Grouped

OLD, CUT = "state read before its update", "state cut between steps"
NORMED = "norm over other axes or groups"
MISSING, EXTRA = "operation missing", "operation that the JAX model lacks"
FARTHEST, TURNED = "another largest distance of relative positions", "relative positions turned round"


def zeros_every(steps: int, factor: float | None = None) -> object:
    def cut(module: object, state: torch.Tensor, step: int) -> torch.Tensor:
        if step % steps != steps - 1:
            return state
        return torch.zeros_like(state) if factor is None else state * factor

    return cut


def of_torch(module: Grouped, x: torch.Tensor) -> torch.Tensor:
    return functional.group_norm(x.transpose(1, 2), GROUPS, eps=1e-5).transpose(1, 2)


STEP_FAULTS: tuple[Fault, ...] = (
    fault("output of the state before its update", "space", OLD, given_out=lambda module, old, new: old),
    fault("state cut every third step", "space", CUT, next=zeros_every(3)),
    fault("state times zero every second step", "space", CUT, next=zeros_every(2, 0.0)),
    fault("state cut once", "space", NOT_GIVEN, next=zeros_every(4)),
    fault("a gate sees the old cell", "peephole", OLD, seen=lambda module, old, new: old),
    fault("a step gives out the old cell", "peephole", OLD, told=lambda module, old, new: old),
    fault("a masked loop from the end runs forwards", "masked", REVERSED, order=lambda module: range(STEPS)),
    fault("the mask of a loop turned round", "masked", REVERSED, mask=lambda module, real, step: real[:, STEPS - 1 - step]),
    fault("distances without their absolute value", "sloping", MISSING, distances=lambda module, distances: distances),
    fault("squares of distances", "sloping", "power for abs", distances=lambda module, distances: distances**2),
    fault("distances limited", "sloping", EXTRA, distances=lambda module, distances: distances.abs().clamp(max=3)),
    fault("distances in another unit", "sloping", EXTRA, distances=lambda module, distances: distances.abs() / 2),
    fault("another largest distance", "distant", FARTHEST, farthest=12),
    fault("distances turned round", "distant", TURNED, rows=lambda module, distances: Distant.rows(module, -distances)),
    fault("rows of near distances alone", "distant", "other rows of a table: operation missing", rows=lambda module, distances: (distances > 0) * 4 + distances.abs().clamp(max=NEAR)),
    fault("moments of groups over all steps", "grouped", NORMED, normed=lambda module, x: Grouped.normed(module, x, axes=(1, 3))),
    fault("moments of groups over all steps, by torch", "grouped", NORMED, normed=of_torch),
    fault("two groups for three", "grouped", NORMED, normed=lambda module, x: Grouped.normed(module, x, groups=2)),
    fault("groups of every third feature", "grouped", NORMED, normed=lambda module, x: Grouped.normed(module, x, groups=4, axes=(2,))),
    fault("residual of a code missing", "coded", MISSING, rest=lambda module, left, code: left),
    fault("residual of a code added", "coded", "the other sign", rest=lambda module, left, code: left + code),
    fault("exp for softplus of a scale", "scaled", "exp for softplus", factor=lambda module, scale: scale.exp()),
    fault("relu for softplus of a scale", "scaled", "relu for softplus", factor=lambda module, scale: scale.relu()),
    fault("softplus of a scale times 1/ln 2", "scaled", EXTRA, factor=lambda module, scale: functional.softplus(scale) * 1.442695),
)  # fmt: skip
