"""The levels that look at the source's leaves, weights and layers: each leaf is read once for both."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from convert.check.recorded import RecordedSource, check_recorded_weights
from convert.check.report import LevelReport, Verdict
from convert.check.weights import WeightsPass
from convert.check.written import Written
from convert.plan import Plan
from convert.streaming import Leaves, read_used

if TYPE_CHECKING:
    from convert.references.protocol import Reference


@contextmanager
def reading(plan: Plan, written: Written, levels: Collection[str]) -> Iterator[tuple[WeightsPass | None, Leaves]]:
    """What `levels_of_leaves` works on. Reading starts at once, and the weights level with it: other levels import torch first."""
    if isinstance(plan.source, RecordedSource) or not {"weights", "layers"} & {*levels}:
        yield None, iter(())
        return
    weights = WeightsPass(plan, written) if "weights" in levels else None
    with read_used(plan, weights.see if weights is not None else None) as leaves:
        yield weights, leaves


def levels_of_leaves(
    plan: Plan,
    written: Written,
    reference: Reference | str,
    levels: Collection[str],
    weights: WeightsPass | None,
    leaves: Leaves,
    *,
    device: str,
    seed: int,
) -> Iterator[LevelReport]:
    """Reports of the levels weights and layers, those of them that are asked for.

    Args:
        reference: builds the target's module, whose facts are compared beside its layers; the reason, when there is none.
        weights, leaves: of `reading`.
        device: where torch runs the layers.
        seed: of the layers' random inputs.
    """
    layers = _layers(plan, written, leaves, weights, device, seed) if "layers" in levels else None
    for _ in leaves:  # those that the layers level has left: all or none
        pass
    if weights is not None:
        yield weights.report()
    elif "weights" in levels:
        yield check_recorded_weights(plan, written)
    if layers is not None:
        from convert.check.facts import with_facts

        yield with_facts(layers, plan, written, reference)


def _layers(
    plan: Plan, written: Written, leaves: Leaves, weights: WeightsPass | None, device: str, seed: int
) -> LevelReport:
    from convert.check.layers import LayersPass, missing

    recorded = isinstance(plan.source, RecordedSource)
    skipped = "needs the checkpoint's own weights: give it with --from" if recorded else missing()
    if skipped:
        return LevelReport("layers", Verdict.SKIPPED, skipped)
    same = weights.same if weights is not None else None
    layers = LayersPass(plan, written, device=device, seed=seed, same=same)
    with layers.running():
        for leaf, work, array in leaves:
            layers.see(leaf, work, array)
        return layers.report()
