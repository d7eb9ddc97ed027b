"""A module whose state_dict holds more than tensors, or is not taken back, is one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convert.core.errors import ConvertError
from convert.verify.target_model import model_of_module
from support.inferred import WIDTH, derive


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


def linear(hook: Any = None) -> torch.nn.Module:
    made = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    if hook is not None:
        made.register_state_dict_post_hook(hook)
    return made


class Expanded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, 1).expand(WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        return x @ self.weight.T


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: linear(lambda _, state, prefix, __: state.update({f"{prefix}more": torch.ones(3)})), "more"),
        (lambda: linear(lambda _, state, prefix, __: state.update({"w": state.pop(f"{prefix}weight")})), "got w"),
        (Expanded, "clone"),
    ],
    ids=["a further entry", "another name", "an expanded parameter"],
)
def test_a_state_dict_that_is_not_taken_back_is_an_error(make: Any, words: str) -> None:
    with pytest.raises(ConvertError) as caught:
        derive(lambda w, x: x @ w["w"], make(), {"w": (WIDTH, WIDTH)})
    (finding,) = caught.value.findings
    assert finding.code == "module-not-runnable" and "of the PyTorch module" in finding.problem
    assert words in str(caught.value) and finding.fix
