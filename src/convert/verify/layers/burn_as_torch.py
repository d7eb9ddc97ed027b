"""A file for Burn, seen as torch's layers have it: so the layers level can run what the file holds, without Burn.

What leads back is what burn-store publishes for the way to PyTorch (`BurnToPyTorchAdapter`): a Linear's weight is transposed, a
norm's gamma and beta are its weight and bias. The gates of a recurrent layer are put together as torch packs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from convert.core.tensor_spec import TensorSpec
from convert.planning.plan import Held, Plan
from convert.verify.written import Written
from convert.writing.execute import computed

Array = np.ndarray[Any, np.dtype[Any]]
NOT_RUN = "Burn is Rust code, which is not run here: only its published conventions are gone by"
BACK = "the layers were run as torch's, with the file's tensors brought back as burn-store's BurnToPyTorchAdapter does; Burn was not run"


@dataclass(frozen=True)
class AsTorch(Written):
    """A file for Burn by torch's names and shapes."""

    held: dict[str, Held] = field(default_factory=dict)

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of torch's tensors, as far as the file has what they consist of."""
        found = {}
        for name, one in self.held.items():
            parts = [entry.spec for part in one.names if (entry := self._entry(part)) is not None]
            if len(parts) < len(one.names):
                continue
            if not parts:
                found[name] = one.step.spec
                continue
            shapes = [spec.shape[::-1] if one.turned else spec.shape for spec in parts]
            rows = sum(shape[0] for shape in shapes) if len(shapes) > 1 else None
            found[name] = TensorSpec(shapes[0] if rows is None else (rows, *shapes[0][1:]), parts[0].dtype)
        return found

    def _entry(self, name: str) -> Any:
        return self.tensors[name][1] if name in self.tensors else None

    def read(self, name: str) -> Array:
        """One tensor of torch's."""
        one = self.held[name]
        if not one.names:
            return computed(one.step)
        parts = [super(AsTorch, self).read(part) for part in one.names]
        turned = [part.T for part in parts] if one.turned else parts
        return turned[0] if len(turned) == 1 else np.concatenate(turned)


def as_torch(plan: Plan, written: Written) -> tuple[Plan, AsTorch]:
    """The plan and the file as torch's layers have them."""
    held = {one.step.name: one for one in plan.held}
    seen = AsTorch(written.path, written.metadata, written.tensors, written.config, written.index, held=held)
    return plan.in_torch, seen
