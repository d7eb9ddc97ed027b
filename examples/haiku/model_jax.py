"""The JAX side: a small Haiku model that labels sequences, its parameters saved as .npz. Run as a script: model_jax.py CKPT.npz

hk.transform gives parameters as a dict of dicts, {"tagger/lstm/linear": {"w": ..., "b": ...}}. People pickle that; a pickle runs
the code in it when it is loaded, so none is read. numpy.savez of the same arrays is as short.
"""

import sys

import haiku as hk
import jax
import numpy as np

VOCABULARY, WIDTH, FIRST, SECOND, LABELS = 11, 6, 7, 5, 4


class Tagger(hk.Module):
    def __call__(self, tokens: jax.Array) -> jax.Array:
        batch = tokens.shape[0]
        x = hk.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        for core in (hk.LSTM(FIRST, name="lstm"), hk.GRU(SECOND, name="gru")):
            x, _ = hk.dynamic_unroll(core, x, core.initial_state(batch), time_major=False)
            x = hk.LayerNorm(-1, create_scale=True, create_offset=True, name=f"{core.name}_norm")(x)
        return hk.Linear(LABELS, name="labels")(x)


@hk.without_apply_rng
@hk.transform
def model(tokens: jax.Array) -> jax.Array:
    return Tagger(name="tagger")(tokens)


def main(checkpoint: str) -> None:
    params = model.init(jax.random.key(0), np.zeros((1, 2), np.int32))
    # Biases start at zero and scales at one: a lost one would not show, so all get random values.
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params)
    np.savez(checkpoint, **{f"{module}/{name}": x for module, leaves in params.items() for name, x in leaves.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
