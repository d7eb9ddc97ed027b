"""Unit tests import NumPy and small packages only, and lie where the code lies that they test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.heavy import is_heavy
from support.paths import ROOT, TESTS

UNIT = TESTS / "unit"
FILES = sorted(UNIT.rglob("*.py"))
PROCESSES = ("subprocess", "multiprocessing")
GUARD = {"subprocess": UNIT / "conftest.py"}  # the one file that names it, to refuse it


def test_folders_mirror_those_of_the_package() -> None:
    """Each folder of tests/unit has a folder of the same path in the package. Some folders are tested elsewhere, with JAX or torch."""
    folders = {path.parent.relative_to(UNIT) for path in FILES}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / "src" / "convert" / folder).is_dir()] == []


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Each module that the file names in an import, in any function of it, or in `importorskip`, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("importorskip", "import_module") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def helper(module: str) -> Path | None:
    """The file of a helper module of the tests."""
    path = TESTS.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def heavy_imports(path: Path, seen: set[Path]) -> Iterator[str]:
    """Heavy imports of a file and of the helpers that it imports."""
    if path in seen:
        return
    seen.add(path)
    for line, module in imported(path):
        if is_heavy(module) or (module.partition(".")[0] in PROCESSES and GUARD.get(module) != path):
            yield f"{path.relative_to(ROOT)}:{line}: {module}"
        elif (file := helper(module)) is not None:
            yield from heavy_imports(file, seen)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(UNIT)))
def test_unit_tests_import_nothing_heavy(path: Path) -> None:
    assert list(heavy_imports(path, set())) == []


def test_a_heavy_import_is_found(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text("def f():\n    from jax import numpy\n    import subprocess\npytest.importorskip('torch.nn')\n")
    assert {module for _, module in imported(file)} == {"jax", "jax.numpy", "subprocess", "torch.nn"}


def test_unit_tests_mirror_the_packages() -> None:
    packages = {
        path.parent.relative_to(ROOT / "src" / "convert") for path in (ROOT / "src" / "convert").rglob("__init__.py")
    }
    folders = {path.parent.relative_to(UNIT) for path in FILES}
    assert folders <= packages, "tests/unit has folders that src/convert lacks"
