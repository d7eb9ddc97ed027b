"""Cells of the real libraries in float64 with random weights and biases: their leaves, and what they compute step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INPUTS, HIDDEN, BATCH, STEPS = 3, 5, 2, 6  # different from each other; more than one of each
Tree = dict[str, np.ndarray]
Run = Callable[
    [np.ndarray, np.ndarray, np.ndarray], np.ndarray
]  # x (T, B, I), h, c -> states (T, B, H), an LSTM's c beside


def given(seed: int = 0, inputs: int = INPUTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, and states that are not zero."""
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((STEPS, BATCH, inputs)),
        rng.standard_normal((BATCH, HIDDEN)),
        rng.standard_normal((BATCH, HIDDEN)),
    )


def noise(tree: Any, seed: int = 1) -> Any:
    """Random numbers in place of all leaves, biases too, which the libraries make zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: 0.6 * rng.standard_normal(np.shape(x)), tree)


def flat(tree: Any, prefix: str = "") -> Tree:
    """A nested dict by path."""
    found: Tree = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": np.asarray(value)}
    return found


def _loop(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, x: np.ndarray) -> np.ndarray:
    """`step` takes a carry and an input and gives a carry and (h,) or (h, c)."""
    out = []
    for row in x:
        carry, states = step(carry, row)
        out.append(np.concatenate([np.asarray(s) for s in states], axis=-1))
    return np.stack(out)


def linen(name: str, lstm: bool = False, **arguments: Any) -> tuple[Tree, Run]:
    from flax import linen as nn

    cell = getattr(nn, name)(HIDDEN, param_dtype=jnp.float64, **arguments)
    x, h, c = given()
    first = (c, h) if lstm else h
    params = noise(cell.init(jax.random.key(0), first, x[0])["params"])

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        carry, _ = cell.apply({"params": params}, carry, row)
        return carry, (carry[1], carry[0]) if lstm else (carry,)

    return flat(params), lambda x, h, c: _loop(step, (c, h) if lstm else h, x)


def nnx(name: str, lstm: bool = False, **arguments: Any) -> tuple[Tree, Run]:
    from flax import nnx as nn

    cell = getattr(nn, name)(INPUTS, HIDDEN, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nn.Rngs(0), **arguments)
    _graph, state = nn.split(cell, nn.Param)[:2]
    pure = noise(nn.to_pure_dict(state))
    nn.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, pure))
    nn.update(cell, state)

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        carry, _ = cell(carry, row)
        return carry, (carry[1], carry[0]) if lstm else (carry,)

    return flat(pure), lambda x, h, c: _loop(step, (c, h) if lstm else h, x)


def equinox(name: str, lstm: bool = False, **arguments: Any) -> tuple[Tree, Run]:
    import equinox as eqx

    cell = getattr(eqx.nn, name)(INPUTS, HIDDEN, dtype=jnp.float64, key=jax.random.key(0), **arguments)
    cell = jax.tree.map(jnp.asarray, noise(cell))
    tree = {
        k: np.asarray(v)
        for k in ("weight_ih", "weight_hh", "bias", "bias_n")
        if (v := getattr(cell, k, None)) is not None
    }

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        carry = jax.vmap(lambda x, state: cell(x, state))(jnp.asarray(row), carry)
        return carry, carry if lstm else (carry,)

    return tree, lambda x, h, c: _loop(step, jax.tree.map(jnp.asarray, (h, c) if lstm else h), x)


def haiku(name: str, lstm: bool = False, **arguments: Any) -> tuple[Tree, Run]:
    import haiku as hk

    core = hk.without_apply_rng(
        hk.transform(lambda x, state: getattr(hk, name)(HIDDEN, name="cell", **arguments)(x, state))
    )
    x, h, c = given()
    first = (h, c)
    params = noise(core.init(jax.random.key(0), x[0], hk.LSTMState(*first) if lstm else h))

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        _, carry = core.apply(params, row, carry)
        return carry, (carry.hidden, carry.cell) if lstm else (carry,)

    tree = {path.removeprefix("cell/"): value for path, value in flat(params).items()}
    return tree, lambda x, h, c: _loop(
        step, hk.LSTMState(jnp.asarray(h), jnp.asarray(c)) if lstm else jnp.asarray(h), x
    )


def keras(name: str, lstm: bool = False, **arguments: Any) -> tuple[Tree, Run]:
    import os

    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras as k

    from convert.numerics.lift_jax import lift

    assert k.backend.backend() == "jax"
    cell = getattr(k.layers, f"{name}Cell")(HIDDEN, dtype="float64", **arguments)
    cell.build((BATCH, INPUTS))
    values = noise([np.asarray(w) for w in cell.weights])
    cell.set_weights(values)

    cast = lift(lambda row, *carry: cell(row, list(carry))[1])  # keras.ops.tanh and sigmoid compute in float32 at most

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        carry = [np.asarray(state) for state in cast(jnp.asarray(row), *carry)]
        return carry, carry

    return {f"vars/{i}": v for i, v in enumerate(values)}, lambda x, h, c: _loop(step, [jnp.asarray(h), jnp.asarray(c)] if lstm else [jnp.asarray(h)], x)  # fmt: skip


Made = Callable[[], tuple[Tree, Run]]
LIVE: dict[str, tuple[str, Made]] = {  # the cell as a rule names it -> torch's kind, and the real one
    "flax.linen.GRUCell": ("gru", partial(linen, "GRUCell")),
    "flax.linen.MGUCell": ("gru", partial(linen, "MGUCell")),
    "flax.linen.MGUCell(reset_gate=False)": ("gru", partial(linen, "MGUCell", reset_gate=False)),
    "flax.linen.LSTMCell": ("lstm", partial(linen, "LSTMCell", True)),
    "flax.linen.OptimizedLSTMCell": ("lstm", partial(linen, "OptimizedLSTMCell", True)),
    "flax.linen.SimpleCell": ("rnn", partial(linen, "SimpleCell")),
    "flax.linen.SimpleCell(residual=True)": ("rnn", partial(linen, "SimpleCell", residual=True)),
    "flax.linen.SimpleCell(activation_fn=relu)": ("rnn", partial(linen, "SimpleCell", activation_fn=jax.nn.relu)),
    "flax.nnx.GRUCell": ("gru", partial(nnx, "GRUCell")),
    "flax.nnx.LSTMCell": ("lstm", partial(nnx, "LSTMCell", True)),
    "flax.nnx.OptimizedLSTMCell": ("lstm", partial(nnx, "OptimizedLSTMCell", True)),
    "flax.nnx.SimpleCell": ("rnn", partial(nnx, "SimpleCell")),
    "flax.nnx.SimpleCell(residual=True)": ("rnn", partial(nnx, "SimpleCell", residual=True)),
    "equinox.nn.GRUCell": ("gru", partial(equinox, "GRUCell")),
    "equinox.nn.GRUCell(use_bias=False)": ("gru", partial(equinox, "GRUCell", use_bias=False)),
    "equinox.nn.LSTMCell": ("lstm", partial(equinox, "LSTMCell", True)),
    "equinox.nn.LSTMCell(use_bias=False)": ("lstm", partial(equinox, "LSTMCell", True, use_bias=False)),
    "haiku.GRU": ("gru", partial(haiku, "GRU")),
    "haiku.LSTM": ("lstm", partial(haiku, "LSTM", True)),
    "haiku.VanillaRNN": ("rnn", partial(haiku, "VanillaRNN")),
    "haiku.VanillaRNN(double_bias=False)": ("rnn", partial(haiku, "VanillaRNN", double_bias=False)),
    "keras.layers.GRU": ("gru", partial(keras, "GRU")),
    "keras.layers.GRU(use_bias=False)": ("gru", partial(keras, "GRU", use_bias=False)),
    "keras.layers.GRU(reset_after=False)": ("gru", partial(keras, "GRU", reset_after=False)),
    "keras.layers.LSTM": ("lstm", partial(keras, "LSTM", True)),
    "keras.layers.SimpleRNN": ("rnn", partial(keras, "SimpleRNN")),
    "keras.layers.SimpleRNN(activation=relu)": ("rnn", partial(keras, "SimpleRNN", activation="relu")),
}
