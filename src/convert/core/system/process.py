"""Settings of the whole process. Each is kept only if a benchmark of a whole command shows a gain of 10 %.

Measured in alternation, with and without each: CPU time of a small conversion (0.6 MB) and of 20,000 leaves; peak memory of
50,640 leaves.
Tried and dropped, as they gave less than 10 %: one OpenBLAS thread, glibc's mallopt thresholds, and `os._exit`. A collector that is
paused is measured by `benchmarks/planning.py`: it is for callers of the library, who have Python's own thresholds.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_PDEATHSIG = 1  # linux/prctl.h: PR_SET_PDEATHSIG
PROGRESS_FD = "CONVERT_PROGRESS_FD"  # environment: the descriptor to which a job of a batch writes `DONE TOTAL` lines


def tune() -> None:
    """Run the garbage collector rarely: 10 % of a conversion of 20,000 leaves, whose objects all stay alive."""
    gc.set_threshold(1_000_000, 20, 20)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage meanwhile: half of the time of a plan of 37,000 tensors, which all stay alive, with Python's own thresholds.

    What was made meanwhile is old afterwards: a look at all of it at once would be another tenth.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what the caller has frozen stays so
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()


def return_freed_memory() -> None:
    """Return what TensorStore has freed, 1.5 kB of JSON for each array, to the system: 12 % of the peak of 50,640 leaves.

    Glibc keeps it for the threads of TensorStore. Other C libraries return it themselves, or have no such function.
    """
    import ctypes  # here, as --help does without

    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def end_with_parent() -> None:
    """Let the system kill this process when its parent dies (Linux, prctl(2)); elsewhere it ends at its next line of progress.

    Otherwise it could remove from a store what the next run of the batch has written there.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def end(code: int) -> NoReturn:
    """Exit without scanning all objects for garbage: 16 % of a small conversion. Exit handlers run as usual."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # `output` has reported a stream that cannot be written
            stream.flush()
    gc.freeze()
    if "h5py" in sys.modules:
        # A failed read leaves the file open in the HDF5 library, which would call Python to close it after Python has ended.
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)
