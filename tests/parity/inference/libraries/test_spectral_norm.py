"""A spectral norm of each JAX library becomes a plain layer: linen and nnx iterate from u, Haiku with another epsilon, Equinox divides by u w v."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.tree_util import keystr, tree_leaves_with_path

from convert.inference.derivation import Arithmetic, Grade
from support.inferred import WIDTH, derive, floats, grades, rules
from support.inferred import linen as of_linen

D, OUT = WIDTH, 8
X = np.zeros((3, 7, D))
Pair = tuple[Callable[[Any, Any], Any], dict[str, tuple[int, ...]]]


def _linen() -> Pair:
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return jnp.tanh(linen.SpectralNorm(linen.Dense(OUT))(x, update_stats=False))

    return of_linen(Model(), X)


def _nnx() -> Pair:
    model = nnx.SpectralNorm(nnx.Linear(D, OUT, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    graph, state, rest = nnx.split(model, nnx.Any(nnx.Param, nnx.BatchStat), ...)
    flat = flatten_dict(nnx.to_pure_dict(state))
    names = {
        "/".join(str(part) for key in path for part in (key if isinstance(key, tuple) else (key,))): path
        for path in flat
    }

    def function(leaves: Any, x: Any) -> Any:
        nnx.replace_by_pure_dict(state, unflatten_dict({names[name]: array for name, array in leaves.items()}))
        return jnp.tanh(nnx.merge(graph, state, rest)(x, update_stats=False))

    return function, {name: flat[path].shape for name, path in names.items()}


def _equinox() -> Pair:
    key = jax.random.key(0)
    model, state = eqx.nn.make_with_state(eqx.nn.SpectralNorm)(
        eqx.nn.Linear(D, OUT, key=key), "weight", inference=True, key=key
    )
    arrays, rest = eqx.partition((model, state), eqx.is_inexact_array)
    named = {keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in tree_leaves_with_path(arrays)}

    def function(leaves: Any, x: Any) -> Any:
        given = jax.tree.unflatten(jax.tree.structure(arrays), [leaves[name] for name in named])
        model, state = eqx.combine(given, rest)
        return jnp.tanh(jax.vmap(jax.vmap(lambda row: model(row, state)[0]))(x))

    return function, named


def _haiku(steps: int) -> Pair:
    def net(x: Any) -> Any:
        kernel = hk.get_parameter("w", (D, OUT), init=jnp.ones)
        kernel = hk.SpectralNorm(n_steps=steps, name="norm")(kernel, update_stats=False)
        return jnp.tanh(x @ kernel + hk.get_parameter("b", (OUT,), init=jnp.zeros))

    model = hk.transform_with_state(net)
    trees = jax.eval_shape(model.init, jax.random.key(0), X)
    named = {
        (kind, module, leaf): array.shape
        for kind, tree in enumerate(trees)
        for module, of in tree.items()
        for leaf, array in of.items()
    }

    def function(leaves: Any, x: Any) -> Any:
        made: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for kind, module, leaf in named:
            made[kind].setdefault(module, {})[leaf] = leaves[f"{kind}/{module}/{leaf}"]
        return model.apply(*made, None, x)[0]

    return function, {"/".join(map(str, name)): shape for name, shape in named.items()}


CASES: dict[str, tuple[Callable[[], Pair], str]] = {
    "linen": (_linen, "spectral_norm: batch_stats/SpectralNorm_0/Dense_0/kernel/u\n"),
    "nnx": (_nnx, "spectral_norm: batch_stats/kernel/u\n"),
    "equinox": (_equinox, "spectral_norm: {u: 1/0/0, v: 1/0/1}\n"),
    "haiku": (lambda: _haiku(1), "spectral_norm: 1/norm/u0\n  normalization_epsilon: 1e-4\n"),
    "haiku with three steps": (
        lambda: _haiku(3),
        "spectral_norm: {u: 1/norm/u0, steps: 3}\n  normalization_epsilon: 1e-4\n",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("nnx", "equinox") else ()) for name in CASES]
)
def test_a_spectral_norm_is_folded_into_a_plain_layer(name: str) -> None:
    make, said = CASES[name]
    function, shapes = make()
    module = torch.nn.Sequential(torch.nn.Linear(D, OUT), torch.nn.Tanh())
    found = derive(function, module, shapes, floats(3, 7, D))
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert {part.arithmetic for part in found.tensor("0.weight").parts} == {Arithmetic.COMPUTED}
    assert said in rules(found, module)[0] + "\n"
