"""The JAX side: a small flax linen net of convolutions, channels last. Run as a script, it saves: model_jax.py CKPT.npz

Every layer is one that converts wrongly in silence: SAME with strides, a depthwise and a standardised kernel, batch and group
norm, a transposed convolution, a map flattened before a Dense, weight norm and spectral norm.
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

SIZE = (9, 8)  # of the images; 9 is no multiple of the strides
EPSILON = 1e-5


class StandardizedConv(nn.Conv):
    """big_vision's: the kernel is standardised over what each filter sums."""

    def param(self, name, *args, **kwargs):
        w = super().param(name, *args, **kwargs)
        if name != "kernel":
            return w
        axes = (0, 1, 2)
        return (w - jnp.mean(w, axes)) / (jnp.std(w, axes) + EPSILON)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(6, (3, 3), strides=(2, 2), name="stem")(x)  # padding="SAME" is the default
        x = nn.BatchNorm(use_running_average=True, momentum=0.9, name="norm")(x)
        x = nn.relu(x)
        x = nn.Conv(6, (3, 3), feature_group_count=6, name="depthwise")(x)
        x = StandardizedConv(6, (2, 3), padding="VALID", name="mix")(x)
        x = nn.GroupNorm(num_groups=3, name="group")(x)
        x = nn.relu(x)
        x = nn.ConvTranspose(6, (3, 3), strides=(2, 2), name="up")(x)
        x = x.reshape(x.shape[0], -1)  # rows, columns, channels
        x = nn.relu(nn.WeightNorm(nn.Dense(7, name="dense"), name="weight_norm")(x))
        return nn.SpectralNorm(nn.Dense(4, name="head"), name="spectral_norm")(x, update_stats=False)


def main(checkpoint: str) -> None:
    variables = Model().init(jax.random.key(0), jnp.zeros((1, *SIZE, 3)))
    rng = np.random.default_rng(0)

    def drawn(name: str, x: jax.Array) -> np.ndarray:
        # Scales start at one, biases and means at zero: a lost one would not show, so all get random values.
        size = 0.3 if x.ndim > 1 and "spectral_norm" not in name else 1.0
        value = rng.normal(0, size, x.shape) + (x.ndim == 1) * 0.5
        return (np.abs(value) + 0.3 if name.endswith(("var", "sigma")) else value).astype(np.float32)

    flat = flatten_dict(variables, sep="/")
    np.savez(checkpoint, **{name: drawn(name, x) for name, x in flat.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
