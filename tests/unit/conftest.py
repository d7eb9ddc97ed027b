"""Fail a unit test that imports JAX, torch or a library on top of them, or that starts a process.

Processes of pytest-xdist also run the other folders, so such a package may be imported already when a unit test runs. The guard
therefore looks at the act: the import statement or the call, and not at `sys.modules`. Code that kept a module from an earlier
import is found in a process of its own: `pytest tests/unit -n 0` fails at its end if a heavy package is in `sys.modules`.
"""

from __future__ import annotations

import builtins
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from support.heavy import is_heavy, loaded

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def unit_guard() -> Iterator[None]:
    """Refuse heavy imports and processes; what the test catches itself is reported when it ends."""
    refused: list[str] = []

    def refuse(what: str) -> NoReturn:
        refused.append(what)
        pytest.fail(f"a unit test {what}; such a test belongs in tests/parity, tests/models or tests/cli")

    statement, function = builtins.__import__, importlib.import_module

    def guarded_statement(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        # einops imports the frameworks that the process has imported already, and no others.
        follows = importer.startswith("einops.") and name in sys.modules
        if level == 0 and is_heavy(name) and not is_heavy(importer) and not follows:
            refuse(f"imports {name} (in {importer})")
        return statement(name, globals, locals, fromlist, level)

    def guarded_function(name: str, package: str | None = None) -> Any:
        if is_heavy(name):
            refuse(f"imports {name}")
        return function(name, package)

    def no_process(called: str) -> Callable[..., NoReturn]:
        return lambda *_, **__: refuse(f"starts a process ({called})")

    before = loaded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "__import__", guarded_statement)
        patch.setattr(importlib, "import_module", guarded_function)
        patch.setattr(subprocess.Popen, "__init__", no_process("subprocess"))
        for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "popen"):
            if hasattr(os, name):
                patch.setattr(os, name, no_process(f"os.{name}"))
        yield
    refused += [f"imported {name}" for name in loaded() if name not in before]
    assert not refused, f"a unit test {', and '.join(refused)}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that ran nothing but unit tests has imported no heavy package."""
    if session.items and all(item.path.is_relative_to(HERE) for item in session.items) and (found := loaded()):
        sys.stderr.write(f"\nunit tests have imported {', '.join(found)}\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
