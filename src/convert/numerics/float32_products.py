"""How PyTorch multiplies float32 numbers: at their full precision, or with factors rounded to TF32 or bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import backends


@dataclass(frozen=True)
class Float32Products:
    """How PyTorch multiplies float32 numbers.

    PyTorch 2.9 has a second set of switches, and its first one cannot be read where the two contradict each other.

    Attributes:
        matmul: of ``torch.set_float32_matmul_precision``; None where it cannot be read.
        cudnn: whether convolutions and recurrent layers may use TF32; None where it cannot be read.
        each: of `_switches`, in their order.
    """

    matmul: str | None
    cudnn: bool | None
    each: tuple[str, ...]


def _switches() -> list[Any]:
    """Return what has a switch of its own in PyTorch 2.9 and newer: first those of all and of CUDA, then those of the CPU.

    The first two have an effect only on what has none of its own.
    """
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        return []
    cudnn: Any = backends.cudnn
    mkldnn: Any = backends.mkldnn
    return [backends, cudnn, backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]


def float32_products() -> Float32Products:
    def read(setting: Callable[[], Any]) -> Any:
        try:
            return setting()
        except RuntimeError:  # the two sets of switches contradict each other
            return None

    return Float32Products(
        read(torch.get_float32_matmul_precision),
        read(lambda: backends.cudnn.allow_tf32),
        tuple(switch.fp32_precision for switch in _switches()),
    )


def set_float32_products(products: Float32Products) -> None:
    """Set both sets of switches; the first set alone leaves convolutions to what all backends have (`fp32_precision`)."""
    if products.matmul is not None:
        torch.set_float32_matmul_precision(products.matmul)
    if products.cudnn is not None:
        backends.cudnn.allow_tf32 = products.cudnn
    for switch, value in zip(_switches(), products.each, strict=True):
        switch.fp32_precision = value


def pin_float32_products(*, tf32: bool = False) -> None:
    """Multiply float32 numbers at their full precision, on every device; or, on a GPU, with factors rounded to TF32."""
    each = ("ieee",) * 2 + ("tf32" if tf32 else "ieee",) * 3 + ("ieee",) * 3
    set_float32_products(Float32Products("high" if tf32 else "highest", tf32, each[: len(_switches())]))


def rounds_float32_products() -> bool:
    """Return whether PyTorch may round the factors of float32 products, to TF32 or to bfloat16."""
    now = float32_products()
    if now.each:
        return any(value not in ("ieee", "none") for value in now.each)
    return now.matmul != "highest" or bool(now.cudnn)
