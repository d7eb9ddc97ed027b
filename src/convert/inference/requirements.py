"""What the two programs and their inputs must give, so that they can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec
from convert.programs.program import Program
from convert.references.user_reference import require_inputs

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
NOT_RUNNABLE = "module-not-runnable"
WHOLE = ("int", "uint", "bool")  # beginnings of the names of dtypes
_KINDS = {False: "real numbers", True: "complex numbers"}
JaxFunction = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
Run = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]


@contextmanager
def packages_named() -> Iterator[None]:
    """Name a package that is not installed: both models run here, so that each needs its framework and what its code imports.

    Raises:
        ConvertError: a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "convert").partition(".")[0] == "convert":
            raise
        fix = f"install {error.name}, or run the command where both models run"
        raise ConvertError(
            Finding("package-missing", f"both models are run, and {error.name} is not installed", fix=fix)
        ) from error


def require_same_inputs(inputs: Callable[[int], Mapping[str, Array]], seed: int) -> None:
    """Check that a seed always gives the same inputs.

    Raises:
        ConvertError: it does not.
        UserCodeError: the inputs are not arrays of numbers by name.
    """
    first, second = ({name: np.array(x) for name, x in require_inputs(inputs(seed)).items()} for _ in range(2))
    names = [name for name in {**first, **second} if name not in first or name not in second]
    names += [name for name in first if not names and not np.array_equal(first[name], second[name], equal_nan=True)]
    if names:
        raise ConvertError(
            Finding(
                "run-not-deterministic",
                f"the input {names[0]!r}",
                expected=f"the same values in two calls with the seed {seed}",
                got="other values",
                fix="draw them from np.random.default_rng(seed)",
            )
        )


def require_outputs_of_both(source: Program, target: Program) -> None:
    """Check that the target computes every output of the source, and that there is one, with elements.

    Raises:
        ConvertError: one is missing or empty, and would not be compared; or only one program has complex numbers there.
    """
    missing = [name for name in source.outputs if name not in target.outputs]
    if source.outputs and not missing:
        for name, value in source.outputs.items():
            if not value.array.size:
                got, fix = f"shape {list(value.array.shape)}", "give inputs that are not empty"
                _refuse(f"the output {name!r}", "elements, to be compared", got, fix)
            expected, got = (_KINDS[x.complex] for x in (value, target.outputs[name]))
            if expected != got:
                fix = "return complex numbers from both, or from both the parts that you compare"
                _refuse(f"the output {name!r}", f"{expected}, as those of the JAX function", got, fix)
        if not target.operations or not target.parameters:
            got = (
                "one without weights of floating-point numbers"
                if target.operations
                else "one that returns its inputs as they are"
            )
            fix = "give the module that computes the outputs"
            _refuse("the PyTorch module", "one that computes with its weights", got, fix)
        return
    expected = f"those of the JAX function ({', '.join(source.outputs)})" if missing else "an array of the JAX function"
    got = f"those of the PyTorch module ({', '.join(target.outputs) or 'none'})" if missing else "none"
    fix = "return the same from both: an array is named output, those of a tuple output.0, output.1, and a dict has its own names"
    _refuse("the outputs", expected, got, fix)


def require_no_indices(function: JaxFunction, leaves: Mapping[str, TensorSpec], inputs: Mapping[str, Array]) -> None:
    """Check that the JAX function takes no leaf as indices or truth values. Quantised weights are no such leaves: they are multiplied.

    Raises:
        ConvertError: it does.
    """
    dtypes = {name: spec.dtype for name, spec in leaves.items()}
    whole = [name for name, dtype in dtypes.items() if dtype.startswith(WHOLE)]
    if not whole:
        return
    used = _used(function, leaves, dtypes, inputs)
    if used is None:  # the search says why it does not run
        return
    whole = [name for name in whole if name in used]
    truth_values = [name for name in whole if dtypes[name] == "bool"]
    if not truth_values and _used(function, leaves, dtypes | dict.fromkeys(whole, "float32"), inputs) is not None:
        return
    for name in truth_values or whole:
        if name in truth_values or _used(function, leaves, dtypes | {name: "float32"}, inputs) is None:
            fix = "give --shapes without it, let both models have the same numbers there, and write its rule by hand"
            expected = "weights, as infer gives every leaf random numbers"
            taken = "truth values" if name in truth_values else "whole numbers, such as indices"
            got = f"{leaves[name]}, which the JAX function takes as {taken}"
            raise ConvertError(Finding("reference-invalid", path=name, expected=expected, got=got, fix=fix))


def _used(
    function: JaxFunction, leaves: Mapping[str, TensorSpec], dtypes: Mapping[str, str], inputs: Mapping[str, Array]
) -> list[str] | None:
    """Return the leaves of these dtypes that the function computes with; None if it does not run."""
    import jax

    from convert.numerics.used_leaves import used_leaves

    given = {name: jax.ShapeDtypeStruct(leaves[name].shape, dtype) for name, dtype in dtypes.items()}
    try:
        return used_leaves(lambda own: function(own, dict(inputs)), given)
    except Exception:  # noqa: BLE001 - the user's code may raise any
        return None


def require_own_state(module: torch.nn.Module) -> None:
    """Check that the module loads the state_dict that it gives, and that this has the names of its parameters.

    Raises:
        ConvertError: it does not (``module-not-runnable``), as where a hook adds an entry, or a parameter is expanded.
    """
    import torch

    from convert.programs.torch_module_state import copy_of

    state = module.state_dict()
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    problem = "the state_dict of the PyTorch module"
    if own and own.isdisjoint(state):
        expected, got = f"the names of its parameters ({', '.join(sorted(own)[:4])})", ", ".join([*state][:4]) or "none"
        _refuse(problem, expected, got, "give the module without the hook that renames or drops them", NOT_RUNNABLE)
    for name, x in state.items():
        if isinstance(x, torch.Tensor) and any(
            step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)
        ):
            got = "one that is expanded, whose elements share memory"
            _refuse(
                f"the tensor {name} of the PyTorch module",
                "one with elements of its own",
                got,
                "clone it",
                NOT_RUNNABLE,
            )
    try:
        copy_of(module).load_state_dict(state, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        fix = "give the module without the hook that adds or changes entries"
        _refuse(problem, "one that load_state_dict(..., strict=True) takes back", reason, fix, NOT_RUNNABLE)


def require_same_again(module: torch.nn.Module, run: Run, recorded: Program) -> None:
    """Check that the module gives the same outputs when it is called again, with the weights and inputs of its record.

    Raises:
        ConvertError: it does not: it keeps a value from call to call.
    """
    from convert.programs.record_torch import require_same_when_called_again
    from convert.programs.torch_module_state import with_weights

    with with_weights(module, {name: value.array for name, value in recorded.parameters.items()}):
        require_same_when_called_again(module, run, {name: value.given for name, value in recorded.inputs.items()})


def _refuse(problem: str, expected: str, got: str, fix: str, code: str = "reference-values-invalid") -> NoReturn:
    raise ConvertError(Finding(code, problem, expected=expected, got=got, fix=fix))
