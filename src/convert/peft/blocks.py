"""An adapter rearranged for a tree in which several modules share a leaf: another rank, the same function.

Where A belongs to several modules (keys and values), each has elements of the rank of its own, for which the B of the others is
zero. Where a pair has elements for each head, each head gets a copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from convert.core.ops import Take
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.peft.adapter import Adapter
from convert.peft.gathered import Array, Gathered
from convert.peft.plan import AdaptedModule, AdapterPlan, Share
from convert.writing.written import Written

Elements = tuple[object, ...]  # which elements of a leaf a module has; equal where two modules share them


@dataclass(frozen=True)
class Slot:
    """The elements of a pair's rank that belong to one module.

    Attributes:
        module: its name.
        start, rank: first element and number.
        shares: the elements of A and of B that it has.
    """

    module: str
    start: int
    rank: int
    shares: tuple[Elements, Elements]


def slots_of(plan: AdapterPlan, adapter: Adapter) -> dict[str, list[Slot]]:
    """Return base leaf -> the slots of its pair; modules that share elements of A or B have different ones."""
    found: dict[str, list[Slot]] = {}
    for module in plan.modules:
        rank = adapter.modules[module.name].rank if module.name in adapter.modules else 0
        for share in module.shares:
            slots, mine = found.setdefault(share.merge.base or "", []), _elements(share)
            start = max((s.start + s.rank for s in slots if _same(s.shares, mine)), default=0)
            slots.append(Slot(module.name, start, rank, mine))
    return found


def ranks_of(slots: Mapping[str, list[Slot]]) -> dict[str, int]:
    """Return base leaf -> the rank of its pair: one for all, as the libraries have one rank."""
    rank = max(slot.start + slot.rank for several in slots.values() for slot in several)
    return dict.fromkeys(slots, rank)


def _same(one: tuple[Elements, Elements], other: tuple[Elements, Elements]) -> bool:
    return any(a == b for a, b in zip(one, other, strict=True))


def _elements(share: Share) -> tuple[Elements, Elements]:
    made = []
    for factor in (share.layout.down, share.layout.up):
        op = gathered(factor.ops)
        kept = [x for x in op.letters if x in op.index and x not in op.blocks]
        takes = tuple((taken.axis, taken.index) for taken in factor.ops if isinstance(taken, Take))
        made.append((takes, *(op.index[x].tobytes() for x in kept)))
    return made[0], made[1]


def gathered(ops: tuple[object, ...]) -> Gathered:
    """Return the operation that gathers the elements of a leaf."""
    return next(op for op in ops if isinstance(op, Gathered))


@dataclass(frozen=True)
class Rearranged(Written):
    """The tensors of an adapter as a plan makes them of the rearranged pairs."""

    plan: AdapterPlan = field(kw_only=True, repr=False)
    adapter: Adapter = field(kw_only=True, repr=False)

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        return {step.name: step.spec for step in self.plan.steps}

    @cached_property
    def _slots(self) -> dict[str, list[Slot]]:
        return slots_of(self.plan, self.adapter)

    @cached_property
    def _modules(self) -> dict[str, tuple[AdaptedModule, int]]:
        return {step.name: (m, end) for m in self.plan.modules for end, step in enumerate((m.down, m.up))}

    def read(self, name: str) -> Array:
        module, end = self._modules[name]
        spec, start = self.specs[name], 0
        out = np.zeros((math.prod(spec.shape) // module.rank, module.rank), numpy_dtype(spec.dtype))
        for share in module.shares:
            op = gathered((share.layout.down, share.layout.up)[end].ops)
            mine, slots = _elements(share)[end], self._slots[share.merge.base or ""]
            for element in itertools.product(*map(range, op.blocks.values())):
                here = np.zeros(op.size, bool)
                here[op.rows] = True
                for letter, k in zip(op.blocks, element, strict=True):
                    if letter in op.own:
                        here[op.rows] &= op.index[letter] == k
                for slot in slots:
                    if slot.rank and slot.shares[end] == mine:
                        at = slice(start + slot.start, start + slot.start + slot.rank)
                        out[here, at] = self._matrix(slot.module, end)[here]
                start += share.pair_rank
        return np.ascontiguousarray(out.T if end == 0 else out).reshape(spec.shape)

    def _matrix(self, module: str, end: int) -> Array:
        """Return ``lora_A`` or ``lora_B`` of the adapter with the rank as the last of two axes."""
        pair = self.adapter.modules[module]
        tensor = self.adapter.written.read((pair.down, pair.up)[end])
        return tensor.reshape(pair.rank, -1).T if end == 0 else tensor.reshape(-1, pair.rank)
