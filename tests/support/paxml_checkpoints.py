"""Checkpoints of paxml that the tests write and open."""

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import flax.serialization
import flax.struct
import jax
import msgpack
import numpy as np
import pytest

from convert.checkpoints.formats.paxml import open_pax
from convert.checkpoints.source import Source
from convert.core.errors import CheckpointError
from convert.core.findings import Finding

STEP = Path("checkpoints", "checkpoint_1100000")
Adam = namedtuple("Adam", "count mu nu")
Empty = namedtuple("Empty", "")


@flax.struct.dataclass
class TrainState:  # the fields of paxml's
    step: Any
    mdl_vars: Any
    opt_states: Any
    extra_state: Any = ()


def packed(tree: Any, *, as_map: bool = False) -> bytes:
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    state = {str(i): leaf for i, leaf in enumerate(leaves)} if as_map else leaves
    return flax.serialization.msgpack_serialize({"flattened_state": state, "str_pytree_state": str(treedef)})


def save(folder: Path, content: bytes | Any, step: int = 7) -> Path:
    file = folder / "checkpoints" / f"checkpoint_{step}" / "state" / "checkpoint"
    file.parent.mkdir(parents=True)
    file.write_bytes(content if isinstance(content, bytes) else packed(content))
    return file


def save_metadata(file: Path, document: Any) -> None:
    path = file.parent.parent / "metadata" / "metadata"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())


def entry(shape: list[int], dtype: str = "float32", masked: bool = False) -> dict[str, Any]:
    tagged = {"_array_metadata_tag": True, "is_optax_masked_node": masked}
    return tagged if masked else {**tagged, "unpadded_shape": shape, "dtype": dtype}


def state(**params: Any) -> TrainState:
    return TrainState(np.int32(7), {"params": params}, [])


def notes(source: Source) -> list[str]:
    return [str(note) for note in source.notes]


def refusal(path: Path, **options: Any) -> Finding:
    """Open a damaged checkpoint and return the only finding."""
    with pytest.raises(CheckpointError) as caught:
        open_pax(path, **options)
    (finding,) = caught.value.findings
    return finding


def ndarray(shape: Any, dtype: Any, data: Any, code: int = 1) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, data)))


CHUNKED = {"__msgpack_chunked_array__": True, "shape": {"0": 2}, "chunks": {"0": ndarray([2], "int8", b"ab")}}
