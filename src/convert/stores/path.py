"""`StorePath`: a URL with the methods of `Path` that read."""

from __future__ import annotations

import errno
import io
import os
import posixpath
import stat
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from typing import Any, Self

from convert.core.system.regular_file import ObjectPath
from convert.stores.client import Bucket, bucket
from convert.stores.entry import Entry
from convert.stores.hub import Repository

FIRST, MOST = (
    1 << 16,
    4 << 20,
)  # bytes of the first request for a file, and of the largest: each further one is twice the last
_KEPT = 64  # blocks of `FIRST` bytes of a `_Mapped`


class StorePath(ObjectPath):
    """The URL of an object, or of a prefix that is used like a directory: ``s3://bucket/run/200``.

    Listings are kept until `located` gives the next path. `stat` always asks the store, so that a change is noticed.
    """

    def __str__(self) -> str:
        """Return the URL; of a part of one (`relative_to`) its text."""
        text = super().__str__()
        scheme, colon, rest = text.partition(":/")
        return f"{scheme}://{rest.lstrip('/')}" if colon and scheme == self.parts[0][:-1] else text

    def __repr__(self) -> str:
        """Return the URL, for messages."""
        return f"{type(self).__name__}({str(self)!r})"

    def __fspath__(self) -> str:
        """Refuse to be a name of the local file system.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self} is not a path of this machine")

    @property
    def _own(self) -> int:
        """How many parts are the scheme and the bucket; the name of a repository on the Hub has two."""
        return 3 if self.parts[0] == "hf:" else 2

    @property
    def bucket(self) -> Bucket | Repository:
        """The bucket, server or repository."""
        return bucket(self.parts[0][:-1], "/".join(self.parts[1 : self._own]))

    @property
    def key(self) -> str:
        """The name in the bucket, without slashes at its ends."""
        return "/".join(self.parts[self._own :])

    def _entry(self) -> Entry | None:
        return self.bucket.find(self.key) if self.key else None

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is an object of this name."""
        return self._entry() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there are objects below this name."""
        return len(self.parts) >= self._own and self.bucket.is_directory(self.key)

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a file or a directory."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """A store has no links."""
        return False

    def is_mount(self) -> bool:
        """A store has no mounts."""
        return False

    def iterdir(self) -> Generator[Self, None, None]:
        """Yield what lies below.

        Raises:
            NotADirectoryError: nothing does.
        """
        if not self.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self))
        for name in self.bucket.names(self.key):
            yield self / name

    def glob(self, pattern: str, **_: Any) -> Iterator[Self]:  # type: ignore[override]  # the arguments differ by version
        """Yield what lies below and has a matching name; a pattern of one level."""
        if self.is_dir():
            for name in self.bucket.names(self.key):
                if fnmatchcase(name, pattern):
                    yield self / name

    def rglob(self, pattern: str, **_: Any) -> Iterator[Self]:  # type: ignore[override]
        """Yield what lies at any depth below and has a matching name."""
        if self.is_dir():
            for child in self.iterdir():
                if fnmatchcase(child.name, pattern):
                    yield child
                yield from child.rglob(pattern)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Ask the store for the size and the change of an object.

        Raises:
            OSError: there is none, or the store does not answer.
        """
        found = self.bucket.head(self.key) if self.key else None
        if found is None and self.is_dir():
            return _status(stat.S_IFDIR | 0o755, Entry(0, "", 0))
        return self._status(found)

    def lstat(self) -> os.stat_result:
        """Return size and change as the listing has them."""
        return self._status(self._entry())

    def _status(self, entry: Entry | None) -> os.stat_result:
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return _status(stat.S_IFREG | 0o644, entry)

    def absolute(self) -> Self:
        """Return the URL itself."""
        return self

    def resolve(self, strict: bool = False) -> Self:
        """Return the URL without ``..``; a store has no links."""
        if ".." not in self.parts:
            return self
        return type(self)(*self.parts[: self._own], posixpath.normpath(f"/{self.key}").lstrip("/"))

    def is_absolute(self) -> bool:
        """Whether it starts with a scheme."""
        return self.parts[:1] != () and self.parts[0].endswith(":")

    def read_bytes(self) -> bytes:
        """Return the object.

        Raises:
            OSError: there is none, or the store does not answer.
        """
        with self.unbuffered() as file:
            return file.readall()

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        """Return the object as text; errors of `read_bytes`."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def unbuffered(self, stop: int | None = None) -> io.RawIOBase:
        return _File(self.bucket, self.key, self._opened(), stop)

    def mapped(self) -> _Mapped:
        entry = self._opened()
        if not entry.size:
            raise ValueError("the file is empty")
        return _Mapped(self.bucket, self.key, entry)

    def kvstore(self) -> dict[str, Any]:
        return self.bucket.kvstore(f"{self.key}/" if self.key else "")

    def _opened(self) -> Entry:
        entry = self._entry()
        if entry is None:
            if self.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return entry


def _status(mode: int, entry: Entry) -> os.stat_result:
    seconds = entry.modified // 10**9
    times = {"st_mtime_ns": entry.modified, "st_ctime_ns": entry.modified}
    inode = int.from_bytes(entry.etag.encode()[:32], "little")  # changes with the content
    return os.stat_result((mode, inode, 0, 1, 0, 0, entry.size, seconds, seconds, seconds), times)


class _File(io.RawIOBase):
    """An opened object. What is read in order is requested ahead, in requests that grow up to `MOST` bytes."""

    def __init__(self, place: Bucket | Repository, key: str, entry: Entry, stop: int | None) -> None:
        self._bucket, self._key, self._entry = place, key, entry
        self._stop = entry.size if stop is None else min(stop, entry.size)
        self._at = self._start = 0
        self._window = memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._entry.size}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer as far as the object goes."""
        with memoryview(buffer) as view, view.cast("B") as out:
            done = 0
            while done < len(out) and self._at < self._entry.size:
                offset = self._at - self._start
                if not 0 <= offset < len(self._window):
                    self._request(len(out) - done)
                    continue
                part = self._window[offset : offset + len(out) - done]
                out[done : done + len(part)] = part
                done, self._at = done + len(part), self._at + len(part)
            return done

    def _request(self, wanted: int) -> None:
        follows = bool(self._window) and self._at == self._start + len(self._window)
        size = max(FIRST, min(wanted, MOST), min(2 * len(self._window), MOST) if follows else 0)
        stop = min(self._at + size, max(self._stop, self._at + min(wanted, MOST)), self._entry.size)
        self._window = memoryview(b"")  # free it before the next one comes
        self._start, self._window = self._at, self._bucket.read(self._key, self._at, stop, self._entry)


