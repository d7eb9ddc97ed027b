"""Decompose fused torch operators into simple ones, so that the record has the values between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten
Tensor = torch.Tensor
_MASKED_SOFTMAX = getattr(
    torch, "_safe_softmax", torch.softmax
)  # since torch 2.5, rows that are masked throughout are zeros


def _added(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return ``beta * c + alpha * multiply(a, b)``."""

    def add(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, value: float = 1) -> Tensor:
        product = multiply(a, b)
        factor = alpha * value
        product = product if factor == 1 else product * factor
        if beta == 0:  # c may hold anything
            return product
        return product + (c if beta == 1 else c * beta)

    return add


def _trilinear(a: Tensor, b: Tensor, c: Tensor, *axes: Any) -> Tensor:
    if axes[:3] == ([1, 3], [0], [1, 2]) and axes[3] == [2, 3]:  # torch.nn.Bilinear: the outer product meets the kernel
        outer = a.unsqueeze(2) * c.unsqueeze(1)
        return outer.flatten(1) @ b.flatten(1).t()
    factors = []
    for x, expanded in zip((a, b, c), axes, strict=False):
        for axis in expanded:
            x = x.unsqueeze(axis)
        factors.append(x)
    return (factors[0] * factors[1] * factors[2]).sum(axes[3])


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Any:
    if bias is None:
        return NotImplemented
    return aten.convolution(x, weight, None, *settings) + bias.view(-1, *[1] * (weight.ndim - 2))


def _normalized(x: Tensor, axes: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    rstd = (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    return centred * rstd, mean, rstd


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _per_channel(weight: Any, x: Tensor) -> Any:
    """Return one number for each channel of `x`, where there are any."""
    return None if weight is None else weight.view(-1, *[1] * (x.ndim - 2))


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    y, mean, rstd = _normalized(x, list(range(-len(shape), 0)), eps)
    return _scaled(y, weight, bias), mean, rstd


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, groups: int, eps: float
) -> Any:
    y, mean, rstd = _normalized(x.reshape(n, groups, -1), [-1], eps)
    y = _scaled(y.reshape(x.shape), _per_channel(weight, x), _per_channel(bias, x))
    return y, mean.squeeze(-1), rstd.squeeze(-1)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = (x.square().mean(list(range(-len(shape), 0)), keepdim=True) + eps).rsqrt()
    return _scaled(x * rstd, weight, None), rstd


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> Any:
    y = (x - _per_channel(mean, x)) * (_per_channel(var, x) + eps).rsqrt()
    return _scaled(y, _per_channel(weight, x), _per_channel(bias, x)), x.new_zeros(0), x.new_zeros(0)


def _native_batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    if training:
        return _training_batch_norm()(x, weight, bias, mean, var, training, momentum, eps)
    return _batch_norm(x, weight, bias, mean, var, momentum, eps)


def _cudnn_batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    return (*_native_batch_norm(x, weight, bias, mean, var, training, momentum, eps), x.new_zeros(0))


@cache
def _training_batch_norm() -> Callable[..., Any]:
    return get_decompositions([aten.native_batch_norm.default])[aten.native_batch_norm.default]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, step by step."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    logits = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        weights = logits.softmax(-1)
    elif attn_mask.dtype == torch.bool:
        weights = _MASKED_SOFTMAX(logits.masked_fill(~attn_mask, -math.inf), -1)
    else:
        weights = _MASKED_SOFTMAX(logits + attn_mask, -1)
    if dropout_p:
        weights = torch.dropout(weights, dropout_p, True)
    return weights @ value


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    out = attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    return out, out.new_zeros(0)  # inference reads no more of the sums of the softmax


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    if padding_idx >= 0 or mode > 1:  # of mode 2, the largest
        return NotImplemented
    ends = [*offsets.tolist(), *([] if include_last_offset else [len(indices)])]
    sizes = [end - start for start, end in itertools.pairwise(ends)]
    rows = aten.embedding(weight, indices)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counts, mean = torch.tensor(sizes), mode == 1
    if sizes and len(set(sizes)) == 1 and sizes[0]:
        rows = rows.view(len(sizes), sizes[0], -1)
        bags = rows.squeeze(1) if sizes[0] == 1 else rows.mean(1) if mean else rows.sum(1)
    else:
        bag = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        bags = rows.new_zeros(len(sizes), weight.shape[1]).index_add(0, bag, rows)
        bags = bags / counts.clamp(min=1).unsqueeze(-1).to(bags.dtype) if mean else bags
    return bags, offsets.new_zeros(0), counts, offsets.new_zeros(0)


def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.where(x > 0, x, weight * x)


def one_hot(tensor: Tensor, number: int) -> Tensor:
    """Return what ``torch.nn.functional.one_hot`` gives, which first looks whether all indices are below the number.

    No path depends on that: it raises an error, or goes on.
    """
    classes = torch.arange(number, device=tensor.device)
    made: Tensor = (tensor.unsqueeze(-1) == classes).to(torch.int64)
    return made


@cache
def table() -> dict[Any, Callable[..., Any]]:
    """Return what takes an operator apart; it may return `NotImplemented`."""
    return {
        aten._trilinear.default: _trilinear,
        aten.addmm.default: _added(aten.mm),
        aten.addmv.default: _added(aten.mv),
        aten.baddbmm.default: _added(aten.bmm),
        aten.addr.default: _added(torch.outer),
        aten.addbmm.default: _added(lambda a, b: aten.bmm(a, b).sum(0)),
        aten.addcmul.default: _added(aten.mul),
        aten.addcdiv.default: _added(aten.div),
        aten.convolution.default: _convolution,
        aten._prelu_kernel.default: _prelu,
        aten._embedding_bag.default: _embedding_bag,
        aten._embedding_bag_forward_only.default: _embedding_bag,
        aten.native_layer_norm.default: _layer_norm,
        aten.native_group_norm.default: _group_norm,
        aten._fused_rms_norm.default: _rms_norm,
        aten.native_batch_norm.default: _native_batch_norm,
        aten._native_batch_norm_legit_no_training.default: _batch_norm,
        aten.cudnn_batch_norm.default: _cudnn_batch_norm,
        aten.scaled_dot_product_attention.default: attention,
        aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
    }


@contextmanager
def attention_apart() -> Iterator[None]:
    """Compute attention by `attention` within this context: torch would choose a kernel, or scale queries and keys apart."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for key in ("CPU", "CUDA"):
            library.impl("scaled_dot_product_attention", attention, f"Autograd{key}")
        yield
