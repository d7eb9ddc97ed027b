"""Settings of the whole process. Each is kept only while a benchmark of the whole command shows what it gives."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from contextlib import suppress
from typing import NoReturn

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
RUNS_MODELS = {"check", "--check", "record", "skeleton"}  # these may multiply matrices; a conversion never does


def tune(arguments: list[str]) -> None:
    """Tune the allocator, the garbage collector and NumPy's threads for one command."""
    gc.set_threshold(100_000, 20, 20)
    if RUNS_MODELS.isdisjoint(arguments):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, 16 << 20)
        mallopt(M_TRIM_THRESHOLD, 12 << 20)


def end(code: int) -> NoReturn:
    """Flush the standard streams and exit."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    sys.exit(code)
