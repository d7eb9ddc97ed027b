"""Code that hides operators from a recorder: kernels, transforms, compiled code, control flow of torch, NumPy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from support.recorded_module import recorded

F = nn.functional
Tensor = torch.Tensor
X = np.random.default_rng(0).normal(size=(2, 3, 8))


Parts = tuple[Callable[[], nn.Module], ...]


class Code(nn.Module):
    """A function of a parameter and an input, with the modules that it needs."""

    def __init__(self, function: Callable[[Code, Tensor], Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def heads(m: Code, x: Tensor) -> Tensor:
    return (x @ m.w).view(2, 3, 2, 4).transpose(1, 2)


def chosen_kernel(m: Code, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*[heads(m, x)] * 3)


def called_kernel(m: Code, x: Tensor) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[heads(m, x)] * 3, is_causal=True)[0]


def flexible(m: Code, x: Tensor) -> Any:
    return flex_attention(*[heads(m, x)] * 3, score_mod=lambda score, batch, head, i, j: score + (i - j))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x @ w).relu()


class InNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(x.numpy()))


def checkpointed(m: Code, x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda y: (y @ m.w).relu(), x, use_reentrant=False)


def branch(m: Code, x: Tensor) -> Any:
    return torch.cond(x.sum() > -1e9, lambda y: y @ m.w, lambda y: y - 1, (x,))


def repeated(m: Code, x: Tensor) -> Any:
    loop = torch._higher_order_ops.while_loop
    return loop(lambda i, y: i < 3, lambda i, y: (i + 1, y @ m.w), (torch.tensor(0), x))[1]


def packed(m: Code, x: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(x @ m.w, torch.tensor([3, 2]), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(m.parts[0](rows)[0], batch_first=True)[0]


def masked(m: Code, x: Tensor) -> Tensor:
    padding = torch.tensor([[False, False, True]] * 2)
    return m.parts[0](x @ m.w, x, x, key_padding_mask=padding, need_weights=False)[0]


def bits(m: Code, x: Tensor) -> Tensor:
    return (x @ m.w).to(torch.bfloat16).view(torch.int16).view(torch.bfloat16) * 2


def spectrum(m: Code, x: Tensor) -> Tensor:
    window = torch.hann_window(8)
    return torch.stft((x @ m.w).reshape(2, -1), 8, 4, window=window, return_complex=True).abs() ** 2


CASES: dict[str, tuple[Callable[[Code, Tensor], Any], Parts]] = {
    "a kernel of attention that the code asks for": (chosen_kernel, ()),
    "a kernel that the code calls": (called_kernel, ()),
    "flex attention": (flexible, ()),
    "an autograd function": (lambda m, x: Product.apply(x, m.w), ()),
    "checkpointing": (checkpointed, ()),
    "while_loop": (repeated, ()),
    "vmap": (lambda m, x: torch.vmap(lambda row: row @ m.w)(x), ()),
    "nested vmap": (lambda m, x: torch.vmap(torch.vmap(lambda a: (a[None] @ m.w)[0]))(x), ()),
    "einsum": (lambda m, x: torch.einsum("bte,ef,bsf->bts", x, m.w, x), ()),
    "a traced module": (
        lambda m, x: m.parts[0](x @ m.w),
        (lambda: torch.jit.trace(nn.Linear(8, 4), torch.zeros(1, 8)),),
    ),
    "attention with added keys": (
        masked,
        (lambda: nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),),
    ),
    "weight norm as a hook": (lambda m, x: m.parts[0](x @ m.w), (lambda: nn.utils.weight_norm(nn.Linear(8, 4)),)),
    "complex spectra": (spectrum, ()),
    "a copy of a tensor with its storage": (lambda m, x: copy.deepcopy(x @ m.w), ()),
    "data without gradients": (lambda m, x: x.data @ m.w.data, ()),
    "a bias that counts zero times": (lambda m, x: torch.addmm(torch.full((3, 8), torch.nan), x[0], m.w, beta=0), ()),
    "factors of a product": (lambda m, x: torch.baddbmm(x, x[:, :, :3], x, beta=0.5, alpha=2) @ m.w, ()),
    "statistics of the batch": (lambda m, x: F.batch_norm(x @ m.w, None, None, training=True), ()),
    "a seeded generator": (lambda m, x: x @ m.w + torch.randn(8, generator=torch.Generator().manual_seed(0)), ()),
}


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:flex_attention called without")
@pytest.mark.parametrize(("function", "parts"), CASES.values(), ids=CASES)
def test_operators_are_seen(function: Callable[[Code, Tensor], Any], parts: Parts) -> None:
    program = recorded(Code(function, *(part() for part in parts)), x=X)
    assert program.outputs["y"].data and "w" in program.outputs["y"].leaves
    assert program.opaque == () and not program.path_taken
    assert "mm" in {operation.name for operation in program.operations} or "bmm" in {o.name for o in program.operations}


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (branch, ()),
        (packed, (lambda: nn.LSTM(8, 4, batch_first=True),)),
        (packed, (lambda: nn.GRU(8, 4, batch_first=True),)),
    ],
    ids=["cond", "packed LSTM", "packed GRU"],
)
def test_a_path_that_values_choose(function: Callable[[Code, Tensor], Any], parts: Parts) -> None:
    program = recorded(Code(function, *(part() for part in parts)), x=X)
    assert program.outputs["y"].leaves == set(program.parameters)
    assert program.path_taken and program.opaque == ()


def test_what_is_not_looked_into_is_listed() -> None:
    assert recorded(Code(bits), x=X).opaque == ("aten.view.dtype",)
    program = recorded(Code(lambda m, x: InNumPy.apply(x @ m.w)), x=X)
    assert program.opaque == ("numpy",) and program.path_taken


def test_recurrent_cells_read_the_gates_without_detours() -> None:
    """The kernel adds and squashes parts of one tensor in place; parts that it has not written to are as they were."""
    torch.manual_seed(0)
    program = recorded(nn.GRU(8, 4, batch_first=True), x=X)
    assert not {"as_strided", "as_strided_scatter"} & {operation.name for operation in program.operations}
    assert [o.name for o in program.operations].count("sigmoid") == 2 * X.shape[1]
