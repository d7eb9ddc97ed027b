"""What cannot be recorded is named by one error, with the line of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from convert.core.errors import ConvertError
from convert.programs.record_torch import record_torch
from support.recorded_module import whole

X = np.random.default_rng(0).normal(size=(2, 3, 8))


class Code(nn.Module):
    """A module that runs a function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(8, 4)


def to_gpu(x: torch.Tensor) -> torch.Tensor:
    return x.to("cuda:7") + 1


def negative_root(x: torch.Tensor) -> torch.Tensor:
    return (-x.abs()).sqrt()


def masked_row(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, x.log())


def sparse(x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(x[0].to_sparse(), x[0].T)


CASES = {
    "meta device": (meta, "module-not-runnable", ["weight", "meta device"]),
    "lazy": (lambda: nn.LazyLinear(4), "module-not-runnable", ["weight", "lazy"]),
    "inputs do not fit": (lambda: nn.Linear(4, 4), "module-not-runnable", ["RuntimeError", "shapes"]),
    "GPU": (
        lambda: Code(to_gpu),
        "module-not-runnable",
        ["test_record_torch_errors.py:", "on a device that this machine has"],
    ),
    "not a tensor": (lambda: Code(lambda x: "text"), "module-not-runnable", ["a tensor for the output 'y'", "str"]),
    "dropout": (lambda: nn.Dropout(0.5), "run-not-deterministic", ["'y'", "dropout"]),
    "random": (lambda: Code(lambda x: x + torch.rand(8)), "run-not-deterministic", ["'y'"]),
    "NaN": (lambda: Code(negative_root), "output-not-a-number", ["sqrt", "test_record_torch_errors.py:"]),
    "sparse": (lambda: Code(sparse), "module-not-runnable", ["sparse", "test_record_torch_errors.py:"]),
}


@pytest.mark.parametrize(("make", "code", "words"), CASES.values(), ids=CASES)
def test_one_clear_error(make: Callable[[], nn.Module], code: str, words: list[str]) -> None:
    module = make()
    if code != "run-not-deterministic":
        module.eval()
    with pytest.raises(ConvertError) as raised:
        record_torch(module, whole, {"x": X})
    assert ("on a device" in str(raised.value)) == ("on a device that this machine has" in words)
    (finding,) = raised.value.findings
    assert finding.code == code
    assert [word for word in words if word not in str(finding)] == []
    assert torch.get_default_dtype() == torch.float32


def test_outputs_without_names_are_refused() -> None:
    with pytest.raises(ConvertError, match="expected outputs by name, got Tensor"):
        record_torch(nn.Linear(8, 4), lambda module, inputs: module(inputs["x"]), {"x": X})


def test_nan_that_no_output_reads_is_allowed() -> None:
    program = record_torch(Code(masked_row), lambda module, inputs: {"y": module(inputs["x"])}, {"x": np.abs(X)})
    assert program.outputs["y"].data
    assert record_torch(
        Code(lambda x: torch.where(x > 0, x, x.log().abs() * 0 + 1).nan_to_num()), whole, {"x": X}
    ).outputs
