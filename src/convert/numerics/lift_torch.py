"""Run PyTorch code in float64, with the casts to narrower dtypes in its code removed ("lifted")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = tuple(
    t for t in vars(torch).values() if isinstance(t, torch.dtype) and t.is_floating_point and t.itemsize < 8
)
LINEAR_FLOAT32, LINEAR_FLOAT64 = 20, 40  # exp(-20) is lost beside 20 in float32, exp(-40) beside 40 in float64
_GROUPED_PRODUCT = getattr(torch.ops.aten, "_grouped_mm", None)  # older versions have none
_WIDE = dict.fromkeys(_NARROW, torch.float64) | {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


def _wide(x: Any) -> Any:
    """Widen an argument that is a narrow dtype or a narrow tensor."""
    if isinstance(x, torch.dtype):
        return _WIDE.get(x, x)
    return x.to(_WIDE[x.dtype]) if isinstance(x, torch.Tensor) and x.dtype in _WIDE else x


def _has_more_digits(x: torch.Tensor) -> bool:
    """Whether a tensor holds numbers with more digits than a bfloat16 has: they may have been rounded to its dtype."""
    lost = {torch.float32: 0xFFFF, torch.float16: 0x7}.get(x.dtype)
    if lost is None or type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta:
        return False
    bits = x.detach().cpu().contiguous().numpy().view(f"u{x.itemsize}")
    return bool((bits & lost).any())


def tensors_in(x: Any) -> list[torch.Tensor]:
    """Return the tensors in what an operator gives, or in an argument."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [tensor for part in x for tensor in tensors_in(part)] if isinstance(x, list | tuple) else []


