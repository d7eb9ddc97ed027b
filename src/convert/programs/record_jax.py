"""Record what a JAX function computes: one run in float64, as a `Program`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.core.errors import ConvertError, UserCodeError
from convert.core.findings import Finding
from convert.core.tensor_spec import is_float
from convert.numerics.jax_observer import Step
from convert.numerics.jax_values import as_jax
from convert.numerics.lift_jax import float64, lift, traced
from convert.numerics.lifter import RefusedError
from convert.numerics.real_numbers import as_real
from convert.numerics.same_trace import traces_alike
from convert.programs.complex_numbers.rewriting import in_real_numbers
from convert.programs.jax_elements import LAYOUT, elements_of
from convert.programs.jax_modules import around_modules
from convert.programs.jax_paddings import PADDED_BY, around_paddings
from convert.programs.program import Array, Operation, Program, Value, parameter_values
from convert.programs.run_checks import require_numbers, require_same_outputs
from convert.programs.where import UNKNOWN, model_line, stack

JaxFunction = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]

# Identities: a result is its operand, and no operation is recorded.
_SAME = {"convert_element_type", "copy", "copy_p", "device_put", "name", "optimization_barrier", "sharding_constraint"}
_SAME |= {"stage", "stop_gradient"}
# Prefixes of JAX's named scopes that have the path of a module, or such a rule.
_SCOPE, _PADDING = "module:", "padding:"
_PADS = {"conv_general_dilated", "reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}
# What they run is not made of primitives.
_OPAQUE = {"pallas_call", "pure_callback", "io_callback", "ffi_call", "custom_partitioning"}


def record_jax(
    function: JaxFunction, parameters: Mapping[str, Any], inputs: Mapping[str, Any], *, twice: bool = True
) -> Program:
    """Run a function in float64 and record each operation.

    The function runs as Python where it can (`convert.numerics.lift_jax`). Calls such as ``jit`` are replaced by what they contain,
    loops are unrolled, and of branches the one that these values choose is recorded. Further iterations of `jax.lax.scan` repeat
    the primitives of the first ones (`convert.numerics.loops`).

    Args:
        function: (parameters, inputs) -> the outputs by name, as `convert.Reference.jax`.
        parameters: by name; of any dtype. Floating ones become float64, exactly.
        inputs: by name, likewise.
        twice: whether two runs are compared. The second is spared where the function always traces to the same program.

    Raises:
        ConvertError: JAX cannot trace the function, it does not return arrays by name, two runs differ, or an output has NaN.
    """
    _require_arrays(_traced(function, parameters, inputs))
    own = parameter_values({name: _wide(value) for name, value in parameters.items()})
    data = {name: Value(_wide(value), data=True) for name, value in inputs.items()}
    recorder = _Recorder(jax.tree.leaves((own, data)))
    with float64():
        arrays = _arrays(parameters, inputs)
        order: list[str] = []

        def in_order(*args: Any) -> Mapping[str, Any]:
            made = function(*args)
            order[:] = made
            return made

        lifted = lift(in_order, observer=recorder, repeats=True)
        with around_modules(recorder.within, every_method=True), around_paddings(recorder.padding):
            made = _run(lifted, arrays)
        outputs = {name: recorder.value(made[name]) for name in order}
        program = Program(own, data, tuple(recorder.operations), outputs, recorder.opaque, recorder.path_taken)
        require_numbers(program)
        program = in_real_numbers(program, LAYOUT)
    if not twice or traced(lambda: traces_alike(function, dict(parameters), dict(inputs))):
        return program
    with float64():
        again = lift(function, staged=lifted.staged, observer=_Unheard())(*arrays)
        first = {name: value.array for name, value in outputs.items()}
        require_same_outputs(first, {name: np.asarray(value) for name, value in again.items()})
    return program


def outputs_jax(function: JaxFunction, parameters: Mapping[str, Any], inputs: Mapping[str, Any]) -> Program:
    """Run a function in float64 as `record_jax` does, without its operations.

    Args:
        function: one that was recorded, perhaps with other sizes.

    Raises:
        ConvertError: it does not run, or an output has NaN.
    """
    with float64():
        made = _run(lift(function, observer=_Unheard(), repeats=True), _arrays(parameters, inputs))
        outputs = {name: _as_given(np.asarray(value)) for name, value in made.items()}
    if any(np.isnan(value.array).any() for value in outputs.values()):
        return record_jax(function, parameters, inputs, twice=False)  # which says where it comes from
    own = parameter_values({name: as_real(_wide(value)) for name, value in parameters.items()})
    return Program(own, {name: _as_given(_wide(value)) for name, value in inputs.items()}, (), outputs)


def _as_given(array: Array) -> Value:
    return Value(as_real(array), data=True, complex=array.dtype.kind == "c")


def _arrays(*given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return copies as arrays of JAX; it would compile a program for each shape of an array of NumPy."""
    return [
        {name: as_jax(np.array(x)) if isinstance(x, np.ndarray) else jnp.array(x) for name, x in arrays.items()}
        for arrays in given
    ]


