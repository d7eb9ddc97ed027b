"""How many bytes are held whole at a time, over all threads: what is too much waits, so that threads do not multiply memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Condition, get_ident

# Bytes. There are two budgets (`sources.chunks.WHOLE`, `moving.move`); with what else a conversion needs it stays below 400 MB where
# no single part exceeds this.
MOST = 128 << 20


class StoppedError(RuntimeError):
    """What was waited for is not wanted any more."""


class Budget:
    """Admits what is held as long as its sum stays within a limit, and one thing of any size when nothing else is held.

    It cannot deadlock as long as who holds something goes on to give it back without waiting for others. So an owner, a thread if
    nothing else is said, that holds something already and needs more to go on never waits here.

    Attributes:
        most: bytes.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._held: Counter[Hashable] = Counter()  # by owner
        self._changed = Condition()
        self._stopped = False

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self._held.total()

    def take(self, nbytes: int, owner: Hashable = None) -> Callable[[int], None]:
        """Waits until there is room.

        Returns:
            What gives bytes back, all at once or little by little, from any thread.

        Raises:
            StoppedError: `stop` was called meanwhile.
        """
        owner = get_ident() if owner is None else owner
        with self._changed:
            while self._held.total() + nbytes > self.most and self._held.total() and not self._held[owner]:
                if self._stopped:
                    raise StoppedError
                self._changed.wait()
            self._held[owner] += nbytes

        def give_back(some: int) -> None:
            with self._changed:
                self._held[owner] -= some
                if not self._held[owner]:
                    del self._held[owner]
                self._changed.notify_all()

        return give_back

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[Callable[[int], None]]:
        """`take`, and all is given back at the end; what is called with a number gives so many bytes back before."""
        give_back = self.take(nbytes)
        left = nbytes

        def less(some: int) -> None:
            nonlocal left
            left -= some
            give_back(some)

        try:
            yield less
        finally:
            give_back(left)

    def stop(self) -> None:
        """Whoever waits gets an error: nobody will give anything back."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
