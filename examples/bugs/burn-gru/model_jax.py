"""The JAX side: a flax linen GRU over a sequence, and the reference that `convert check` compares with.

Run as a script, it writes a checkpoint with random weights: model_jax.py CKPT.npz
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from convert import Reference

INPUTS, HIDDEN, STEPS = (
    3,
    4,
    6,
)  # the report that found Burn's bugs had a state of one element, which hides half of them


def apply(weights, inputs):
    """All states of the GRU, from a state that is not zero."""
    params = {}
    for name, value in weights.items():
        _, gate, leaf = name.split("/")
        params.setdefault(gate, {})[leaf] = value
    h, states = inputs["h"], []
    for t in range(STEPS):
        h, _ = nn.GRUCell(HIDDEN).apply({"params": params}, h, inputs["x"][:, t])
        states.append(h)
    states = jnp.stack(states, axis=1)
    return {"gru": states, "y": states}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(2, STEPS, INPUTS)).astype(np.float32),
        "h": rng.normal(size=(2, HIDDEN)).astype(np.float32),
    }


def _reference(gru):
    import model_torch

    return Reference(
        inputs=draw,
        build=lambda state: model_torch.load(gru, state),
        run=lambda module, inputs: {"y": module(inputs["x"], inputs["h"])},
        outputs=("y",),
        reduction=HIDDEN,
        depth=STEPS,
        jax=apply,
    )


def wrong(plan):
    """The target is a GRU as Burn's was before 0.17."""
    import model_torch

    return _reference(model_torch.BurnGRU)


def half_right(plan):
    """The first of the two bugs repaired."""
    import model_torch

    return _reference(model_torch.StaleGRU)


def right(plan):
    """The target is torch's own GRU."""
    import torch

    return _reference(torch.nn.GRU)


def main(checkpoint: str) -> None:
    params = nn.GRUCell(HIDDEN).init(jax.random.key(0), jnp.zeros((2, HIDDEN)), jnp.zeros((2, INPUTS)))["params"]
    # Biases start at zero, and with zero biases and a zero state the first step hides where the reset gate is.
    rng = np.random.default_rng(0)
    np.savez(
        checkpoint,
        **{
            f"cell/{gate}/{leaf}": rng.normal(0, 0.7, x.shape).astype(np.float32)
            for gate, d in params.items()
            for leaf, x in d.items()
        },
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
