"""The levels that look at the source's leaves, weights and layers: each leaf is read once for both."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from convert.check.recorded import RecordedSource, check_recorded_weights
from convert.check.report import LevelReport, Verdict
from convert.check.weights import WeightsPass
from convert.check.written import Written
from convert.plan import Plan
from convert.streaming import Leaves, read_used

if TYPE_CHECKING:
    from convert.references.protocol import Reference


def reading(plan: Plan, levels: Collection[str]) -> AbstractContextManager[Leaves]:
    """The leaves for `levels_of_leaves`; reading starts at once. None where no level asked for looks at them."""
    needed = not isinstance(plan.source, RecordedSource) and {"weights", "layers"} & {*levels}
    return read_used(plan) if needed else nullcontext(iter(()))


def levels_of_leaves(
    plan: Plan,
    written: Written,
    reference: Reference | str,
    levels: Collection[str],
    leaves: Leaves,
    *,
    device: str,
    seed: int,
) -> Iterator[LevelReport]:
    """Reports of the levels weights and layers, those of them that are asked for.

    Args:
        reference: builds the target's module, whose facts are compared beside its layers; the reason, when there is none.
        leaves: of `reading`.
        device: where torch runs the layers.
        seed: of the layers' random inputs.
    """
    recorded = isinstance(plan.source, RecordedSource)
    weights = WeightsPass(plan, written) if "weights" in levels and not recorded else None
    layers: LevelReport | None = None
    if "layers" in levels:
        from convert.check.layers import missing

        skipped = "needs the checkpoint's own weights: give it with --from" if recorded else missing()
        layers = (
            LevelReport("layers", Verdict.SKIPPED, skipped)
            if skipped
            else _run(plan, written, weights, leaves, device, seed)
        )
    if weights is not None:
        for leaf, work, array in leaves:  # those that the layers' run has left: all or none
            weights.see(leaf, work, array)
        yield weights.report()
    elif "weights" in levels:
        yield check_recorded_weights(plan, written)
    if layers is not None:
        from convert.check.facts import with_facts

        yield with_facts(layers, plan, written, reference)


def _run(
    plan: Plan, written: Written, weights: WeightsPass | None, leaves: Leaves, device: str, seed: int
) -> LevelReport:
    """The layers level; the weights level sees each leaf at the same time, in a thread of its own."""
    from convert.check.layers import LayersPass

    layers = LayersPass(plan, written, device=device, seed=seed)
    with layers.running(), ThreadPoolExecutor(1, thread_name_prefix="convert-weights") as beside:
        for leaf, work, array in leaves:
            seen = beside.submit(weights.see, leaf, work, array) if weights is not None else None
            layers.see(leaf, work, array)
            if seen is not None:
                seen.result()
        return layers.report()
