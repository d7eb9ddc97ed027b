"""Run PyTorch code in one precision: the casts to narrower floats in its code removed, and no float32 product rounded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from convert.numerics.float32_products import pin_float32_products, rounds_float32_products
from convert.programs.where import model_line, stack

TO_TF32 = "the factors of float32 products to TF32 or bfloat16, which the target's code switches on"
METHODS = {torch.Tensor.bfloat16: torch.bfloat16, torch.Tensor.half: torch.float16}


class _WithoutNarrowCasts(TorchFunctionMode):
    def __init__(self, precision: torch.dtype) -> None:
        super().__init__()
        self.precision = precision
        self.casts: dict[str, str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if rounds_float32_products():  # the code has switched it on since the last operation
            pin_float32_products()
            self.casts.setdefault(model_line(stack(sys._getframe())), TO_TF32)
        narrow = [x for x in (*args, *given.values(), METHODS.get(func)) if self._is_narrow(x)]
        if not narrow or func is torch.Tensor.view:  # with a dtype it reinterprets bits
            return func(*args, **given)
        self._note(narrow[0], args)
        if func in METHODS:
            return args[0].to(self.precision)
        wide = {key: self.precision if self._is_narrow(x) else x for key, x in given.items()}
        return func(*(self.precision if self._is_narrow(x) else x for x in args), **wide)

    def _is_narrow(self, x: Any) -> bool:
        return isinstance(x, torch.dtype) and x.is_floating_point and x.itemsize < self.precision.itemsize

    def _note(self, dtype: torch.dtype, args: tuple[Any, ...]) -> None:
        """Keep the line of a cast, with its number if it is one that the dtype does not have."""
        said = f"to {str(dtype).removeprefix('torch.')}"
        if args and (isinstance(args[0], float) or (isinstance(args[0], torch.Tensor) and args[0].numel() == 1)):
            number = float(args[0])
            rounded = float(torch.tensor(number, dtype=torch.float64).to(dtype))
            if rounded == number:
                return
            said = f"{number:.7g} {said}, {rounded:.7g}"
        self.casts.setdefault(model_line(stack(sys._getframe())), said)


@contextmanager
def without_narrow_casts(precision: str) -> Iterator[dict[str, str]]:
    """Within this context, nothing is cast to floats narrower than a precision; yield the lines that do, with what they round.

    Of code that switches to rounded products, the line is that of the first operation behind it.
    """
    with _WithoutNarrowCasts(getattr(torch, precision)) as mode:
        yield mode.casts
