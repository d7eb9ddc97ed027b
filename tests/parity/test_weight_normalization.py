"""Weights that the source normalises at every call, in forms that no matrix has: kernels of several output axes, both vectors of a
spectral norm stored, maps and heads in another order. Against flax linen and nnx, Equinox and Keras in float64.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

from convert import PlanError, RuleError
from convert.planning.planner import make_plan
from convert.verify.layers.level import check_layers
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.live_layers import converted, draw, drawn, loaded, names, same
from support.marks import slow_but
from support.memory_source import MemorySource, rule_file
from support.weights_level import check_weights


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.disable_jit():
        yield


HEADS = "- einsum: ...D,DNH->...NH\n  from: params/dense/kernel\n  bias: params/dense/bias\n  {word}: {said}\n  linear: {target}"
SCALE = "params/wn/dense/kernel/scale"


def heads(word: str, said: str, target: str = "m") -> str:
    return HEADS.format(word=word, said=said, target=target)


# ---- weight norm


@pytest.mark.parametrize(
    ("axes", "shape", "said"),
    [
        (-1, (3,), SCALE),
        ((-2, -1), (5, 3), SCALE),
        (None, (), SCALE),
        (-2, (5,), f"{{scale: {SCALE}, axes: N}}"),
        ((0, 2), (4, 3), f"{{scale: {SCALE}, axes: DH}}"),
    ],
)
@pytest.mark.parametrize("library", slow_but(["nnx"], ["linen", "nnx"]))
def test_flax_weight_norm_of_heads(library: str, axes: Any, shape: tuple[int, ...], said: str) -> None:
    """flax takes the norm over all axes but the last one, not over those of the input: a scale for each place within a head."""
    x = draw(2, 4)
    if library == "nnx":
        dense = nnx.LinearGeneral(4, (5, 3), param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        tree = {"params/dense/kernel": draw(4, 5, 3), "params/dense/bias": draw(5, 3), SCALE: draw(*shape)}
        dense.kernel[...], dense.bias[...] = (
            jnp.asarray(tree["params/dense/kernel"]),
            jnp.asarray(tree["params/dense/bias"]),
        )
        outer: Any = nnx.WeightNorm(dense, feature_axes=axes, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        (path,) = outer.scales
        outer.scales[path] = jnp.asarray(tree[SCALE])
        want = outer(jnp.asarray(x))
    else:

        class Outer(linen.Module):
            @linen.compact
            def __call__(self, x: Any) -> Any:
                dense = linen.DenseGeneral((5, 3), param_dtype=jnp.float64, name="dense")
                return linen.WeightNorm(dense, feature_axes=axes, param_dtype=jnp.float64, name="wn")(x)

        variables = drawn(Outer().init(jax.random.key(0), x))
        tree, want = names(variables), Outer().apply(variables, x)
    assert tree[SCALE].shape == shape
    got = loaded(torch.nn.Linear(4, 15), converted(heads("weight_norm", said), tree))(torch.tensor(x))
    same(got.reshape(2, 5, 3).numpy(), want)


TRANSPOSED = """\
- dimension_numbers: NWC,WIO->NWC
  axes: PIO
  from: v
  bias: b
  weight_norm: {scale: g, axes: AXES}
  normalization_epsilon: 0
  padding: SAME
  strides: [2]
  conv_transpose: TARGET"""


def _transposed_tree(axes: str) -> dict[str, Any]:
    return {"v": draw(4, 5, 3), "g": draw({"I": 5, "O": 3}[axes]), "b": draw(3)}


def _transposed(tree: dict[str, Any], x: Any, axes: str) -> Any:
    over = (0, 2) if axes == "I" else (0, 1)
    scale = tree["g"][:, None] if axes == "I" else tree["g"]
    kernel = tree["v"] * scale / np.sqrt((tree["v"] ** 2).sum(over, keepdims=True))
    return jax.lax.conv_transpose(x, kernel, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) + tree["b"]


@pytest.mark.parametrize(("axes", "kept"), [("I", True), ("I", False), ("O", True), ("O", False)])
def test_weight_norm_of_a_transposed_convolution(axes: str, kept: bool) -> None:
    """torch stores the channels that come in first, and takes the norms of these; other code may take those that come out: they are folded."""
    tree, x = _transposed_tree(axes), draw(2, 6, 5)
    target = "{module: m, parametrization: weight_norm}" if kept else "m"
    layer: torch.nn.Module = torch.nn.ConvTranspose1d(5, 3, 4, 2, 1)
    if kept:
        layer = torch.nn.utils.parametrizations.weight_norm(layer)
    written = converted(TRANSPOSED.replace("AXES", axes).replace("TARGET", target), tree)
    got = loaded(layer, written)(torch.tensor(x).transpose(1, 2)).transpose(1, 2)
    same(got.detach().numpy(), _transposed(tree, x, axes))


def test_a_weight_norm_of_groups_is_refused() -> None:
    rule = TRANSPOSED.replace("AXES", "I").replace("TARGET", "{module: m, parametrization: weight_norm}")
    with pytest.raises(RuleError, match="goes with one group"):
        converted(rule.replace("  from: v", "  feature_group_count: 5\n  from: v"), _transposed_tree("I"))


@pytest.mark.slow
@pytest.mark.parametrize("many", [1, 2])
def test_equinox_weight_norm(many: int) -> None:
    """g has the weight's number of axes, and nothing is added to the norm."""
    import equinox as eqx

    key = jax.random.key(0)
    layer: Any = eqx.nn.Linear(4, 5, key=key, dtype=jnp.float64) if many == 1 else eqx.nn.Conv2d(3, 5, (2, 3), key=key, dtype=jnp.float64)  # fmt: skip
    norm = eqx.nn.WeightNorm(layer)
    tree = {"w": draw(*layer.weight.shape), "b": draw(*layer.bias.shape), "g": draw(*norm.g.shape)}
    norm = eqx.tree_at(lambda m: (m.layer.weight, m.layer.bias, m.g), norm, tuple(map(jnp.asarray, tree.values())))
    how = "einsum: ...D,FD->...F" if many == 1 else "dimension_numbers: NCHW,OIHW->NCHW\n  axes: OIPQ"
    rules = f"- {how}\n  from: w\n  bias: b\n  weight_norm: g\n  normalization_epsilon: 0\n  {'linear' if many == 1 else 'conv'}: m"
    x = draw(2, 4) if many == 1 else draw(2, 3, 5, 6)
    module = torch.nn.Linear(4, 5) if many == 1 else torch.nn.Conv2d(3, 5, (2, 3))
    same(loaded(module, converted(rules, tree))(torch.tensor(x)).numpy(), jax.vmap(norm)(jnp.asarray(x)))


