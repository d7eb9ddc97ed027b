"""Names without contents in place of packages that a module imports and does not use here. It runs in the environments of the golden cases, too."""

from __future__ import annotations

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class _Names(type):
    """A class whose attributes are texts, such as the members of an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Empty(types.ModuleType):
    """A module in which every name is a class without contents."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


class StandIn(MetaPathFinder, Loader):
    """Stands for packages, but for modules of theirs that are there; in a ``with`` statement only for its duration."""

    def __init__(self, *packages: str, but: tuple[str, ...] = ()) -> None:
        self.packages, self.but = packages, but

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Empty) and self._has(name)]:
            del sys.modules[name]

    def _has(self, name: str) -> bool:
        return name.partition(".")[0] in self.packages and name not in self.but

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if self._has(fullname) else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...
