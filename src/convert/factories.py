"""Functions of the user's own code, named on the command line as ``module:function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from convert.errors import ConvertError


def find_factory(factory: str) -> Callable[..., Any]:
    """Imports the function that ``module:function`` names; the module may lie in the working directory.

    Raises:
        ConvertError: the words are none such, the module cannot be imported, or it has no such function.
    """
    module, colon, name = factory.partition(":")
    if not colon or not module or not name:
        raise ConvertError(f"{factory!r}: expected module:factory, such as my_package.model:make")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConvertError(f"{factory}: {error}") from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ConvertError(f"{factory}: {module} has no {name!r}") from None
    if not callable(found):
        raise ConvertError(f"{factory}: {name} cannot be called; it must be a function")
    return found  # type: ignore[no-any-return]
