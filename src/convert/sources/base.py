"""What a checkpoint is to the rest of the package: named leaves with specs, and a way to read one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.spec import TensorSpec


@dataclass(frozen=True)
class Leaf:
    """An array of the checkpoint's pytree.

    Attributes:
        keys: the path through the pytree, one string per level; keys may hold dots and slashes, sequence
            indices are decimal strings.
        spec: global shape and dtype.
    """

    keys: tuple[str, ...]
    spec: TensorSpec


@dataclass(frozen=True)
class Absent:
    """A node of the pytree that holds no array. `why` is ``None``, ``empty dict``, ``empty list``, ``string``, ..."""

    keys: tuple[str, ...]
    why: str


def name_leaves(leaves: Iterable[Leaf]) -> dict[str, Leaf]:
    """Names leaves by their keys joined with ``/``, in the order given.

    The flat keys of official Gemma releases (``transformer/layer_0/attn``) and the nested ones get the same names
    this way. Where two leaves of one tree would share a name, the slashes inside their keys are written ``\\/``.
    """
    leaves = list(leaves)
    names = Counter("/".join(leaf.keys) for leaf in leaves)
    named = {}
    for leaf in leaves:
        name = "/".join(leaf.keys)
        if names[name] > 1:
            name = "/".join(key.replace("/", "\\/") for key in leaf.keys)
        named[name] = leaf
    return named


class Source(ABC):
    """A checkpoint, opened: its leaves are known, none has been read.

    Attributes:
        path: the directory or file that holds the arrays (a step's item directory, not what the user typed).
        format: how it lies on disk, for people, such as ``Orbax, OCDBT, zarr``.
        leaves: name -> leaf, in the order of the tree.
        absent: nodes without an array.
        notes: what was decided on the way to `path` (which step, which item), for people.
        named: what the user called the checkpoint; None when it was opened by other means than `open_source`.
    """

    path: Path
    format: str
    leaves: Mapping[str, Leaf]
    absent: tuple[Absent, ...] = ()
    notes: tuple[str, ...] = ()
    named: Path | None = None

    @property
    def called(self) -> Path:
        """The checkpoint as the user called it, for messages."""
        return self.named or self.path

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The whole array called `name`, in C order, of the spec's shape and dtype. Safe to call from several threads.

        Raises:
            CheckpointError: a file is missing, truncated or corrupt; the message names the leaf and the file.
            KeyError: there is no such leaf.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves in memory."""
        return sum(leaf.spec.nbytes for leaf in self.leaves.values())
