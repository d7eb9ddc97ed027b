"""The journal of an unfinished output: which tensors are complete, so that `--resume` continues with the others.

On a disk it lies beside the temporary (see `atomic`) and goes with it. Each line is complete or ignored. A line is written when the
bytes are in the page cache, and not synced: a killed process loses nothing, and after a power cut the digests tell what was lost.
In a store, its lines are those of objects (`stores.unfinished`).
The first line says of what conversion the output is. Tensors of two conversions are never mixed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from convert.core.errors import OutputError
from convert.core.findings import Finding
from convert.core.system.regular_file import close, read_regular

_MEANING = {
    "converter": "another version of convert",
    "rules_sha256": "other rules",
    "source": "the checkpoint has changed since",
    "layout": "another --max-shard-size",
    "plan": "another plan",
    "dtype": "another --dtype",
    "settings": "another --set",
    "target": "another --to",
    "tokenizer": "other files of --tokenizer",
}
_UNFINISHED = "the unfinished output", "start again without --resume, which removes it"
MAX_BYTES = 1 << 30


def refuse_other(out: Path, differing: list[str], what: str, fix: str) -> OutputError:
    """Return the error for an output that belongs to another conversion.

    Args:
        differing: keys of `identity`.
        what: the output, such as ``the unfinished output``.
        fix: the next step.
    """
    meanings = ", ".join(_MEANING.get(key, f"other {key.replace('_', ' ')}") for key in differing)
    return OutputError(
        Finding(
            "resume-mismatch",
            f"{what} is of another conversion: {meanings}",
            path=str(out),
            fix=fix,
            data={"differs": differing},
        )
    )


class Lines(Protocol):
    """Where the lines of a journal are."""

    def read(self) -> list[Any]:
        """Return the lines that are complete."""

    def append(self, line: object) -> None:
        """Add a line. Called from several threads."""

    def close(self) -> None:
        """End; what was added stays."""


@dataclass
class Journal:
    """An opened journal.

    Attributes:
        lines: where it is.
        tensors: name -> digest of the tensors that an earlier run completed.
        leaves: name -> digest of the leaves that it read to their end.
        notes: lines of other kinds, of the place of the output.
        out: the output, for messages.
        fixed: whether a tensor must get the digest that an earlier run recorded, as a part of it may stay.
    """

    lines: Lines
    out: Path
    fixed: bool = False
    tensors: dict[str, str] = field(default_factory=dict)
    leaves: dict[str, str] = field(default_factory=dict)
    notes: list[list[Any]] = field(default_factory=list)

    @classmethod
    def start(cls, lines: Lines, of: Mapping[str, str], *, out: Path, fixed: bool = False) -> Journal:
        """Open the journal of an output that is begun or continued.

        Args:
            lines: its place.
            of: the `identity` of this conversion (`conversion_identity`).
            out, fixed: attributes of the journal.

        Raises:
            OutputError: the output is of another conversion. It stays as it is.
        """
        journal = cls(lines, out, fixed)
        first, *rest = lines.read() or [{}]
        differing = sorted(key for key in {*of, *first} if of.get(key) != first.get(key)) if first else []
        if differing:
            lines.close()
            raise refuse_other(out, differing, *_UNFINISHED)
        for line in rest:
            match line:
                case ["tensor", name, digest]:
                    journal.tensors[name] = digest
                case ["leaf", name, digest]:
                    journal.leaves[name] = digest
                case _:
                    journal.notes.append(line)
        if not first:
            lines.append(dict(of))
        return journal

    @property
    def empty(self) -> bool:
        """Whether no tensor is complete."""
        return not self.tensors

    def tensor(self, name: str, digest: str) -> None:
        """Record a tensor whose bytes are all written.

        Raises:
            OutputError: it has other values than in the run that is continued.
        """
        if self.fixed and self.tensors.get(name, digest) != digest:
            raise refuse_other(self.out, ["source"], *_UNFINISHED)
        self.tensors[name] = digest
        self.lines.append(["tensor", name, digest])

    def leaf(self, name: str, digest: str) -> None:
        """Record a leaf that was read to its end."""
        self.lines.append(["leaf", name, digest])

    def note(self, *line: object) -> None:
        """Record something of the place of the output."""
        self.lines.append(list(line))

    def close(self) -> None:
        """End."""
        self.lines.close()


class FileLines:
    """The lines of a file."""

    def __init__(self, path: Path, adopted: bool) -> None:
        """Open the file; cut off what an earlier run did not write to its end.

        Args:
            adopted: whether an earlier run wrote the temporary; else its lines do not count.
        """
        self._read, size = _read(path) if adopted else ([], 0)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._fd, size)

    def read(self) -> list[Any]:
        return self._read

    def append(self, line: object) -> None:
        """Add a line with one call, so that lines of several threads do not mix."""
        os.write(self._fd, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            close(descriptor)


def _read(path: Path) -> tuple[list[Any], int]:
    """Read the lines and the bytes that they take."""
    try:
        content = read_regular(path, MAX_BYTES)
    except OSError:
        return [], 0
    return complete_lines(content)


def complete_lines(content: bytes) -> tuple[list[Any], int]:
    """Return the lines of a journal and the bytes that they take: nothing after a line that is cut off or damaged."""
    lines: list[Any] = []
    size = 0
    for line in content.splitlines(keepends=True):
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(value, list if size else dict):
            break
        lines.append(value)
        size += len(line)
    return lines, size
