"""The levels that look at the source's leaves, weights and layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from convert.check.recorded import RecordedSource, check_recorded_weights
from convert.check.report import LevelReport, Verdict
from convert.check.weights import WeightsPass
from convert.check.written import Written
from convert.plan import Plan

if TYPE_CHECKING:
    from convert.references.protocol import Reference


def comparing(plan: Plan, written: Written, levels: Collection[str]) -> AbstractContextManager[WeightsPass | None]:
    """The weights level, which starts on entering, where it is asked for and there is a source to read."""
    if isinstance(plan.source.on_disk, RecordedSource) or "weights" not in levels:
        return nullcontext()
    return WeightsPass(plan, written)


def levels_of_leaves(
    plan: Plan,
    written: Written,
    reference: Reference | str,
    levels: Collection[str],
    weights: WeightsPass | None,
    *,
    device: str,
    seed: int,
) -> Iterator[LevelReport]:
    """Reports of the levels weights and layers, those of them that are asked for.

    Args:
        reference: builds the target's module, whose facts are compared beside its layers; the reason, when there is none.
        weights: of `comparing`.
        device: where torch runs the layers.
        seed: of the layers' random inputs.
    """
    if weights is not None:
        if "layers" in levels:
            _missing()  # imports the frameworks while the tensors are compared
        yield weights.report()
    elif "weights" in levels:
        yield check_recorded_weights(plan, written)
    if "layers" in levels:
        from convert.check.facts import with_facts

        yield with_facts(_layers(plan, written, weights, device, seed), plan, written, reference)


def _missing() -> str:
    from convert.check.layers import missing

    return missing()


def _layers(plan: Plan, written: Written, weights: WeightsPass | None, device: str, seed: int) -> LevelReport:
    from convert.check.layers import check_layers

    if isinstance(plan.source.on_disk, RecordedSource):
        return LevelReport("layers", Verdict.SKIPPED, "needs the checkpoint's own weights: give it with --from")
    return check_layers(plan, written, device=device, seed=seed, same=weights.same if weights is not None else None)
