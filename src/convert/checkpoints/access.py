"""Opens the files of a checkpoint: regular files that lie inside of it.

A downloaded checkpoint is not trusted. A link in it could lead to any file of this machine, whose values would end up in
the output. A FIFO would wait for a writer, and a device has no end.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from convert.checkpoints.errors import corrupt, link_refused, parse_json, unreadable
from convert.core.system.regular_file import ObjectPath, not_regular, open_regular, size_of

MOST_JSON = 64 << 20  # bytes of an index of shards or of a skeleton; 100 per leaf are usual
_FOLLOW = "copy the file into the checkpoint, or pass --follow-links if you trust the checkpoint"
# The folder of one repository in the cache of huggingface_hub (file_download.py, repo_folder_name). The files in its
# `snapshots` are links to its `blobs`.
_HUB = re.compile(r"[a-z]+s--.+")
# Reasons that say something about the path; others, such as EIO and EMFILE, do not.
_NOT_THERE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EINVAL)  # fmt: skip


@dataclass(frozen=True)
class Boundary:
    """Where the files of a checkpoint may lie.

    A path is inside if all links in it lead to the directory of the checkpoint, or to the folder of the same repository in
    the cache of the Hugging Face Hub. The check is made before a file is opened. A program that writes to the checkpoint at
    the same time can replace a file between the two.

    Attributes:
        given: the path of the checkpoint that the user gave. It may be a link itself.
        follow_links: whether links may lead to any place.
    """

    given: Path
    follow_links: bool = False

    def open(self, path: Path) -> BinaryIO:
        """Open a file for reading.

        Raises:
            CheckpointError: a link in the path leads out of the checkpoint, or the file is no regular one or cannot be read.
        """
        self.check(path)
        return opened(path)

    def check(self, path: Path) -> None:
        """Check that no link in the path of a file or directory leads out of the checkpoint.

        Raises:
            CheckpointError: one does.
        """
        given = absolute(self.given)
        path = absolute(path)
        if self.follow_links or path == given:
            return
        home = given if given.is_dir() else given.parent
        roots = _roots(home)
        if _is_inside(path, roots):
            return
        problem = "this link leads out of the checkpoint"
        above = [parent for parent in path.parents if parent.is_relative_to(home) and parent != home]
        link = next(place for place in (*reversed(above), path) if not _is_inside(place, roots))
        raise link_refused(problem, link, expected=f"a file in {roots[0]}", got=str(_resolved(link)), fix=_FOLLOW)

    def around(self, directory: Path) -> Boundary:
        """Return a boundary that has `directory` inside, which may lie above the given path."""
        above = not absolute(directory).is_relative_to(absolute(self.given))
        return replace(self, given=directory) if above else self

    def check_file(self, path: Path) -> None:
        """Check a path that a library will open: that no link in it leads out, and that it is no FIFO or device.

        Raises:
            CheckpointError: the check fails. A path that does not exist passes.
        """
        self.check(path)
        try:
            if (kind := not_regular(path.stat().st_mode)) is not None:
                raise unreadable(path, kind)
        except OSError:
            return  # the library reports it

    def check_tree(self, directory: Path) -> None:
        """Check all files below a directory, as `check_file` does for one. One system call for each directory.

        Raises:
            CheckpointError: one check fails, or a directory cannot be listed.
        """
        self.check(directory)
        if isinstance(directory, ObjectPath):  # a store has neither links nor devices
            return
        pending, linked = [directory], set()
        while pending:
            place = pending.pop()
            try:
                entries = sorted(os.scandir(place), key=lambda entry: entry.name)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    continue
                raise unreadable(place, error) from None
            for entry in entries:
                path = place / entry.name
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif entry.is_symlink():
                    self.check_file(path)
                    if path.is_dir() and (real := _resolved(path)) not in linked:
                        linked.add(real)
                        pending.append(path)
                elif not entry.is_file(follow_symlinks=False):
                    self.check_file(path)

    def named(self, folder: Path, name: object) -> Path:
        """Return the path of `name` in `folder`. The name comes from the checkpoint.

        Raises:
            CheckpointError: it is not a plain name, or a link that leads out of the checkpoint.
        """
        if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\\0"):
            problem = (
                f"the checkpoint refers to {name!r:.200}, which is not a plain file name; such a path is not followed"
            )
            raise link_refused(problem, folder, fix="save the checkpoint again")
        self.check(folder / name)
        return folder / name


def absolute(path: Path) -> Path:
    """Return the absolute path without ``..``. The last link in it is not resolved: its name and its folder matter."""
    if ".." not in path.parts:
        return path.absolute()
    return path.resolve() if path.name == ".." else path.parent.resolve() / path.name


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise unreadable(path, error) from None


def _is_inside(path: Path, roots: tuple[Path, ...]) -> bool:
    real = _resolved(path)
    return any(real.is_relative_to(root) for root in roots)


def _roots(home: Path) -> tuple[Path, ...]:
    """Return the directories in which the files of a checkpoint in `home` may lie."""
    real = _resolved(home)
    hub = (parent.parent for parent in (real, *real.parents) if parent.name == "snapshots")
    return (real, *(folder for folder in hub if _HUB.fullmatch(folder.name)))


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading, wherever it lies.

    Raises:
        CheckpointError: the file cannot be opened.
    """
    try:
        return open_regular(path)
    except OSError as error:
        raise unreadable(path, error) from None


def read_json(file: BinaryIO, path: Path, most: int = MOST_JSON) -> Any:
    """Read an open JSON file of at most `most` bytes, and close it.

    Raises:
        CheckpointError: unreadable, too large, or not JSON.
    """
    with file:
        if (size := size_of(file)) > most:
            raise corrupt("the file is too large", path, expected=f"at most {most} bytes", got=f"{size} bytes")
        try:
            return parse_json(file.read(), path)
        except OSError as error:
            raise unreadable(path, error) from None
        except (ValueError, RecursionError) as error:
            raise corrupt(f"not valid JSON (truncated or corrupt): {error}", path) from None


def head(path: Path, nbytes: int = 64) -> bytes:
    """Read the first bytes of a regular file; none where there is none, or it may not be read.

    Raises:
        OSError: for another reason, such as a disk error.
    """
    try:
        with open_regular(path) as file:
            return file.read(nbytes)
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return b""


def children(directory: Path) -> list[Path]:
    """List a directory, sorted by name; empty where `directory` is not a directory, or may not be listed.

    Raises:
        OSError: for another reason, such as a disk error.
    """
    try:
        return sorted(directory.iterdir()) if directory.is_dir() else []
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return []
