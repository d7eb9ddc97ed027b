"""Names for checkpoints that hold none: a list of path, shape and dtype, in the order of the file.

`write_skeleton` runs where JAX runs (``convert skeleton module:factory``); reading one needs JSON alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from convert.checkpoints.files import read_json
from convert.core.errors import CheckpointError, ConvertError
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, dtype_name
from convert.core.user_code import find_factory, signature_error, user_code_errors

_FORMAT = "convert skeleton 1"


@dataclass(frozen=True)
class Record:
    """What a skeleton says of one array. `spec` is None where only a name is known."""

    keys: tuple[str, ...]
    spec: TensorSpec | None = None


def read_skeleton(path: Path) -> tuple[Record, ...]:
    """The records of a skeleton file.

    Raises:
        CheckpointError: unreadable, or not what `convert skeleton` writes.
    """
    document = read_json(path)
    records = document.get("records") if isinstance(document, dict) and document.get("format") == _FORMAT else None
    if not isinstance(records, list):
        raise CheckpointError(f"{path}: not a skeleton; `convert skeleton module:factory > {path.name}` writes one")
    return tuple(_record(path, number, record) for number, record in enumerate(records))


def _record(path: Path, number: int, record: Any) -> Record:
    fields = record if isinstance(record, dict) else {}
    keys, shape, dtype = fields.get("path"), fields.get("shape"), fields.get("dtype")
    if (
        not _all(keys, str)
        or not _all(shape, int)
        or any(not 0 <= n < 2**60 for n in shape)
        or not isinstance(dtype, str)
        or dtype not in SAFETENSORS_TAGS
    ):
        raise CheckpointError(f"{path}: record {number} has no valid path, shape and dtype; write the skeleton again")
    return Record(tuple(keys), TensorSpec(tuple(shape), dtype))


def _all(value: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def skeleton_of(tree: Any) -> tuple[Record, ...]:
    """The records that ``equinox.tree_serialise_leaves`` writes for a pytree, in its order. Needs JAX.

    Arrays, ``jax.ShapeDtypeStruct`` and Python's and NumPy's numbers are records; functions, strings and None are not
    (equinox/_serialisation.py, ``default_serialise_filter_spec``).

    Raises:
        ConvertError: a leaf that Equinox could not save (a PRNG key).
    """
    from jax.tree_util import tree_flatten_with_path

    records = []
    for path, leaf in tree_flatten_with_path(tree)[0]:
        keys = tuple(_key(entry) for entry in path)
        if isinstance(leaf, (bool, int, float, complex)):
            leaf = np.asarray(leaf)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            try:
                records.append(Record(keys, TensorSpec(tuple(leaf.shape), dtype_name(leaf.dtype))))
            except (ConvertError, TypeError):
                raise ConvertError(
                    f"{'/'.join(keys)}: {leaf.dtype} is not a dtype that can be saved; for a PRNG key, keep jax.random.key_data(key)"
                ) from None
    return tuple(records)


def _key(entry: Any) -> str:
    for attribute in ("name", "key", "idx"):  # GetAttrKey, DictKey and FlattenedIndexKey, SequenceKey
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def write_skeleton(factory: str) -> str:
    """The skeleton, as JSON, of the pytree that ``module:factory`` returns when it is called without arguments.

    The factory makes what was saved: a model, or (model, state). Nothing is computed where it can be evaluated abstractly.

    Raises:
        ConvertError: there is no such factory, JAX is missing, or two leaves would have one name.
        UserCodeError: the factory failed.
    """
    make = find_factory(factory)
    if (error := signature_error(make)) is not None:  # a class, or a function with parameters
        raise ConvertError(
            f"{factory} is called without arguments, and needs some ({error}); name a function that makes the whole model, such "
            "as `def make(): return Model(...)`"
        )
    try:
        import jax  # noqa: F401
    except ImportError:
        raise ConvertError(
            "a skeleton is made where JAX runs, and JAX is not installed here: pip install jax equinox"
        ) from None
    try:
        with user_code_errors(factory):
            records = skeleton_of(_abstract(make))
    except ModuleNotFoundError as error:
        raise ConvertError(f"{factory}: {error}; make the skeleton where the model's code runs") from error
    if not records:
        raise ConvertError(f"{factory}: what it returns holds no arrays; return the model, or (model, state)")
    rows = [{"path": r.keys, "shape": r.spec.shape, "dtype": r.spec.dtype} for r in records if r.spec is not None]
    body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    return f'{{\n  "format": "{_FORMAT}",\n  "factory": {json.dumps(factory)},\n  "records": [\n{body}\n  ]\n}}'


def _abstract(make: Callable[[], Any]) -> Any:
    """What `make` gives; with Equinox without computing it, so that a large model takes no memory."""
    try:
        import equinox
    except ImportError:
        return make()
    try:
        return equinox.filter_eval_shape(make)
    except Exception:  # noqa: BLE001 - code that needs values, such as one that reads a file
        return make()


def match_names(candidates: Sequence[Sequence[str]]) -> tuple[tuple[Record, ...], ...]:
    """Records with the names that rule files list; keys are joined with ``/``."""
    return tuple(tuple(Record(tuple(name.split("/"))) for name in names) for names in candidates)
