"""A recorded PyTorch run: its operations, run again, give its outputs; it knows parameters, inputs, code and modules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from convert.core.errors import ConvertError
from convert.programs.record_torch import record_torch
from support.recorded_module import recorded, whole

F = nn.functional
X = np.random.default_rng(0).normal(size=(2, 3, 8))
IMAGE = np.random.default_rng(1).normal(size=(2, 3, 8, 8))


class Attention(nn.Module):
    """Attention by torch's function, with the settings that it has."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.qkv, self.settings = nn.Linear(8, 24), settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.settings.get("enable_gqa"):
            k, v = k[:, :1], v[:, :1]
        return F.scaled_dot_product_attention(q, k, v, **self.settings)


class Inference(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return super().forward(x)


def conv_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding="same"), nn.BatchNorm2d(6), nn.ReLU(), nn.GroupNorm(2, 6)),
        *(nn.ConvTranspose2d(6, 4, 3, 2), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 4, 3, groups=2, bias=False)),
        *(nn.Flatten(), nn.Linear(900, 3)),
    )


MODULES = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.LayerNorm(4), nn.SiLU(), nn.Softmax(-1)),
    "inference mode": lambda: Inference(
        nn.Linear(8, 4), nn.LayerNorm(4), Itself(nn.MultiheadAttention(4, 2, batch_first=True))
    ),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "bilinear": lambda: Twice(nn.Bilinear(8, 8, 3)),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "decoder": lambda: Twice(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)),
    "attention": Attention,
    "causal": lambda: Attention(is_causal=True),
    "boolean mask": lambda: Attention(attn_mask=torch.tensor([[True, False, True], [True, True, False], [False] * 3])),
    "float mask": lambda: Attention(attn_mask=torch.tensor([[0.0, -1.0, 2.0]]), scale=0.3),
    "grouped queries": lambda: Attention(enable_gqa=True),
    "GRU": lambda: nn.GRU(8, 4, 2, batch_first=True, bidirectional=True),
    "LSTM": lambda: nn.LSTM(8, 4, proj_size=3),
    "RNN": lambda: nn.RNN(8, 4),
    "GRUCell": lambda: Rows(nn.GRUCell(8, 4)),
    "LSTMCell": lambda: Rows(nn.LSTMCell(8, 4)),
}


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x)


class Rows(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x[0])


class Itself(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x)[0]


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_the_record_gives_the_outputs(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    program = recorded(make(), x=X)
    (output,) = program.outputs.values()
    assert output.data and output.leaves == set(program.parameters)
    assert not program.path_taken
    kernels = ("addmm", "layer_norm", "scaled_dot", "_multi_head", "gru", "lstm", "linear", "_trilinear")
    names = {operation.name for operation in program.operations}
    assert not {name for name in names if any(kernel in name for kernel in kernels)}


def test_a_conv_net_is_taken_apart_and_running_statistics_are_parameters() -> None:
    torch.manual_seed(0)
    module = conv_net()
    nn.init.normal_(module[1].running_mean), nn.init.uniform_(module[1].running_var)
    program = recorded(module, x=IMAGE)
    assert {"1.running_mean", "1.running_var"} <= program.outputs["y"].leaves
    assert "1.num_batches_tracked" not in program.parameters
    convolutions = [operation for operation in program.operations if operation.name == "convolution"]
    assert [len(operation.operands) for operation in convolutions] == [2, 2, 2], "biases are added apart"
    assert [operation.settings["transposed"] for operation in convolutions] == [False, True, False]
    assert not [o.name for o in program.operations if "norm" in o.name]
    assert 1e-5 in [
        float(value.array)
        for o in program.operations
        if o.name == "add"
        for value in o.operands[1:]
        if value.array.ndim == 0
    ]


def test_weight_norm_keeps_a_factor_for_each_parameter() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    program = recorded(module, x=X)
    (made,) = [operation.results[0] for operation in program.operations if operation.name == "_weight_norm_interface"]
    start = program.first_element
    direction, length = made.elements
    np.testing.assert_array_equal(direction, start["parametrizations.weight.original1"] + np.arange(32).reshape(4, 8))
    np.testing.assert_array_equal(
        length, start["parametrizations.weight.original0"] + np.arange(4)[:, None] + np.zeros((4, 8))
    )


def test_spectral_norm_keeps_the_elements_of_the_kernel() -> None:
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))
    program = recorded(module, x=X)
    kernel = program.parameters["parametrizations.weight.original"]
    divided = next(operation for operation in program.operations if operation.name == "div")
    np.testing.assert_array_equal(divided.results[0].elements, kernel.elements)
    assert divided.results[0].leaves == {name for name in program.parameters if "parametrizations" in name}


