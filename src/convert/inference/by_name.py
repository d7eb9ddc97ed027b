"""The arrays of a pytree by name: what a model returns, and the leaves of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from convert.checkpoints.formats.skeleton import path_keys
from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.nnx_names import without_value

Arrays = Mapping[str, Any]


def outputs_by_name(outputs: Any) -> Arrays:
    """Return the arrays that a model returns, by name; what is no array, such as a cache, is left out.

    One array is ``output``. Those of a tuple are ``output.0``, ..., and a dict has its own names; inside one another the names are
    joined: ``output.1.0``, ``state.h``.
    """
    return {name: value for name, value in _named(outputs) if hasattr(value, "shape")}


def require_outputs_by_name(outputs: Any, path: str) -> Arrays:
    """Return the outputs of the JAX function by name, as `outputs_by_name` does.

    Raises:
        ConvertError: something is no array, or two have one name: it would not be compared.
    """
    found: dict[str, Any] = {}
    for name, value in _named(outputs):
        if not hasattr(value, "shape") or name in found:
            got = f"two outputs of the name {name}" if name in found else f"{type(value).__name__} as {name}"
            raise _invalid(path, "arrays, alone or in tuples, lists and dicts", got)
        found[name] = value
    return found


def _named(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a model returns, with its names; None is nothing."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _named(part, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, tuple | list):
        for k, part in enumerate(value):
            yield from _named(part, f"{prefix or 'output'}.{k}")
    elif value is not None:
        yield prefix or "output", value


def leaves_by_name(tree: Any, path: str = "") -> Arrays:
    """Return the arrays of a pytree, such as ``jax.eval_shape`` returns, by the names that a checkpoint gives them.

    Args:
        path: where the tree comes from, for errors.

    Raises:
        ConvertError: it has something else than arrays, or nothing.
    """
    from jax.tree_util import tree_leaves_with_path

    found = {}
    for keys, leaf in tree_leaves_with_path(tree):
        if callable(leaf):  # an activation that Equinox keeps beside the arrays; no checkpoint has it
            continue
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise _invalid(path, "a tree of arrays, as jax.eval_shape returns it", type(leaf).__name__)
        found["/".join(path_keys(keys))] = leaf
    if not found:
        raise _invalid(path, "a tree of arrays, as jax.eval_shape returns it", "an empty one")
    return {name: found[full] for full, name in without_value(found).items()}


def shapes_by_name(shapes: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters by name, of these or of a tree of arrays.

    >>> shapes_by_name({"dense/kernel": (2, 3)})
    {'dense/kernel': (2, 3)}

    Raises:
        ConvertError: they are neither.
    """
    if are_sizes(shapes):
        return sizes_by_name(shapes, "shapes")
    return {name: tuple(leaf.shape) for name, leaf in leaves_by_name(shapes, "shapes").items()}


def are_sizes(shapes: Any) -> bool:
    """Whether shapes are tuples of sizes by name, and no tree of arrays."""
    return isinstance(shapes, Mapping) and bool(shapes) and all(_is_shape(shape) for shape in shapes.values())


def sizes_by_name(sizes: Mapping[str, Sequence[int]], path: str) -> dict[str, tuple[int, ...]]:
    """Return tuples of sizes by name.

    Raises:
        ConvertError: a size is below 0.
    """
    for name, shape in sizes.items():
        if min(shape, default=0) < 0:
            raise _invalid(path, f"sizes of 0 or more for {name!r}", str(list(shape)))
    return {name: tuple(shape) for name, shape in sizes.items()}


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(size, int) for size in value)


def _invalid(path: str, expected: str, got: str) -> ConvertError:
    return ConvertError(
        Finding("reference-invalid", path=path, expected=expected, got=got, fix="see docs/guides/infer.md")
    )
