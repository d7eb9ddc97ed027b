"""The same model in Keras 3 with the JAX backend: keras_model.py CKPT.weights.h5|CKPT.keras INPUT_OUTPUT.npz"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import numpy as np


def make() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(6, activation="silu"),
            layers.Dense(6, activation="silu"),
            layers.LayerNormalization(epsilon=1e-5),
            layers.Dense(3, name="head"),
        ]
    )


def main(checkpoint: str, recorded: str) -> None:
    model = make()
    random = np.random.default_rng(1)
    model.set_weights([w + 0.3 * random.normal(size=w.shape) for w in model.get_weights()])
    if checkpoint.endswith(".keras"):
        model.save(checkpoint)
    else:
        model.save_weights(checkpoint)
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        np.savez(recorded, x=x, y=np.array(model(x)))


if __name__ == "__main__":
    main(*sys.argv[1:])
