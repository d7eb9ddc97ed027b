"""Output that appears whole or not at all: written beside its place, synced, then moved there in one step.

The temporary is called ``.NAME.tmp-HOST-RANDOM`` and lies in the directory of OUT, because a rename is atomic only
within a file system. Its writer holds a lock on it (``flock``), which the kernel drops when the process dies, however
it dies; so the next run for the same OUT on the same machine can tell the leftovers of a killed one from a run that is
under way, and removes them. The host is part of the name because some network file systems do not pass locks on.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from convert.core.errors import OutputError

_ATTEMPTS = 10
_ZEROS = 8 << 20  # bytes written at once where the file system cannot reserve space
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def os_errors(out: Path, needed: int | None = None) -> Iterator[None]:
    """Turns the system's refusals into OutputErrors that say what to do; `needed` bytes if that is known."""
    free = shutil.disk_usage(out.parent).free if needed is not None else 0  # before anything is written
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            room = f": {needed:,} bytes are needed in {out.parent}, {free:,} are free" if needed is not None else ""
            raise OutputError(
                f"{out}: {reason}{room}; make room, or write elsewhere. An output that is overwritten stays until the "
                "new one is complete"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise OutputError(
                f"{out}: {reason}: {out.parent} must be writable, for the output is written beside its place first"
            ) from error
        raise OutputError(f"{out}: cannot be written: {reason}") from error


def real(path: Path) -> Path:
    """The whole path, symbolic links resolved.

    Raises:
        OutputError: it is relative, and the current directory does not exist any more.
    """
    try:
        return Path(os.path.realpath(path))
    except OSError as error:
        raise OutputError(
            f"{path}: the current directory cannot be told ({error.strerror}); give a whole path"
        ) from None


def refuse_existing(out: Path, overwrite: bool, *, directory: bool | None = None) -> None:
    """Checks that something may be written at `out`.

    Args:
        directory: whether `out` will be a directory; None: unless its name ends in ``.safetensors``.

    Raises:
        OutputError: `out` exists and `overwrite` is not set, is of the other kind, cannot be replaced, or its parent is
            missing.
    """
    directory = out.suffix != ".safetensors" if directory is None else directory
    out = real(out)
    if not out.name:
        raise OutputError(f"{out}: not a name that can be written; give a name below it")
    if not out.parent.is_dir():
        raise OutputError(f"{out}: the directory {out.parent} does not exist; create it first")
    if not os.path.lexists(out):
        return
    if not directory:
        if out.is_dir():
            raise OutputError(f"{out}: is a directory; give another name for the file")
        if not out.is_file():
            raise OutputError(f"{out}: is not a regular file; give another name")
        if not overwrite:
            raise OutputError(f"{out}: exists and is kept; replace it with --overwrite, or give another name")
        return
    if not out.is_dir():
        raise OutputError(f"{out}: is a file; give a directory, or a name that ends in .safetensors for one file")
    with os_errors(out):
        empty = not any(out.iterdir())
    if not empty and not overwrite:
        raise OutputError(f"{out}: exists and is not empty; replace its model with --overwrite, or give another name")
    if out.is_mount():
        raise OutputError(f"{out}: is a mount point, which cannot be replaced; give a directory in it: {out / 'model'}")
    if _cwd().is_relative_to(out):
        raise OutputError(f"{out}: holds the current directory, and is replaced as a whole; run from elsewhere")


class Stage:
    """The temporary beside `out`, and the step that puts it in place.

    Attributes:
        out: the output's place, symbolic links resolved, so that a link stays and what it points to is replaced.
        path: the temporary: a file, or a directory to put files into.
        directory: which of both.
    """

    def __init__(self, out: Path, *, directory: bool, overwrite: bool) -> None:
        """Checks that `out` may be written, removes what killed runs left, and makes the temporary.

        Raises:
            OutputError: `out` exists and `overwrite` is not set, is of the other kind, cannot be replaced, or its
                parent is missing or not writable.
        """
        self.out = real(out)
        self.directory = directory
        self.overwrite = overwrite
        self._fd = -1
        refuse_existing(out, overwrite, directory=directory)
        with suppress(OSError):  # tidiness only
            _remove_stale(self.out)
        with os_errors(self.out):
            self._make()

    def _make(self) -> None:
        for _ in range(_ATTEMPTS):
            self.path = self.out.parent / f"{_prefix(self.out)}{secrets.token_hex(4)}"
            try:
                if self.directory:
                    self.path.mkdir()
                    self._fd = os.open(self.path, os.O_RDONLY)
                else:
                    self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                with suppress(OSError):  # without locks nobody's leftovers are removed
                    fcntl.flock(self._fd, fcntl.LOCK_EX)
                if _is_at(self._fd, self.path):
                    return
                self._close()  # another run took it for stale between its creation and its lock
            except FileExistsError:
                continue
            except BaseException:
                _remove(self.path)
                raise
        raise OutputError(f"{self.out}: other runs keep removing this one's temporary; run one at a time")

    def publish(self, ours: Callable[[str], bool]) -> None:
        """Puts the temporary in the output's place. Whatever happens, `out` is the old output or the new one.

        A directory that is overwritten keeps its other entries: they are hard-linked into the temporary first (copied
        where links are not possible), then both directories change places. Where the file system cannot exchange them
        (NFS, macOS), the old one is moved to ``.NAME.old-RANDOM`` and the new one into its place; a crash between these
        two renames leaves no OUT, and the old one under that name, which no later run removes.

        Args:
            ours: tells, by name, an entry of an overwritten directory that belongs to its model and must go.

        Raises:
            OutputError: something appeared at `out` meanwhile, or the system refuses.
        """
        out = self.out
        with os_errors(out):
            if not self.directory:
                self._publish_file()
            elif not self.overwrite or not out.is_dir() or not any(out.iterdir()):
                try:
                    self.path.rename(out)  # succeeds onto nothing or an empty directory
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                        raise
                    raise OutputError(f"{out}: appeared while this run was writing, and is kept") from None
            else:
                self._replace_directory(ours)
            self._close()
            sync_directory(out.parent)

    def _publish_file(self) -> None:
        if self.overwrite:
            self.path.replace(self.out)
            return
        try:
            os.link(self.path, self.out)  # unlike a rename, it fails if something is there
        except FileExistsError:
            raise OutputError(f"{self.out}: appeared while this run was writing, and is kept") from None
        except OSError:  # no hard links here
            if self.out.exists():
                raise OutputError(f"{self.out}: appeared while this run was writing, and is kept") from None
            self.path.replace(self.out)
        else:
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
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Removes the temporary. Does nothing after `publish`."""
        if self._fd >= 0:
            _remove(self.path)
            self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def write_text(out: str | Path, text: str) -> None:
    """Writes a text file whole or not at all; one that is there already is replaced.

    Raises:
        OutputError: `out` is a directory, its parent is missing, or the system refuses.
    """
    stage = Stage(Path(out), directory=False, overwrite=True)
    try:
        with os_errors(stage.out), stage.path.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        stage.publish(lambda name: False)
    finally:
        stage.discard()


def allocate(fd: int, size: int) -> None:
    """Makes the file `size` bytes long and reserves them, so that a full disk is an OSError here and not a SIGBUS when
    the mapped file is written to."""
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:  # macOS
        pass
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    else:
        return
    at = 0
    while at < size:
        at += os.pwrite(fd, bytes(min(_ZEROS, size - at)), at)


def write_back(fd: int, start: int, size: int) -> None:
    """Begins to write a range of a file to the disk, without waiting for it. Only a hint: what fails here shows when the
    file is synced. Nothing is done where the system has no such call (Linux has: sync_file_range(2))."""
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(fd, ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def sync_directory(path: Path) -> None:
    """Makes the names in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _prefix(out: Path) -> str:
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]
    return f".{out.name}.tmp-{host}-"


def _remove_stale(out: Path) -> None:
    pattern = re.compile(re.escape(_prefix(out)) + "[0-9a-f]{8}")
    for path in out.parent.iterdir():
        if not pattern.fullmatch(path.name):
            continue
        with suppress(OSError):  # locked by its writer, gone by now, or another user's
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(fd, path):
                    _remove(path)
            finally:
                os.close(fd)


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
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names in one step. False where the system or the file system cannot."""
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
