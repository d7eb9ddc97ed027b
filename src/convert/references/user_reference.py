"""Validate a user's reference and the values that its functions return, so that an error names the user's mistake."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from convert.core.errors import ConvertError, UserCodeError
from convert.core.findings import Finding
from convert.core.user_code import REFERENCE_OPTION, signature_error
from convert.references.protocol import Deferred, Reference

Array = np.ndarray[Any, np.dtype[Any]]
ARGUMENTS = {
    "inputs": ("seed",),
    "jax": ("weights", "inputs"),
    "build": ("state_dict",),
    "run": ("module", "inputs"),
    "masks": ("inputs",),
    "facts": ("module",),
    "variants": ("name",),
}
EXAMPLE = "see docs/guides/own-reference.md"


def require_factory(factory: str, function: Callable[..., Any]) -> None:
    """Check that a factory can be called with a plan.

    Raises:
        ConvertError: it takes other arguments.
    """
    _require_arguments(factory, "the factory", function, ("plan",))


def require_reference(made: Any, factory: str) -> None:
    """Check that the value which a factory returned can serve as a reference.

    Raises:
        ConvertError: a field has a value that cannot be used.
    """

    def reject(field: str, expected: str, got: str) -> NoReturn:
        _reject(factory, f"`{field}`", expected, got)

    if not isinstance(made, Reference):
        _reject(factory, "the factory's value", "a convert.Reference", type(made).__name__)
    for name, arguments in ARGUMENTS.items():
        function = getattr(made, name)
        if not (name == "jax" and (function is None or isinstance(function, Deferred))):
            _require_arguments(factory, f"`{name}`", function, arguments)
    if not isinstance(made.backends, Mapping):
        reject("backends", "functions by name", type(made.backends).__name__)
    for name, function in made.backends.items():
        _require_arguments(factory, f"`backends[{name!r}]`", function, ("module", "inputs"))
    if isinstance(made.outputs, str) or not made.outputs or not all(isinstance(name, str) for name in made.outputs):
        reject("outputs", "the names of the outputs, which are compared", repr(made.outputs))
    if unknown := next((name for name in made.logits if name not in made.outputs), None):
        reject("logits", f"names of outputs ({', '.join(made.outputs)})", repr(unknown))
    for name in ("reduction", "depth"):
        number = getattr(made, name)
        if not isinstance(number, int | np.integer) or number < 1:
            reject(name, "an integer of at least 1, from which tolerances are derived", repr(number))


def _require_arguments(factory: str, name: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    expected = f"a function of ({', '.join(arguments)})"
    if not callable(function):
        _reject(factory, name, expected, repr(function))
    if signature_error(function, arguments) is not None:
        _reject(factory, name, expected, f"one of {inspect.signature(function)}")


def _reject(factory: str, problem: str, expected: str, got: str) -> NoReturn:
    path = f"{REFERENCE_OPTION}{factory}"
    raise ConvertError(Finding("reference-invalid", problem, path=path, expected=expected, got=got, fix=EXAMPLE))


def require_inputs(made: Any) -> Mapping[str, Array]:
    """Check the value of `inputs`, and return its arrays.

    Raises:
        UserCodeError: it is not a mapping from names to arrays of numbers.
    """
    if not isinstance(made, Mapping) or not made or not all(isinstance(name, str) for name in made):
        wrong = [name for name in made if not isinstance(name, str)] if isinstance(made, Mapping) else []
        got = f"the name {wrong[0]!r}" if wrong else f"{'an empty ' if isinstance(made, Mapping) else ''}{_kind(made)}"
        _wrong_value("inputs", "NumPy arrays by name", got)
    arrays = {}
    for name, value in made.items():
        try:
            arrays[name] = np.asarray(value)
        except (TypeError, ValueError):  # of lists of unequal lengths
            arrays[name] = np.array(None)
        if arrays[name].dtype.kind not in "biufc" and arrays[name].dtype.name != "bfloat16":
            _wrong_value("inputs", f"a NumPy array of numbers for {name!r}", _kind(value))
        arrays[name] = _of_known_type(arrays[name])
    return arrays


def _of_known_type(array: Array) -> Array:
    """Return an array of a type that both frameworks take from NumPy: PyTorch takes no bfloat16, and none has wider numbers than float64."""
    if array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    widest = {"f": np.float64, "c": np.complex128}.get(array.dtype.kind, array.dtype)
    return array.astype(widest) if array.dtype.itemsize > np.dtype(widest).itemsize else array


def require_outputs(outputs: Sequence[str], function: str, made: Any) -> None:
    """Check that a function returned each of `Reference.outputs`; a missing one would not be compared.

    Raises:
        UserCodeError: it is not a mapping from names to arrays, or an output is missing.
    """
    if not isinstance(made, Mapping):
        _wrong_value(function, f"values by name ({', '.join(outputs)})", type(made).__name__)
    for name in outputs:
        if name not in made:
            got = f"values for {', '.join(map(str, made)) or 'no name'}"
            _wrong_value(function, f"a value for the output {name!r}, which `outputs` lists", got)
    for name, value in made.items():
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            _wrong_value(function, f"an array for {name!r}", _kind(value))


def require_masks(masks: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Array]]:
    """Yield the masks by the names of the values.

    Raises:
        UserCodeError: a mask does not fit its value, or excludes all of it.
    """
    if not isinstance(masks, Mapping):
        _wrong_value("masks", "masks by the names of the values", _kind(masks))
    for name, given in masks.items():
        mask = np.asarray(given)
        shape = shapes.get(name)
        if shape is None:
            yield name, mask
            continue
        fits = mask.ndim <= len(shape) and all(n in (1, size) for n, size in zip(mask.shape, shape, strict=False))
        if mask.dtype != bool or not fits:
            axes = f"the leading axes of {list(shape)}, with 1 for an axis along which all elements count the same"
            _wrong_value("masks", f"bool for {name!r}, with {axes}", f"{mask.dtype} of shape {list(mask.shape)}")
        if not mask.any():
            _wrong_value("masks", f"true where {name!r} counts", "false everywhere, so that nothing is compared")
        yield name, mask


def _wrong_value(function: str, expected: str, got: str) -> NoReturn:
    raise UserCodeError(
        Finding("reference-values-invalid", f"the value of `{function}`", expected=expected, got=got, fix=EXAMPLE)
    )


def _kind(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
