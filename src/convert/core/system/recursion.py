"""How deep calls may nest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

DEEP = 20_000  # a thread's stack of 8 MB has room for more


@contextmanager
def deep_calls() -> Iterator[None]:
    """Let calls nest deeper than Python's default of 1,000, and restore the limit afterwards: a sum that a loop adds up nests once for each step."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, DEEP))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