class _Mapped:
    """The bytes of an object as a sequence, read in blocks of which the last ones are kept."""

    def __init__(self, place: Bucket | Repository, key: str, entry: Entry) -> None:
        self._bucket, self._key, self._entry = place, key, entry
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._entry.size

    def __getitem__(self, at: Any, /) -> Any:
        if isinstance(at, int):
            return self._block(at // FIRST)[at % FIRST]
        start, stop, _ = at.indices(len(self))
        if stop - start > FIRST:
            whole = io.BytesIO()
            for begin in range(start, stop, MOST):
                whole.write(self._bucket.read(self._key, begin, min(begin + MOST, stop), self._entry))
            return whole.getvalue()
        blocks = range(start // FIRST, -(-stop // FIRST))
        joined = b"".join(map(self._block, blocks))
        return joined[start - blocks.start * FIRST : stop - blocks.start * FIRST]

    def close(self) -> None:
        self._blocks.clear()

    def _block(self, number: int) -> bytes:
        with self._lock:
            if number not in self._blocks:
                start = number * FIRST
                stop = min(start + FIRST, len(self))
                self._blocks[number] = bytes(self._bucket.read(self._key, start, stop, self._entry))
                if len(self._blocks) > _KEPT:
                    self._blocks.popitem(last=False)
            return self._blocks[number]
