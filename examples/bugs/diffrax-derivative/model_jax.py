"""The JAX side: how rough a signal is, from the slopes of its path (diffrax), and the references that `convert check` compares with.

Run as a script, it writes a checkpoint: model_jax.py CKPT.npz
"""

import sys
from collections.abc import Callable

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from convert import Reference
from convert.references.neural_cde import path_variants

KNOTS = 11


def wrong_slopes(ts, signal):
    """As in patrick-kidger/diffrax#619: all times at once. `derivative` takes one; (T, 1) divided by (T,) is (T, T)."""
    return diffrax.LinearInterpolation(ts, signal).derivative(ts)


def right_slopes(ts, signal):
    return jax.vmap(diffrax.LinearInterpolation(ts, signal).derivative)(ts)


def model(slopes: Callable) -> Callable:
    def apply(weights, inputs):
        at = jax.vmap(slopes, in_axes=(None, 0))(inputs["ts"], inputs["signal"])
        rough = jnp.tanh(weights["gain"] * at + weights["offset"])  # elementwise: takes any shape
        return {"slope": at, "y": jnp.mean(rough, axis=(1, 2))}

    return apply


def draw(seed):
    rng = np.random.default_rng(seed)
    ts = np.cumsum(rng.uniform(0.3, 1.6, KNOTS)).astype(np.float32)
    return {"ts": ts, "signal": rng.normal(size=(3, KNOTS, 1)).astype(np.float32)}


def _reference(slopes):
    import model_torch

    return Reference(
        inputs=draw,
        build=model_torch.load,
        run=lambda module, inputs: module(inputs["ts"], inputs["signal"]),
        outputs=("slope", "y"),
        reduction=KNOTS,
        depth=2,
        jax=model(slopes),
        variants=lambda name: (
            path_variants("linear", name, times="ts", data="signal", at="ts") if name == "slope" else []
        ),
    )


def wrong(plan):
    return _reference(wrong_slopes)


def right(plan):
    return _reference(right_slopes)


def main(checkpoint: str) -> None:
    np.savez(checkpoint, gain=np.float32([0.7]), offset=np.float32([0.2]))


if __name__ == "__main__":
    main(*sys.argv[1:])
