"""The two models for `convert check --reference reference:cubic` (or `:linear`); the protocol is in docs/guides/check.md.

The path's values and derivatives are compared at its knots, between them, and outside; then the vector field, and the solution
by the same method on both sides: diffrax's `Midpoint` and torchdiffeq's `midpoint`, and `Euler` and `euler`. (torchdiffeq's
`rk4` is the 3/8 rule, which diffrax does not have by that name.)
"""

from collections.abc import Callable, Mapping
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import model_jax
import model_torch
import numpy as np
import torch

from convert import Observed, Plan, Reference, Variant
from convert.references.neural_cde import path_variants, solution_variants

METHODS = {"linear": (diffrax.Euler, "euler", "Euler"), "cubic": (diffrax.Midpoint, "midpoint", "midpoint")}
BOUNDARIES = ("value", "slope", "initial", "field", "states", "out")  # in the order of the data
SIZES = (model_jax.CHANNELS, model_jax.HIDDEN, model_jax.WIDTH, model_jax.OUTPUTS)


def draw(seed: int, batch: int = 2) -> dict[str, np.ndarray]:
    ts, ys = model_jax.series(seed, batch)
    steps = np.diff(ts)
    inside = [ts, ts[:-1] + 0.3 * steps, ts[:-1] + 0.8 * steps]
    at = np.concatenate([*inside, [ts[0] - 0.7, ts[-1] + 0.4]]).astype(np.float32)
    return {"ts": ts, "ys": ys, "at": at}


def restored(weights: Mapping[str, Any]) -> model_jax.NeuralCDE:
    """The Equinox model with these weights; what is no array stays as `make` makes it."""

    def leaf(path: Any, value: Any) -> Any:
        name = "/".join(str(getattr(key, "name", getattr(key, "idx", ""))) for key in path)
        return weights.get(name, value)

    return jax.tree_util.tree_map_with_path(leaf, model_jax.make())


def steps(model: model_jax.NeuralCDE, ts: Any, path: diffrax.AbstractPath, solver: diffrax.AbstractSolver) -> Any:
    """`model_jax.solve`, with diffrax's solver stepping from knot to knot: `diffeqsolve` traces ten times as long, and gives the
    same (tests/parity/test_control_path.py)."""
    terms = model_jax.terms(model, path)
    z = model.initial(path.evaluate(ts[0]))
    states, state = [z], solver.init(terms, ts[0], ts[1], z, None)
    for k in range(len(ts) - 1):
        z, _, _, state, _ = solver.step(terms, ts[k], ts[k + 1], z, None, state, made_jump=False)
        states.append(z)
    return jnp.stack(states)


def jax_side(kind: str) -> Callable[..., dict[str, Any]]:
    """The JAX model by its boundaries, in the order of the data."""

    def apply(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        model, ts, at = restored(weights), inputs["ts"], inputs["at"]

        def one(ys: Any) -> dict[str, Any]:
            path = model_jax.control(ts, ys, kind)
            states = steps(model, ts, path, METHODS[kind][0]())
            return {
                "value": jax.vmap(path.evaluate)(at),
                "slope": jax.vmap(path.derivative)(at),  # of one time at a time
                "initial": states[0],
                "field": model.field(states[0]),
                "states": states,
                "out": jax.vmap(model.readout)(states),
            }

        made = jax.vmap(one)(inputs["ys"])
        return {name: made[name] for name in BOUNDARIES}  # jax.vmap sorts them

    return apply


def run(module: Any, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    path = module.path(inputs["ts"], inputs["ys"])
    states, out = module(inputs["ts"], inputs["ys"])
    return {"value": path.evaluate(inputs["at"]), "slope": path.derivative(inputs["at"]), "states": states, "out": out}


def field_of(seen: Observed) -> Callable[[np.ndarray], np.ndarray]:
    """The vector field with the PyTorch model's weights, for the diagnosis."""

    def field(z: np.ndarray) -> np.ndarray:
        for k in range(3):
            z = z @ seen.weights[f"field.layers.{k}.weight"].T + seen.weights[f"field.layers.{k}.bias"]
            z = np.tanh(z) if k == 2 else np.logaddexp(z, 0)
        return z.reshape(*z.shape[:-1], model_jax.HIDDEN, model_jax.CHANNELS)

    return field


def field_variants() -> list[Variant]:
    """The rows of the field's last layer are (hidden, channels) on both sides, in this order."""

    def field(seen: Observed) -> np.ndarray:
        return field_of(seen)(seen.values["initial"])

    def exchanged(seen: Observed) -> np.ndarray:
        made = field(seen)
        return made.reshape(*made.shape[:-2], *made.shape[:-3:-1]).swapaxes(-1, -2)

    return [Variant("rows (hidden, channels)", field), Variant("rows (channels, hidden)", exchanged)]


def make_reference(kind: str, **changed: Any) -> Reference:
    method = METHODS[kind]

    def build(weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        module = model_torch.NeuralCDE(*SIZES, kind=kind, method=method[1])
        return model_torch.load(module, dict(weights))

    def variants(name: str) -> list[Any]:
        if name in ("value", "slope"):
            return path_variants(kind, name, times="ts", data="ys", at="at")
        if name == "field":
            return field_variants()
        if name == "states":
            return solution_variants(kind, method[2], times="ts", data="ys", field=field_of, start="initial")
        return []

    own = {
        "inputs": draw,
        "jax": jax_side(kind),
        "build": build,
        "run": run,
        "outputs": ("value", "slope", "states", "out"),
        "reduction": model_jax.WIDTH,
        "depth": len(draw(0)["ts"]),  # steps
        "variants": variants,
    }
    return Reference(**{**own, **changed})


def linear(plan: Plan) -> Reference:
    """A linear path, and Euler's method."""
    return make_reference("linear")


def cubic(plan: Plan) -> Reference:
    """A cubic path of backward differences, and the midpoint method."""
    return make_reference("cubic")
