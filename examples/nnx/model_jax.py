"""The JAX side: a small decoder of flax nnx, saved with Orbax. Run as a script: model_jax.py CKPT_DIR"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS = 11, 12, 3, 14, 2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        may_look = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.attention_norm(x), mask=may_look)
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def main(checkpoint: str) -> None:
    params = nnx.to_pure_dict(nnx.state(Decoder(nnx.Rngs(0)), nnx.Param))
    # Biases start at zero and scales at one: a lost one would not show, so all get random values.
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), jnp.shape(x)), params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(checkpoint).resolve(), params)


if __name__ == "__main__":
    main(*sys.argv[1:])
