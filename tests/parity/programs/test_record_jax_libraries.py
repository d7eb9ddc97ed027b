"""Models of every JAX library are recorded: all parameters are found, loops are unrolled, modules are named."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from convert.core.errors import ConvertError
from convert.programs.program import Program
from convert.programs.record_jax import record_jax
from support.marks import slow_but

WIDTH, LAYERS = 4, 3
X = {"x": np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)}
Tree = Any


@dataclass(frozen=True)
class Model:
    """A model to record.

    Attributes:
        tree: its variables.
        apply: (variables, x) -> its output.
        products: how many matrix products it has, with its loops unrolled.
        modules: paths that are recorded.
    """

    tree: Tree
    apply: Callable[[Tree, Any], Any]
    products: int
    modules: tuple[str, ...] = ()


# ---- linen


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.Dense(WIDTH, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dropout(0.5)(nn.gelu(y), deterministic=True)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.MultiHeadDotProductAttention(2, name="attention")(x, x)
        for k in range(LAYERS):
            x = Block(name=f"layer_{k}")(x)
        return x


def _step(block: Any, x: Any) -> Any:
    return block(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        stack = nn.scan(_step, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return stack(Block(name="block"), x)[0]


class Remat(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.remat(Block)(name="block")(x)


class Mapped(nn.Module):
    """Experts, each with its own weights."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        experts = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3)
        return experts(WIDTH, name="experts")(x).mean(0)


class Cell(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.RNN(nn.GRUCell(WIDTH), name="rnn")(x)


def linen(model: nn.Module, products: int, *modules: str) -> Model:
    return Model(jax.eval_shape(model.init, jax.random.key(0), X["x"]), model.apply, products, modules)


# ---- nnx


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True)

    def __call__(self, x: Any) -> Any:
        return x + self.dropout(jax.nn.silu(self.up(self.norm(x))))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class NnxScanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxBlock))(rngs)

    def __call__(self, x: Any) -> Any:
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def of_nnx(kind: Any, *modules: str) -> Model:
    graph, params, rest = nnx.split(kind(nnx.Rngs(0)), nnx.Param, ...)
    return Model(params, lambda params, x: nnx.merge(graph, params, rest)(x), LAYERS, modules)


# ---- the others


class Equinox(eqx.Module):
    layers: list[eqx.nn.Linear]
    norm: eqx.nn.LayerNorm

    def __init__(self) -> None:
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(k)) for k in range(LAYERS)]
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.norm(x)


def of_equinox() -> Model:
    arrays, rest = eqx.partition(Equinox(), eqx.is_array)
    return Model(
        arrays,
        lambda arrays, x: jax.vmap(jax.vmap(eqx.combine(arrays, rest)))(x),
        LAYERS,
        ("layers/0", "layers/2", "norm"),
    )


def of_haiku() -> Model:
    def apply(x: Any) -> Any:
        return hk.LayerNorm(-1, True, True)(hk.nets.MLP([WIDTH, WIDTH])(x))

    model = hk.without_apply_rng(hk.transform(apply))
    return Model(model.init(jax.random.key(0), X["x"]), model.apply, 2, ("mlp/~/linear_0", "layer_norm"))


