"""A lazy mapping of the tensors of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from convert.core.tensor_spec import TensorSpec
from convert.loading.arrays import as_tensor
from convert.loading.step_values import read_step
from convert.planning.plan import Plan
from convert.writing.transfer import require_unchanged


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
        array = read_step(self.plan, self._steps[name])
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
