"""Give a JAX model the leaves of a checkpoint by their names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from convert.checkpoints.formats.skeleton import path_keys
from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean

SHOWN = 5  # problems
OTHER_ROOT = "give `--root` and the model's tree the same beginning"


def fill_pytree(like: Any, leaves: Mapping[str, Any]) -> Any:
    """Return a pytree with the structure of `like` and the arrays of `leaves`.

    `like` is a model of Equinox or flax nnx, or the variables of linen or Haiku: with values, or as ``jax.eval_shape`` returns
    them. The name of an array is its path in the pytree, its keys joined by ``/``. For a variable of nnx it ends before ``/value``.

    What is no array stays: functions, numbers of Python, and PRNG keys with their counts (``nnx.RngState``). Leaves that `like`
    has no place for are not used.

    Examples:
        >>> fill_pytree({"dense": {"kernel": np.zeros((2, 3))}}, {"dense/kernel": np.ones((2, 3))})["dense"]["kernel"].sum()
        np.float64(6.0)

    Args:
        like: any pytree.
        leaves: the arrays, or tracers of JAX, by name: what a `Reference` and `infer` give to the JAX function.

    Raises:
        ConvertError: an array of `like` has no leaf (``leaf-missing``), or one of another shape (``shape-mismatch``). It lists the first ones.
    """
    from jax.tree_util import tree_flatten_with_path, tree_unflatten

    found, structure = tree_flatten_with_path(like, is_leaf=_is_random_state)
    values: list[Any] = []
    problems: list[Finding] = []
    for path, value in found:
        if _is_array(value) and not _is_random_state(value):
            full = "/".join(path_keys(path))
            name = full if full in leaves else full.removesuffix("/value")
            problems += _problems(name, value, leaves)
            value = leaves.get(name)
        values.append(value.copy() if _is_random_state(value) else value)  # a trace changes only what it has made
    if problems:
        count = f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}"
        problems.sort(key=lambda problem: OTHER_ROOT not in problem.fix)  # one mistake, that says the most
        more = (f"  ... and {len(problems) - SHOWN} more",) if len(problems) > SHOWN else ()
        raise ConvertError(*problems[:SHOWN], headline=f"the leaves do not fit the model: {count}", lines=more)
    return tree_unflatten(structure, values)


def _problems(name: str, value: Any, leaves: Mapping[str, Any]) -> Iterator[Finding]:
    if name not in leaves:
        expected = f"a leaf of shape {_shape(value)} with this path"
        yield Finding("leaf-missing", path=name, expected=expected, got="none", fix=_fix(name, leaves))
    elif tuple(leaves[name].shape) != tuple(value.shape):
        fix = "make the model with the sizes of the checkpoint"
        expected = f"the shape of the model's array, {_shape(value)}"
        yield Finding("shape-mismatch", path=name, expected=expected, got=_shape(leaves[name]), fix=fix)


def _fix(name: str, leaves: Mapping[str, Any]) -> str:
    for leaf in leaves:
        if leaf.endswith(f"/{name}") or name.endswith(f"/{leaf}"):
            return f"the leaf is {leaf!r}: {OTHER_ROOT}"
    return did_you_mean(name, leaves) or f"the leaves are {', '.join(map(repr, list(leaves)[:3]))}, ..."


def _shape(value: Any) -> str:
    return f"[{','.join(map(str, value.shape))}]"


def _is_array(value: Any) -> bool:
    """Whether a value is an array of numbers. The dtype of a PRNG key is not one of NumPy."""
    return hasattr(value, "shape") and isinstance(getattr(value, "dtype", None), np.dtype)


def _is_random_state(value: Any) -> bool:
    """Whether a value is a variable of nnx with a PRNG key or its count. They are never saved with the weights."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.RngState)
