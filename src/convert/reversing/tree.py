"""Nest the leaves of a checkpoint as its JAX code has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from convert.checkpoints.chunks import Box
from convert.checkpoints.source import Absent, Source
from convert.core.tensor_spec import TensorSpec

_EMPTY: dict[str, Callable[[], Any]] = {"empty dict": dict, "empty list": list, "empty tuple": tuple}


def nest(leaves: Iterable[tuple[tuple[str, ...], Any]], absent: Iterable[Absent] = ()) -> Any:
    """Nest values by their keys, as dicts; a tree of one leaf without a key is that leaf.

    >>> nest([(("a", "b"), 1), (("a", "c"), 2)], [Absent(("d",), "None")])
    {'a': {'b': 1, 'c': 2}, 'd': None}
    """
    tree: dict[str, Any] = {}
    empty = ((node.keys, _EMPTY.get(node.why, lambda: None)()) for node in absent)
    for keys, value in (*leaves, *empty):
        if not keys:
            return value
        inner = tree
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    return tree


def read_tree(source: Source, sharding: Any = None) -> Any:
    """Read all leaves as a tree.

    Args:
        sharding: a `jax.sharding.Sharding` of every leaf, or a function of its name and spec that returns one. None gives NumPy
            arrays.
    """
    place = sharding if callable(sharding) else lambda name, spec: sharding
    values = (
        (leaf.keys, source.read(name) if sharding is None else _placed(source, name, leaf.spec, place(name, leaf.spec)))
        for name, leaf in source.leaves.items()
    )
    return nest(values, source.absent)


def _placed(source: Source, name: str, spec: TensorSpec, sharding: Any) -> Any:
    """Make a `jax.Array`; each device gets its part, and only that part is computed."""
    import jax

    def part(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
        ranges = [range(*cut.indices(size)) for cut, size in zip(index or (), spec.shape, strict=True)]
        return source.read_box(name, Box(tuple(r.start for r in ranges), tuple(map(len, ranges))))

    return jax.make_array_from_callback(spec.shape, sharding, part)
