"""The JAX side: a small flax linen model, saved with Orbax. Run as a script: model_jax.py CKPT_DIR INPUT_OUTPUT.npz"""

import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import orbax.checkpoint as ocp


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(epsilon=1e-6, name="norm")(x)
        y = nn.DenseGeneral((self.heads, width // self.heads), name="split")(y)
        y = nn.gelu(y)
        return x + nn.DenseGeneral(width, axis=(-2, -1), name="merge")(y)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(11, 12, name="embed")(tokens)
        for i in range(3):
            x = Block(heads=3, name=f"block_{i}")(x)
        return nn.Dense(7, use_bias=False, name="head")(x)


def main(checkpoint: str, recorded: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 11, (2, 5))
    params = Model().init(jax.random.key(0), tokens)["params"]
    # Biases start at zero and scales at one: a lost one would not show, so all get random values.
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(checkpoint).resolve(), {"params": params, "step": 3})
    with jax.default_matmul_precision("highest"):
        logits = Model().apply({"params": params}, tokens)
    np.savez(recorded, tokens=tokens, logits=logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
