"""Settings of the whole process. Each is kept only if a benchmark of a whole command shows a gain.

Measured as CPU time, alternating, with and without each: a small conversion (0.6 MB), and one of 20,000 leaves.
Tried and dropped, as they gave less than 10 %: one OpenBLAS thread, glibc's mallopt thresholds, `os._exit`, and a
collector that is paused while rules are read and a plan is made.
"""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from typing import NoReturn


def tune() -> None:
    """Run the garbage collector rarely: 10 % of a conversion of 20,000 leaves, whose objects all stay alive."""
    gc.set_threshold(100_000, 20, 20)


def end(code: int) -> NoReturn:
    """Exit without scanning all objects for garbage: 16 % of a small conversion. Exit handlers run as usual."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # `output` has reported a stream that cannot be written
            stream.flush()
    gc.freeze()
    sys.exit(code)