# ---- spectral norm


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_flax_spectral_norm_of_heads(steps: int) -> None:
    """A matrix of all axes against the last one: u has as many numbers as a head is wide. And the bias, which has two axes here, is
    divided by its own sigma."""
    x = draw(2, 4)

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.SpectralNorm(linen.DenseGeneral((5, 3), name="dense"), n_steps=steps, name="sn")(
                x, update_stats=False
            )

    tree = {"params/dense/kernel": draw(4, 5, 3), "params/dense/bias": draw(5, 3), "u": draw(1, 3), "b/u": draw(1, 3)}
    stats = {"sn": {f"dense/{key}/sigma": np.array(1.7) for key in ("kernel", "bias")}}
    stats["sn"] |= {"dense/kernel/u": tree["u"], "dense/bias/u": tree["b/u"]}
    params = {"dense": {key: tree[f"params/dense/{key}"] for key in ("kernel", "bias")}}
    want = Outer().apply({"params": params, "batch_stats": stats}, x)
    said = "{u: u, bias: b/u}" if steps == 1 else f"{{u: u, bias: b/u, steps: {steps}}}"
    got = loaded(torch.nn.Linear(4, 15), converted(heads("spectral_norm", said), tree))(torch.tensor(x))
    same(got.reshape(2, 5, 3).numpy(), want)


@pytest.mark.slow
def test_flax_spectral_norm_of_an_output_projection() -> None:
    """From heads: the last axis is the output."""
    x = draw(2, 5, 3)

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.SpectralNorm(linen.DenseGeneral(4, axis=(-2, -1), name="dense"), name="sn")(
                x, update_stats=False
            )

    tree = {"k": draw(5, 3, 4), "b": draw(4), "u": draw(1, 4)}
    stats = {"sn": {"dense/kernel/u": tree["u"], "dense/kernel/sigma": np.array(1.7)}}
    want = Outer().apply({"params": {"dense": {"kernel": tree["k"], "bias": tree["b"]}}, "batch_stats": stats}, x)
    rules = "- einsum: ...NH,NHD->...D\n  from: k\n  bias: b\n  spectral_norm: u\n  linear: m"
    same(loaded(torch.nn.Linear(15, 4), converted(rules, tree))(torch.tensor(x.reshape(2, 15))).numpy(), want)


