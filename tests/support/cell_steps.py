"""Cells of the real libraries as functions of their leaves: one step, that JAX can trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import traverse_util

from support.cell_trees import BATCH, HIDDEN, INPUTS

Step = Callable[
    [Mapping[str, Any], tuple[Any, ...], Any], tuple[Any, ...]
]  # leaves, (h,) or (h, c), x -> the next state


def step_of(cell: str) -> Step:
    """The step of a cell as a rule names it: ``flax.linen.GRUCell``, ``keras.layers.GRU(use_bias=False)``."""
    name, _, arguments = cell.partition("(")
    library, _, kind = name.rpartition(".")
    words = {"True": True, "False": False, "relu": jax.nn.relu}
    given = {key: words[word] for key, word in (pair.split("=") for pair in arguments.rstrip(")").split(",") if pair)}
    return {"flax.linen": _linen, "flax.nnx": _nnx, "equinox.nn": _equinox, "haiku": _haiku, "keras.layers": _keras}[library](kind, "LSTM" in kind, given)  # fmt: skip


def _nested(leaves: Mapping[str, Any]) -> Any:
    return traverse_util.unflatten_dict(dict(leaves), sep="/")


def _linen(kind: str, lstm: bool, given: dict[str, Any]) -> Step:
    from flax import linen as nn

    cell = getattr(nn, kind)(HIDDEN, **given)

    def step(leaves: Mapping[str, Any], state: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
        carry, _ = cell.apply({"params": _nested(leaves)}, state[::-1] if lstm else state[0], x)
        return tuple(carry[::-1]) if lstm else (carry,)

    return step


def _nnx(kind: str, lstm: bool, given: dict[str, Any]) -> Step:
    from flax import nnx as nn

    graph, state_of_cell, rest = nn.split(getattr(nn, kind)(INPUTS, HIDDEN, rngs=nn.Rngs(0), **given), nn.Param, ...)

    def step(leaves: Mapping[str, Any], state: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
        own = jax.tree.map(lambda value: value, state_of_cell)
        nn.replace_by_pure_dict(own, _nested(leaves))
        carry, _ = nn.merge(graph, own, rest)(state[::-1] if lstm else state[0], x)
        return tuple(carry[::-1]) if lstm else (carry,)

    return step


def _equinox(kind: str, lstm: bool, given: dict[str, Any]) -> Step:
    import equinox as eqx

    cell = getattr(eqx.nn, kind)(INPUTS, HIDDEN, key=jax.random.key(0), **given)

    def step(leaves: Mapping[str, Any], state: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
        own = eqx.tree_at(lambda c: [getattr(c, name) for name in leaves], cell, list(leaves.values()))
        made = jax.vmap(lambda x, state: own(x, state))(x, state if lstm else state[0])
        return tuple(made) if lstm else (made,)

    return step


def _haiku(kind: str, lstm: bool, given: dict[str, Any]) -> Step:
    import haiku as hk

    core = hk.without_apply_rng(
        hk.transform(lambda x, state: getattr(hk, kind)(HIDDEN, name="cell", **given)(x, state))
    )

    def step(leaves: Mapping[str, Any], state: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
        modules: dict[str, dict[str, Any]] = {}
        for path, leaf in leaves.items():
            module, _, name = f"cell/{path}".rpartition("/")
            modules.setdefault(module, {})[name] = leaf
        _, carry = core.apply(modules, x, hk.LSTMState(*state) if lstm else state[0])
        return (carry.hidden, carry.cell) if lstm else (carry,)

    return step


def _keras(kind: str, lstm: bool, given: dict[str, Any]) -> Step:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    given = {key: value if isinstance(value, bool) else "relu" for key, value in given.items()}
    cell = getattr(keras.layers, f"{kind}Cell")(HIDDEN, **given)
    cell.build((BATCH, INPUTS))
    seeds = [variable.value for variable in cell.non_trainable_variables]

    def step(leaves: Mapping[str, Any], state: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
        weights = [leaves[f"vars/{k}"] for k in range(len(leaves))]
        (_, carry), _ = cell.stateless_call(weights, seeds, x, list(state))
        return tuple(carry)

    return step