def exact_arguments(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with which an operator is as exact as float64: of softplus, the default limit above which it is linear is for float32."""
    if func is torch.ops.aten.softplus.default and args[2:] in ((), (LINEAR_FLOAT32,)):
        return args[0], *(args[1:2] or (1,)), LINEAR_FLOAT64
    return args


@cache  # PyTorch makes the arguments of a schema anew each time
def _shares(func: Any) -> bool:
    """Whether an operator gives a view, or changes an argument."""
    return any(argument.alias_info is not None for argument in func._schema.arguments)


def _called(func: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
    if func is torch.ops.higher_order.cond:  # its kernel refuses a mode
        condition, yes, no, operands = args
        return (yes if condition else no)(*operands)
    return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)


def _grouped_product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any) -> Any:
    """Multiply group by group: mixtures of experts do so by a kernel that float64 does not have.

    Args:
        offs: where each group ends: of the rows of `a`, the columns of `b`, or the axis that is summed over.
    """
    if offs is None:
        return torch.bmm(a, b)
    if a.ndim == 2 and b.ndim == 3:  # with other weights, other rows go to an expert
        group = torch.bucketize(torch.arange(a.shape[0], device=a.device), offs, right=True)
        made = a.new_zeros(a.shape[0], b.shape[2])
        for k in range(b.shape[0]):
            (rows,) = torch.where(group == k)
            made = made.index_add(0, rows, a[rows] @ b[k])
        return made
    ends = [int(end) for end in offs]
    groups = list(enumerate(zip([0, *ends], ends, strict=False)))
    if a.ndim == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for _, (start, end) in groups])
    rest = a.new_zeros(a.shape[1], b.shape[1] - ends[-1])
    return torch.cat([*(a[k] @ b[:, start:end] for k, (start, end) in groups), rest], 1)


def _narrow_names(*values: Any) -> frozenset[str]:
    """Return the names of the dtypes among these that are narrower than float64."""
    return frozenset(str(x).removeprefix("torch.") for x in values if isinstance(x, torch.dtype) and x in _WIDE)


def _has_dtypes(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a dtype is among the arguments: a function of the code is called thousands of times without one."""
    return torch.dtype in map(type, args) or bool(kwargs and torch.dtype in map(type, kwargs.values()))


class _Names(TorchFunctionMode):
    """Widens dtypes in arguments, before PyTorch rounds a Python number to them."""

    def __init__(self, mode: Lift) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.view:  # with a dtype it reinterprets bits
            return func(*args, **(kwargs or {}))
        if (
            func is torch.Tensor.__deepcopy__ and args[0].dtype in _WIDE
        ):  # it would put a narrow storage into a wide tensor
            x, memo = args
            return memo.setdefault(id(x), x.detach().clone().requires_grad_(x.requires_grad))
        if not _has_dtypes(args, kwargs):
            return func(*args, **(kwargs or {}))
        self.mode.casts |= _narrow_names(*args, *(kwargs or {}).values())
        dtypes = {k: _wide(v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*(_wide(arg) if isinstance(arg, torch.dtype) else arg for arg in args), **dtypes)


class DispatchMode(TorchDispatchMode):
    """A mode that sees the operators of code that nothing compiles."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks whether `torch.compile` must leave these methods out: that imports all of the compiler, which takes seconds."""
        return False


class Lift(DispatchMode):
    """Widens the arguments of every operation to float64. A subclass may see the operations, and what they give.

    Attributes:
        unlifted: operations that still gave narrower floats; their results are rounded.
        casts: the narrower floats to which the code casts, or in which it contains data: without lifting, it rounds.
        rounded: tensors that were rounded before the code ran, such as tables of NumPy. With `shaken`, they move at random by up to half
            a unit in the last place: one more sample of the rounding.
    """

    supports_higher_order_operators = True

    def __init__(self, shaken: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unlifted: set[str] = set()
        self.casts: frozenset[str] = frozenset()
        self.rounded: set[str] = set()
        self._shake = torch.Generator().manual_seed(0) if shaken else None
        self._known: set[int] = set()  # addresses, as an operation may be given a view

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the values of tensors as they are: weights, which the other side has as well."""
        self._known.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator):  # it runs functions of the code
            with self:
                return _called(func, *args, **kwargs)
        if func.overloadpacket is _GROUPED_PRODUCT:
            with self:
                return _grouped_product(*args, **kwargs)
        args = exact_arguments(func, args)
        if _has_dtypes(args, kwargs):
            self.casts |= _narrow_names(*args, *kwargs.values())
        if func is torch.ops.aten.lift_fresh.default:  # a new tensor from data; nothing else refers to it
            self.casts |= _narrow_names(args[0].dtype)
            return self._of_one(args[0])
        if func is torch.ops.aten.view.dtype:
            return self.bits(func, *args)
        if _shares(func):
            args = tuple(_wide(x) if isinstance(x, torch.dtype) else x for x in args)
            kwargs = {k: _wide(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
            out = func(*args, **kwargs)
            rounds = func._schema.is_mutable
        else:
            out = func(*map(self._widened, args), **{k: self._widened(v) for k, v in kwargs.items()})
            rounds = True
        if rounds and any(tensor.dtype in _WIDE for tensor in tensors_in(out)):
            self.unlifted.add(str(func))
        return out

    def _widened(self, x: Any) -> Any:
        """Widen an argument, or the arguments in a list: an operator has no others."""
        return [self._of_one(part) for part in x] if isinstance(x, list) or type(x) is tuple else self._of_one(x)

    def _of_one(self, x: Any) -> Any:
        wide = _wide(x)
        if wide is x or not isinstance(x, torch.Tensor) or x.untyped_storage().data_ptr() in self._known:
            return wide
        if _has_more_digits(x):
            self.rounded.add(f"constant {str(x.dtype).removeprefix('torch.')}{list(x.shape)}")
            if self._shake is not None:
                move = torch.rand(x.shape, generator=self._shake) - 0.5
                return wide * (1 + move.to(x.device) * torch.finfo(x.dtype).eps)
        return wide

    def bits(self, func: Any, x: torch.Tensor, dtype: torch.dtype) -> Any:
        """Reinterpret bits in the dtype that the code expects."""
        if x.dtype == torch.float64 and dtype.itemsize in (2, 4):
            x = x.to({4: torch.float32, 2: torch.bfloat16}[dtype.itemsize])
            self.unlifted.add(str(func))
        return func(x, dtype)


@contextmanager
def lifted(mode: Lift | None = None) -> Iterator[Lift]:
    """Build and run modules in float64 within this context.

    Build the module inside, load the weights as float64, and run it inside. `Lift.unlifted` lists the operations that still
    gave narrower floats.

    Args:
        mode: what widens, if it is to do more than that.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    mode = mode or Lift()
    names = _Names(mode)
    try:
        with mode, names:
            yield mode
    finally:
        torch.set_default_dtype(before)
