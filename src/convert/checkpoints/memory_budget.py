"""Limits the bytes that all threads use at a time: at the limit a thread waits, so threads do not multiply memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Condition, get_ident

# Bytes. There are two budgets (`checkpoints.chunks.AT_ONCE_BUDGET`, and one in `writing.transfer`). A conversion stays below
# 400 MB in total where no single part exceeds this limit.
DEFAULT_LIMIT = 128 << 20


class StoppedError(RuntimeError):
    """The budget was stopped while a thread waited for it."""


class Budget:
    """Admits reservations while their sum stays within a limit, and one of any size when nothing else is reserved.

    There is no deadlock as long as an owner with a reservation releases it without waiting for others. So an owner (by
    default the thread) that has a reservation and needs more never waits.

    Attributes:
        limit: bytes.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        self._bytes: Counter[Hashable] = Counter()  # by owner
        self._changed = Condition()
        self._stopped = False

    @property
    def in_use(self) -> int:
        """Bytes that are reserved now."""
        return self._bytes.total()

    def acquire(self, nbytes: int, owner: Hashable = None) -> Callable[[int], None]:
        """Wait until the bytes fit into the limit, and reserve them.

        Returns:
            A function that releases a number of these bytes, from any thread.

        Raises:
            StoppedError: `stop` was called while waiting.
        """
        owner = get_ident() if owner is None else owner
        with self._changed:
            while self._bytes.total() + nbytes > self.limit and self._bytes.total() and not self._bytes[owner]:
                if self._stopped:
                    raise StoppedError
                self._changed.wait()
            self._bytes[owner] += nbytes

        def release(count: int) -> None:
            with self._changed:
                self._bytes[owner] -= count
                if not self._bytes[owner]:
                    del self._bytes[owner]
                self._changed.notify_all()

        return release

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[Callable[[int], None]]:
        """Reserve bytes until the end of the block. The function that it gives releases a number of them earlier."""
        release = self.acquire(nbytes)
        left = nbytes

        def release_some(count: int) -> None:
            nonlocal left
            left -= count
            release(count)

        try:
            yield release_some
        finally:
            release(left)

    def stop(self) -> None:
        """Raise StoppedError in all waiting threads."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
