"""What takes an operator apart computes what the operator computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convert.programs.torch_decompositions import table

aten = torch.ops.aten
torch.manual_seed(0)
A, B, V, W = torch.randn(3, 4), torch.randn(4, 5), torch.randn(4), torch.randn(3)
X, IMAGE, SCALE, SHIFT = torch.randn(2, 3, 4), torch.randn(2, 6, 5, 5), torch.randn(6), torch.randn(6)
MEAN, VAR = torch.randn(6), torch.rand(6) + 0.5
QUERY = torch.randn(2, 2, 3, 4)
ROWS = torch.tensor([2, 0, 1, 1, 2, 0])
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.addmm.default, (torch.randn(3, 5), A, B), {"beta": 0.5, "alpha": 2}),
    (aten.addmm.default, (torch.randn(5), A, B), {}),
    (aten.addmv.default, (W, A, V), {"alpha": 3}),
    (aten.addr.default, (A, W, V), {"beta": 2}),
    (aten.baddbmm.default, (X, X @ X.mT, X), {"beta": 0}),
    (aten.addbmm.default, (torch.randn(3, 3), X, X.mT), {"alpha": 0.5}),
    (aten.addcmul.default, (A, A, A), {"value": 2}),
    (aten.addcdiv.default, (A, A, A), {"value": 0.5}),
    (
        aten.convolution.default,
        (IMAGE, torch.randn(4, 3, 3, 3), torch.randn(4), [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
        {},
    ),
    (
        aten.convolution.default,
        (IMAGE, torch.randn(6, 4, 3, 3), torch.randn(4), [2, 2], [1, 0], [1, 1], True, [1, 0], 1),
        {},
    ),
    (aten.native_layer_norm.default, (X, [3, 4], A, A, 1e-3), {}),
    (aten.native_layer_norm.default, (X, [4], None, V, 1e-3), {}),
    (aten.native_group_norm.default, (IMAGE, SCALE, SHIFT, 2, 6, 25, 3, 1e-3), {}),
    (aten.native_group_norm.default, (IMAGE, None, None, 2, 6, 25, 2, 1e-3), {}),
    (aten._fused_rms_norm.default, (X, [4], V, 1e-3), {}),
    (aten._fused_rms_norm.default, (X, [3, 4], None, None), {}),
    (aten.native_batch_norm.default, (IMAGE, SCALE, SHIFT, MEAN, VAR, False, 0.1, 1e-3), {}),
    (aten.native_batch_norm.default, (IMAGE, None, SHIFT, None, None, True, 0.1, 1e-3), {}),
    (aten._native_batch_norm_legit_no_training.default, (IMAGE, SCALE, None, MEAN, VAR, 0.1, 1e-3), {}),
    (aten._trilinear.default, (A, torch.randn(2, 4, 5), torch.randn(3, 5), [1, 3], [0], [1, 2], [2, 3]), {}),
    (aten.scaled_dot_product_attention.default, (QUERY, QUERY, QUERY), {"is_causal": True}),
    (
        aten.scaled_dot_product_attention.default,
        (QUERY, QUERY[:, :1], QUERY[:, :1]),
        {"enable_gqa": True, "scale": 0.2},
    ),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (QUERY, QUERY, QUERY), {"attn_mask": torch.randn(3, 3)}),
    (aten._prelu_kernel.default, (A, torch.randn(A.shape[-1])), {}),
    (aten._embedding_bag.default, (A, ROWS, torch.tensor([0, 2, 4])), {}),
    (aten._embedding_bag.default, (A, ROWS, torch.tensor([0, 1, 1, 5])), {"mode": 1}),  # an empty bag
    (aten._embedding_bag.default, (A, ROWS, torch.arange(6)), {"mode": 1}),
    (aten._embedding_bag_forward_only.default, (A, ROWS, torch.tensor([0, 2, 6])), {"include_last_offset": True}),
    (aten._embedding_bag_forward_only.default, (A, ROWS, torch.tensor([0, 4])), {"per_sample_weights": torch.randn(6)}),
]


def in_float64(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize(("operator", "args", "kwargs"), CALLS, ids=[str(call[0]) for call in CALLS])
def test_apart_it_computes_the_same(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    args = tuple(map(in_float64, args))
    kwargs = {key: in_float64(x) for key, x in kwargs.items()}
    want, got = first(operator(*args, **kwargs)), first(table()[operator](*args, **kwargs))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_batch_norm_of_cudnn_is_that_of_torch() -> None:
    """It has no kernel on a CPU."""
    args = (IMAGE, SCALE, SHIFT, MEAN, VAR, False, 0.1, 1e-3)
    got, *_ = table()[aten.cudnn_batch_norm.default](*args)
    torch.testing.assert_close(got, aten.native_batch_norm.default(*args)[0], rtol=1e-5, atol=1e-5)


def test_every_operator_is_tried() -> None:
    assert set(table()) - {aten.cudnn_batch_norm.default} == {operator for operator, _, _ in CALLS}
