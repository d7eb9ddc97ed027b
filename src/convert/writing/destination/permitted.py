"""Whether OUT may be written, and what an error of the system while it is written says."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from convert.core.errors import OutputError
from convert.core.findings import Finding
from convert.core.system.regular_file import ObjectPath
from convert.stores import located


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


def require_text_file(out: Path) -> None:
    """Check that `atomic.write_text` can write a file, without writing anything.

    Raises:
        OutputError: as `atomic.write_text`.
    """
    refuse_existing(out, overwrite=True, directory=False)


def appeared(out: Path) -> OutputError:
    return OutputError(
        Finding(
            "output-changed",
            "another program created it while this run was writing; it is kept",
            path=str(out),
            fix="give another name, or run again with --overwrite",
        )
    )


def _cwd() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # removed under this process
        return Path("/")
