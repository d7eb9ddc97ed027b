"""Record every operator that torch runs as an operation of a program."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.numerics.lift_torch import Lift, exact_arguments, tensors_in
from convert.programs.program import Array, Operation, TakenOut, Value
from convert.programs.torch_aliases import Aliases, array_of
from convert.programs.torch_call import Call
from convert.programs.torch_decompositions import one_hot, table
from convert.programs.torch_elements import elements_of
from convert.programs.where import UNKNOWN, model_line, stack

aten = torch.ops.aten
CALL = torch.nn.Module._call_impl.__code__
SAME = frozenset(
    ["detach", "alias", "clone", "contiguous", "copy", "_to_copy"]
)  # in one dtype, they give what they were given
LOOK_ELSEWHERE = {"as_strided", "set"}  # they say where in a storage a tensor is
UNSET = ("empty", "new_empty")  # memory that nothing has been written to
TO_NUMPY = {torch.Tensor.numpy: "numpy", torch.Tensor.__array__: "numpy", torch.Tensor.__dlpack__: "dlpack"}
TO_PYTHON = {**TO_NUMPY, torch.Tensor.tolist: "tolist"}
SCALARS = {"_local_scalar_dense": "item"}  # operators that give Python a number
KERNELS = {  # with products inside that no decomposition takes apart
    *("_cudnn_rnn", "mkldnn_rnn_layer", "miopen_rnn", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"),
    *("_transformer_encoder_layer_fwd", "_native_multi_head_attention"),
}


class Tape(Lift):
    """Records the operators that run in this mode, lifted to float64.

    Attributes:
        operations: in the order of execution.
        opaque: operators that could not be looked into.
        path_taken: the line at which Python code first used the elements of a value that is not constant, or they chose a shape;
            empty if none did.
        taken_out: where it has used them.

    Args:
        modules: paths of the modules, by `id`.
    """

    def __init__(self, modules: Mapping[int, str]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.opaque: set[str] = set()
        self.path_taken = ""
        self.taken_out: list[TakenOut] = []
        self._modules = modules
        self._running = False
        self._aliases = Aliases(self._moved)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The model runs within this context: also notice that its code takes elements without an operator."""
        self._running = True
        with _ToPython(self):
            yield
        self._running = False

    def bind(self, tensor: torch.Tensor, value: Value) -> None:
        """Tell what a tensor holds that the run is given."""
        self._aliases.give(tensor, value)

    def read(self, tensor: torch.Tensor) -> Value:
        """Return the value that a tensor holds now."""
        return self._aliases.read(tensor)

    def used_in_python(self, values: Iterable[Value], how: str, *, to_numpy: bool = False) -> None:
        """Note that Python code has used the elements of values; what NumPy makes of them is not seen."""
        if any(not value.constant for value in values):
            self.path_taken = self.path_taken or _line()
            self.taken_out.append(TakenOut(model_line(stack(sys._getframe())), how, len(self.operations)))
            self.opaque |= {"numpy"} if to_numpy else set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func in table():
            with self:
                if (out := table()[func](*args, **kwargs)) is not NotImplemented:
                    return out
        elif _composite(func):
            with self:  # in inference mode, nothing has taken it apart yet
                if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
        args = exact_arguments(func, args)
        call = Call.of(func, args, kwargs)
        _require_strides(call.name, call.operands)
        operands = [self.read(x) if isinstance(x, torch.Tensor) else Value(np.asarray(x)) for x in call.operands]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        given = call.written or tensors_in(out)
        _require_strides(call.name, given)
        if call.name in LOOK_ELSEWHERE:  # the value is made where it is used
            pass
        elif call.name.startswith(UNSET):
            for tensor in given:
                tensor.zero_()
        elif given and any(isinstance(x, torch.Tensor) for x in call.operands):
            self._record(call, operands, call.results(out))
        elif given:
            for tensor in call.written:
                self._aliases.write(tensor, Value(array_of(tensor)))
        else:
            self.used_in_python(operands, SCALARS.get(call.name, call.name))
        if any(not operands[k].constant for k in call.sizing):
            self.path_taken = self.path_taken or _line()
        return out

    def _record(self, call: Call, operands: Sequence[Value], results: Sequence[torch.Tensor]) -> None:
        """Record an operator that has run, unless it only gives a value that is known."""
        written = len(call.written)
        new = [not self._aliases.known(x) for x in results]
        if call.name in SAME and _same(call.operands[0], results[0]):
            self._bind(results, [operands[0]], written, new)
            return
        if not written and not any(new) and not call.elementwise:
            if all(self._aliases.seen(x) is not None for x in results):
                return
            values = self._add(call, operands)
        else:
            values = self._add(call, operands, [array_of(x) for x in results])
        self._bind(results, values, written, new)
        if call.name in KERNELS or call.foreign:
            self.opaque.add(call.name)

    def _bind(
        self, results: Sequence[torch.Tensor], values: Sequence[Value], written: int, new: Sequence[bool]
    ) -> None:
        for number, (tensor, value) in enumerate(zip(results, values, strict=True)):
            if number < written:
                self._aliases.write(tensor, value)
            else:
                self._aliases.bind(tensor, value, new=new[number])

    def _moved(self, name: str, operands: Sequence[Value], function: Any, settings: Mapping[str, Any]) -> Value:
        return self._add(Call.moving(name, lambda xs: [function(*xs)], settings), operands)[0]

    def _add(self, call: Call, operands: Sequence[Value], arrays: Sequence[Array] | None = None) -> tuple[Value, ...]:
        """Record an operation.

        Args:
            arrays: what it gave; None to run it on its operands: where it moves elements, the arrays share their memory.
        """

        def again(given: Sequence[Array]) -> Sequence[Array]:
            if call.random:
                return list(arrays or ())
            with torch.no_grad(), _default_float64():
                return [_as_array(x) for x in call.run([_as_tensor(x) for x in given])]

        found = again([operand.array for operand in operands]) if arrays is None else arrays
        data = any(operand.data for operand in operands)
        leaves = frozenset().union(*(operand.leaves for operand in operands))
        elements: list[tuple[Array, ...]] = [()] * len(found)
        if leaves and not data:
            elements = elements_of(
                *(call.name, operands, found, call.run), elementwise=call.elementwise, scalars=call.scalars
            )
        values = tuple(Value(array, data, leaves, part) for array, part in zip(found, elements, strict=True))
        frame = sys._getframe()
        self.operations.append(
            Operation(
                *(call.name, tuple(operands), values, dict(call.settings), again),
                where=model_line(stack(frame)) if self._running else "",
                module=self._module(frame),
            )
        )
        return values

    def _module(self, frame: FrameType | None) -> str:
        """Return the path of the innermost module that runs in these frames; empty where none does."""
        while frame:
            if frame.f_code is CALL and (path := self._modules.get(id(frame.f_locals["self"]))) is not None:
                return path
            frame = frame.f_back
        return ""


