"""Small checkpoints in every file format, written by the libraries themselves, and what is in them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts


def plain() -> dict[str, np.ndarray]:
    """Name -> array: the dtypes that every format holds, and names that are easily taken for paths."""
    numbers = np.random.default_rng(0)
    return {
        "a.dotted/kernel": numbers.normal(size=(3, 5)).astype(np.float32),
        "a.dotted/half": numbers.normal(size=(7,)).astype(ml_dtypes.bfloat16),
        "blocks/0/scale": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "blocks/10/scale": numbers.normal(size=(2, 3)).astype(np.float16),
        "blocks/2/scale": numbers.normal(size=(2, 2, 2)),
        "empty": np.zeros((0, 4), np.float32),
        "flags": np.array([True, False, True]),
        "größe": np.arange(3, dtype=np.int64),
        "scalar": np.array(2.5, np.float32),
        "ints": np.array([-3, 0, 127], np.int8),
    }


def odd() -> dict[str, np.ndarray]:
    """For formats whose names may be any text, and that keep the order of bytes and axes."""
    return {
        **plain(),
        "../up": np.arange(4, dtype=np.uint16),
        "back\\slash": np.arange(2, dtype=np.uint32),
        "big": np.arange(5, dtype=">f4"),
        "bigint": np.arange(5, dtype=">i8").reshape(5, 1),
        "fortran": np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
    }


def native(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same numbers in this machine's byte order and in C order."""
    return {
        name: np.ascontiguousarray(x.astype(x.dtype.newbyteorder("="))).reshape(x.shape) for name, x in arrays.items()
    }


def float8() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(1).normal(size=9)
    return {
        "f8/e4m3": numbers.astype(ml_dtypes.float8_e4m3fn),
        "f8/e5m2": numbers.astype(ml_dtypes.float8_e5m2).reshape(3, 3),
    }


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The names taken apart at slashes."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        node = tree
        *parents, last = name.split("/")
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = array
    return tree


def msgpack(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    import flax.serialization

    path.write_bytes(flax.serialization.to_bytes(nested(arrays)))
    return path


def msgpack_shards(folder: Path, arrays: Mapping[str, np.ndarray], count: int = 3) -> Path:
    """As transformers 4 wrote them (modeling_flax_utils.py, `flax_shard_checkpoint`): nested maps, an index of flat names."""
    folder.mkdir()
    weight_map = {}
    for k in range(count):
        part = dict(list(arrays.items())[k::count])
        name = f"flax_model-{k + 1:05}-of-{count:05}.msgpack"
        msgpack(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "flax_model.msgpack.index.json").write_text(json.dumps(index))
    return folder


def npz(path: Path, arrays: Mapping[str, np.ndarray], compressed: bool = False) -> Path:
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


def safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    import jax.numpy as jnp
    from safetensors.flax import save_file

    save_file({name: jnp.asarray(x) for name, x in arrays.items()}, path)
    return path


def safetensors_shards(folder: Path, arrays: Mapping[str, np.ndarray], count: int = 2) -> Path:
    folder.mkdir()
    weight_map = {}
    for k in range(count):
        part = dict(list(arrays.items())[k::count])
        name = f"model-{k + 1:05}-of-{count:05}.safetensors"
        safetensors(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def equinox(path: Path, tree: Any, hyperparameters: Any = None) -> Path:
    import equinox as eqx

    with path.open("wb") as file:
        if hyperparameters is not None:
            file.write((json.dumps(hyperparameters) + "\n").encode())
        eqx.tree_serialise_leaves(file, tree)
    return path


def t5x(
    folder: Path, arrays: Mapping[str, np.ndarray], inline: tuple[str, ...] = (), version: int = 3, **change: Any
) -> Path:
    """Writes as t5x/checkpoints.py does: arrays with TensorStore (zarr, gzip), their specs into the msgpack file."""
    import flax.serialization

    folder.mkdir(parents=True)
    written: dict[str, Any] = {}
    for name, array in arrays.items():
        if name in inline:
            written[name] = array
            continue
        stored = array.view(np.uint16) if version < 3 and array.dtype == ml_dtypes.bfloat16 else array
        directory = name.replace("/", ".")
        metadata = {
            "chunks": [max(n, 1) for n in array.shape],
            "compressor": {"id": "gzip"},
            "shape": list(array.shape),
        }
        spec = {
            "driver": "zarr",
            "dtype": stored.dtype.name,
            "kvstore": {"driver": "file", "path": directory},
            "metadata": metadata,
        }
        real = {**spec, "kvstore": {"driver": "file", "path": str(folder / directory)}}
        ts.open(real, create=True, open=True).result().write(stored).result()
        kvstore = {"driver": "gfile", "path": f"{directory}/"} if version == 3 else {"driver": "gfile"}
        spec = {**spec, "kvstore": kvstore, **({"path": directory} if version < 3 else {}), **change}
        written[name] = spec
    tree = {"version": version, "optimizer": nested(written)}
    (folder / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    return folder


def big_vision(run: Path, step: int, arrays: Mapping[str, np.ndarray], *, keep: bool = True) -> Path:
    """Writes with the calls of big_vision's `save_checkpoint_ts`: JAX's manager writes the arrays, then the file of the last step."""
    import jax
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

    name = f"{step:09d}{'' if keep else '-tmp'}"
    folder = run.with_name(f"{run.name}-{name}")
    folder.mkdir(parents=True)
    paths = [str(folder / leaf.replace("/", "~")) for leaf in arrays]
    manager = GlobalAsyncCheckpointManager()
    with jax.enable_x64(True):
        manager.serialize_with_paths(
            [jax.numpy.asarray(array) for array in arrays.values()],
            paths,
            on_commit_callback=lambda: run.with_name(f"{run.name}-LAST").write_text(name),
        )
        manager.wait_until_finished()
    return folder


def keras_model() -> Any:
    """A model of layers inside layers, some of one class, one of them in bfloat16, built."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    keras.utils.set_random_seed(0)

    @keras.saving.register_keras_serializable("convert_tests")
    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(4, name="chosen_name")
            self.blocks = [keras.layers.Dense(4, use_bias=False) for _ in range(3)]
            self.half = keras.layers.Dense(3, dtype="bfloat16")
            self.norm = keras.layers.LayerNormalization()
            self.gru = keras.layers.GRU(5)

        def call(self, x: Any) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.gru(self.norm(self.half(x)))

        def get_config(self) -> dict[str, Any]:
            return {}

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls()

    model = Model()
    model(np.ones((2, 3, 6), np.float32))
    return model


def keras_expected(model: Any) -> dict[str, np.ndarray]:
    """What the reader shall call the variables of `keras_model`."""

    def variables(layer: Any) -> list[np.ndarray]:
        return [np.array(v.value.__array__()) for v in layer.variables]

    # Keras walks attributes by name, and meets `norm` first in its own list `layers`.
    layers = {
        "first": model.first,
        "half": model.half,
        "layers/layer_normalization": model.norm,
        "gru/cell": model.gru.cell,
    }
    layers |= {f"blocks/dense_{i}": block for i, block in enumerate(model.blocks)}
    found = {
        f"{name}/vars/{k}": v
        for name, layer in layers.items()
        for k, v in enumerate(variables(layer))
        if name != "gru/cell"
    }
    cell = [v for v in model.gru.cell.variables if "seed" not in v.path]
    return found | {f"gru/cell/vars/{k}": np.array(v.value.__array__()) for k, v in enumerate(cell)}


def records(*arrays: np.ndarray) -> bytes:
    """Arrays one after the other, as Equinox writes them."""
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array)
    return file.getvalue()