EQUINOX = "- {how}\n  from: w\n  bias: b\n  spectral_norm: {{u: u, v: v}}\n  {word}: m"


def equinox_spectral(many: int) -> tuple[Any, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The layer's leaves, an input, and what Equinox computes at inference; u and v are no singular vectors."""
    import equinox as eqx

    key = jax.random.key(0)
    layer: Any = eqx.nn.Linear(4, 6, key=key, dtype=jnp.float64) if many == 1 else eqx.nn.Conv2d(3, 6, (2, 5), key=key, dtype=jnp.float64)  # fmt: skip
    norm, state = eqx.nn.make_with_state(eqx.nn.SpectralNorm)(layer, "weight", num_power_iterations=2, key=key)
    rest = layer.weight.size // 6
    tree = {"w": draw(*layer.weight.shape), "b": draw(*layer.bias.shape), "u": draw(6), "v": draw(rest)}
    norm = eqx.tree_at(lambda m: (m.layer.weight, m.layer.bias), norm, (jnp.asarray(tree["w"]), jnp.asarray(tree["b"])))
    state = state.set(norm.uv_index, (jnp.asarray(tree["u"]), jnp.asarray(tree["v"])))
    x = draw(2, 4) if many == 1 else draw(2, 3, 5, 6)
    want = jax.vmap(lambda x: norm(x, state, inference=True)[0])(jnp.asarray(x))
    how, word = ("einsum: ...D,FD->...F", "linear") if many == 1 else ("dimension_numbers: NCHW,OIHW->NCHW\n  axes: OIPQ", "conv")  # fmt: skip
    return EQUINOX.format(how=how, word=word), tree, x, np.asarray(want)


@pytest.mark.slow
@pytest.mark.parametrize("many", [1, 2])
def test_equinox_spectral_norm(many: int) -> None:
    rules, tree, x, want = equinox_spectral(many)
    module = torch.nn.Linear(4, 6) if many == 1 else torch.nn.Conv2d(3, 6, (2, 5))
    same(loaded(module, converted(rules, tree))(torch.tensor(x)).numpy(), want)


@pytest.mark.slow
def test_torch_at_inference_has_the_same_sigma() -> None:
    """torch's own spectral norm divides by u w v of its stored vectors, too: a source that keeps both is meant so."""
    _, tree, x, want = equinox_spectral(1)
    module = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 6)).double()
    state = module.state_dict()
    mine = {"bias": "b", "parametrizations.weight.original": "w", "parametrizations.weight.0._u": "u", "parametrizations.weight.0._v": "v"}  # fmt: skip
    module.load_state_dict({name: torch.tensor(tree[mine[name]]) for name in state})
    same(module.eval()(torch.tensor(x)).detach().numpy(), want)


@pytest.mark.slow
def test_keras_spectral_normalization_computes_nothing_at_inference() -> None:
    """It assigns the normalised kernel in training; at inference it computes with the kernel as it is. u is a state of training."""
    import keras

    layer = keras.layers.SpectralNormalization(
        keras.layers.Dense(5, dtype="float64"), power_iterations=2, dtype="float64"
    )
    x = draw(3, 4)
    layer.build(x.shape)
    tree = {"w": draw(4, 5), "b": draw(5), "vector_u": draw(1, 5)}
    layer.layer.kernel.assign(tree["w"])
    layer.layer.bias.assign(tree["b"])
    layer.vector_u.assign(tree["vector_u"])
    rules = (
        "- einsum: ...D,DF->...F\n  from: w\n  bias: b\n  linear: m\n- drop: vector_u\n  because: a state of training"
    )
    same(loaded(torch.nn.Linear(4, 5), converted(rules, tree))(torch.tensor(x)).numpy(), np.asarray(layer(x)))
    layer(x, training=True)  # and then the stored kernel is the one that it divided
    stored = {**tree, "w": np.asarray(layer.layer.kernel.value), "vector_u": np.asarray(layer.vector_u.value)}
    assert np.abs(stored["w"] - tree["w"]).max() > 0.1
    same(loaded(torch.nn.Linear(4, 5), converted(rules, stored))(torch.tensor(x)).numpy(), np.asarray(layer(x)))


# ---- what is moved besides


