"""Fill a module from a checkpoint: everything is decided first, then each piece goes to its place in the module."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from convert.checkpoints.digest import combine
from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.similarity import ClosestNames
from convert.core.tensor_spec import TensorSpec, is_float, numpy_dtype, widens
from convert.core.value_ops import Cast
from convert.layers.base import Part, Step
from convert.loading.slots import Destination, Slot, by_name, find_slots, materialise
from convert.planning.plan import Plan
from convert.writing.execute import Event, computed, overflowed
from convert.writing.transfer import default_jobs, stream_leaves, used_leaves

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Loaded:
    """What `load_into` did.

    Attributes:
        plan: the plan of the conversion, in the dtypes of the module.
        tensors, nbytes: number and bytes of the module's tensors that were filled; a tied tensor counts once.
        materialised: names of those that were on the meta device.
        source_digest: checksum of the leaves that were used (see `convert.checkpoints.digest`).
        seconds: from the first read to the last write.
    """

    plan: Plan = field(repr=False)
    tensors: int
    nbytes: int
    materialised: tuple[str, ...] = field(repr=False)
    source_digest: str
    seconds: float


def fill(
    module: torch.nn.Module,
    plan_for: Callable[[str | None], Plan],
    *,
    device: torch.device | str | None = None,
    jobs: int | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Loaded:
    """Fill all parameters and persistent buffers of a module. See `convert.load_into`, which has the same errors.

    Args:
        plan_for: returns the plan whose floating-point tensors have a dtype.
    """
    slots, findings = find_slots(module)
    plan, filled, more = _fit(slots, plan_for)
    if findings or more:
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        count = len(findings) + len(more)
        raise PlanError(*findings, *more, headline=f"{plan.found} does not fit the module {name}: {count} problem{'s' * (count > 1)}")  # fmt: skip
    started = time.monotonic()
    tensors = materialise(slots, _device(slots, device))
    places = {step.name: Destination(tensors[id(slot.tensor)]) for step, slot in filled}
    plan = replace(plan, steps=tuple(step for step, _ in filled))
    total, done, digests = sum(plan.source.leaves[leaf].spec.nbytes for leaf in used_leaves(plan)), 0, {}
    for step in plan.steps:
        if step.value is not None:
            places[step.name].put(places[step.name].array, computed(step).astype(numpy_dtype(step.spec.dtype)))
            places[step.name].complete()
    for leaf, digest in stream_leaves(plan, _Fill(places), jobs=jobs or default_jobs()):
        digests[leaf] = digest
        done += plan.source.leaves[leaf].spec.nbytes
        if on_event is not None:
            on_event(Event(leaf, done, total))
    return Loaded(
        plan,
        len(filled),
        sum(slot.spec.nbytes for _, slot in filled),
        tuple(slot.names[0] for _, slot in filled if slot.tensor.is_meta),
        combine(digests),
        time.monotonic() - started,
    )


class _Fill:
    """Put every piece into the module."""

    def __init__(self, places: Mapping[str, Destination]) -> None:
        self._places = places

    def region(self, step: Step) -> Array:
        return self._places[step.name].array

    def piece(self, step: Step, part: Part, region: Array, values: Callable[[], Array]) -> None:
        try:
            self._places[step.name].put(region, values())
        except OverflowError as error:
            raise overflowed(step, part, error, "load into a module of a wider dtype") from None

    def complete(self, step: Step) -> None:
        self._places[step.name].complete()


def _fit(
    slots: Sequence[Slot], plan_for: Callable[[str | None], Plan]
) -> tuple[Plan, list[tuple[Step, Slot]], list[Finding]]:
    """Find the step that fills each slot; the floating-point dtype that most slots have is that of the plan which is returned."""
    dtypes = Counter(slot.spec.dtype for slot in slots if is_float(slot.spec.dtype))
    wanted: list[str | None] = [dtype for dtype, _ in dtypes.most_common()]
    plans = {dtype: plan_for(dtype) for dtype in wanted or [None]}
    plan, slot_of = next(iter(plans.values())), by_name(slots)
    steps = {dtype: {step.name: step for step in made.steps} for dtype, made in plans.items()}
    names = next(iter(steps.values()))
    findings: list[Finding] = []
    filled: list[tuple[Step, Slot]] = []
    for slot in slots:
        given = [name for name in slot.names if name in names]
        if not given:
            continue
        makers = [steps.get(slot.spec.dtype, names)[name] for name in given]
        findings += _two_values(slot, makers)
        first = next((step for step in makers if not step.tied), makers[0])
        if (cast := _in_dtype(first, slot.spec)) is not None:
            filled.append((cast, slot))
        else:
            findings.append(
                Finding(
                    "state-dict-mismatch",
                    rule=first.rule.line_only,
                    path=first.name,
                    expected=f"{slot.spec} as in the module",
                    got=str(first.spec),
                    fix="build the module with the sizes of the checkpoint",
                )
            )
    findings += _missing(slots, names) + _unexpected(names, slot_of)
    return plan, filled, findings


TIE = "if it is a tied one, which accelerate's init_empty_weights unties, call `module.tie_weights()` of transformers first; or else "


def _missing(slots: Sequence[Slot], names: Mapping[str, Step]) -> list[Finding]:
    known, missing = ClosestNames(names), [slot for slot in slots if not any(name in names for name in slot.names)]
    return [
        Finding(
            "state-dict-mismatch",
            f"the module has this tensor ({slot.spec}), and the checkpoint gives none",
            path=slot.names[0],
            fix=known.did_you_mean(slot.names[0])
            or (TIE if slot.tensor.is_meta else "")
            + "build a module without it, choose another target with `to=`, or add a rule",
        )
        for slot in missing
    ]


def _unexpected(names: Mapping[str, Step], slot_of: Mapping[str, Slot]) -> list[Finding]:
    known = ClosestNames(slot_of)
    return [
        Finding(
            "state-dict-mismatch",
            f"the checkpoint gives this tensor ({step.spec}), and the module has none of this name",
            rule=step.rule.line_only,
            path=name,
            fix=known.did_you_mean(name)
            or "build a module with it, choose another target with `to=`, or drop its leaf",
        )
        for name, step in names.items()
        if name not in slot_of
    ]


def _two_values(slot: Slot, makers: Sequence[Step]) -> Iterator[Finding]:
    """Report a tied parameter for which the checkpoint has several values."""
    ours = {step.name for step in makers}
    free = [step for step in makers if step.tied not in ours]
    made = [(step.value, [(part.leaf, part.ops, part.rows) for part in step.parts]) for step in free]
    if any(one != made[0] for one in made):
        yield Finding(
            "tied-weights-differ",
            "the module has one parameter under these names, and the checkpoint has different leaves",
            rule=free[1].rule.line_only,
            path=" and ".join(step.name for step in free),
            expected="one leaf",
            got=", ".join(dict.fromkeys(part.leaf for step in free for part in step.parts)),
            fix="build the module with untied weights",
        )


def _in_dtype(step: Step, spec: TensorSpec) -> Step | None:
    """Return the step with a last cast to the dtype of the module's tensor; None where shape or kind of number differ."""
    if step.spec == spec:
        return step
    both_float = is_float(step.spec.dtype) and is_float(spec.dtype)
    if step.spec.shape != spec.shape or not (both_float or widens(step.spec.dtype, spec.dtype)):
        return None
    parts = tuple(replace(part, ops=(*part.ops, Cast(spec.dtype))) for part in step.parts)
    return replace(step, spec=spec, parts=parts)


def _device(slots: Sequence[Slot], device: torch.device | str | None) -> torch.device:
    """Return where tensors without memory go: the given device, that of the module's other tensors, or the CPU."""
    if device is not None:
        return torch.device(device)
    return next((slot.tensor.device for slot in slots if not slot.tensor.is_meta), torch.device("cpu"))
