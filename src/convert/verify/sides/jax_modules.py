"""Record what the modules of a JAX model are given and give, by their paths.

The model runs as Python, as the lifted run does: values that exist only within a compiled loop are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.jax_modules import around_modules

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        path: of the module below the outermost one, its parts joined by slashes, as in the names of leaves.
        given: its first argument; None if it is not an array.
        result: its first result; None if it is not an array.
    """

    path: str
    given: Array | None
    result: Array | None


def with_module_calls(side: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[], list[ModuleCall]]]:
    """Return a JAX side that records the calls of modules, and a function that returns the calls of its last run in their order."""
    found: list[ModuleCall | None] = []  # a call that has not returned is None

    def record(path: str, run: Callable[[], Any], argument: Any) -> Any:
        at = len(found)
        found.append(None)
        given = _concrete(argument)
        result = run()
        found[at] = ModuleCall(path, given, _concrete(result))
        return result

    def recorded(*args: Any) -> Any:
        found.clear()
        with around_modules(record):
            return side(*args)

    return recorded, lambda: [call for call in found if call is not None]


def _concrete(value: Any) -> Array | None:
    """Return the value of an array, with the axes of each `vmap` in front; None for what is no array, or not known yet."""
    import jax

    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    found = _unbatched(value)
    if found is None or isinstance(found[0], jax.core.Tracer) or not isinstance(found[0], jax.Array):
        return None
    array, axes = found
    moved = np.asarray(array, np.float64) if np.issubdtype(array.dtype, np.floating) else np.asarray(array)
    for front, axis in enumerate(reversed(axes)):
        moved = np.moveaxis(moved, front + axis, front)
    return moved


def _unbatched(value: Any) -> tuple[Any, list[int]] | None:
    """Return the whole array of which `vmap` shows one element, and the axes over which it maps, the innermost first."""
    axes: list[int] = []
    while hasattr(value, "batch_dim") and hasattr(value, "val"):
        if isinstance(value.batch_dim, int):
            axes.append(value.batch_dim)
        elif value.batch_dim is not None:
            return None
        value = value.val
    return value, axes
