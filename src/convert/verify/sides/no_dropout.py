"""Run PyTorch code without dropout, wherever its code asks for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from convert.programs.where import model_line, stack

NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
DROPOUTS = {found for name in NAMES for of in (functional, torch) if (found := getattr(of, name, None)) is not None}
ATTENTION = functional.scaled_dot_product_attention
RATE = 4  # place of dropout_p in its arguments


class _WithoutDropout(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in DROPOUTS:
            operands = dict(zip(("input", "p", "training"), args, strict=False)) | given
            if operands.get("training", operands.get("train", True)):
                self._note()
                return operands["input"]
        if func is ATTENTION and (given.pop("dropout_p", 0) or any(args[RATE : RATE + 1])):
            self._note()
            args = (*args[:RATE], 0.0, *args[RATE + 1 :])[: len(args)]
        return func(*args, **given)

    def _note(self) -> None:
        self.lines.append(model_line(stack(sys._getframe())))


@contextmanager
def without_dropout() -> Iterator[list[str]]:
    """Within this context, no element is dropped; yield the lines of the model's code that drop elements."""
    with _WithoutDropout() as mode:
        yield mode.lines
