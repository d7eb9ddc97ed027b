"""What a reference of the user's own must be, asked before it is used: an error then says what is wrong with it, and is theirs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.core.errors import ConvertError, UserCodeError
from convert.core.fields import nearest
from convert.core.user_code import signature_error
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
EXAMPLE = "docs/guides/check.md has an example"


def require_arguments(name: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Refuses a function that cannot be called with these arguments.

    Raises:
        ConvertError: it takes others, or it is none.
    """
    if not callable(function):
        raise ConvertError(f"{name} is {function!r}, and must be a function of ({', '.join(arguments)}); {EXAMPLE}")
    if signature_error(function, arguments) is not None:
        raise ConvertError(
            f"{name} takes {inspect.signature(function)}, and is called with ({', '.join(arguments)}); {EXAMPLE}"
        )


def require_reference(made: Any, factory: str) -> None:
    """Refuses what a factory gave if it cannot serve as a reference.

    Raises:
        ConvertError: with what is wrong, and what it should be.
    """
    said = f"--reference {factory}: "
    if not isinstance(made, Reference):
        raise ConvertError(
            f"{said}gave {type(made).__name__}, and a factory gives a convert.references.protocol.Reference; {EXAMPLE}"
        )
    for name, arguments in ARGUMENTS.items():
        function = getattr(made, name)
        if not (name == "jax" and (function is None or isinstance(function, Deferred))):
            require_arguments(f"{said}`{name}`", function, arguments)
    if not isinstance(made.backends, Mapping):
        raise ConvertError(f"{said}`backends` is {type(made.backends).__name__}, and must be functions by name")
    for name, function in made.backends.items():
        require_arguments(f"{said}`backends[{name!r}]`", function, ("module", "inputs"))
    if isinstance(made.outputs, str) or not made.outputs or not all(isinstance(name, str) for name in made.outputs):
        raise ConvertError(
            f"{said}`outputs` is {made.outputs!r}, and must list the names of the outputs: they are what is compared"
        )
    if unknown := next((name for name in made.logits if name not in made.outputs), None):
        raise ConvertError(
            f"{said}`logits` names {unknown!r}{nearest(unknown, made.outputs)}, which is none of `outputs`"
        )
    for name in ("reduction", "depth"):
        number = getattr(made, name)
        if not isinstance(number, int | np.integer) or number < 1:
            raise ConvertError(
                f"{said}`{name}` is {number!r}, and must be a whole number, at least 1: tolerances follow from it"
            )


def require_inputs(made: Any) -> None:
    """Raises UserCodeError where `inputs` does not give arrays of numbers by name."""
    if not isinstance(made, Mapping) or not made:
        raise UserCodeError(f"`inputs` gave {_said(made)}; it must give NumPy arrays by name")
    for name, value in made.items():
        if np.asarray(value).dtype.kind not in "biuf" and np.asarray(value).dtype.name != "bfloat16":
            raise UserCodeError(f"`inputs` gave {_said(value)} for {name!r}; it must be a NumPy array of numbers")


def require_outputs(outputs: Sequence[str], function: str, made: Any) -> None:
    """Raises UserCodeError where a function does not give each of `Reference.outputs` by name: it would go uncompared."""
    if not isinstance(made, Mapping):
        raise UserCodeError(
            f"`{function}` gave {type(made).__name__}; it must give values by name: {', '.join(outputs)}"
        )
    for name in outputs:
        if name not in made:
            raise UserCodeError(f"`{function}` gave no value for the output {name!r}{nearest(name, made)}; `outputs` of the reference lists what it must give")  # fmt: skip
    for name, value in made.items():
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise UserCodeError(f"`{function}` gave {_said(value)} for {name!r}; it must be an array")


def require_masks(masks: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Array]]:
    """The masks of these values.

    Raises:
        UserCodeError: one does not fit its value, or leaves nothing to compare.
    """
    if not isinstance(masks, Mapping):
        raise UserCodeError(f"`masks` gave {_said(masks)}; it must give masks by the names of the values")
    for name, given in masks.items():
        mask = np.asarray(given)
        shape = shapes.get(name)
        if shape is None:
            yield name, mask
            continue
        fits = mask.ndim <= len(shape) and all(n in (1, size) for n, size in zip(mask.shape, shape, strict=False))
        if mask.dtype != bool or not fits:
            raise UserCodeError(
                f"`masks` gave for {name!r} {mask.dtype} of shape {list(mask.shape)}, and the value has the shape {list(shape)}; a mask is "
                "bool and has the value's leading axes, with 1 for an axis along which all count alike"
            )
        if not mask.any():
            raise UserCodeError(
                f"`masks` leaves nothing of {name!r} to compare: it is false everywhere; it must be true where the value counts"
            )
        yield name, mask


def _said(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
