"""What a run into a store keeps of an unfinished output, so that another run can continue: small objects below ``.OUT.unfinished``.

They lie beside OUT, so that no reader of OUT sees them, and go when OUT is complete. Objects cannot grow: the lines of a journal are
collected for `EVERY` seconds, and become an object. A killed run loses what it had collected, no more.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any

from convert.stores.path import StorePath
from convert.stores.upload import Uploads

EVERY = 5.0  # seconds
_LINES = "lines-"


def folder_of(out: StorePath) -> StorePath:
    """Return where the objects lie."""
    return out.parent / f".{out.name}.unfinished"


class Unfinished:
    """The objects of one output; the lines of its journal are some of them."""

    def __init__(self, out: StorePath, uploads: Uploads) -> None:
        self.folder = folder_of(out)
        self._uploads = uploads
        self._collected: list[object] = []
        self._written, self._at = 0, time.monotonic()
        self._lock = threading.RLock()
        self._ended = False

    def names(self) -> list[str]:
        """Return the names of the objects."""
        self.folder.bucket.forget()
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []

    def read(self) -> list[Any]:
        """Return the lines that earlier runs wrote; none where the first object of them is missing or damaged.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        found: list[Any] = []
        for name in self.names():
            if name.startswith(_LINES):
                self._written = max(self._written, int(name.removeprefix(_LINES)))
                try:
                    found += [json.loads(line) for line in (self.get(name) or b"").splitlines()]
                except ValueError:
                    break
        return found if found and isinstance(found[0], dict) else []

    def append(self, line: object) -> None:
        """Add a line; write those that are collected when it is time.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        with self._lock:
            self._collected.append(line)
            if time.monotonic() - self._at >= EVERY:
                self.flush()

    def flush(self) -> None:
        """Write the lines that are collected.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        with self._lock:
            if self._collected and not self._ended:
                content = "".join(json.dumps(line) + "\n" for line in self._collected).encode()
                self.put(f"{_LINES}{self._written + 1:06d}", memoryview(content))
                self._written, self._at = self._written + 1, time.monotonic()
                self._collected.clear()

    def close(self) -> None:
        """Write what is left, where the store takes it: without it, the next run does more again."""
        with suppress(OSError):
            self.flush()

    def put(self, name: str, content: memoryview) -> None:
        """Write an object.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        self._uploads.write(self.folder / name, content)

    def get(self, name: str) -> bytes | None:
        """Return an object; None where there is none.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        path = self.folder / name
        return path.read_bytes() if path.is_file() else None

    def remove(self) -> None:
        """End: remove all objects.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        with self._lock:
            self._ended = True
            for name in self.names():
                self._uploads.remove(self.folder / name)
            self.folder.bucket.forget()
