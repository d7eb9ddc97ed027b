"""The JAX side: a neural CDE of Equinox and diffrax. As a script it saves one with random weights, and the paths of a data set as a
preprocessing step keeps them: model_jax.py CKPT.eqx PATHS.npz

`make` is what `convert skeleton` calls.
"""

import sys

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

CHANNELS, HIDDEN, WIDTH, OUTPUTS = 3, 5, 7, 2


class Field(eqx.Module):
    mlp: eqx.nn.MLP
    channels: int  # fields that are not static: Equinox saves them, too
    hidden: int

    def __call__(self, z: jax.Array) -> jax.Array:
        return self.mlp(z).reshape(self.hidden, self.channels)


class NeuralCDE(eqx.Module):
    initial: eqx.nn.Linear
    field: Field
    readout: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        one, two, three = jax.random.split(key, 3)
        self.initial = eqx.nn.Linear(CHANNELS, HIDDEN, key=one)
        mlp = eqx.nn.MLP(HIDDEN, HIDDEN * CHANNELS, WIDTH, 2, jax.nn.softplus, jnp.tanh, key=two)
        self.field = Field(mlp, CHANNELS, HIDDEN)
        self.readout = eqx.nn.Linear(HIDDEN, OUTPUTS, key=three)


def make() -> NeuralCDE:
    return NeuralCDE(jax.random.key(0))


def control(ts: jax.Array, ys: jax.Array, kind: str) -> diffrax.AbstractPath:
    """A path through `ys` (T, C), for one series: diffrax's paths have no batch axes."""
    if kind == "linear":
        return diffrax.LinearInterpolation(ts, ys)
    return diffrax.CubicInterpolation(ts, diffrax.backward_hermite_coefficients(ts, ys))


def terms(model: NeuralCDE, path: diffrax.AbstractPath) -> diffrax.AbstractTerm:
    """``dz = field(z) dX/dt dt``: with `to_ode` by the path's derivative, as torchcde has it; without, by its increments."""
    return diffrax.ControlTerm(lambda t, z, args: model.field(z), path).to_ode()


def solve(model: NeuralCDE, ts: jax.Array, path: diffrax.AbstractPath, solver: diffrax.AbstractSolver) -> jax.Array:
    """The hidden states at the knots (T, H), one step from each to the next."""
    return diffrax.diffeqsolve(
        terms(model, path),
        solver,
        t0=ts[0],
        t1=ts[-1],
        dt0=None,
        y0=model.initial(path.evaluate(ts[0])),
        stepsize_controller=diffrax.StepTo(ts),
        saveat=diffrax.SaveAt(ts=ts),
        max_steps=len(ts),
    ).ys


def series(seed: int, batch: int = 2, knots: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Irregular times (T,) and data (batch, T, C)."""
    rng = np.random.default_rng(seed)
    return (
        np.cumsum(rng.uniform(0.3, 1.6, knots)).astype(np.float32),
        rng.normal(size=(batch, knots, CHANNELS)).astype(np.float32),
    )


def main(checkpoint: str, paths: str) -> None:
    keys = iter(jax.random.split(jax.random.key(1), 100))
    model = jax.tree.map(lambda p: p + 0.3 * jax.random.normal(next(keys), p.shape) if eqx.is_array(p) else p, make())
    eqx.tree_serialise_leaves(checkpoint, model)
    ts, ys = series(7)
    cubic = jax.vmap(lambda y: diffrax.backward_hermite_coefficients(jnp.asarray(ts), y))(jnp.asarray(ys))
    np.savez(
        paths,
        **{"cubic/ts": ts, "linear/ts": ts, "linear/ys": ys},
        **{f"cubic/coeffs/{k}": x for k, x in enumerate(cubic)},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
