"""Tell which module of a JAX model runs, by its path: the modules of linen, nnx, Haiku and Equinox."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import numpy as np

CALL = "__call__"
Around = Callable[[str, Callable[[], Any], Any], Any]


@contextmanager
def around_modules(around: Around, *, every_method: bool = False) -> Iterator[None]:
    """Intercept the calls of modules, of the libraries that are imported, while the context lasts.

    Args:
        around: is called in place of a module with its path, what runs the module, and its first argument (None without one);
            returns what the module gives. The path is below the outermost module, its parts joined by slashes, as in the names
            of leaves. A module whose place is unknown is not intercepted.
        every_method: intercept all methods of the modules of linen and Haiku, such as ``Embed.attend``, not ``__call__`` alone.
    """
    with ExitStack() as stack:
        if linen := sys.modules.get("flax.linen"):

            def linen_call(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
                if context.method_name != CALL and not every_method:
                    return call(*args, **kwargs)
                return around("/".join(context.module.path), lambda: call(*args, **kwargs), _first(args, kwargs))

            stack.enter_context(linen.intercept_methods(linen_call))
        if haiku := sys.modules.get("haiku"):

            def haiku_call(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
                wanted = every_method and hasattr(context.module, "module_name")  # its constructor has not named it yet
                if context.method_name != CALL and not wanted:
                    return call(*args, **kwargs)
                return around(context.module.module_name, lambda: call(*args, **kwargs), _first(args, kwargs))

            stack.enter_context(haiku.intercept_methods(haiku_call))
        paths: dict[int, str] = {}
        for name, base in (("flax.nnx", "Module"), ("equinox", "Module")):
            if library := sys.modules.get(name):
                for kind in _with_subclasses(getattr(library, base)):
                    if CALL in vars(kind):
                        stack.enter_context(mock.patch.object(kind, CALL, _wrapped(vars(kind)[CALL], around, paths)))
        yield


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


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


def _wrapped(method: Any, around: Around, paths: dict[int, str]) -> Callable[..., Any]:
    """Return a `__call__` that is intercepted, for a class of nnx or Equinox, whose modules do not know their paths.

    Args:
        paths: of the modules below the outermost one that runs, by identity; empty outside of any.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = not paths
        if outermost:
            paths.update((id(module), path) for path, module in _modules(self, "", set()))
        bound = method.__get__(self, type(self))
        try:
            if (path := paths.get(id(self))) is None:
                return bound(*args, **kwargs)
            return around(path, lambda: bound(*args, **kwargs), _first(args, kwargs))
        finally:
            if outermost:
                paths.clear()

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
