"""Record what the modules of a JAX model are given and give, by their paths: those of linen, nnx, Haiku and Equinox.

The model runs as Python, as the lifted run does: values that exist only within a compiled loop are not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any
from unittest import mock

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
CALL = "__call__"


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


@dataclass
class _Calls:
    """The calls so far, in the order in which they began.

    Attributes:
        found: the calls; a call that has not returned is None.
        paths: of the modules below the outermost one that runs; empty outside of any.
    """

    found: list[ModuleCall | None] = field(default_factory=list)
    paths: dict[int, str] = field(default_factory=dict)

    def run(self, path: str | None, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a module and record it; `path` is None for one whose place is unknown."""
        if path is None:
            return call(*args, **kwargs)
        at = len(self.found)
        self.found.append(None)
        given = _concrete(args[0] if args else next(iter(kwargs.values()), None))
        result = call(*args, **kwargs)
        self.found[at] = ModuleCall(path, given, _concrete(result))
        return result


def with_module_calls(side: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[], list[ModuleCall]]]:
    """Return a JAX side that records the calls of modules, and what gives those of its last run."""
    calls = _Calls()

    def recorded(*args: Any) -> Any:
        calls.found.clear()
        with _hooks(calls):
            return side(*args)

    return recorded, lambda: [call for call in calls.found if call is not None]


@contextmanager
def _hooks(calls: _Calls) -> Iterator[None]:
    """Intercept the calls of modules of the libraries that are imported."""
    with ExitStack() as stack:
        if linen := sys.modules.get("flax.linen"):

            def linen_call(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
                path = "/".join(context.module.path) if context.method_name == CALL else None
                return calls.run(path, call, args, kwargs)

            stack.enter_context(linen.intercept_methods(linen_call))
        if haiku := sys.modules.get("haiku"):

            def haiku_call(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
                path = context.module.module_name if context.method_name == CALL else None
                return calls.run(path, call, args, kwargs)

            stack.enter_context(haiku.intercept_methods(haiku_call))
        for name, base in (("flax.nnx", "Module"), ("equinox", "Module")):
            if library := sys.modules.get(name):
                for kind in _with_subclasses(getattr(library, base)):
                    if CALL in vars(kind):
                        stack.enter_context(mock.patch.object(kind, CALL, _wrapped(vars(kind)[CALL], calls)))
        yield


def _with_subclasses(kind: type) -> Iterator[type]:
    found: set[type] = {kind}
    waiting: list[type] = [kind]
    while waiting:
        subclasses: list[type] = waiting.pop().__subclasses__()
        for sub in subclasses:
            if sub not in found:
                found.add(sub)
                waiting.append(sub)
    return iter(found)


def _wrapped(method: Any, calls: _Calls) -> Callable[..., Any]:
    """Return a `__call__` that records, for a class of nnx or Equinox, whose modules do not know their paths."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        if calls.paths:
            return calls.run(calls.paths.get(id(self)), bound, args, kwargs)
        calls.paths = {id(module): path for path, module in _modules(self, "", set())}
        try:
            return calls.run("", bound, args, kwargs)
        finally:
            calls.paths = {}

    return call


def _modules(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the modules in a module, with their paths; one that is in two places has the first path."""
    if isinstance(value, (str, bytes, int, float, np.ndarray)) or value is None or id(value) in seen:
        return
    seen.add(id(value))
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, _module_types()):
        yield path, value
        names = [f.name for f in fields(value)] if is_dataclass(value) else list(vars(value))
        items = [(name, getattr(value, name, None)) for name in names if not name.startswith("__")]
        if hasattr(value, "__len__") and hasattr(value, "__getitem__"):  # a list of modules that is a module
            items = [*items, *((k, value[k]) for k in range(len(value)) if not isinstance(value, Mapping))]
    for name, item in items:
        yield from _modules(item, f"{path}/{name}" if path else str(name), seen)


def _module_types() -> tuple[type, ...]:
    names = ("flax.nnx", "equinox")
    return tuple(sys.modules[name].Module for name in names if name in sys.modules)


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
