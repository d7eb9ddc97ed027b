"""Record what a PyTorch module computes: one run in float64, as a `Program`."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.numerics.lift_torch import lifted
from convert.numerics.precision import torch_pinned
from convert.programs.complex_numbers.rewriting import in_real_numbers
from convert.programs.program import Array, Program, Value, parameter_values
from convert.programs.run_checks import require_numbers, require_same_outputs
from convert.programs.torch_aliases import array_of
from convert.programs.torch_decompositions import attention_apart
from convert.programs.torch_elements import LAYOUT
from convert.programs.torch_module_state import frozen, in_float64, state_of, tied_names, wide
from convert.programs.torch_tape import Tape
from convert.programs.where import model_line

Run = Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], Mapping[str, Any]]
_DEVICES = re.compile(r"cuda|device|gpu|\b(mps|xpu|hip)\b", re.IGNORECASE)
SMALL = 10_000_000  # elements of the parameters of a module that one thread runs


def record_torch(module: torch.nn.Module, run: Run, inputs: Mapping[str, Array]) -> Program:
    """Run a module in float64, with the casts in its code removed, and record every operator.

    What torch computes by one kernel is taken apart where that is known. The module also runs without being recorded, to see that
    its outputs are the same. It is left as it was.

    Args:
        module: in eval mode, with its weights.
        run: (module, inputs as tensors) -> the outputs by name, as `convert.Reference.run`.
        inputs: by name; floating ones become float64.

    Raises:
        ConvertError: the module has no weights, it does not run, two runs differ, or an output is not a number.
    """
    require_weights(module)
    with _nothing_hidden(), few_threads(module):
        plain = _arrays(_run(module, run, inputs))
        program = _record(module, run, inputs)
        require_numbers(program)
        try:
            require_same_outputs({name: value.array for name, value in program.outputs.items()}, plain)
        except ConvertError as error:
            require_same_outputs(plain, _arrays(_run(module, run, inputs)))
            raise RuntimeError("the recorded run computes something else than the module") from error
    return in_real_numbers(program, LAYOUT)


def _run(module: torch.nn.Module, run: Run, inputs: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Run the module without recording it."""
    with in_float64(module), lifted():
        try:
            return _tensors(run(module, _as_tensors(module, inputs)))
        except ConvertError:
            raise
        except (Exception, SystemExit) as error:
            frames = reversed(traceback.extract_tb(error.__traceback__))
            text = " ".join(str(error).split())[:300]
            where = ", on a device that this machine has" if _DEVICES.search(text) else ""
            raise _not_runnable(
                f"{type(error).__name__}: {text}",
                path=model_line((frame.filename, frame.lineno or 0) for frame in frames),
                fix=f"correct the module, or give it inputs that fit{where}",
            ) from error


def require_same_when_called_again(module: torch.nn.Module, run: Run, inputs: Mapping[str, Array]) -> None:
    """Check that a second call of a module, in float64, gives the outputs of the first.

    Raises:
        ConvertError: the module keeps something from call to call that changes them, such as a cache.
    """
    with _nothing_hidden(), in_float64(module), lifted():
        first, again = (_arrays(_tensors(run(module, _as_tensors(module, inputs)))) for _ in range(2))
    require_same_outputs(
        first, again, fix="the module keeps a value from the first call: start each call from the first state"
    )


def _record(module: torch.nn.Module, run: Run, inputs: Mapping[str, Array]) -> Program:
    tape = Tape({id(part): path for path, part in reversed(list(module.named_modules(remove_duplicate=False)))})
    with in_float64(module):
        state = state_of(module)
        tied = tied_names(state)
        parameters = parameter_values({name: array_of(x) for name, x in state.items() if name not in tied})
        tensors = _as_tensors(module, inputs)
        given = {name: Value(array_of(tensor), data=True) for name, tensor in tensors.items()}
        for of, values in ((state, parameters), (tensors, given)):  # a parameter may have the name of an input
            for name, value in values.items():
                tape.bind(of[name], value)
        with lifted(tape), tape.running():
            outputs = _tensors(run(module, tensors))
        made = {name: tape.read(output) for name, output in outputs.items()}
    opaque = tuple(sorted(tape.opaque | tape.unlifted))
    buffers = parameters.keys() & (dict(module.named_buffers(remove_duplicate=False)).keys() | frozen(module))
    taken = tape.path_taken, tuple(tape.taken_out)
    return Program(parameters, given, tuple(tape.operations), made, opaque, *taken, tied, frozenset(buffers))


@contextmanager
def _nothing_hidden() -> Iterator[None]:
    """Run without gradients, and without what hides operators: fast paths, compiled code, kernels of attention."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        for context in (torch_pinned(), torch.no_grad(), attention_apart()):
            stack.enter_context(context)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing the compiler takes seconds
            stack.enter_context(getattr(torch.compiler, "set_stance", nullcontext)("force_eager"))  # torch 2.6
        yield


@contextmanager
def few_threads(module: torch.nn.Module) -> Iterator[None]:
    """Compute small modules by one thread: several wait for each other longer than they compute, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if sum(x.numel() for x in module.parameters()) < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _as_tensors(module: torch.nn.Module, inputs: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    device = next((x.device for x in module.parameters()), torch.device("cpu"))
    tensors = {name: torch.as_tensor(np.array(array), device=device) for name, array in inputs.items()}
    return {name: wide(x) for name, x in tensors.items()}


def _tensors(outputs: Any) -> dict[str, torch.Tensor]:
    """Return the outputs as tensors.

    Raises:
        ConvertError: they are no mapping from names to tensors.
    """
    if not isinstance(outputs, Mapping):
        raise _not_runnable(expected="outputs by name", got=type(outputs).__name__)
    for name, value in outputs.items():
        if not isinstance(value, torch.Tensor):
            raise _not_runnable(expected=f"a tensor for the output {name!r}", got=type(value).__name__)
    return dict(outputs)


def _arrays(outputs: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {name: array_of(output) for name, output in outputs.items()}


def require_weights(module: torch.nn.Module) -> None:
    """Check that every tensor of the module has elements.

    Raises:
        ConvertError: one is on the meta device, waits for its shape, or is sparse.
    """
    for name, x in module.state_dict(keep_vars=True).items():
        if isinstance(x, torch.Tensor) and x.layout is not torch.strided:
            expected, fix = "dense weights", "give the module `to_dense()` of it"
            raise _not_runnable(f"the tensor {name} is sparse", expected=expected, got=str(x.layout), fix=fix)
        if torch.nn.parameter.is_lazy(x) or (isinstance(x, torch.Tensor) and x.is_meta):
            raise _not_runnable(
                f"the tensor {name} has no elements",
                expected="a module with weights",
                got="a lazy module that has not run"
                if torch.nn.parameter.is_lazy(x)
                else "a module on the meta device",
                fix="load weights, or draw them at random",
            )


def _not_runnable(problem: str = "", **parts: Any) -> ConvertError:
    return ConvertError(Finding("module-not-runnable", problem, **parts))
