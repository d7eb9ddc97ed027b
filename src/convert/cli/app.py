"""Puts the commands together, and turns errors into a message and an exit code."""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

import click

from convert.cli import INTERRUPTED, output
from convert.cli import options as o
from convert.cli.check import check
from convert.cli.convert import run
from convert.cli.inspect import inspect
from convert.cli.plan import plan
from convert.cli.record import record
from convert.cli.rules import rules
from convert.cli.skeleton import skeleton

HELP = """Convert JAX checkpoints to PyTorch safetensors with declarative per-layer rules.

\b
  convert MODEL CKPT OUT        e.g. convert timesfm ckpt/ out.safetensors
  convert inspect CKPT          the tree: paths, shapes, dtypes, bytes; which rules fit
  convert plan MODEL CKPT       what would be written, from what, and what a shape check could not catch
  convert check OUT --from CKPT the proof that both compute the same, or where and why they do not
  convert record MODEL CKPT OUT what the JAX model computes, for check --recorded where there is no JAX
  convert skeleton MODULE:FACTORY   names for an Equinox file, made where JAX runs
  convert rules list            the shipped rules; also: show, validate, schema
  convert rules new CKPT        a draft of rules for a model of your own

OUT ending in .safetensors is one file; anything else is a directory. Data goes to stdout, everything else to stderr.
Exit codes: 0 done, 2 a usage, input or internal error, 130 interrupted.
"""
EPILOG = "Options of the conversion itself: convert run --help"
RUN = "run"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
COMPUTING = {"check", "--check", "record", "skeleton"}  # whose models may multiply matrices; a conversion never does


class DefaultToRun(o.Commands):
    """Takes ``convert MODEL CKPT OUT`` for ``convert run MODEL CKPT OUT``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {"-h", "--help", "--version"}
        if args and args[0] not in self.commands and args[0] not in own:
            args = [RUN, *args]
        return super().parse_args(ctx, args)


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from convert.writing.execute import tool_version

        output.data(tool_version())
        ctx.exit()


app = DefaultToRun(
    "convert",
    commands=[run, inspect, plan, check, record, skeleton, rules],
    params=[
        click.Option(
            ["--version"], is_flag=True, callback=_version, expose_value=False, is_eager=True, help="Print the version."
        )
    ],
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def program() -> NoReturn:
    """``convert`` and ``ckpt-convert``: a process of their own, which ends with the command."""
    gc.set_threshold(100_000, 20, 20)  # importing a framework makes many objects, all of which stay
    if COMPUTING.isdisjoint(sys.argv):  # else NumPy starts a thread for each processor, which spins for 30 ms or more
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _give_large_memory_back()
    _end(_run())


def _give_large_memory_back() -> None:
    """As soon as it is freed: glibc's malloc would keep blocks of up to 32 MB, and those of each thread for that thread alone.

    What is smaller, a piece, say, it does keep, as it would by itself: to make its pages anew each time takes long.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, 16 << 20)
        mallopt(M_TRIM_THRESHOLD, 12 << 20)


def main() -> NoReturn:
    """The same command within another program: ends with `SystemExit`."""
    sys.exit(_run())


def _run() -> int:
    """Runs the command; its exit code."""
    from convert.core.errors import ConvertError

    for name in ("SIGTERM", "SIGHUP"):  # so that what was written aside is removed; Windows has no SIGHUP
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return app(standalone_mode=False) or 0  # the code that a command has ended with, if it says one
    except ConvertError as error:
        output.error(str(error))
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):  # the former is what click makes of the latter
        output.error("interrupted; no unfinished output is left")
        return INTERRUPTED
    except SystemExit as stop:
        if isinstance(stop.code, str):
            output.error(stop.code)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:  # noqa: BLE001 - the last resort: say so, and exit with the documented code
        if (
            isinstance(error, OSError)
            and error.filename is None
            and error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO)
        ):
            output.error(f"stdout cannot be written: {error.strerror}")  # of a help that click prints
            return 2
        import traceback

        output.error(f"internal error, please report it:\n{traceback.format_exc()}")
        return 2


def _end(code: int) -> NoReturn:
    """Ends the process without taking down its modules one by one, which takes half a second where torch and JAX are loaded.

    What was registered for the exit is run, and all output is out.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):  # `output` has said what there is to say of a stream that takes nothing
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
