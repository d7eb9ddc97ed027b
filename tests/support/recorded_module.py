"""Record a run of a PyTorch module, and assert what holds of every record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from convert.numerics.lift_torch import lifted
from convert.programs.program import Array, Program
from convert.programs.record_torch import record_torch
from support.replay import assert_again, assert_elements, replay

Run = Callable[[nn.Module, Mapping[str, torch.Tensor]], Mapping[str, Any]]


def whole(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The first output of a module of one input."""
    y = module(inputs["x"])
    return {"y": y[0] if isinstance(y, tuple) else y}


def recorded(module: nn.Module, run: Run = whole, **inputs: Array) -> Program:
    """The program, asserted to give the outputs of the module as it is, in float64. The module is float64 afterwards."""
    module = module.eval()
    program = record_torch(module, run, inputs)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), lifted():
        outputs = run(module.double(), {name: torch.tensor(array) for name, array in inputs.items()})
    assert_again(program)
    assert_elements(program)
    assert list(program.outputs) == list(outputs)
    for found in (replay(program), {name: value.array for name, value in program.outputs.items()}):
        for name, output in outputs.items():
            want = output.numpy()
            np.testing.assert_allclose(found[name], want, 1e-11, 1e-13 * np.abs(want).max(initial=0), err_msg=name)
    return program
