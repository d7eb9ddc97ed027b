"""Names for checkpoints without names: a list of path, shape and dtype, in the order of the file.

`write_skeleton` runs where JAX is installed (``convert skeleton module:factory``); reading a skeleton needs only JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from convert.checkpoints.access import opened, read_json
from convert.core.errors import CheckpointError, ConvertError
from convert.core.findings import Finding
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, dtype_name
from convert.core.user_code import find_factory, signature_error, user_code_errors

_FORMAT = "convert skeleton 1"


@dataclass(frozen=True)
class SkeletonRecord:
    """One array of a skeleton. `spec` is None where only the name is known."""

    keys: tuple[str, ...]
    spec: TensorSpec | None = None


def read_skeleton(path: Path) -> tuple[SkeletonRecord, ...]:
    """Read the records of a skeleton file.

    Raises:
        CheckpointError: unreadable, or not a skeleton.
    """
    document = read_json(opened(path), path)
    records = document.get("records") if isinstance(document, dict) and document.get("format") == _FORMAT else None
    if not isinstance(records, list):
        fix = f"write one with `convert skeleton module:factory > {path.name}`"
        raise CheckpointError(Finding("skeleton-invalid", "this file is not a skeleton", path=str(path), fix=fix))
    return tuple(_record(path, number, record) for number, record in enumerate(records))


def _record(path: Path, number: int, record: Any) -> SkeletonRecord:
    fields = record if isinstance(record, dict) else {}
    keys, shape, dtype = fields.get("path"), fields.get("shape"), fields.get("dtype")
    if (
        not _all(keys, str)
        or not _all(shape, int)
        or any(not 0 <= n < 2**60 for n in shape)
        or not isinstance(dtype, str)
        or dtype not in SAFETENSORS_TAGS
    ):
        problem = f"record {number} has no valid path, shape and dtype"
        raise CheckpointError(Finding("skeleton-invalid", problem, path=str(path), fix="write the skeleton again"))
    return SkeletonRecord(tuple(keys), TensorSpec(tuple(shape), dtype))


def _all(value: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def skeleton_of(tree: Any) -> tuple[SkeletonRecord, ...]:
    """Return the records that ``equinox.tree_serialise_leaves`` writes for a pytree, in its order. Needs JAX.

    Arrays, ``jax.ShapeDtypeStruct`` and Python's and NumPy's numbers are records; functions, strings and None are not
    (equinox/_serialisation.py, ``default_serialise_filter_spec``).

    Raises:
        ConvertError: Equinox cannot save a leaf (a PRNG key).
    """
    from jax.tree_util import tree_flatten_with_path

    records = []
    for path, leaf in tree_flatten_with_path(tree)[0]:
        keys = path_keys(path)
        if isinstance(leaf, (bool, int, float, complex)):
            leaf = np.asarray(leaf)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            try:
                records.append(SkeletonRecord(keys, TensorSpec(tuple(leaf.shape), dtype_name(leaf.dtype))))
            except (ConvertError, TypeError):
                problem = "Equinox cannot save this dtype"
                fix = "for a PRNG key, store jax.random.key_data(key)"
                raise ConvertError(
                    Finding("skeleton-not-made", problem, path="/".join(keys), got=str(leaf.dtype), fix=fix)
                ) from None
    return tuple(records)


def path_keys(path: Sequence[Any]) -> tuple[str, ...]:
    """Return the keys of a path of ``jax.tree_util``, as they are in the name of a leaf."""
    return tuple(map(_key, path))


def _key(entry: Any) -> str:
    for attribute in ("name", "key", "idx"):  # GetAttrKey, DictKey and FlattenedIndexKey, SequenceKey
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def write_skeleton(factory: str) -> str:
    """Return the skeleton, as JSON, of the pytree that ``module:factory`` returns when it is called without arguments.

    The factory returns what was saved: a model, or (model, state). It is evaluated abstractly where possible.

    Raises:
        ConvertError: the factory does not exist or needs arguments, JAX is missing, or there are no arrays.
        UserCodeError: the factory failed.
    """
    make = find_factory(factory)
    if (error := signature_error(make)) is not None:  # a class, or a function with parameters
        fix = "name a function that makes the whole model, such as `def make(): return Model(...)`"
        expected = "a factory that is called without arguments"
        raise ConvertError(Finding("skeleton-not-made", path=factory, expected=expected, got=str(error), fix=fix))
    try:
        import jax  # noqa: F401
    except ImportError:
        problem = "a skeleton is made with JAX, and JAX is not installed"
        raise ConvertError(Finding("package-missing", problem, fix="run pip install jax equinox")) from None
    try:
        with user_code_errors(factory):
            records = skeleton_of(_abstract(make))
    except ModuleNotFoundError as error:
        fix = "make the skeleton where the code of the model runs"
        raise ConvertError(Finding("package-missing", str(error), path=factory, fix=fix)) from error
    if not records:
        problem, fix = "the result of the factory has no arrays", "return the model, or (model, state)"
        raise ConvertError(Finding("skeleton-not-made", problem, path=factory, fix=fix))
    rows = [{"path": r.keys, "shape": r.spec.shape, "dtype": r.spec.dtype} for r in records if r.spec is not None]
    body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    return f'{{\n  "format": "{_FORMAT}",\n  "factory": {json.dumps(factory)},\n  "records": [\n{body}\n  ]\n}}'


def _abstract(make: Callable[[], Any]) -> Any:
    """Return the result of `make`. With Equinox nothing is computed, so a large model takes no memory."""
    try:
        import equinox
    except ImportError:
        return make()
    try:
        return equinox.filter_eval_shape(make)
    except Exception:  # noqa: BLE001 - code that needs values, for example because it reads a file
        return make()


def records_from_names(candidates: Sequence[Sequence[str]]) -> tuple[tuple[SkeletonRecord, ...], ...]:
    """Return records with the names that rule files list; keys are joined with ``/``."""
    return tuple(tuple(SkeletonRecord(tuple(name.split("/"))) for name in names) for names in candidates)
