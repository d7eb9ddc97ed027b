"""An output appears complete or not at all: it is written to a temporary, synced, then renamed in one step.

The temporary is ``.NAME.tmp-HOST-RANDOM`` in the directory of OUT, because a rename is atomic only within one file
system. Its writer holds a lock on it (``flock``). The kernel drops the lock when the process dies, however it dies.
So the next run for the same OUT on the same machine can tell the temporary of a killed run from that of a running one,
and removes it. The host is part of the name because some network file systems do not share locks.

With `keep`, an interrupted run leaves its temporary and the journal beside it (``NAME.journal``, see `journal`), and the next
one continues it. It may be of another host: both would write the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from convert.core.errors import OutputError
from convert.core.findings import Finding
from convert.core.system import file_calls, signals
from convert.core.system.regular_file import close
from convert.writing.destination.permitted import appeared, os_errors, real, refuse_existing

_ATTEMPTS = 10
_LOCK_WAIT = 10.0  # seconds; a job ends at its next leaf when its batch was killed


class AtomicOutput:
    """The temporary for an output, and the step that renames it.

    Attributes:
        out: the output, with symbolic links resolved: a link stays, and its target is replaced.
        path: the temporary, a file or a directory.
        directory: whether `path` is a directory.
        adopted: whether an earlier run made the temporary.
    """

    def __init__(self, out: Path, *, directory: bool, overwrite: bool, keep: bool = False) -> None:
        """Check that `out` may be written, remove temporaries of killed runs, and create the temporary.

        Args:
            keep: whether to continue the temporary of an earlier run, and to leave it when this one is interrupted.

        Raises:
            OutputError: as `refuse_existing`, or the parent directory is not writable.
        """
        self.out = real(out)
        self.directory = directory
        self.overwrite = overwrite
        self._fd = -1
        refuse_existing(out, overwrite, directory=directory)
        self.adopted = keep and self._adopt()
        with suppress(OSError):  # a stale temporary does no harm
            _remove_stale(self.out)
        if not self.adopted:
            refuse_existing(out, overwrite, directory=directory)  # a run that was waited for may have written it
            with os_errors(self.out):
                self._make()
        if keep:
            signals.remove_cleanup(self._remove)
            signals.rest = "what is done is kept; continue with --resume"

    @property
    def journal(self) -> Path:
        """The journal of the temporary."""
        return _journal(self.path)

    def _adopt(self) -> bool:
        """Lock the temporary of an earlier run that has a journal. Return whether there is one.

        Raises:
            OutputError: another run is writing it.
        """
        pattern = re.compile(re.escape(f".{self.out.name}.tmp-") + "[0-9a-f]{6}-[0-9a-f]{8}")
        with os_errors(self.out):
            found = [path for path in self.out.parent.iterdir() if pattern.fullmatch(path.name)]
            found = [path for path in found if _journal(path).is_file() and path.is_dir() == self.directory]
        for path in sorted(found, key=lambda path: _journal(path).stat().st_mtime_ns, reverse=True):
            try:
                fd = os.open(path, os.O_RDONLY if self.directory else os.O_RDWR)
            except FileNotFoundError:  # its run has published it meanwhile
                continue
            if not _lock(fd, _LOCK_WAIT):
                close(fd)
                problem, fix = "another run is writing it", "wait for its end, or end it"
                raise OutputError(Finding("output-changed", problem, path=str(self.out), fix=fix))
            if not file_calls.is_at(fd, path):
                close(fd)
                continue
            self.path, self._fd = path, fd
            return True
        return False

    def _make(self) -> None:
        for _ in range(_ATTEMPTS):
            self.path = self.out.parent / f"{_prefix(self.out)}{secrets.token_hex(4)}"
            signals.add_cleanup(self._remove)
            try:
                if self.directory:
                    self.path.mkdir()
                    self._fd = os.open(self.path, os.O_RDONLY)
                else:
                    self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                with suppress(OSError):  # without locks, temporaries of killed runs stay
                    fcntl.flock(self._fd, fcntl.LOCK_EX)
                if file_calls.is_at(self._fd, self.path):
                    return
                self._close()  # another run removed it as stale before it was locked
            except FileExistsError:
                signals.remove_cleanup(self._remove)
                continue
            except BaseException:
                self._remove()
                signals.remove_cleanup(self._remove)
                raise
        raise OutputError(
            Finding(
                "output-changed",
                "other runs keep removing the temporary file of this run",
                path=str(self.out),
                fix="run one at a time",
            )
        )

    def publish(self, ours: Callable[[str], bool]) -> None:
        """Rename the temporary to `out`. After a crash or an error, `out` is the old output or the new one.

        An overwritten directory keeps its other entries. They are hard-linked into the temporary first, or copied where
        links are not possible; then both directories are exchanged. Where the file system cannot exchange them (NFS,
        macOS), the old one is renamed to ``.NAME.old-RANDOM`` and the new one to OUT. A crash between these two renames
        leaves no OUT, and the old output under that name; no later run removes it.

        Args:
            ours: returns whether an entry of the overwritten directory belongs to its model, and must go.

        Raises:
            OutputError: another program created `out` meanwhile, or the system refused.
        """
        out = self.out
        with signals.uninterrupted(), os_errors(out):
            if not self.directory:
                self._publish_file()
            elif not self.overwrite or not out.is_dir() or not any(out.iterdir()):
                try:
                    self.path.rename(out)  # succeeds onto nothing or an empty directory
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                        raise
                    raise appeared(out) from None
            else:
                self._replace_directory(ours)
            with suppress(OSError):  # a later run removes it
                self.journal.unlink(missing_ok=True)
            self._close()
        try:
            file_calls.sync_directory(out.parent)
        except OSError as error:
            if error.errno in file_calls.UNSUPPORTED:  # some network file systems sync no directories
                return
            raise OutputError(
                Finding(
                    "output-not-synced",
                    "is complete, but its directory could not be synced",
                    path=str(out),
                    expected="its name on the disk",
                    got=error.strerror or str(error),
                    fix="check the disk, then `convert check`, or write elsewhere",
                )
            ) from error

    def _publish_file(self) -> None:
        if self.overwrite:
            self.path.replace(self.out)
            return
        try:
            os.link(self.path, self.out)  # unlike a rename, it fails if something is there
        except FileExistsError:
            raise appeared(self.out) from None
        except OSError:  # no hard links here
            if self.out.exists():
                raise appeared(self.out) from None
            self.path.replace(self.out)
        else:
            with suppress(OSError):  # the output is complete; a later run removes the other name
                self.path.unlink()

    def _replace_directory(self, ours: Callable[[str], bool]) -> None:
        for entry in sorted(self.out.iterdir()):
            if ours(entry.name) or os.path.lexists(self.path / entry.name):  # a new file takes the place of an old one
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, self.path / entry.name, symlinks=True, copy_function=file_calls.link)
            else:
                file_calls.link(entry, self.path / entry.name)
        shutil.copymode(self.out, self.path)
        file_calls.sync_directory(self.path)
        if file_calls.exchange(self.path, self.out):
            old = self.path
        else:
            old = self.out.parent / f".{self.out.name}.old-{secrets.token_hex(4)}"
            try:
                self.out.rename(old)
                self.path.rename(self.out)
            except BaseException:
                if old.exists() and not self.out.exists():
                    old.rename(self.out)
                raise
        file_calls.remove(old)

    def discard(self, *, keep: bool = False) -> None:
        """Remove the temporary, or leave it for the next run. Does nothing after `publish`."""
        if self._fd >= 0:
            if not keep:
                self._remove()
            self._close()

    def _remove(self) -> None:
        file_calls.remove(self.path)
        file_calls.remove(self.journal)

    def _close(self) -> None:
        signals.remove_cleanup(self._remove)
        descriptor, self._fd = self._fd, -1
        close(descriptor)


def write_text(out: str | Path, text: str) -> None:
    """Write a text file atomically; an existing file is replaced.

    Raises:
        OutputError: `out` is a directory, its parent is missing, or the system refused.
    """
    output = AtomicOutput(Path(out), directory=False, overwrite=True)
    try:
        with os_errors(output.out), output.path.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        output.publish(lambda name: False)
    finally:
        output.discard()


def _lock(fd: int, seconds: float) -> bool:
    """Lock a temporary; wait for a job whose batch was killed. Return False where another run holds it."""
    stop = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= stop:
                return False
            signals.check()
            time.sleep(0.05)
        except OSError:  # no locks here
            return True
        else:
            return True


def _journal(temporary: Path) -> Path:
    return temporary.with_name(f"{temporary.name}.journal")


def _prefix(out: Path) -> str:
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]
    return f".{out.name}.tmp-{host}-"


def _remove_stale(out: Path) -> None:
    pattern = re.compile(re.escape(_prefix(out)) + r"[0-9a-f]{8}(\.journal)?")
    for path in out.parent.iterdir():
        if (found := pattern.fullmatch(path.name)) is None:
            continue
        if found[1]:  # goes with its temporary
            if not os.path.lexists(path.with_suffix("")):
                file_calls.remove(path)
            continue
        with suppress(OSError):  # locked by its writer, removed meanwhile, or owned by another user
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if file_calls.is_at(fd, path):
                    file_calls.remove(path)
                    file_calls.remove(_journal(path))
            finally:
                close(fd)
