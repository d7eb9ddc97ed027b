"""Deep and two-way recurrent models, as users of each library write them, and torch's layer for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import traverse_util

os.environ.setdefault("KERAS_BACKEND", "jax")

BATCH, STEPS, INPUTS, HIDDEN = 2, 4, 3, 5
Function = Callable[[Mapping[str, Any], Any], Any]  # (leaves by name, x) -> the states of the last layer
Made = tuple[Function, dict[str, tuple[int, ...]]]
LAYERS = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "rnn": torch.nn.RNN}


def draw(seed: int) -> dict[str, Any]:
    """Inputs."""
    return {"x": np.random.default_rng(seed).normal(size=(BATCH, STEPS, INPUTS))}


class Recurrent(torch.nn.Module):
    """A recurrent layer of torch, without its last state."""

    def __init__(self, kind: str, layers: int, two_way: bool, **arguments: Any) -> None:
        super().__init__()
        self.r = LAYERS[kind](INPUTS, HIDDEN, layers, batch_first=True, bidirectional=two_way, **arguments)

    def forward(self, x: Any) -> Any:
        return self.r(x)[0]


def linen(cell: str, layers: int, two_way: bool) -> Made:
    """`nn.RNN` and `nn.Bidirectional`, one after the other."""
    from flax import linen as nn

    make = getattr(nn, cell)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(layers):
                x = (nn.Bidirectional(nn.RNN(make(HIDDEN)), nn.RNN(make(HIDDEN))) if two_way else nn.RNN(make(HIDDEN)))(
                    x
                )
            return x

    model = Model()
    tree = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((BATCH, STEPS, INPUTS)))["params"]

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        return model.apply({"params": traverse_util.unflatten_dict(dict(leaves), sep="/")}, x)

    return function, {name: leaf.shape for name, leaf in traverse_util.flatten_dict(tree, sep="/").items()}


def nnx(cell: str, layers: int, two_way: bool) -> Made:
    """`nnx.RNN` and `nnx.Bidirectional` in a list."""
    from flax import nnx as nn

    def one(width: int) -> Any:
        return nn.RNN(getattr(nn, cell)(width, HIDDEN, rngs=nn.Rngs(0)))

    widths = [INPUTS, *[HIDDEN * (1 + two_way)] * (layers - 1)]
    model = nn.List([nn.Bidirectional(one(width), one(width)) if two_way else one(width) for width in widths])
    graph, state, rest = nn.split(model, nn.Param, ...)
    paths = {"/".join(map(str, path)): path for path in traverse_util.flatten_dict(nn.to_pure_dict(state))}
    shapes = {name: np.shape(leaf) for name, leaf in zip(paths, jax.tree.leaves(nn.to_pure_dict(state)), strict=True)}

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        own = jax.tree.map(lambda value: value, state)
        nn.replace_by_pure_dict(own, traverse_util.unflatten_dict({paths[name]: leaf for name, leaf in leaves.items()}))
        for layer in nn.merge(graph, own, rest):
            x = layer(x, rngs=nn.Rngs(0))  # of the first state, which is zeros
        return x

    return function, shapes


def haiku(cell: str, layers: int, two_way: bool) -> Made:
    """`hk.dynamic_unroll`; of two ways the second over the reversed sequence, and its states reversed back."""
    import haiku as hk

    def model(x: Any) -> Any:
        for _ in range(layers):
            found = []
            for way in (1, -1)[: 1 + two_way]:
                core = getattr(hk, cell)(HIDDEN)
                states, _ = hk.dynamic_unroll(core, x[:, ::way], core.initial_state(BATCH), time_major=False)
                found.append(states[:, ::way])
            x = jnp.concatenate(found, -1)
        return x

    return _of_haiku(model)


def _of_haiku(model: Callable[[Any], Any]) -> Made:
    import haiku as hk

    made = hk.without_apply_rng(hk.transform(model))
    tree = jax.eval_shape(made.init, jax.random.key(0), jnp.zeros((BATCH, STEPS, INPUTS)))

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        modules: dict[str, dict[str, Any]] = {}
        for name, leaf in leaves.items():
            module, _, own = name.rpartition("/")
            modules.setdefault(module, {})[own] = leaf
        return made.apply(modules, x)

    return function, {f"{module}/{name}": leaf.shape for module, own in tree.items() for name, leaf in own.items()}


def haiku_in_one_loop(cell: str, layers: int, fault: str = "") -> Made:
    """`hk.DeepRNN`: each step of the loop goes through all layers."""
    import haiku as hk

    class Faulty(hk.DeepRNN):  # type: ignore[misc]  # Haiku has no types
        """Planted: a layer gives its hidden state a step late, or the state of its cell."""

        def __call__(self, x: Any, states: Any) -> tuple[Any, Any]:
            made = []
            for layer, before in zip(self.layers, states, strict=True):
                _, after = layer(x, before)
                x = before.hidden if fault == "a step late" else after.cell
                made.append(after)
            return x, tuple(made)

    def model(x: Any) -> Any:
        core = (Faulty if fault else hk.DeepRNN)([getattr(hk, cell)(HIDDEN) for _ in range(layers)])
        return hk.dynamic_unroll(core, x, core.initial_state(BATCH), time_major=False)[0]

    return _of_haiku(model)


def equinox(cell: str, layers: int, two_way: bool) -> Made:
    """Cells in `lax.scan`, the second way with ``reverse=True``."""
    import equinox as eqx

    ways = 1 + two_way
    widths = [INPUTS, *[HIDDEN * ways] * (layers - 1)]
    cells = [[getattr(eqx.nn, cell)(width, HIDDEN, key=jax.random.key(k)) for k in range(ways)] for width in widths]
    arrays, rest = eqx.partition(cells, eqx.is_array)
    paths, structure = jax.tree_util.tree_flatten_with_path(arrays)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    zeros = jnp.zeros(HIDDEN)

    def run(own: Any, x: Any, reverse: bool) -> Any:
        def step(state: Any, row: Any) -> tuple[Any, Any]:
            state = own(row, state)
            return state, state[0] if isinstance(state, tuple) else state

        return jax.lax.scan(step, (zeros, zeros) if "LSTM" in cell else zeros, x, reverse=reverse)[1]

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        own = eqx.combine(jax.tree.unflatten(structure, [leaves[name] for name in names]), rest)
        for layer in own:
            x = jnp.concatenate([jax.vmap(lambda x, c=c, k=k: run(c, x, k == 1))(x) for k, c in enumerate(layer)], -1)
        return x

    return function, {name: leaf.shape for name, (_, leaf) in zip(names, paths, strict=True)}


def keras(cell: str, layers: int, two_way: bool) -> Made:
    """`keras.layers.LSTM` and `Bidirectional` in a model."""
    import keras as k

    given = k.Input((STEPS, INPUTS), batch_size=BATCH)
    x = given
    for _ in range(layers):
        layer = getattr(k.layers, cell)(HIDDEN, return_sequences=True)
        x = (k.layers.Bidirectional(layer) if two_way else layer)(x)
    model = k.Model(given, x)
    shapes: dict[str, tuple[int, ...]] = {}  # as in the file of weights: the variables of a cell are numbered
    for variable in model.trainable_variables:
        start = variable.path.rpartition("/")[0]
        shapes[f"{start}/vars/{sum(name.startswith(f'{start}/') for name in shapes)}"] = tuple(variable.shape)
    seeds = [variable.value for variable in model.non_trainable_variables]

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        return model.stateless_call([leaves[name] for name in shapes], seeds, x)[0]

    return function, shapes
