"""The command line, a thin layer over `convert.api` and `convert.verify`.

One module for each command; `options` holds what they share, `folding` folds repeated layers, `output` is the only
module that prints. May import everything; nothing imports it.

A command loads what it needs when it runs: ``convert --help`` is fast, and Ctrl-C works while libraries load.
"""

import os
import sys
from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT, the shells' convention


def program() -> NoReturn:
    """Entry point of ``convert`` and ``ckpt-convert``."""
    _open_streams()
    try:
        from convert.core import process

        process.tune()
        from convert.cli.app import program as run
    except KeyboardInterrupt:
        sys.stderr.write("error[interrupted]: interrupted; nothing was written\n")
        sys.stderr.flush()
        sys.exit(INTERRUPTED)
    run()


def _open_streams() -> None:
    """Point closed standard streams at the null device; else the next opened file, the output, would take their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 - stays open


def main() -> NoReturn:
    """Run the command within another program; ends with `SystemExit`."""
    from convert.cli.app import main as run

    run()