@pytest.mark.parametrize("word", ["weight_norm", "spectral_norm"])
def test_the_leaf_beside_is_moved_as_the_weight_is(word: str) -> None:
    """A dense that makes a map, and one whose pairs RoPE turns: the numbers of its outputs go with them."""
    head = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\naxes: {H: {is: r, equals: 2}, W: {is: c, equals: 3}, C: {is: d, equals: 4}}\n"  # fmt: skip
    w, sidecar, x = draw(5, 24), draw(24) if word == "weight_norm" else draw(1, 24), draw(2, 5)

    def source() -> np.ndarray:
        if word == "weight_norm":
            return w / np.sqrt((w**2).sum(0) + 1e-12) * sidecar
        v = sidecar @ w.T
        v /= np.sqrt((v**2).sum() + 1e-12)
        u = v @ w
        return w / (v @ w @ (u / np.sqrt((u**2).sum() + 1e-12)).T)[0, 0]

    rules = f"- einsum: ...D,DK->...K\n  from: w\n  {word}: g\n  flattened: {{K: HWC}}\n  linear: m"
    got = converted(rules, {"w": w, "g": sidecar}, head)["m.weight"].numpy()
    same(x @ got.T, np.einsum("bhwc->bchw", (x @ source()).reshape(2, 2, 3, 4)).reshape(2, 24))
    rules = f"- einsum: ...D,DK->...K\n  from: w\n  {word}: g\n  rope: {{K: interleaved}}\n  linear: m"
    got = converted(rules, {"w": w, "g": sidecar})["m.weight"].numpy()
    y = x @ source()
    same(x @ got.T, np.concatenate([y[:, ::2], y[:, 1::2]], -1))


def test_a_stack_of_them() -> None:
    tree = {"k": draw(3, 4, 5, 2), "g": draw(3, 2), "u": draw(2, 6), "w": draw(2, 6, 4), "v": draw(2, 4)}
    rules = """
- einsum: ...D,DNH->...NH
  from: k
  weight_norm: g
  stacked: {i: 0}
  linear: a.{i}
- einsum: ...D,FD->...F
  from: w
  spectral_norm: {u: u, v: v}
  stacked: {j: 0}
  linear: b.{j}
"""
    state = {name: value.numpy() for name, value in converted(rules, tree).items()}
    for i in range(3):
        k = tree["k"][i]
        want = k / np.sqrt((k**2).sum((0, 1)) + 1e-12) * tree["g"][i]
        same(state[f"a.{i}.weight"], want.reshape(4, 10).T)
    for j in range(2):
        same(state[f"b.{j}.weight"], tree["w"][j] / (tree["u"][j] @ tree["w"][j] @ tree["v"][j]))


# ---- the check, and what is refused

CHECKED = [
    (heads("weight_norm", "g"), {"g": (3,)}, "normalisation of the weight left out", lambda k: k.reshape(4, 15).T),
    (heads("spectral_norm", "{u: g, bias: b}"), {"g": (1, 3), "b": (1, 3)}, "normalisation of the weight left out", lambda k: k.reshape(4, 15).T),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "more", "diagnosis", "wrong"), CHECKED)
def test_the_check_of_heads(rules: str, more: Any, diagnosis: str, wrong: Any, tmp_path: Path) -> None:
    shapes = {"params/dense/kernel": (4, 5, 3), "params/dense/bias": (5, 3), **more}
    tree = {name: draw(*shape).astype(np.float32) for name, shape in shapes.items()}
    _check(rules, tree, {"m.weight": wrong(tree["params/dense/kernel"])}, diagnosis, tmp_path)


@pytest.mark.slow
def test_the_check_of_both_vectors(tmp_path: Path) -> None:
    """One step of the iteration from the stored u is what flax computes; Equinox does not, and the check says so."""
    rules, tree, _, _ = equinox_spectral(2)
    tree = {name: value.astype(np.float32) for name, value in tree.items()}
    w, u = tree["w"].astype(np.float64).reshape(6, -1), tree["u"].astype(np.float64)
    v = u @ w / np.linalg.norm(u @ w)
    stepped = tree["w"] / np.float64(np.linalg.norm(w @ v))
    _check(rules, tree, {"m.weight": stepped.astype(np.float32)}, "a step of the power iteration too many", tmp_path)


