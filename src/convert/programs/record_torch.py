"""Record one run of a PyTorch module as a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from convert.numerics.lift_torch import Lift, lifted
from convert.numerics.precision import torch_pinned
from convert.programs.program import Array, Program, Value, first_elements
from convert.programs.torch_aliases import Geometry, array_of
from convert.programs.torch_decompositions import attention_apart
from convert.programs.torch_tape import Tape

Run = Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], Mapping[str, Any]]


def record_torch(module: torch.nn.Module, run: Run, inputs: Mapping[str, Array]) -> Program:
    """Run a module in float64, with the casts in its code removed, and record every operator.

    Kernels are taken apart where torch can. The module is left as it was.

    Args:
        module: in eval mode, with weights.
        run: (module, inputs as tensors) -> the outputs by name.
        inputs: by name; floating ones become float64.
    """
    tape = Tape({id(part): path for path, part in reversed(list(module.named_modules(remove_duplicate=False)))})
    with _in_float64(module) as state, _recordable(tape):
        tied = _tied(state)
        parameters = _parameters({name: x for name, x in state.items() if name not in tied})
        for name, value in parameters.items():
            tape.bind(state[name], value)
        tensors = {name: _as_input(array, _device(module)) for name, array in inputs.items()}
        given = {name: Value(array_of(tensor), data=True) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            tape.bind(tensor, given[name])
        with lifted(tape), tape.watching_python():
            outputs = run(module, tensors)
        found = {name: tape.read(output) for name, output in outputs.items()}
    opaque = tuple(sorted(tape.opaque | tape.unlifted))
    return Program(parameters, given, tuple(tape.operations), found, opaque, tape.path_taken, tied)


@contextmanager
def _recordable(tape: Lift) -> Iterator[None]:
    """Run without gradients and without what hides operators: fast paths, compiled code, kernels of attention."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        for context in (torch_pinned(), torch.no_grad(), attention_apart(), torch.compiler.set_stance("force_eager")):
            stack.enter_context(context)
        yield


def _device(module: torch.nn.Module) -> torch.device:
    return next((x.device for x in module.parameters()), torch.device("cpu"))


def _as_input(array: Array, device: torch.device) -> torch.Tensor:
    tensor = torch.as_tensor(np.array(array), device=device)
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def _in_float64(module: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Give the module copies of its parameters and buffers, floating ones in float64; its own come back afterwards.

    Yields:
        The module's floating parameters and buffers in its state_dict, by name, in its order. Tied ones are one tensor.
    """
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    before = {id(x): (x, x.data) for x in own.values()}
    copies: dict[Any, torch.Tensor] = {}
    try:
        for x, data in before.values():
            where = (data.untyped_storage()._cdata, Geometry.of(data))
            if where not in copies:
                copies[where] = (
                    data.double() if data.dtype != torch.float64 and data.is_floating_point() else data.clone()
                )
            x.data = copies[where]
        yield {name: own[name] for name in module.state_dict() if name in own and own[name].is_floating_point()}
    finally:
        for x, data in before.values():
            x.data = data


def _tied(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of tensors that an earlier name has too, each with the first name."""
    first: dict[Any, str] = {}
    names = {name: first.setdefault((x.untyped_storage()._cdata, Geometry.of(x)), name) for name, x in state.items()}
    return {name: other for name, other in names.items() if name != other}


def _parameters(state: Mapping[str, torch.Tensor]) -> dict[str, Value]:
    """Return the parameters by name, with the numbers of their elements."""
    start = first_elements({name: x.numel() for name, x in state.items()})
    return {
        name: Value(
            array_of(x),
            leaves=frozenset({name}),
            elements=(start[name] + np.arange(x.numel()).reshape(tuple(x.shape)),),
        )
        for name, x in state.items()
    }
