"""The functions of the guide that make a library's tree of the leaves by name give what the model gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.paths import ROOT

jax = pytest.importorskip("jax")
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def _forward(library: str, model: Any) -> Any:
    blocks = (ROOT / "docs/guides/infer.md").read_text().split("```python\n")[1:]
    (code,) = [block.partition("```")[0] for block in blocks if block.startswith(f"# {library}")]
    names: dict[str, Any] = {"model": model}
    exec(code, names)
    return lambda leaves: names["forward"](leaves, {"x": X})


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by the names that `convert inspect` lists."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): x for path, x in found}


def _other(leaves: dict[str, Any]) -> dict[str, Any]:
    return {name: x + 0.5 for name, x in leaves.items()}


def test_linen() -> None:
    nn = pytest.importorskip("flax.linen")
    model = nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(2)])
    variables = model.init(jax.random.key(0), X)
    expected = model.apply(jax.tree.map(lambda x: x + 0.5, variables), X)
    assert np.allclose(_forward("flax linen", model)(_other(_named(variables))), expected)


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

    model = Net(nnx.Rngs(0))
    before = np.asarray(model(X))
    leaves = _named(nnx.to_pure_dict(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))))
    forward = _forward("flax nnx", model)
    assert np.allclose(forward(leaves), before)
    changed = np.asarray(forward(_other(leaves)))
    assert not np.allclose(changed, before) and np.array_equal(before, model(X))
    nnx.update(model, jax.tree.map(lambda x: x + 0.5, nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))))
    assert np.allclose(model(X), changed)


def test_haiku() -> None:
    hk = pytest.importorskip("haiku")
    model = hk.transform(lambda x: hk.nets.MLP([4, 2])(x))
    tree = model.init(jax.random.key(0), X)
    leaves = {f"{module}/{name}": x for module, part in tree.items() for name, x in part.items()}
    expected = model.apply(jax.tree.map(lambda x: x + 0.5, tree), None, X)
    assert np.allclose(_forward("Haiku", model)(_other(leaves)), expected)


def test_haiku_with_state() -> None:
    hk = pytest.importorskip("haiku")

    def net(x: Any, is_training: bool) -> Any:
        return hk.nets.MLP([4, 2])(hk.BatchNorm(True, True, 0.9)(x, is_training))

    model = hk.transform_with_state(net)
    trees = jax.tree.map(
        lambda x: x + 1, dict(zip(("params", "state"), model.init(jax.random.key(0), X, True), strict=True))
    )
    leaves = {
        f"{top}/{module}/{name}": x
        for top, tree in trees.items()
        for module, part in tree.items()
        for name, x in part.items()
    }
    expected, _ = model.apply(trees["params"], trees["state"], None, X, is_training=False)
    assert np.allclose(_forward("With state, as hk.transform_with_state", model)(leaves), expected)


def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 2, 4, 1, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)
    expected = jax.vmap(eqx.combine(jax.tree.map(lambda x: x + 0.5, arrays), rest))(X)
    assert np.allclose(_forward("Equinox", model)(_other(_named(arrays))), expected)
