"""A spectral norm of each JAX library becomes a plain layer: linen and nnx iterate from u, Haiku with another epsilon, Equinox divides by u w v.

torch's own, old and new, keep the weight and two vectors: Equinox's as they are; those of the others are computed at every call.
"""

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
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import WIDTH, derive, floats, grades, rules, sources
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


KEPT = {
    "parametrizations": (
        torch.nn.utils.parametrizations.spectral_norm,
        ("0.parametrizations.weight.original", "0.parametrizations.weight.0._u", "0.parametrizations.weight.0._v"),
    ),
    "old": (torch.nn.utils.spectral_norm, ("0.weight_orig", "0.weight_u", "0.weight_v")),
}


@pytest.mark.parametrize("kept", [pytest.param("parametrizations", marks=pytest.mark.slow), "old"])
def test_the_vectors_of_equinox_are_those_of_torch(kept: str) -> None:
    function, shapes = _equinox()
    wrap, names = KEPT[kept]
    module = torch.nn.Sequential(wrap(torch.nn.Linear(D, OUT)), torch.nn.Tanh())
    found = derive(function, module, shapes, floats(3, 7, D))
    assert grades(found) == {Grade.DERIVED}
    assert [sources(found.tensor(name)) for name in names] == ["0/layer/weight", "1/0/0", "1/0/1"]
    weight = names[0].removeprefix("0.")
    assert f'linear: {{module: "0", weight: {weight}}}' in "\n".join(rules(found, module))


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", ["linen", "haiku with three steps"])
def test_vectors_that_are_computed_at_every_call_are_derived_and_have_no_rule(name: str, kept: str) -> None:
    function, shapes = CASES[name][0]()
    wrap, names = KEPT[kept]
    module = torch.nn.Sequential(wrap(torch.nn.Linear(D, OUT)), torch.nn.Tanh())
    found = derive(function, module, shapes, floats(3, 7, D))
    assert found.complete and grades(found) == {Grade.DERIVED}
    written = write_rules(found, model_of_module(module, "Model"))
    assert set(written.open) == set(names[1:])
    remove = "torch.nn.utils.remove_spectral_norm" if kept == "old" else "parametrize.remove_parametrizations"
    assert all(remove in why and "a rule computes no vector" in why for why in written.open.values())
    assert 'module: "0"' in written.decided and f"# parameter: {names[1]}" not in written.text


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
def test_a_spectral_norm_that_the_source_lacks_is_never_derived(kept: str) -> None:
    module = torch.nn.Sequential(KEPT[kept][0](torch.nn.Linear(D, OUT)), torch.nn.Tanh())
    found = derive(lambda w, x: jnp.tanh(x @ w["a"] + w["b"]), module, {"a": (D, OUT), "b": (OUT,)}, floats(3, 7, D))
    assert not found.complete and found.proof is None and found.differences


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
def test_a_convolution_of_equinox_with_a_spectral_norm(kept: str) -> None:
    key = jax.random.key(0)
    layer = eqx.nn.Conv2d(3, OUT, 3, padding=1, key=key)
    model, state = eqx.nn.make_with_state(eqx.nn.SpectralNorm)(layer, "weight", inference=True, key=key)
    arrays, rest = eqx.partition((model, state), eqx.is_inexact_array)
    named = {keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in tree_leaves_with_path(arrays)}

    def function(leaves: Any, x: Any) -> Any:
        given = jax.tree.unflatten(jax.tree.structure(arrays), [leaves[name] for name in named])
        model, state = eqx.combine(given, rest)
        return jnp.tanh(jax.vmap(lambda row: model(row, state)[0])(x))

    module = torch.nn.Sequential(KEPT[kept][0](torch.nn.Conv2d(3, OUT, 3, padding=1)), torch.nn.Tanh())
    found = derive(function, module, named, floats(2, 3, 6, 6))
    assert grades(found) == {Grade.DERIVED}
    assert [sources(found.tensor(name)) for name in KEPT[kept][1]] == ["0/layer/weight", "1/0/0", "1/0/1"]
    assert rules(found, module)
