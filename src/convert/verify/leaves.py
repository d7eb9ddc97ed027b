"""The levels that look at the source's leaves, weights and layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from convert.planning.burn.modules import conventions_of
from convert.planning.plan import Plan
from convert.verify.config.compare import check_facts, with_facts
from convert.verify.layers.burn_as_torch import BACK, as_torch
from convert.verify.layers.level import check_layers, missing
from convert.verify.recording.source import RecordedSource, check_recorded_weights
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.weights.level import WeightsPass
from convert.verify.written import Written

if TYPE_CHECKING:
    from convert.references.protocol import Reference


def comparing(plan: Plan, written: Written, levels: Collection[str]) -> AbstractContextManager[WeightsPass | None]:
    """The weights level, which starts on entering, where it is asked for and there is a source to read."""
    if isinstance(plan.checkpoint, RecordedSource) or "weights" not in levels:
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
    with ThreadPoolExecutor(2, thread_name_prefix="convert-check") as sidecar:
        if deep := "layers" in levels:
            if not isinstance(plan.checkpoint, RecordedSource):
                missing()  # imports the frameworks, while the tensors are compared
            layers = sidecar.submit(_layers, plan, written, weights, device, seed)
            facts = sidecar.submit(check_facts, plan, written, reference)
        if weights is not None:
            yield weights.report()
        elif "weights" in levels:
            yield check_recorded_weights(plan, written)
        if deep:
            yield with_facts(layers.result(), facts.result())


def _layers(plan: Plan, written: Written, weights: WeightsPass | None, device: str, seed: int) -> LevelReport:
    if isinstance(plan.checkpoint, RecordedSource):
        return LevelReport("layers", Verdict.SKIPPED, "needs the checkpoint's own weights: give it with --from")
    if conventions_of(plan.loader) is not None:
        seen, file = as_torch(plan, written)
        same = None if weights is None else lambda step, part: all(map(weights.equal, file.held[step.name].names))
        found = check_layers(seen, file, device=device, seed=seed, same=same)
        return replace(found, notes=(*found.notes, BACK))
    return check_layers(plan, written, device=device, seed=seed, same=weights.same if weights is not None else None)
