"""A lazy mapping of the tensors of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from convert.core.ops import apply
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.core.weight_norm_ops import operand_leaves, with_operands
from convert.layers.base import Step
from convert.loading.arrays import as_tensor
from convert.planning.plan import Plan
from convert.writing.execute import computed, overflowed
from convert.writing.scatter import needed_box
from convert.writing.transfer import require_unchanged

Array = np.ndarray[Any, np.dtype[Any]]


class StateDict(Mapping[str, torch.Tensor]):
    """The state_dict of a conversion. Names, shapes and dtypes are known; each access reads one tensor and keeps nothing.

    Reading one layer of a stack reads only that layer's part of the leaf.

    Attributes:
        plan: the plan of the conversion.
        specs: name -> shape and dtype of each tensor.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._steps = {step.name: step for step in plan.steps}
        self.specs: Mapping[str, TensorSpec] = {name: step.spec for name, step in self._steps.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor.

        Raises:
            KeyError: there is no such tensor.
            CheckpointError: a leaf cannot be read, or the checkpoint was rewritten since it was opened.
            PlanError: a value does not fit the dtype of the tensor.
        """
        array = _read(self.plan, self._steps[name])
        require_unchanged(self.plan.checkpoint)
        return as_tensor(array)

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, name: object) -> bool:
        return name in self._steps  # the default of a Mapping would read the tensor

    def __repr__(self) -> str:
        return f"StateDict({self.plan.found}, {len(self)} tensors, {self.plan.nbytes:,} bytes)"


def _read(plan: Plan, step: Step) -> Array:
    if step.value is not None:
        return computed(step).astype(numpy_dtype(step.spec.dtype), copy=False)
    out = np.empty(step.spec.shape, numpy_dtype(step.spec.dtype))
    for part in step.parts:
        box, rest = needed_box(part.ops, plan.source.leaves[part.leaf].spec)
        operands = {leaf: plan.source.read(leaf) for leaf in operand_leaves(part.ops)}
        try:
            part.share(out)[...] = apply(with_operands(rest, operands), plan.source.read_box(part.leaf, box))
        except OverflowError as error:
            raise overflowed(step, part, error) from None
    return out
