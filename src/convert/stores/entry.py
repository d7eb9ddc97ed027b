"""What a listing says of an object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """An object.

    Attributes:
        size: in bytes.
        etag: changes with its content; empty where the store gives none.
        modified: when, in nanoseconds.
    """

    size: int
    etag: str
    modified: int
