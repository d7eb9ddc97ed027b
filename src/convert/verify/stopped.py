"""An error of this package once something was measured: what was measured stands, and is reported."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from convert.core.errors import ConvertError
from convert.core.user_code import is_of_user_code

T = TypeVar("T")
U = TypeVar("U")
STOPS: tuple[type[Exception], ...] = (
    Exception,
)  # the tests of this package take them out, so that each error fails a test
MAX_TEXT = 200  # characters of an exception's text; that of an array fills pages
REPORT = "please report it, with both models; what was measured stands"
SEARCH = "the search for the mistake"


def or_stopped(step: Callable[[], T], stopped: Callable[[str], T], what: str = SEARCH) -> T:
    """Return what a step gives; where an error ends it, what `stopped` makes of the error in words."""
    try:
        return step()
    except STOPS as error:
        return stopped(_in_words(error, what))


@dataclass
class Remaining:
    """The steps that follow once a verdict is known.

    An error of this package in one of them is kept here, and the next step runs. Errors that a user can cause are raised: they have a
    place of their own in the report.

    Attributes:
        errors: in words, by the step that each ended.
    """

    errors: dict[str, str] = field(default_factory=dict)

    def __call__(self, what: str, step: Callable[[], T], otherwise: U) -> T | U:
        """Return what a step gives; where an error of this package ends it, `otherwise`.

        Args:
            what: the step, in words.
        """
        try:
            return step()
        except STOPS as error:
            if isinstance(error, ConvertError | ImportError) or is_of_user_code(error):
                raise
            self.errors[what] = _in_words(error, what)
            return otherwise

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on each error."""
        return tuple(f"{why}; {REPORT}" for why in self.errors.values())


def _in_words(error: Exception, what: str) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
    return f"an internal error ended {what}: {type(error).__name__}{f': {text}' if text else ''} ({where})"
