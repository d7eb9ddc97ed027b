"""A flax model, saved in a format of your choice: flax_model.py msgpack|npz|safetensors CKPT INPUT_OUTPUT.npz"""

import sys
from pathlib import Path

import flax.linen as nn
import flax.serialization
import jax
import numpy as np
import safetensors.flax
from flax.traverse_util import flatten_dict


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(2):
            x = nn.silu(nn.Dense(6, name=f"dense_{i}")(x))
        return nn.Dense(3, name="head")(nn.LayerNorm(epsilon=1e-5, name="norm")(x))


def main(format: str, checkpoint: str, recorded: str) -> None:
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    params = Model().init(jax.random.key(0), x)["params"]
    # Biases start at zero and scales at one: a lost one would not show, so all get random values.
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda p: p + 0.3 * jax.random.normal(next(keys), p.shape), params)
    flat = flatten_dict({"params": params}, sep="/")
    if format == "msgpack":
        Path(checkpoint).write_bytes(flax.serialization.to_bytes({"params": params}))
    elif format == "npz":
        np.savez(checkpoint, **flat)
    else:
        safetensors.flax.save_file(flat, checkpoint)
    with jax.default_matmul_precision("highest"):
        np.savez(recorded, x=x, y=Model().apply({"params": params}, x))


if __name__ == "__main__":
    main(*sys.argv[1:])
