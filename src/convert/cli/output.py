"""The only module that prints: data to stdout, everything else to stderr, colour and progress only on a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from convert.core.errors import OutputError
from convert.core.findings import Finding
from convert.core.system import signals
from convert.core.system.process import PROGRESS_FD, end_with_parent
from convert.core.text import escape, one_line

if TYPE_CHECKING:
    from rich.console import Console

_COMMAND = re.compile(r"^(\s*)::", re.MULTILINE)
_LOGGING = re.compile(r"##(?=\w*\[)")
HEADING, NOTE, GOOD, BAD = "bold", "dim", "green", "bold red"


class Progress(Protocol):
    """Called with the bytes done and the bytes in all."""

    def __call__(self, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Line:
    """A line of output with a style for terminals, such as `HEADING`."""

    text: str
    style: str = ""


def _escape(text: str) -> str:
    """Escape control characters, and the commands that CI systems obey in the output of a step.

    Names in a checkpoint are untrusted. A terminal obeys control characters, GitHub's runner lines that begin with ``::``
    and ``##[`` anywhere (its ActionCommand.cs), others ``##vso[`` and ``##teamcity[``.
    """
    text = escape(text, keep="\n\t")
    if "::" in text:
        text = _COMMAND.sub(r"\1\\x3a:", text)
    return _LOGGING.sub(r"#\\u0023", text) if "##" in text else text  # the escape is valid in JSON, too


def _print(text: str, stream: TextIO, end: str = "\n", style: str = "") -> None:
    """Print plain text; on a terminal a styled line is coloured and wrapped to the width."""
    if style and stream.isatty():
        from rich.text import Text

        _console(stream).print(Text(_escape(text), style), end=end)
    else:
        print(_escape(text), file=stream, end=end, flush=True)


@lru_cache(maxsize=2)
def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream)


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Run code of the user, such as a model that prints: stdout is for the result alone."""
    with redirect_stdout(sys.stderr):
        yield


def data(text: str, end: str = "\n", style: str = "") -> None:
    """Print a result to stdout. When the reader has closed the pipe, as `head` does, the rest is not shown; the exit code stays.

    Raises:
        OutputError: stdout cannot be written, for example because the disk is full.
    """
    try:
        _print(text, sys.stdout, end, style)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        if isinstance(error, BrokenPipeError):
            return
        raise OutputError(Finding("output-not-writable", path="stdout", problem=f"{error.strerror}")) from None


def data_lines(lines: Iterable[str | Line]) -> None:
    """Print lines to stdout. In a pipe they are written in blocks; a reader such as `head` stops the rest."""
    if sys.stdout.isatty():
        for line in lines:
            line = Line(line) if isinstance(line, str) else line
            data(one_line(line.text), style=line.style or "default")
        return
    texts = (one_line(line if isinstance(line, str) else line.text) for line in lines)
    while block := list(islice(texts, 1000)):
        data("\n".join(block))


def data_json(value: Any) -> None:
    """Print a result as JSON to stdout, piece by piece."""
    pieces = json.JSONEncoder(indent=2).iterencode(value)
    while block := list(islice(pieces, 10_000)):
        data("".join(block), end="")
    data("")


def status(text: str, style: str = "") -> None:
    """Print a status message, one line, to stderr. Write errors are ignored."""
    _status(one_line(text), style)


def _status(text: str, style: str) -> None:
    with suppress(OSError):
        _print(text, sys.stderr, style=style)


def error(code: str, text: str) -> None:
    """Print the message of a failed command to stderr, with its code in the error index if it has only one."""
    _status(f"error[{code}]: {text}" if code else f"error: {text}", BAD)


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Align columns, two spaces apart; the columns in `right` are aligned to the right. Nothing is cut."""
    rows = [tuple(map(one_line, row)) for row in rows]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = [
            text.rjust(w) if k in right else text.ljust(w) for k, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def headed(lines: Iterable[str]) -> Iterator[str | Line]:
    """Style the first line of a table as its heading."""
    for k, line in enumerate(lines):
        yield Line(line, HEADING) if k == 0 else line


def size(nbytes: int) -> str:
    """Format bytes with decimal units: ``925.1 MB``."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def count(number: int, word: str) -> str:
    """Format a count with its noun: ``1 leaf``, ``2 leaves``."""
    plural = {"leaf": "leaves"}.get(word, word + "s")
    return f"{number:,} {word if number == 1 else plural}"


def on_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr.isatty()


def _to_batch(descriptor: int, done: int, total: int) -> None:
    """Write the progress to the batch.

    Raises:
        OutputError: the batch has ended, so this job ends, too: another run may continue its work.
    """
    try:
        os.write(descriptor, f"{done} {total}\n".encode())
    except OSError:
        problem = "the batch that started this conversion has ended"
        raise OutputError(Finding("interrupted", problem, fix="start the batch again")) from None


class BatchDisplay(Protocol):
    """Shows the jobs of a batch."""

    def job(self, name: str, phase: str, done: int, total: int) -> None:
        """Show how far a running job is."""

    def finished(self, name: str, text: str, style: str) -> None:
        """Replace a job by its result."""


class _Lines:
    """A line for each job that has ended."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def job(self, name: str, phase: str, done: int, total: int) -> None:
        pass

    def finished(self, name: str, text: str, style: str) -> None:
        if not self._quiet:
            status(f"{name}: {text}", style)


@contextmanager
def batch_progress(jobs: int, nbytes: int, quiet: bool) -> Iterator[BatchDisplay]:
    """Show a bar for the batch and one for each running job on a terminal; a line for each job that ends elsewhere.

    Args:
        jobs, nbytes: number of jobs, and the bytes that they write.
    """
    if quiet or not on_terminal():
        yield _Lines(quiet)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar, signals.cleanup(bar.stop):
        everything = bar.add_task(f"0 of {jobs} jobs", total=nbytes)
        running: dict[str, TaskID] = {}
        ended = 0

        class Bars:
            def job(self, name: str, phase: str, done: int, total: int) -> None:
                if name not in running:
                    running[name] = bar.add_task("", total=None)
                bar.update(running[name], description=one_line(f"{phase} {name}"), completed=done, total=total or None)
                active = sum(bar.tasks[bar.task_ids.index(task)].completed for task in running.values())
                bar.update(everything, completed=active)

            def finished(self, name: str, text: str, style: str) -> None:
                nonlocal ended
                ended += 1
                if name in running:
                    bar.update(running[name], visible=False)
                bar.update(everything, description=f"{ended} of {jobs} jobs")
                bar.console.print(Text(_escape(one_line(f"{name}: {text}")), style))

        yield Bars()


@contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """Show a bar with bytes, rate and time left on stderr when that is a terminal; nothing elsewhere.

    A job of a batch writes its progress to the pipe of the batch.
    """
    if descriptor := os.environ.get(PROGRESS_FD):
        end_with_parent()
        to_batch = partial(_to_batch, int(descriptor))
        to_batch(0, 0)  # the batch may have ended before the line above
        yield to_batch
        return
    if quiet or not on_terminal():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar, signals.cleanup(bar.stop):
        task = bar.add_task("convert", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
