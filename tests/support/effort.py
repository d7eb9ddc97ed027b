"""A limit on the work of a test, in function calls: the same on every machine, which seconds are not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class TooManyCallsError(BaseException):
    """The code under test made more calls than the test allows. Not an `Exception`, so that no handler there hides it."""


@contextmanager
def calls_at_most(limit: int) -> Iterator[None]:
    """Within this context, at most `limit` functions are called, those written in C included; the next one raises.

    Raises:
        TooManyCallsError: at the call over the limit, so a search that explodes ends as well.
    """
    made = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")
        if made > limit:
            raise TooManyCallsError(f"expected at most {limit} calls; the next one is {frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
