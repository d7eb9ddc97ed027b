"""The command line, a thin layer over `convert.api` and `convert.verify`.

One module for each command; `options` holds what they share, `folding` folds repeated layers, `output` is the only
module that prints. May import everything; nothing imports it.

A command loads what it needs when it runs: ``convert --help`` is fast, and Ctrl-C works while libraries load.
"""

from __future__ import annotations

import os
import sys

from convert import _end_by_interrupt  # by name: `convert` here becomes the module of the command, once that is loaded

TYPE_CHECKING = False  # the handlers of signals come first; the module `typing` takes longer to import
if TYPE_CHECKING:
    from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT, the shells' convention


def program() -> NoReturn:
    """Entry point of ``convert`` and ``ckpt-convert``."""
    _end_by_interrupt()
    from convert.core.system import signals

    signals.install()
    _open_streams()
    signals.watch()
    from convert.core.system import process

    process.tune()
    from convert.cli.app import run

    code = run()
    signals.stop_if_received()
    process.end(code)


def _open_streams() -> None:
    """Make the standard streams safe to print to.

    Closed ones are pointed at the null device; else the next opened file, the output, would take their number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 - stays open
    # A name that the encoding of stdout lacks is escaped, as on stderr.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def main() -> NoReturn:
    """Run the command within another program, whose handlers of signals stay; ends with `SystemExit`."""
    from convert.cli.app import main as run

    run()
