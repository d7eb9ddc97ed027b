"""Fixtures of all tests, and what keeps JAX from compiling the same thing again and again.

Models that run op by op are hundreds of small programs, and XLA takes longer to compile them than the tests take otherwise.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from convert.verify import stopped
from support.command_line import Run
from support.parts import parse_part, part_of

GROWTH = 1 << 30  # bytes of memory after which a process lets go of what JAX has compiled
CACHE = {  # jax/_src/config.py: every program is worth keeping
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
FOLDER = "JAX_COMPILATION_CACHE_DIR"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", default="1/1", help="run the K-th of N parts of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the part that was asked for."""
    try:
        number, parts = parse_part(config.getoption("--part"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    others = [item for item in items if part_of(item.nodeid, parts) != number]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if part_of(item.nodeid, parts) == number]


def pytest_configure(config: pytest.Config) -> None:
    """One folder of compiled programs for all processes of a run, those that tests start included, and for the next run.

    It lies in pytest's own cache (`pytest --cache-clear` empties it); without that, in a folder that goes with the run. JAX's keys
    have the program, the versions and the options in them, and the folder's name the processor.
    """
    if hasattr(config, "workerinput") or FOLDER in os.environ:
        return
    if config.pluginmanager.hasplugin("cacheprovider"):
        folder = str(config.cache.mkdir(f"jax-{_processor()}"))  # type: ignore[union-attr]
    else:
        folder = tempfile.mkdtemp(prefix="convert-tests-jax-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ |= {FOLDER: folder, **CACHE}


def _processor() -> str:
    """A name for what XLA may use of this processor: a program for another one could stop the process."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return hashlib.sha256("\n".join([platform.platform(), platform.machine(), *told]).encode()).hexdigest()[:12]


def _resident() -> int:
    """Bytes of memory that this process takes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


_after = 0  # bytes that it took when it had let go last


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A worker would keep every program of every model: they come back from the folder, in a tenth of the time."""
    global _after
    if "jax" not in sys.modules or _resident() - _after < GROWTH:
        return
    import jax

    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    _after = _resident()


@pytest.fixture(autouse=True)
def _errors_of_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while the check looks for a mistake fails the test; users get the difference without a name."""
    monkeypatch.setattr(stopped, "STOPS", ())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)
