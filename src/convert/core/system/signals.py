"""SIGINT, SIGTERM and SIGHUP end the program without raising in the middle of other code.

The handler records the signal. If no output is unfinished, the process ends there. Otherwise it ends at the next
`check`, or after `GRACE` seconds, when a thread removes what is unfinished. A second signal does so at once.

An exception in a handler would be lost in a callback of JAX, or break the import of a C extension. `os._exit` skips the
destructors of libraries whose threads still run.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # the module `typing` takes longer to import than this one
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 2.0  # seconds; a leaf of 1 GB takes about one

rest = "no unfinished output is left"  # what the message of an interrupted program says
_received = 0
_publishing = False
_cleanups: list[Callable[[], object]] = []
_lock = threading.RLock()


def install() -> None:
    """Handle the signals from now on. A signal that the parent process ignores, as `nohup` does, stays ignored."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_first)


def watch() -> None:
    """Start the thread that ends the process when the main thread does not, for example in a long call of C code."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    with suppress(RuntimeError):  # no thread can be started: signals take effect at `check` alone
        threading.Thread(target=_watch, args=(reader,), name="convert-signals", daemon=True).start()


class SignalExit(SystemExit):
    """A signal ends the program; code of the user that calls ``sys.exit`` raises a plain `SystemExit`."""


def check() -> None:
    """End the program if a signal was received: a safe point.

    Raises:
        SignalExit: with 128 + the number of the signal.
    """
    if _received:
        raise SignalExit(128 + _received)


def stop_if_received() -> None:
    """End the process if a signal was received."""
    if _received:
        _stop()


def add_cleanup(cleanup: Callable[[], object]) -> None:
    """Call a function before a signal ends the process, in any thread."""
    _cleanups.append(cleanup)


def remove_cleanup(cleanup: Callable[[], object]) -> None:
    """Undo `add_cleanup`; does nothing when it was undone."""
    with suppress(ValueError):
        _cleanups.remove(cleanup)


@contextmanager
def cleanup(function: Callable[[], object]) -> Iterator[None]:
    """Call a function if a signal ends the process within the block."""
    add_cleanup(function)
    try:
        yield
    finally:
        remove_cleanup(function)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run a block to its end before a signal ends the process."""
    global _publishing
    with _lock:
        _publishing = True
        try:
            yield
        finally:
            _publishing = False


def _on_first(number: int, _frame: object) -> None:
    global _received
    _received = number
    for other in NUMBERS:
        if signal.getsignal(other) is _on_first:
            signal.signal(other, _on_second)
    if not _cleanups:
        _stop()


def _on_second(_number: int, _frame: object) -> None:
    for other in NUMBERS:
        if signal.getsignal(other) is _on_second:
            signal.signal(other, signal.SIG_DFL)
    if not _publishing:
        _stop()


def _watch(reader: int) -> None:
    global _received
    while (number := os.read(reader, 1)[0]) not in NUMBERS:
        pass
    _received = _received or number
    if _cleanups:
        select.select([reader], [], [], GRACE)
    _stop()


def _stop() -> NoReturn:
    """Remove what is unfinished and end the process. Other threads that come here wait for its end."""
    with _lock:
        for function in reversed(_cleanups.copy()):
            with suppress(Exception):  # the next one may still succeed
                function()
        word = "interrupted" if _received == signal.SIGINT else "terminated"
        with suppress(OSError):
            os.write(2, f"error[interrupted]: {word}; {rest}\n".encode())
        os._exit(128 + _received)
