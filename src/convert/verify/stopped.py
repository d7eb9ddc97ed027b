"""An error of this package while it looks for the mistake behind a difference: the difference stands, and is reported without a name."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
STOPS: tuple[type[Exception], ...] = (
    Exception,
)  # the tests of this package take them out, so that each error fails a test
MAX_TEXT = 200  # characters of an exception's text; that of an array fills pages
REPORT = "please report it, with both models; what was measured stands"


def or_stopped(search: Callable[[], T], stopped: Callable[[str], T]) -> T:
    """Return what a search finds; where an error ends it, what `stopped` makes of the error in words."""
    try:
        return search()
    except STOPS as error:
        return stopped(_in_words(error))


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
    return f"an internal error ended the search for the mistake: {type(error).__name__}{f': {text}' if text else ''} ({where})"
