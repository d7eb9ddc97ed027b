"""Read a file of another target format as the tensors of torch's layers, so that the layers level can run what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from convert.core.tensor_spec import TensorSpec
from convert.planning.plan import Plan
from convert.planning.target_formats.base import TranslatedTensor
from convert.writing.execute import computed
from convert.writing.written import Written

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class AsTorch(Written):
    """A file with torch's names and shapes."""

    translated: Mapping[str, TranslatedTensor] = field(default_factory=dict)

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of torch's tensors whose parts are all in the file."""
        found = {}
        for name, tensor in self.translated.items():
            parts = [self.tensors[part][1].spec for part in tensor.names if part in self.tensors]
            if len(parts) < len(tensor.names):
                continue
            if not parts:
                found[name] = tensor.torch.spec
                continue
            shapes = [spec.shape[::-1] if tensor.transposed else spec.shape for spec in parts]
            rows = sum(shape[0] for shape in shapes) if len(shapes) > 1 else None
            found[name] = TensorSpec(shapes[0] if rows is None else (rows, *shapes[0][1:]), parts[0].dtype)
        return found

    def read(self, name: str) -> Array:
        """Read one tensor of torch's."""
        tensor = self.translated[name]
        if not tensor.names:
            return computed(tensor.torch)
        parts = [super(AsTorch, self).read(part) for part in tensor.names]
        rows = [part.T for part in parts] if tensor.transposed else parts
        return rows[0] if len(rows) == 1 else np.concatenate(rows)


def as_torch(plan: Plan, written: Written) -> tuple[Plan, AsTorch]:
    """Return the plan and the file as torch's layers have them."""
    translated = {tensor.torch.name: tensor for tensor in plan.translated}
    seen = AsTorch(
        written.path, written.metadata, written.tensors, written.config, written.index, translated=translated
    )
    return plan.as_torch, seen
