"""An output appears complete or not at all: it is written to a temporary, synced, then renamed in one step.

The temporary is ``.NAME.tmp-HOST-RANDOM`` in the directory of OUT, because a rename is atomic only within one file
system. Its writer holds a lock on it (``flock``). The kernel drops the lock when the process dies, however it dies.
So the next run for the same OUT on the same machine can tell the temporary of a killed run from that of a running one,
and removes it. The host is part of the name because some network file systems do not share locks.

With `keep`, an interrupted run leaves its temporary and the journal beside it (``NAME.journal``, see `journal`), and the next
one continues it. It may be of another host: both would write the same bytes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from convert.core.errors import OutputError
from convert.core.findings import Finding
from convert.core.system import signals
from convert.core.system.regular_file import ObjectPath, close
from convert.stores import located

_ATTEMPTS = 10
_LOCK_WAIT = 10.0  # seconds; a job ends at its next leaf when its batch was killed
_ZEROS = 8 << 20  # bytes written at once where the file system cannot reserve space
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def os_errors(out: Path, needed: int | None = None, folder: Path | None = None) -> Iterator[None]:
    """Turn an OSError into an OutputError with the next step.

    Args:
        out: the output, for the message.
        needed: bytes that the output takes, where they are known.
        folder: where it takes them; None is that of the output.

    Raises:
        OutputError: the block raised OSError.
    """
    folder = folder or out.parent
    free = shutil.disk_usage(folder).free if needed is not None else 0  # before anything is written
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(
                Finding(
                    "disk-full",
                    reason,
                    path=str(out),
                    expected=f"{needed:,} free bytes in {folder}" if needed is not None else "",
                    got=f"{free:,}" if needed is not None else "",
                    fix="make room, or write elsewhere. An existing output stays until the new one is complete",
                )
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise OutputError(
                Finding(
                    "output-not-writable",
                    f"{reason}: the temporary file lies in {out.parent}",
                    path=str(out),
                    fix="make that directory writable, or write elsewhere",
                )
            ) from error
        fix = getattr(error, "fix", "")  # of a store
        raise OutputError(
            Finding("output-not-writable", f"cannot be written: {reason}", path=str(out), fix=fix)
        ) from error


def real(path: Path) -> Path:
    """Return the absolute path with symbolic links resolved.

    Raises:
        OutputError: `path` is relative, and the current directory no longer exists.
    """
    if isinstance(there := located(path), ObjectPath):
        return there.resolve()
    try:
        return Path(os.path.realpath(path))
    except OSError as error:
        raise OutputError(
            Finding(
                "output-not-writable",
                f"the current directory is not known ({error.strerror})",
                path=str(path),
                fix="give an absolute path",
            )
        ) from None


def refuse_url(path: Path) -> None:
    """Refuse a URL for what is written to a disk only.

    Raises:
        OutputError: it is one.
    """
    if isinstance(there := located(path), ObjectPath):
        problem, fix = "this is not written to a URL", "write to a disk, and copy it"
        raise OutputError(Finding("output-kind", problem, path=str(there), fix=fix))


def refuse_existing(out: Path, overwrite: bool, *, directory: bool | None = None, or_one_file: bool = True) -> None:
    """Check that `out` may be written.

    Args:
        overwrite: whether an existing output may be replaced.
        directory: whether `out` will be a directory; None means yes, unless its name ends in ``.safetensors``.
        or_one_file: whether another name would give one file.

    Raises:
        OutputError: `out` exists and `overwrite` is False, it is a file where a directory is needed or the reverse, it
            cannot be replaced, or its parent is missing or read-only.
    """

    def refuse(code: str, problem: str, fix: str) -> OutputError:
        return OutputError(Finding(code, problem, path=str(out), fix=fix))

    other = ", or a name ending in .safetensors for one file" if or_one_file else ""
    directory = out.suffix != ".safetensors" if directory is None else directory
    refuse_url(out)
    out = real(out)
    if not out.name:
        raise refuse("output-kind", "is a root directory", "give a name inside it")
    folder = out.parent
    if not folder.is_dir():
        raise refuse("output-not-writable", f"the directory {folder} does not exist", "create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise refuse("output-not-writable", f"the directory {folder} is not writable", "write elsewhere")
    if not os.path.lexists(out):
        return
    if not directory:
        if out.is_dir():
            raise refuse("output-kind", "is a directory", "give another name for the file")
        if not out.is_file():
            raise refuse("output-kind", "is not a regular file", "give another name")
        if not overwrite:
            raise refuse("output-exists", "exists and is kept", "replace it with --overwrite, or give another name")
        return
    if not out.is_dir():
        raise refuse("output-kind", "is a file", f"give a directory{other}")
    with os_errors(out):
        empty = not any(out.iterdir())
    if not empty and not overwrite:
        raise refuse(
            "output-exists", "exists and is not empty", "replace its model with --overwrite, or give another name"
        )
    if out.is_mount():
        raise refuse(
            "output-kind", "is a mount point, which cannot be replaced", f"give a directory in it: {out / 'model'}"
        )
    if _cwd().is_relative_to(out):
        raise refuse(
            "output-kind", "contains the current directory and would be replaced", "run from another directory"
        )


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
            if not _is_at(fd, path):
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
                if _is_at(self._fd, self.path):
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
            sync_directory(out.parent)
        except OSError as error:
            if error.errno in _UNSUPPORTED:  # some network file systems sync no directories
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
            if ours(entry.name):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, self.path / entry.name, symlinks=True, copy_function=_link)
            else:
                _link(entry, self.path / entry.name)
        shutil.copymode(self.out, self.path)
        sync_directory(self.path)
        if _exchange(self.path, self.out):
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
        _remove(old)

    def discard(self, *, keep: bool = False) -> None:
        """Remove the temporary, or leave it for the next run. Does nothing after `publish`."""
        if self._fd >= 0:
            if not keep:
                self._remove()
            self._close()

    def _remove(self) -> None:
        _remove(self.path)
        _remove(self.journal)

    def _close(self) -> None:
        signals.remove_cleanup(self._remove)
        descriptor, self._fd = self._fd, -1
        close(descriptor)


def require_text_file(out: Path) -> None:
    """Check that `write_text` can write a file, without writing anything.

    Raises:
        OutputError: as `write_text`.
    """
    refuse_existing(out, overwrite=True, directory=False)


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


def allocate(fd: int, start: int, size: int) -> None:
    """Reserve `size` bytes of the file from `start` on the disk, and extend it where it is shorter.

    A full disk is then an OSError here, not a SIGBUS when the mapped file is written.
    """
    try:
        os.posix_fallocate(fd, start, size)
    except AttributeError:  # macOS
        pass
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    else:
        return
    at, stop = start, start + size
    while at < stop:
        at += os.pwrite(fd, bytes(min(_ZEROS, stop - at)), at)


def write_back(fd: int, start: int, size: int) -> None:
    """Start to write a range of a file to the disk, without waiting (Linux, sync_file_range(2); a no-op elsewhere).

    It is only a hint: an error shows when the file is synced.
    """
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(fd, ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def appeared(out: Path) -> OutputError:
    return OutputError(
        Finding(
            "output-changed",
            "another program created it while this run was writing; it is kept",
            path=str(out),
            fix="give another name, or run again with --overwrite",
        )
    )


def sync_directory(path: Path) -> None:
    """Sync a directory, so that its names survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        close(fd)


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
                _remove(path)
            continue
        with suppress(OSError):  # locked by its writer, removed meanwhile, or owned by another user
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(fd, path):
                    _remove(path)
                    _remove(_journal(path))
            finally:
                close(fd)


def _cwd() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # removed under this process
        return Path("/")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    """Remove a file or a directory as far as possible, without an error."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        with suppress(OSError):  # rmtree does not ignore all errors
            shutil.rmtree(path, ignore_errors=True)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step. Return False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(b))