def _run(function: Callable[..., Mapping[str, Any]], arrays: Sequence[Any]) -> Mapping[str, Any]:
    """Run a lifted function.

    Raises:
        ConvertError: an operation does not run on this machine.
    """
    try:
        return function(*arrays)
    except RefusedError as error:
        fix = "use an operation that runs on the CPU there, such as interpret=True of a Pallas kernel or a mesh of one device"
        raise ConvertError(Finding("function-not-runnable", f"the JAX function: {error}", fix=fix)) from error


class _Recorder:
    """Observes a lifted run.

    Attributes:
        given: the values of the function's arguments, in the order of JAX's trees.
        operations: so far.
        opaque: names of operations that were not run in float64, or not looked into.
        path_taken: the line at which values first chose a branch or a number of iterations; empty if none did.
    """

    def __init__(self, given: Sequence[Value]) -> None:
        self.given = given
        self.module = self.padded_by = ""
        self.begin([])

    def begin(self, arguments: Sequence[Any]) -> None:
        # By identity; the arrays are kept, so that no other array has the identity of one of them.
        self.known = {id(array): (array, value) for array, value in zip(arguments, self.given, strict=False)}
        self.operations: list[Operation] = []
        self.opaque: tuple[str, ...] = ()
        self.path_taken = ""

    def within(self, path: str, run: Callable[[], Any], _: Any) -> Any:
        """Run a module. What it traces carries its path, for when the jaxpr is evaluated."""
        around, self.module = self.module, path
        try:
            with jax.named_scope(f"{_SCOPE}{path}"):
                return run()
        finally:
            self.module = around

    def padding(self, rule: str, run: Callable[[], Any]) -> Any:
        """Run a function that pads by a rule, as `within` runs a module."""
        self.padded_by = rule
        try:
            with jax.named_scope(f"{_PADDING}{rule}"):
                return run()
        finally:
            self.padded_by = ""

    def value(self, array: Any) -> Value:
        """Return the value that an array is; one that nothing recorded computed is a constant."""
        if known := self.known.get(id(array)):
            return known[1]
        value = Value(_numpy(array))
        if isinstance(array, jax.Array):
            self.known[id(array)] = array, value
        return value

    def choice(self, value: Any) -> None:
        chosen_by = self.value(value)
        if not chosen_by.constant and not self.path_taken:
            made = (one.where for one in reversed(self.operations) if chosen_by in one.results)
            self.path_taken = next(made, "") or UNKNOWN

    def step(self, step: Step) -> tuple[str, str] | None:
        name = step.primitive.name
        if any(hasattr(jax.typeof(x), "inner_aval") for x in step.results):  # a reference to an array that changes
            raise ConvertError(
                Finding(
                    "function-not-traceable",
                    f"the JAX function changes an array in place (`{name}`)",
                    path=_where(step, sys._getframe()),
                    fix="make a new array there, as x.at[...].set(...) does",
                )
            )
        operands = tuple(map(self.value, step.operands))
        if name in _SAME and all(map(_same_kind, step.operands, step.results)):
            for array, value in zip(step.results, operands, strict=True):
                self.known[id(array)] = array, value
            return None
        if (not step.lifted or name in _OPAQUE) and name not in self.opaque:
            self.opaque = (*self.opaque, name)
        data = any(operand.data for operand in operands)
        leaves = frozenset[str]().union(*(operand.leaves for operand in operands))
        arrays = [_numpy(array) for array in step.results]
        again = partial(_again, step, tuple(_key_kind(x) for x in step.operands))
        elements: Sequence[tuple[Array, ...]] = [()] * len(arrays)
        if leaves and not data:
            elements = elements_of(name, operands, arrays, again)
        results = tuple(Value(array, data, leaves, part) for array, part in zip(arrays, elements, strict=True))
        for array, value in zip(step.results, results, strict=True):
            self.known[id(array)] = array, value
        where, module = step.place or (_where(step, sys._getframe()), _scoped(step, _SCOPE) or self.module)
        rule = _scoped(step, _PADDING) or self.padded_by if name in _PADS else ""
        settings = {**step.params, PADDED_BY: rule} if rule else step.params
        self.operations.append(Operation(name, operands, results, settings, again, where, module))
        return where, module


