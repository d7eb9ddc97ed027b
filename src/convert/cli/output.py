"""The only place that prints: data to stdout, everything else to stderr, progress only on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Protocol

from convert.core.errors import OutputError


class Progress(Protocol):
    """Where the work stands, in bytes."""

    def __call__(self, done: int, total: int) -> None: ...


def _harmless(text: str) -> str:
    """Control characters written out: names in a checkpoint are a stranger's, and a terminal obeys what it is sent."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def data(text: str, end: str = "\n") -> None:
    """A result that the user asked for: to stdout. Ends the program quietly when the reader has gone, as `head` does.

    Raises:
        OutputError: it cannot be written: the disk is full, say.
    """
    try:
        print(_harmless(text), end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        if isinstance(error, BrokenPipeError):
            sys.exit(0)
        raise OutputError(f"stdout cannot be written: {error.strerror}") from None


def data_lines(lines: Iterable[str]) -> None:
    """Such a result line by line, many of them at a time; a reader such as `head` stops those that are not yet made."""
    lines = iter(lines)
    while some := list(islice(lines, 1000)):
        data("\n".join(some))


def data_json(value: Any) -> None:
    """A result as JSON, to stdout; the text is not held as a whole."""
    pieces = json.JSONEncoder(indent=2).iterencode(value)
    while some := list(islice(pieces, 10_000)):
        data("".join(some), end="")
    data("")


def say(text: str) -> None:
    """Narration, to stderr; where that cannot be written, nobody is told, and the work is done all the same."""
    with suppress(OSError):
        print(_harmless(text), file=sys.stderr, flush=True)


def error(text: str) -> None:
    """The last word of a failed command, to stderr."""
    say(f"error: {text}")


def cell(text: str) -> str:
    """A text that stays in its column and on its line."""
    return text.replace("\n", "\\n").replace("\t", "\\t")


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Lines with aligned columns, two spaces apart; the columns in `right` are aligned to the right. Nothing is cut."""
    rows = [tuple(map(cell, row)) for row in rows]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = [
            text.rjust(w) if k in right else text.ljust(w) for k, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def size(nbytes: int) -> str:
    """Bytes for people, with the decimal units that file sizes have: ``925.1 MB``."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def count(number: int, word: str) -> str:
    """``1 leaf``, ``2 leaves``."""
    plural = {"leaf": "leaves"}.get(word, word + "s")
    return f"{number:,} {word if number == 1 else plural}"


def on_terminal() -> bool:
    """Whether a person watches stderr."""
    return sys.stderr.isatty()


@contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """A bar with bytes, rate and time left on stderr when that is a terminal; nothing elsewhere."""
    if quiet or not on_terminal():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("convert", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
