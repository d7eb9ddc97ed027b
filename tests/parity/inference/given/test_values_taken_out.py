"""A module that computes outside of PyTorch: one error with the line where the value leaves; a path that values choose is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.core.errors import ConvertError
from convert.inference.derivation import Derivation
from support.inferred import WIDTH, derive, floats
from support.marks import slow_but

D = WIDTH
LEAVES = {"w": (D, D), "v": (D, D)}


class Net(nn.Module):
    def __init__(self, between: Callable[[Any], Any], before: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.before, self.between = before, between

    def forward(self, x: Any) -> Any:
        return self.second(self.between(self.first(self.before(x))))


class WeightInNumPy(Net):
    def forward(self, x: Any) -> Any:
        weight = torch.from_numpy(self.first.weight.detach().numpy().copy())  # it leaves here
        return self.second(torch.tanh(x @ weight.T))


class OutputInNumPy(Net):
    def forward(self, x: Any) -> Any:
        return torch.from_numpy(2 * super().forward(x).numpy())  # it leaves here


def in_place(x: Any) -> Any:
    y = x.numpy()  # it leaves here
    np.tanh(y, out=y)
    return x


def chosen_and_taken(x: Any) -> Any:
    y = np.tanh(x.numpy())  # it leaves here
    return torch.as_tensor(y) if x.sum() < 1e9 else x


def rows(x: Any) -> Any:
    return torch.tensor([[float(np.tanh(y)) for y in row] for row in x.tolist()])  # it leaves here


TAKEN: dict[str, tuple[str, Callable[[], Net]]] = {
    "numpy": ("numpy", lambda: Net(lambda x: torch.from_numpy(np.tanh(x.detach().numpy())))),  # it leaves here
    "DLPack": ("dlpack", lambda: Net(lambda x: torch.from_dlpack(np.tanh(np.from_dlpack(x))))),  # it leaves here
    "list": ("tolist", lambda: Net(rows)),
    "number": ("item", lambda: Net(lambda x: torch.tanh(x / float(x.abs().max())))),  # it leaves here
    "in place": ("numpy", lambda: Net(in_place)),
    "with a choice": ("numpy", lambda: Net(chosen_and_taken)),
    "input": ("numpy", lambda: Net(torch.tanh, lambda x: torch.from_numpy(np.sort(x.numpy(), -1)))),  # it leaves here
    "weight": ("numpy", lambda: WeightInNumPy(torch.tanh)),
    "output": ("numpy", lambda: OutputInNumPy(torch.tanh)),
}
LINES = [k for k, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# it leaves here")]


def found(module: nn.Module) -> Derivation:
    return derive(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], module, LEAVES, floats(7, D))


@pytest.mark.parametrize("name", slow_but(["numpy", "list"], TAKEN))
def test_one_error_names_the_line_where_a_value_leaves_torch(name: str) -> None:
    how, make = TAKEN[name]
    with pytest.raises(ConvertError) as raised:
        found(make())
    (finding,) = raised.value.findings
    file, _, line = finding.path.partition(":")
    assert finding.code == "function-not-traceable" and f"(`{how}`)" in finding.problem
    assert file == "test_values_taken_out.py" and int(line) in LINES
    assert "compute with torch there" in finding.fix


CHOSEN = {
    "derived": (lambda x: torch.tanh(x) if x.max().item() < 1e9 else x, ""),
    "another function": (lambda x: torch.sigmoid(x) if x.sum() < 1e9 else x, "sigmoid"),
    "another factor": (lambda x: torch.tanh(x) * (2.0 if x.sum() > 0 else 3.0), "multiplies by"),
    "printed": (lambda x: (repr(x.tolist()), torch.sigmoid(x))[1], "sigmoid"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("between", "named"), CHOSEN.values(), ids=CHOSEN)
def test_values_that_choose_a_path_leave_the_difference_as_it_is(between: Callable[[Any], Any], named: str) -> None:
    made = found(Net(between))
    assert made.complete == (not named)
    assert [named in (d.brief or d.problem) for d in made.differences] == [True] * bool(named)