class _Unheard:
    """Observes nothing; a run for it is evaluated as one that is recorded."""

    def begin(self, arguments: Sequence[Any]) -> None:
        pass

    def step(self, step: Step) -> None:
        pass

    def choice(self, value: Any) -> None:
        pass


def _again(step: Step, keys: Sequence[Any], operands: Sequence[Array]) -> list[Array]:
    """Evaluate a primitive on other operands; those that were random keys become keys again."""
    with float64():
        arrays = [
            np.asarray(x) if kind is None else jax.random.wrap_key_data(jnp.asarray(x), impl=kind)
            for x, kind in zip(operands, keys, strict=True)
        ]
        return [_numpy(x) for x in step.evaluate(step.primitive, step.params, arrays)[0]]


def _scoped(step: Step, prefix: str) -> str:
    """Return what the innermost scope with a prefix says of where a primitive was traced; empty if there is none."""
    scopes = [scope.name for source in step.source for scope in source.name_stack.stack]
    found = [name.removeprefix(prefix) for name in scopes if name.startswith(prefix)]
    return found[-1] if found else ""


def _where(step: Step, frame: FrameType | None) -> str:
    """Return the line of the model's code: that of the innermost jaxpr that knows it, otherwise that of the running code."""
    for source in reversed(step.source):
        if source.traceback and (line := model_line((f.file_name, f.line_num) for f in source.traceback.frames)):
            return line
    return model_line(stack(frame))


def _key_kind(x: Any) -> Any:
    """Return the implementation of an array of random keys; None for other arrays."""
    return jax.random.key_impl(x) if _is_key(x) else None


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _numpy(x: Any) -> Array:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _wide(x: Any) -> Array:
    """Return a value as an array; a floating one in float64 and a complex one of twice that, without a copy where it is."""
    array = np.asarray(x)
    if array.dtype.kind == "c":
        return array.astype(np.complex128, copy=False)
    return array.astype(np.float64, copy=False) if is_float(array.dtype.name) else array


def _same_kind(x: Any, y: Any) -> bool:
    return np.shape(x) == np.shape(y) and getattr(x, "dtype", None) == getattr(y, "dtype", None)


def _require_arrays(made: Any) -> None:
    """Check that a function returns arrays by name.

    Raises:
        UserCodeError: it does not.
    """
    wrong = [name for name, x in made.items() if not hasattr(x, "shape")] if isinstance(made, Mapping) else []
    if isinstance(made, Mapping) and not wrong:
        return
    expected = f"an array for {wrong[0]!r}" if wrong else "arrays by name"
    got = type(made[wrong[0]] if wrong else made).__name__.replace("ShapeDtypeStruct", "an array")
    raise UserCodeError(Finding("reference-values-invalid", "the value of `jax`", expected=expected, got=got))


def _traced(function: JaxFunction, parameters: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
    """Return the shapes of what a function returns. Values must not leave JAX within it, where nothing could follow them.

    Raises:
        ConvertError: JAX cannot trace it.
    """
    errors = jax.errors
    try:
        return traced(lambda: jax.eval_shape(function, dict(parameters), dict(inputs)))
    except (
        errors.ConcretizationTypeError,
        errors.TracerArrayConversionError,
        errors.TracerIntegerConversionError,
        errors.NonConcreteBooleanIndexError,
        errors.UnexpectedTracerError,
    ) as error:
        frames = []
        traceback = error.__traceback__
        while traceback:
            frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
            traceback = traceback.tb_next
        raise ConvertError(
            Finding(
                "function-not-traceable",
                f"the JAX function uses the value of an array outside of JAX: {str(error).splitlines()[0]}",
                path=model_line(reversed(frames)),
                fix="compute with jax.numpy there, and choose with jnp.where or jax.lax.cond",
            )
        ) from error
