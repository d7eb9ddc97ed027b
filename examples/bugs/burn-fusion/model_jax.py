"""The JAX side: convolution, LayerNorm, head in flax, and the references that `convert check` compares with.

Run as a script, it writes a checkpoint with random weights: model_jax.py CKPT.npz
"""

import sys

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from convert import Reference

CHANNELS, WIDTH, OUTPUTS, STEPS = 4, 12, 5, 16


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(WIDTH, (3,), name="conv")(x)
        x = nn.LayerNorm(epsilon=1e-6, use_fast_variance=False, name="norm")(x)
        return nn.Dense(OUTPUTS, name="head")(x)


def apply(weights, inputs):
    params = unflatten_dict(dict(weights), sep="/")
    y, state = Model().apply({"params": params}, inputs["x"], capture_intermediates=True)
    seen = {name: value["__call__"][0] for name, value in state["intermediates"].items() if name != "__call__"}
    return {"conv": seen["conv"].swapaxes(1, 2), "norm": seen["norm"], "y": y}


def draw(seed):
    return {"x": np.random.default_rng(seed).normal(0, 2, (2, STEPS, CHANNELS)).astype(np.float32)}


def _reference(**backends):
    import model_torch

    return Reference(
        inputs=draw,
        build=model_torch.load,
        run=lambda module, inputs: {"y": module(inputs["x"])},
        outputs=("y",),
        reduction=3 * WIDTH,
        depth=1,
        jax=apply,
        backends=backends,
    )


def wrong(plan):
    """With a backend whose fused kernel has the fault."""
    import model_torch

    return _reference(fused=model_torch.fused)


def right(plan):
    """With the kernel as it was repaired."""
    import model_torch

    return _reference(fused=model_torch.repaired)


def main(checkpoint: str) -> None:
    shapes = jax.eval_shape(Model().init, jax.random.key(0), np.zeros((1, STEPS, CHANNELS), np.float32))["params"]
    rng = np.random.default_rng(0)
    np.savez(
        checkpoint,
        **{k: rng.normal(0.5, 0.4, x.shape).astype(np.float32) for k, x in flatten_dict(shapes, sep="/").items()},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
