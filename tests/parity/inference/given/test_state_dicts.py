"""A module whose state_dict holds more than tensors is one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convert.core.errors import ConvertError
from convert.verify.target_model import model_of_module


class Extra(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        del state


def quantized() -> torch.nn.Module:
    made: torch.nn.Module = torch.ao.nn.quantized.dynamic.Linear(4, 3)
    return made


@pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated
@pytest.mark.parametrize(("make", "name"), [(lambda: Extra(4, 3), "_extra_state"), (quantized, "_packed_params")])
def test_an_entry_that_is_no_tensor_is_an_error(make: Any, name: str) -> None:
    with pytest.raises(ConvertError) as caught:
        model_of_module(torch.nn.Sequential(make()), "Net")
    (finding,) = caught.value.findings
    assert finding.code == "module-not-runnable" and name in finding.problem
    assert "is no tensor" in finding.problem and "before it is quantized" in (finding.fix or "")
