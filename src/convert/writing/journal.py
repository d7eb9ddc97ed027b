"""The journal of an unfinished output: which tensors are complete, so that `--resume` continues with the others.

It lies beside the temporary (see `atomic`) and goes with it. Each line is complete or ignored. A line is written when the bytes
are in the page cache, and not synced: a killed process loses nothing, and after a power cut the digests tell what was lost.
The first line says of what conversion the temporary is. Tensors of two conversions are never mixed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass
class Journal:
    """An opened journal.

    Attributes:
        path: the file.
        tensors: name -> digest of the tensors that an earlier run completed.
        leaves: name -> digest of the leaves that it read to their end.
    """

    path: Path
    tensors: dict[str, str] = field(default_factory=dict)
    leaves: dict[str, str] = field(default_factory=dict)
    _fd: int = -1

    @classmethod
    def start(cls, path: Path, of: Mapping[str, str], *, adopted: bool, out: Path) -> Journal:
        """Open the journal of a temporary.

        Args:
            of: the `identity` of this conversion (`conversion_identity`).
            adopted: whether an earlier run made the temporary.
            out: the output, for the message.

        Raises:
            OutputError: the temporary is of another conversion. It stays as it is.
        """
        journal = cls(path)
        first, lines, size = _read(path) if adopted else ({}, [], 0)
        differing = sorted(key for key in {*of, *first} if of.get(key) != first.get(key)) if first else []
        if differing:
            raise refuse_other(
                out, differing, "the unfinished output", "start again without --resume, which removes it"
            )
        for kind, name, digest in lines:
            (journal.tensors if kind == "tensor" else journal.leaves)[name] = digest
        journal._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        os.ftruncate(journal._fd, size)
        if not first:
            journal._write(dict(of))
        return journal

    @property
    def empty(self) -> bool:
        """Whether no tensor is complete."""
        return not self.tensors

    def tensor(self, name: str, digest: str) -> None:
        """Record a tensor whose bytes are all written."""
        self.tensors[name] = digest
        self._write(["tensor", name, digest])

    def leaf(self, name: str, digest: str) -> None:
        """Record a leaf that was read to its end."""
        self._write(["leaf", name, digest])

    def close(self) -> None:
        """Close the file."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            close(descriptor)

    def _write(self, value: object) -> None:
        """Append a line with one call, so that lines of several threads do not mix."""
        os.write(self._fd, (json.dumps(value) + "\n").encode())


def _read(path: Path) -> tuple[dict[str, str], list[tuple[str, str, str]], int]:
    """Read the first line, the others, and the bytes that they take: nothing after a line that is cut off or damaged."""
    try:
        content = read_regular(path, MAX_BYTES)
    except OSError:
        return {}, [], 0
    first: dict[str, str] = {}
    lines: list[tuple[str, str, str]] = []
    size = 0
    for line in content.splitlines(keepends=True):
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(value, list if size else dict):
            break
        if size:
            lines.append((value[0], value[1], value[2]))
        else:
            first = dict(value)
        size += len(line)
    return first, lines, size
