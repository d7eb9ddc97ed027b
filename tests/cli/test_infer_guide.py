"""The functions of the guide that give a library's model the leaves by name compute what the model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import convert
from support.paths import ROOT

jax = pytest.importorskip("jax")
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def _forward(title: str, **names: Any) -> Callable[[dict[str, Any]], Any]:
    """Return the function of the guide's block whose first line begins with this title, as a function of the leaves."""
    blocks = (ROOT / "docs/guides/infer.md").read_text().split("```python\n")[1:]
    (code,) = [block.partition("```")[0] for block in blocks if block.startswith(f"# {title}")]
    names |= {"convert": convert, "jax": jax, "x": X}
    exec(code, names)
    return lambda leaves: jax.jit(names["forward"])(leaves, {"x": X})


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by the names that `convert inspect` lists."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): x for path, x in found}


def _changed(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 0.5, tree)


def _linen() -> Any:
    nn = pytest.importorskip("flax.linen")
    return nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=True), nn.Dense(2)])


@pytest.mark.slow
def test_linen() -> None:
    model = _linen()
    variables = _changed(model.init(jax.random.key(0), X))
    assert np.allclose(_forward("flax linen: saved", model=model)(_named(variables)), model.apply(variables, X))


def test_linen_with_root() -> None:
    nn = pytest.importorskip("flax.linen")
    model = nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(2)])
    first = model.init(jax.random.key(0), X)
    variables = _changed(first)
    forward = _forward("flax linen with --root", model=model, variables=first)
    assert np.allclose(forward(_named(variables["params"])), model.apply(variables, X))


def test_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
            self.norm, self.dropout = (
                nnx.BatchNorm(4, use_running_average=True, rngs=rngs),
                nnx.Dropout(0.5, deterministic=True, rngs=rngs),
            )

        def __call__(self, x: Any) -> Any:
            return self.norm(self.layers[1](self.dropout(jax.numpy.tanh(self.layers[0](x)))))

    model, saved = Net(nnx.Rngs(0)), nnx.Any(nnx.Param, nnx.BatchStat)
    before = np.asarray(model(X))
    forward = _forward("flax nnx", model=model)
    leaves = _named(nnx.to_pure_dict(nnx.state(model, saved)))
    assert np.allclose(forward(leaves), before)
    changed = np.asarray(forward(_changed(leaves)))
    assert not np.allclose(changed, before) and np.array_equal(before, model(X))
    nnx.update(model, _changed(nnx.state(model, saved)))
    assert np.allclose(model(X), changed)


@pytest.mark.slow
def test_haiku() -> None:
    hk = pytest.importorskip("haiku")
    net = hk.transform(lambda x: hk.nets.MLP([4, 2])(x))
    params = net.init(jax.random.key(0), X)
    expected = net.apply(_changed(params), None, X)
    assert np.allclose(_forward("Haiku\n", net=net, params=params)(_changed(_named(params))), expected)


def test_haiku_with_state() -> None:
    hk = pytest.importorskip("haiku")

    def model(x: Any, is_training: bool) -> Any:
        return hk.nets.MLP([4, 2])(hk.BatchNorm(True, True, 0.9)(x, is_training))

    net = hk.transform_with_state(model)
    params, state = net.init(jax.random.key(0), X, True)
    trees = _changed({"params": params, "state": state})
    expected, _ = net.apply(trees["params"], trees["state"], None, X, is_training=False)
    forward = _forward("Haiku with state", net=net, params=params, state=state)
    assert np.allclose(forward(_named(trees)), expected)


@pytest.mark.slow
def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 2, 4, 1, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)
    expected = jax.vmap(eqx.combine(_changed(arrays), rest))(X)
    assert np.allclose(_forward("Equinox: the model", model=model)(_changed(_named(arrays))), expected)


def test_equinox_with_state() -> None:
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        linear: Any
        norm: Any

        def __init__(self) -> None:
            self.linear = eqx.nn.Linear(4, 2, key=jax.random.key(0))
            self.norm = eqx.nn.BatchNorm(2, "batch", inference=True, mode="ema")

        def __call__(self, x: Any, state: Any) -> Any:
            return self.norm(self.linear(x), state)

    both = eqx.nn.make_with_state(Net)()
    arrays, rest = eqx.partition(both, eqx.is_inexact_array)
    model, state = eqx.combine(_changed(arrays), rest)
    expected, _ = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(X, state)
    leaves = _named(eqx.filter((model, state), eqx.is_array))
    forward = _forward("Equinox with state", model=both[0], state=both[1])
    assert np.allclose(forward(leaves), expected)