def _check(rules: str, tree: Any, wrong: dict[str, np.ndarray], diagnosis: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    plan, out = make_plan(rule_file(rules), MemorySource(tree)), tmp_path / "out.safetensors"
    list(execute(plan, out))
    level = check_layers(plan, open_written(out))
    assert level.verdict == "passed", level.findings
    assert check_weights(plan, open_written(out)).verdict == "passed"
    metadata = dict(open_written(out).metadata)
    save_file(load_file(out) | {k: np.ascontiguousarray(x) for k, x in wrong.items()}, out, metadata=metadata)
    (finding,) = check_weights(plan, open_written(out)).findings
    assert finding.data["diagnosis"] == diagnosis
    assert check_layers(plan, open_written(out)).verdict == "failed"


def test_the_layers_level_goes_by_the_features_that_are_declared(tmp_path: Path) -> None:
    """A plan that folds by other axes than the rule says fails it, although the file is what the plan makes."""
    from dataclasses import replace

    from convert.core.weight_norm_ops import Features, WeightNorm

    tree = {"params/dense/kernel": draw(4, 5, 5), "params/dense/bias": draw(5, 5), "g": draw(5)}
    plan = make_plan(rule_file(heads("weight_norm", "g")), MemorySource(tree))

    def other(step: Any) -> Any:
        ops = [replace(op, of=Features(op.of.inner, (0,))) if isinstance(op, WeightNorm) else op for part in step.parts for op in part.ops]  # fmt: skip
        return replace(step, parts=(replace(step.parts[0], ops=tuple(ops)),))

    wrong = replace(plan, steps=tuple(other(step) if step.role == "weight" else step for step in plan.steps))
    out = tmp_path / "out.safetensors"
    list(execute(wrong, out))
    assert check_layers(wrong, open_written(out)).verdict == "failed"


@pytest.mark.parametrize(
    ("rules", "tree", "said"),
    [
        (EQUINOX.format(how="einsum: ...D,FD->...F", word="linear").replace("{u: u, v: v}", "u"), {"w": (6, 4), "b": (6,), "u": (6,)},
         "r.yaml:5: u: float64[6] does not fit the weight w: float64[6,4]: it has one axis; flax's u has two, [1, 6]. For Equinox at inference write `spectral_norm: {u: ..., v: ...}`; if the source iterates, `{u: ..., steps: 1}`"),
        (EQUINOX.format(how="einsum: ...D,FD->...F", word="linear"), {"w": (6, 4), "b": (6,), "u": (6,), "v": (5,)}, "v has 5 numbers, and the weight 4 inputs"),
        (EQUINOX.format(how="einsum: ...D,FD->...F", word="linear").replace("v: v", "v: v, steps: 2"), {}, "a spectral norm with `v` takes no steps: it divides by u w v of the two stored vectors; leave `steps` out"),
        (EQUINOX.format(how="einsum: ...D,FD->...F", word="linear").replace("v: v", "steps: 0"), {}, "`steps` is at least 1, not 0; for a source without power iteration give both `u` and `v`"),
        (EQUINOX.format(how="einsum: ...D,FD->...F", word="linear").replace("{u: u, v: v}", "{u: u, v: 'v_{i}'}"), {}, "r.yaml:8:28: `spectral_norm: v` and `from` do not have the same indices"),
        (heads("weight_norm", "g"), {"params/dense/kernel": (4, 5, 3), "params/dense/bias": (5, 3), "g": (5,)}, "g: float64[5] does not fit the weight params/dense/kernel: float64[4,5,3]: its shape does not determine for which axes of the weight it has values (D=4, N=5, H=3); say it: `weight_norm: {scale: ..., axes: NH}`"),
        (heads("spectral_norm", "{u: u, v: v}"), {"params/dense/kernel": (4, 5, 3), "params/dense/bias": (5, 3), "u": (15,), "v": (4,)}, "say it: `spectral_norm: {u: ..., v: ..., axes: NH}`"),
        (heads("spectral_norm", "u"), {"params/dense/kernel": (4, 5, 3), "params/dense/bias": (5, 3), "u": (1, 3)}, "r.yaml:5: params/dense/bias: a flax SpectralNorm also divides a bias of 2 axes (float64[5,3]) by its own sigma; give the path of its u: `spectral_norm: {u: ..., bias: path}`"),
        (heads("spectral_norm", "{u: u, v: v, bias: c}"), {}, "a spectral norm has `bias:`, the path of the bias's u, and `v`, whose source leaves the bias as it is; leave one of the two out"),
        (heads("weight_norm", "{scale: g, axes: K}"), {}, "r.yaml:5:3: `weight_norm` has the axis K, and the weight the axes D N H"),
        ("- dimension_numbers: NWC,WCO->NWC\n  axes: PCM\n  from: k\n  weight_norm: g\n  conv: m", {}, "`weight_norm` requires a kernel with I, and that of NWC,WCO->NWC has C"),
    ],
)  # fmt: skip
def test_what_is_refused(rules: str, tree: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises((PlanError, RuleError)) as refused:
        make_plan(rule_file(rules), MemorySource({name: draw(*shape) for name, shape in tree.items()}))
    assert said in str(refused.value)
