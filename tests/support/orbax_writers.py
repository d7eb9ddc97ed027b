"""Writes checkpoints with the real Orbax in processes of their own: several devices, several processes.

python orbax_writers.py devices DIR
python orbax_writers.py process INDEX PORT DIR
"""

import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

DEVICES = 8


def values() -> dict[str, np.ndarray]:
    import ml_dtypes

    random = np.random.default_rng(0)
    return {
        "matrix": random.normal(size=(16, 6)).astype(np.float32),
        "rows": random.normal(size=(24, 5)).astype(ml_dtypes.bfloat16),
        "columns": random.integers(0, 100, size=(3, 40)).astype(np.int32),
        "replicated": random.normal(size=(7,)).astype(np.float32),
        "half": random.normal(size=(8, 3)).astype(np.float16),  # sharded on one axis of the mesh, replicated on another
        "zeros": np.zeros((16, 2), np.float32),
        "small": random.integers(-8, 8, size=(16,)).astype(ml_dtypes.int4),
    }


def write_devices(out: Path) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax
    import orbax.checkpoint as ocp

    tree = _sharded(jax)
    chunked = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=32), tree)
    for name, options, arguments in [
        ("ocdbt", {"use_ocdbt": True}, {}),
        ("directories", {"use_ocdbt": False}, {}),
        ("zarr3", {"use_ocdbt": True, "use_zarr3": True}, {}),
        ("zarr3-directories", {"use_ocdbt": False, "use_zarr3": True}, {}),
        ("chunks", {"use_ocdbt": True, "use_zarr3": True}, {"save_args": chunked}),
        ("chunked-directories", {"use_ocdbt": False}, {"save_args": chunked}),
        ("small-files", {"use_ocdbt": True}, {"ocdbt_target_data_file_size": 256}),
    ]:
        checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))
        checkpointer.save(out / name, args=ocp.args.PyTreeSave(tree, **arguments))
        checkpointer.close()


def write_process(index: int, port: int, out: Path) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // 2}"
    import jax
    import orbax.checkpoint as ocp

    jax.distributed.initialize(f"localhost:{port}", 2, index)
    for name, options in [("ocdbt", {"use_ocdbt": True}), ("zarr3", {"use_ocdbt": True, "use_zarr3": True})]:
        checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))
        checkpointer.save(out / name, args=ocp.args.PyTreeSave(_sharded(jax)))
        checkpointer.close()


def _sharded(jax: ModuleType) -> dict:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    axes = {
        "matrix": ("x", "y"),
        "rows": (("x", "y"),),
        "columns": (None, ("y", "x")),
        "replicated": (),
        "half": ("x",),
        "zeros": ("y",),
        "small": ("x",),
    }
    return {
        name: jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, PartitionSpec(*axes[name])), lambda index, array=array: array[index]
        )
        for name, array in values().items()
    }


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    match sys.argv[1:]:
        case ["devices", out]:
            write_devices(Path(out))
        case ["process", index, port, out]:
            write_process(int(index), int(port), Path(out))
