"""Writes `orbax-0.5/`: small checkpoints of an old Orbax, and what they hold.

The versions do not run on the Python of this project. With Python 3.10:

    python3.10 -m venv old
    old/bin/pip install --no-deps orbax-checkpoint==0.5.0 jax==0.4.25 jaxlib==0.4.25 flax==0.8.1 numpy==1.26.4 \\
        scipy==1.12.0 ml_dtypes==0.3.2 tensorstore==0.1.52 absl-py==2.1.0 etils==1.7.0 msgpack==1.1.0 \\
        nest_asyncio==1.6.0 opt_einsum==3.3.0 protobuf==4.25.9 PyYAML==6.0.1 typing_extensions==4.12.2 \\
        importlib_resources==6.4.0 zipp==3.19.2 fsspec==2024.6.0
    old/bin/python tests/golden/make_orbax_0_5.py

The values are the same each time; the names of OCDBT's files and its time stamps are not.
"""

import collections
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

OUT = Path(__file__).parent / "orbax-0.5"
Moments = collections.namedtuple("Moments", ["mu", "nu"])


def tree() -> dict:
    random = np.random.default_rng(0)
    return {
        "params": {
            "blocks.0": {
                "w": jnp.asarray(random.normal(size=(3, 4)), jnp.float32),
                "zeros": jnp.zeros((2, 3), jnp.float32),
            },
            "half": jnp.asarray(random.normal(size=(5,)), jnp.bfloat16),
        },
        "opt": [Moments(np.arange(3, dtype=np.int32), jnp.ones((2,), jnp.float16)), (jnp.asarray([True, False]),)],
        "step": 7,
        "rate": 0.125,
        "empty": {},
        "none": None,
    }


def expected() -> dict:
    """Names as the reader gives them. A bfloat16 array as its bits, since .npz has no such dtype."""
    values = tree()
    return {
        "params/blocks.0/w": values["params"]["blocks.0"]["w"],
        "params/blocks.0/zeros": values["params"]["blocks.0"]["zeros"],
        "params/half": np.asarray(values["params"]["half"]).view(np.uint16),
        "opt/0/mu": values["opt"][0].mu,
        "opt/0/nu": values["opt"][0].nu,
        "opt/1/0": values["opt"][1][0],
        "step": np.asarray(values["step"]),
        "rate": np.asarray(values["rate"]),
    }


def write(path: Path, values: dict, aggregate: bool = False, **options: bool) -> None:
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))
    arguments = jax.tree_util.tree_map(lambda _: ocp.SaveArgs(aggregate=aggregate), values)
    checkpointer.save(path, values, save_args=arguments)


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    warnings.simplefilter("ignore", DeprecationWarning)
    write(OUT / "ocdbt", tree(), use_ocdbt=True)
    write(OUT / "leaf-directories", tree(), use_ocdbt=False)
    write(OUT / "without-metadata", tree(), use_ocdbt=False, write_tree_metadata=False)
    write(OUT / "aggregated", tree(), use_ocdbt=False, aggregate=True)
    write(OUT / "aggregated-without-metadata", tree(), use_ocdbt=False, aggregate=True, write_tree_metadata=False)
    # Chunks of zeros are not stored with zarr3. (It takes arrays of JAX only; others since 0.5.7.)
    write(OUT / "zarr3", {"params": tree()["params"]}, use_ocdbt=False, use_zarr3=True)
    manager = ocp.CheckpointManager(OUT / "steps", ocp.PyTreeCheckpointer())
    for step in (1, 2):
        manager.save(step, {"w": np.full((2,), step, np.float32)})
    np.savez(OUT / "expected.npz", **{name: np.asarray(value) for name, value in expected().items()})


if __name__ == "__main__":
    main()