def plain() -> Model:
    def apply(tree: Tree, x: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            return jax.nn.relu(x @ weights["kernel"] + weights["bias"]), None

        return jax.jit(lambda tree, x: jax.lax.scan(layer, x, tree)[0])(tree, x)

    rng = np.random.default_rng(0)
    return Model({"kernel": rng.normal(size=(LAYERS, 4, 4)), "bias": rng.normal(size=(LAYERS, 4))}, apply, LAYERS)


MODELS: dict[str, Callable[[], Model]] = {
    "linen": lambda: linen(Linen(), 6 + LAYERS, "attention/query", "attention/out", "layer_0/up", "layer_2/norm"),
    "linen scan": lambda: linen(Scanned(), LAYERS, "block/up"),
    "linen remat": lambda: linen(Remat(), 1, "block/up"),
    "linen vmap": lambda: linen(Mapped(), 1),
    "linen cell": lambda: linen(Cell(), 6 * 5),
    "nnx": lambda: of_nnx(Nnx, "layers/0/up", "layers/2/norm"),
    "nnx scan": lambda: of_nnx(NnxScanned),
    "equinox": of_equinox,
    "haiku": of_haiku,
    "plain": plain,
}


@cache
def recorded(name: str) -> tuple[Model, Program]:
    model = MODELS[name]()
    function, weights = flat(model)
    return model, record_jax(function, weights, X)


def flat(model: Model) -> tuple[Callable[..., Mapping[str, Any]], dict[str, Any]]:
    """The model as a function of its parameters by name, and the parameters, which are random."""
    leaves, structure = jax.tree.flatten_with_path(model.tree)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    rng = np.random.default_rng(1)
    weights = {
        name: rng.normal(size=leaf.shape).astype(np.float32) for name, (_, leaf) in zip(names, leaves, strict=True)
    }
    return lambda w, i: {"y": model.apply(jax.tree.unflatten(structure, [w[name] for name in names]), i["x"])}, weights


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_each_library_is_recorded(name: str) -> None:
    model, program = recorded(name)
    function, weights = flat(model)
    made = program.outputs["y"]
    assert made.leaves == set(weights)
    assert not program.opaque and not program.path_taken
    products = [operation for operation in program.operations if operation.name == "dot_general"]
    assert len(products) == model.products
    assert {operation.module for operation in program.operations} >= set(model.modules)
    assert all(operation.where for operation in program.operations)
    for operation in products:
        assert all(operand.data or operand.constant or operand.elements for operand in operation.operands), operation
    with jax.default_matmul_precision("highest"):
        native = jax.jit(function)(weights, X)["y"]
    np.testing.assert_allclose(made.array, np.asarray(native), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(list(MODELS)[::4], MODELS))
def test_every_operation_runs_again(name: str) -> None:
    _, program = recorded(name)
    for operation in program.operations:
        repeated = operation.again([operand.array for operand in operation.operands])
        for value, again in zip(operation.results, repeated, strict=True):
            np.testing.assert_array_equal(value.array, again, err_msg=str(operation))


def test_a_layer_of_a_scan_has_its_own_elements() -> None:
    _, program = recorded("plain")
    kernels = [operation.operands[1].elements[0] for operation in program.operations if operation.name == "dot_general"]
    np.testing.assert_array_equal(np.stack(kernels), 12 + np.arange(48).reshape(LAYERS, 4, 4))  # after the biases


def test_keras_on_jax_is_recorded() -> None:
    model = keras.Sequential(
        [keras.Input((5, WIDTH)), keras.layers.Dense(WIDTH, "gelu"), keras.layers.LayerNormalization()]
    )
    weights = {variable.path: np.asarray(variable) for variable in model.trainable_variables}
    program = record_jax(
        lambda w, i: {"y": model.stateless_call([w[v.path] for v in model.trainable_variables], [], i["x"])[0]},
        weights,
        X,
    )
    assert program.outputs["y"].leaves == set(weights)


def _double(x: Any, out: Any) -> None:
    out[...] = x[...] * 2


@pytest.mark.parametrize("given", [np.float32, np.float64])
def test_a_pallas_kernel_is_one_opaque_operation(given: type) -> None:
    def function(w: Any, i: Any) -> Any:
        made = jax.ShapeDtypeStruct((4, 4), w["a"].dtype)
        return {"y": i["x"] @ pallas.pallas_call(_double, out_shape=made, interpret=True)(w["a"])}

    program = record_jax(function, {"a": np.random.default_rng(0).normal(size=(4, 4)).astype(given)}, X)
    assert program.opaque == ("pallas_call",)
    assert [operation.name for operation in program.operations].count("pallas_call") == 1
    assert program.outputs["y"].leaves == {"a"}


def test_a_kernel_for_another_device_is_one_error() -> None:
    def function(w: Any, i: Any) -> Any:
        return {"y": i["x"] @ pallas.pallas_call(_double, out_shape=jax.ShapeDtypeStruct((4, 4), jnp.float32))(w["a"])}

    with pytest.raises(ConvertError, match="interpret=True of a Pallas kernel") as raised:
        record_jax(function, {"a": np.ones((4, 4), np.float32)}, X)
    assert raised.value.findings[0].code == "function-not-runnable"


SHARDED: Mapping[str, Callable[[Any, Any], Any]] = {
    "product": lambda x, w: x @ w,
    "sum": lambda x, w: lax.psum(x @ w, "rows"),
    "mean": lambda x, w: x @ w - lax.pmean(x @ w, "rows"),
    "gathered": lambda x, w: lax.all_gather(x @ w, "rows", tiled=True),
    "scattered": lambda x, w: lax.psum_scatter(x @ w, "rows", tiled=True),
    "exchanged": lambda x, w: lax.all_to_all(x @ w, "rows", 1, 0, tiled=True),
    "place": lambda x, w: x @ w + lax.axis_index("rows"),
    "loop": lambda x, w: lax.scan(lambda y, _: (jnp.tanh(y @ w) + lax.psum(y, "rows"), None), x, length=2)[0],
}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", SHARDED)
def test_what_runs_on_the_shards_of_one_device_is_recorded(name: str, checked: bool) -> None:
    rows = PartitionSpec("rows")
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    sharded = partial(jax.shard_map, mesh=mesh, in_specs=(rows, PartitionSpec()), check_vma=checked)
    w = {"a": np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)}

    def function(w: Any, i: Any) -> Any:
        specs = PartitionSpec() if checked and name == "sum" else rows
        return {"y": sharded(SHARDED[name], out_specs=specs)(i["x"], w["a"])}

    program = record_jax(function, w, X)
    assert program.opaque == ()
    assert program.outputs["y"].leaves == {"a"}
    assert "dot_general" in {operation.name for operation in program.operations}
    np.testing.assert_allclose(program.outputs["y"].array, function(w, X)["y"], rtol=1e-5, atol=1e-5)


def test_shards_of_several_devices_are_one_error() -> None:
    mesh = AbstractMesh((2,), ("rows",))
    rows = PartitionSpec("rows")
    sharded = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=(rows,), out_specs=rows)
    with pytest.raises(ConvertError, match="a mesh of 2 devices.*or a mesh of one device"):
        record_jax(lambda w, i: {"y": sharded(i["x"])}, {}, {"x": np.ones((4, 4), np.float32)})


def test_a_function_with_a_rule_of_its_own_for_vmap_is_recorded() -> None:
    @jax.custom_batching.custom_vmap
    def product(x: Any, w: Any) -> Any:
        return x @ w

    product.def_vmap(lambda size, batched, x, w: (x @ w, True))
    program = record_jax(lambda w, i: {"y": product(i["x"], w["a"])}, {"a": np.eye(4)}, X)
    assert [operation.name for operation in program.operations] == ["dot_general"]