def _line() -> str:
    """Return the line of the model's code that runs."""
    return model_line(stack(sys._getframe())) or UNKNOWN


class _ToPython(TorchFunctionMode):
    """Notices that Python code takes the elements of a tensor without an operator, and takes no notice of checks of a function's own."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.one_hot and args:
            number = (*args[1:], (kwargs or {}).get("num_classes", -1))[0]
            if _are_below(self.tape.read(args[0]).array, number):  # else it chooses the number, or raises an error
                return one_hot(args[0], number)
        if func in TO_PYTHON:
            self.tape.used_in_python([self.tape.read(args[0])], TO_PYTHON[func], to_numpy=func in TO_NUMPY)
        return func(*args, **(kwargs or {}))


def _are_below(indices: Array, number: int) -> bool:
    """Whether there are indices, and all are below a number."""
    return indices.size > 0 and 0 <= indices.min() <= indices.max() < number


@cache
def _composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _require_strides(name: str, tensors: Sequence[Any]) -> None:
    """Check that tensors lie in memory as arrays do.

    Raises:
        ConvertError: one is sparse, or otherwise encoded.
    """
    for x in tensors:
        if isinstance(x, torch.Tensor) and (x.layout != torch.strided or x.is_quantized):
            raise ConvertError(
                Finding(
                    "module-not-runnable",
                    path=model_line(stack(sys._getframe())),
                    expected="dense tensors",
                    got=f"a {'quantized' if x.is_quantized else str(x.layout).removeprefix('torch.')} tensor at `{name}`",
                    fix="replace it by a dense tensor",
                )
            )


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a copy has the shape of what was copied, and a dtype that holds the same numbers."""
    wide = {torch.float64: before.is_floating_point(), torch.complex128: before.is_complex()}
    return before.shape == after.shape and (before.dtype == after.dtype or wide.get(after.dtype, False))


def _as_tensor(array: Array) -> torch.Tensor:
    """Return the elements without a copy, but of an array that is read-only, as JAX's are: torch warns of these."""
    array = np.asarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _as_array(tensor: torch.Tensor) -> Array:
    """Return the elements without a copy where possible; floating ones as float64."""
    tensor = tensor.resolve_conj().resolve_neg()
    wide = torch.float64 if tensor.is_floating_point() else torch.complex128 if tensor.is_complex() else tensor.dtype
    array: Array = tensor.to(wide).numpy()
    return array


@contextmanager
def _default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
