"""The same model in Equinox: equinox_model.py CKPT.eqx INPUT_OUTPUT.npz. `make` is what `convert skeleton` calls."""

import sys

import equinox as eqx
import jax
import numpy as np


class Model(eqx.Module):
    layers: list[eqx.nn.Linear]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    width: int  # a field that is not static: Equinox saves it as well

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.width = 6
        self.layers = [eqx.nn.Linear(6, 6, key=key) for key in keys[:2]]
        self.norm = eqx.nn.LayerNorm(6)
        self.head = eqx.nn.Linear(6, 3, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jax.nn.silu(layer(x))
        return self.head(self.norm(x))


def make() -> Model:
    return Model(jax.random.key(0))


def main(checkpoint: str, recorded: str) -> None:
    keys = iter(jax.random.split(jax.random.key(1), 100))
    model = jax.tree.map(lambda p: p + 0.3 * jax.random.normal(next(keys), p.shape) if eqx.is_array(p) else p, make())
    eqx.tree_serialise_leaves(checkpoint, model)
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        np.savez(recorded, x=x, y=jax.vmap(model)(x))


if __name__ == "__main__":
    main(*sys.argv[1:])
