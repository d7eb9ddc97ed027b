"""The command line. Each command has a module; `output` is the only one that prints.

What the commands need is loaded when one is run, so that Ctrl-C is answered while it loads, too.
"""

import os
import sys
from typing import NoReturn

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it


def program() -> NoReturn:
    """``convert`` and ``ckpt-convert``: a process of their own, which ends with the command."""
    _open_streams()
    try:
        from convert.cli.app import program as run
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted; nothing was written\n")
        os._exit(INTERRUPTED)
    run()


def _open_streams() -> None:
    """Standard streams that were closed lead nowhere: else the next file that is opened, the output, say, would be taken for one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 - stays open


def main() -> NoReturn:
    """The same command within another program: ends with `SystemExit`."""
    from convert.cli.app import main as run

    run()
