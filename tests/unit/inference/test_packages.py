"""A package that is not installed is named, and is no internal error; a module of this package is a bug."""

from __future__ import annotations

import pytest

from convert.core.errors import ConvertError
from convert.inference.requirements import packages_named


@packages_named()
def _imports(name: str) -> None:
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConvertError, match="both models are run, and torch is not installed; install torch, or run"):
        _imports("torch")


def test_a_missing_module_of_this_package_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError):
        _imports("convert.nothing")