class Layout(nn.Module):
    """Operators that move the elements of parameters, and fill in constants."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.row = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(6))
        self.register_buffer("order", torch.tensor([3, 1, 1]))

    def forward(self) -> dict[str, torch.Tensor]:
        t = self.table
        moved = {
            "pad": F.pad(t, (1, 2, 0, 1)),
            "pad with one": F.pad(t, (1, 0), value=1.0),
            "tril": t.tril(),
            "roll": t.roll((1, 2), (0, 1)),
            "unfold": t.unfold(1, 3, 2),
            "index": t[self.order, :3],
            "lookup": F.embedding(self.order, t),
            "one": t[torch.tensor(2)],
            "cat": torch.cat([t[:2], self.row[None], torch.zeros(1, 6)]),
            "stack": torch.stack([self.row, t[0].flip(0)], 1),
            "where": torch.where(torch.arange(6) > 2, t, torch.tensor(7.0)),
            "fill": t.masked_fill(torch.arange(6) < 2, -1.0),
            "repeat": self.row.repeat(2, 2),
            "heads": t.view(5, 2, 3).permute(1, 2, 0).reshape(6, 5).contiguous(),
            "cast": t.float().to(torch.bfloat16)[1:, ::2],
        }
        grown = torch.zeros(7, 6)
        grown[1:6] = t
        moved["written"] = grown
        return moved


def test_elements_are_followed_wherever_they_go() -> None:
    program = record_torch(Layout(), lambda module, inputs: module(), {"x": X})
    numbers = np.concatenate([value.array.ravel() for value in program.parameters.values()])
    filled = {"pad with one": 1.0, "where": 7.0, "fill": -1.0}
    for name, value in program.outputs.items():
        (part,) = value.elements
        np.testing.assert_array_equal(
            value.array, np.where(part < 0, filled.get(name, 0.0), numbers[part]), err_msg=name
        )


class Shared(nn.Module):
    """A tied table, a buffer that is not saved, a constant of the code and one that is made while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 8), nn.Linear(8, 5, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("hidden", torch.tensor([3.0]), persistent=False)
        self.plain = torch.tensor([4.0])

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.table(tokens) * self.scale * self.hidden * self.plain + torch.zeros_like(tokens)[..., None] * 0.5
        return {
            "y": self.head(y),
            "zeros": torch.zeros_like(y) + torch.ones_like(tokens)[..., None],
            "known": self.scale * 2,
        }


def test_what_a_value_is_computed_from() -> None:
    program = recorded(Shared(), lambda module, inputs: module(inputs["tokens"]), tokens=np.array([[0, 3]]))
    assert list(program.parameters) == ["scale", "table.weight"]
    assert program.tied == {"head.weight": "table.weight"}
    assert program.outputs["y"].data and program.outputs["y"].leaves == {"scale", "table.weight"}
    assert program.outputs["zeros"].constant, "only the shape of an input is in it"
    assert program.outputs["known"].of_parameters
    assert program.first_element == {"scale": 0, "table.weight": 1}
    constants = {
        float(v.array.item()) for o in program.operations for v in o.operands if v.constant and v.array.size == 1
    }
    assert {3.0, 4.0} <= constants


def test_a_parameter_that_has_the_name_of_an_input() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.x

    (times,) = recorded(Scaled(), lambda module, inputs: {"y": module(inputs["x"])}, x=X).operations
    assert [value.data for value in times.operands] == [True, False]
    assert times.operands[1].of_parameters


class Choosing(nn.Module):
    def __init__(self, choice: str) -> None:
        super().__init__()
        self.choice, self.weight = choice, nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(3)
        if self.choice == "constant":
            return x * (2 if lengths.sum() == 3 else 1)
        if self.choice == "input":
            return x * (2 if (x > -100).all() else 1)
        if self.choice == "weight":
            return x * (2 if self.weight.sum() > 0 else 1)
        if self.choice == "item":
            return x[:, : int((x > -100).long().sum().item() > 0) + 1]
        if self.choice == "list":
            return x * len(x[0, 0].tolist())
        if self.choice == "numpy":
            return x * float(np.asarray(x.numpy()).size)
        if self.choice == "nonzero":
            return x.sum() * torch.nonzero(x > 0)[:, 0]
        if self.choice == "one hot":
            return torch.nn.functional.one_hot(x.argmax(-1), num_classes=9).to(x.dtype)
        if self.choice == "classes":
            return torch.nn.functional.one_hot(x.argmax(-1)).to(x.dtype)
        if self.choice == "index":
            return x[x.argmax(0)[0], 0]
        return x[x > 0] if self.choice == "mask" else x


@pytest.mark.parametrize("choice", ["input", "weight", "item", "list", "numpy", "mask", "nonzero", "classes"])
def test_a_value_that_python_uses_or_that_sizes_another_chooses_the_path(choice: str) -> None:
    file, line = recorded(Choosing(choice), x=X).path_taken.split(":")
    first = Choosing.forward.__code__.co_firstlineno
    assert file == "test_record_torch.py" and first < int(line) < first + 30


@pytest.mark.parametrize("choice", ["constant", "none", "index", "one hot"])
def test_a_constant_or_no_value_chooses_no_path(choice: str) -> None:
    assert not recorded(Choosing(choice), x=X).path_taken


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.tanh()  # the line


def test_operations_know_their_module_and_the_line_of_the_model() -> None:
    program = recorded(Placed(), x=X)
    assert [o.module for o in program.operations if o.name in ("mm", "gelu", "tanh")] == [
        "layers.0",
        "layers.1.0",
        "layers.1.1",
        "",
    ]
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line" in text)
    (tanh,) = [operation for operation in program.operations if operation.name == "tanh"]
    assert tanh.where == f"test_record_torch.py:{line}"
    assert all(operation.where.startswith("test_record_torch.py:") for operation in program.operations)


def test_numbers_are_operands_and_the_rest_are_settings() -> None:
    program = recorded(nn.LayerNorm(8, eps=0.25), x=X)
    (added,) = [o for o in program.operations if o.name == "add" and o.operands[1].array.ndim == 0]
    assert added.operands[1].constant and float(added.operands[1].array) == 0.25
    means = [operation for operation in program.operations if operation.name == "mean"]
    assert [operation.settings for operation in means] == [{"dim": [-1], "keepdim": True}] * 2


def test_casts_are_removed_and_the_module_is_left_as_it_was() -> None:
    class Casting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return super().forward(x.float().to(torch.bfloat16).to(self.weight.dtype)).half() / 3

    module = Casting(8, 4).eval()
    module.register_buffer("count", torch.zeros(1))
    before = {
        name: (x, x.clone(), x.data_ptr(), x.requires_grad) for name, x in module.state_dict(keep_vars=True).items()
    }
    fast = torch.backends.mha.get_fastpath_enabled()
    program = record_torch(module, whole, {"x": X})
    weight, bias = (module.state_dict()[name].double().numpy() for name in ("weight", "bias"))
    np.testing.assert_allclose(program.outputs["y"].array, (X @ weight.T + bias) / 3, rtol=1e-14)
    for name, x in module.state_dict(keep_vars=True).items():
        was, elements, address, gradient = before[name]
        assert x is was and x.data_ptr() == address and x.dtype == torch.float32 and x.requires_grad == gradient
        assert torch.equal(x, elements)
    assert torch.backends.mha.get_fastpath_enabled() == fast and torch.get_default_dtype() == torch.float32
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_a_compiled_module_is_recorded_as_its_code() -> None:
    program = recorded(torch.compile(nn.Sequential(nn.Linear(8, 4), nn.GELU()), backend="eager"), x=X)
    assert [o.name for o in program.operations if o.name in ("mm", "gelu")] == ["mm", "gelu"]


def test_an_operator_of_another_library_is_one_operation() -> None:
    @torch.library.custom_op("convert_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight * 2

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> Any:
            return scaled(x, self.weight)

    program = recorded(Custom(), x=X)
    (operation,) = program.operations
    assert (operation.name, program.opaque) == ("scaled", ("scaled",))
    assert [operand.of_parameters for operand in operation.operands] == [False, True]


@pytest.mark.slow
def test_a_run_imports_no_compiler() -> None:
    """It takes seconds, and a module that nothing compiled has no use for it."""
    code = (
        "import sys, torch; from convert.programs.record_torch import record_torch; "
        "record_torch(torch.nn.Linear(2, 2), lambda m, i: {'y': m(i['x'])}, {'x': torch.ones(1, 2).numpy()}); "
        "print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_one_hot_of_indices_that_are_too_large_is_the_models_error() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(x.argmax(-1), 1)

    with pytest.raises(ConvertError, match="smaller than num_classes"):
        recorded(Model(), x=X)


@pytest.mark.parametrize("search", [torch.searchsorted, lambda at, x: torch.bucketize(x, at[0])])
def test_a_sorted_search_runs_again_on_arrays_of_any_strides_without_a_warning(
    search: Callable[..., Any], capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """The module gives it a contiguous tensor; the array of the record, of a view that was expanded, has other strides."""

    class Search(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            at = torch.linspace(0.1, 0.9, 5, dtype=x.dtype).expand(8, 5).contiguous()
            return search(x.sigmoid().cumsum(-1), at) * x.sum()

    (one,) = [o for o in recorded(Search(), x=X[0].T.copy()).operations if o.name in ("searchsorted", "bucketize")]
    torch.set_warn_always(True)
    try:
        again = one.again([np.asfortranarray(operand.array) for operand in one.operands])
    finally:
        torch.set_warn_always(False)
    np.testing.assert_array_equal(again[0], one.results[0].array)
    assert "non-contiguous" not in capfd.readouterr().err and not recwarn.list
