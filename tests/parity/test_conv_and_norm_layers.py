"""The kinds of convolutions and norms against the real libraries, in float64: flax linen and nnx, Equinox, Haiku, Keras.

Each library runs its own layer with random weights, op by op; the rules say what the layer is; torch's own module with the
converted tensors, loaded with ``strict=True``, gives the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

from convert.layers import ConvTranspose
from convert.numerics.lift_jax import lift
from convert.planning.planner import make_plan
from support.live_layers import Tree, converted, draw, drawn, first, last, loaded, names, same
from support.memory_source import MemorySource, rule_file, run


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


# ---- ordinary convolutions

NUMBERS = {1: "NWC,WIO->NWC", 2: "NHWC,HWIO->NHWC", 3: "NHWDC,HWDIO->NHWDC"}
CONVS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
TRANSPOSED = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)


def conv_rule(many: int, word: str, *more: str, out: str = "O") -> str:
    lines = [f"- dimension_numbers: {NUMBERS[many]}", f"  axes: {'PQR'[:many]}I{out}", "  from: k", "  bias: b", *more, f"  {word}: m"]  # fmt: skip
    return "\n  ".join(line.strip() for line in lines).replace("\n  - ", "\n- ")


BOTH = [("linen", 1), ("linen", 2), ("linen", 3), ("nnx", 2)]  # they share their body


@pytest.mark.slow
@pytest.mark.parametrize(("library", "many"), BOTH)
def test_flax_conv_with_strides(library: str, many: int) -> None:
    """SAME of an even kernel with strides, in sizes that leave a rest and in ones that do not; padded as the plan says."""
    kernel, strides, size = (4, 3, 2)[:many], (2, 3, 2)[:many], (7, 9, 6)[:many]
    x = draw(2, *size, 3)
    if library == "linen":
        layer = linen.Conv(5, kernel, strides=strides, param_dtype=jnp.float64)
        params = drawn(layer.init(jax.random.key(0), x)["params"])
        want, tree = (
            layer.apply({"params": params}, x),
            {"k": np.asarray(params["kernel"]), "b": np.asarray(params["bias"])},
        )
    else:
        nn = nnx.Conv(3, 5, kernel, strides=strides, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        nn.bias[...] = jnp.asarray(draw(5))
        want, tree = nn(x), {"k": np.asarray(nn.kernel[...]), "b": np.asarray(nn.bias[...])}
    rules = conv_rule(many, "conv", "padding: SAME", f"strides: {list(strides)}", f"input_size: {list(size)}")
    plan = make_plan(rule_file(rules), MemorySource(tree))
    numbers = [
        int(n) for n in plan.layers[0]["target_padding"].split("F.pad(x, (")[1].split(")")[0].strip(",").split(",")
    ]
    module = loaded(CONVS[many - 1](3, 5, kernel, stride=strides), converted(rules, tree))
    same(last(module(torch.nn.functional.pad(first(x), numbers))), want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_flax_conv_depthwise_grouped_dilated() -> None:
    for groups, out, dilation in ((4, 8, 1), (2, 6, 2), (4, 4, 3)):
        x = draw(2, 9, 10, 4)
        layer = linen.Conv(out, (3, 2), feature_group_count=groups, kernel_dilation=dilation, param_dtype=jnp.float64)
        params = drawn(layer.init(jax.random.key(0), x)["params"])
        rules = conv_rule(2, "conv", f"feature_group_count: {groups}", "padding: SAME", f"dilation: {dilation}")
        state = converted(rules, {"k": np.asarray(params["kernel"]), "b": np.asarray(params["bias"])})
        module = loaded(torch.nn.Conv2d(4, out, (3, 2), groups=groups, dilation=dilation, padding="same"), state)
        same(last(module(first(x))), layer.apply({"params": params}, x))


DEPTHWISE = """
- dimension_numbers: NHWC,HWCO->NHWC
  axes: PQCM
  from: k
  bias: b
  padding: SAME
  strides: {strides}
  conv: m
"""


@pytest.mark.slow
@pytest.mark.parametrize("multiplier", [1, 2, 3])
def test_keras_depthwise(multiplier: int) -> None:
    """Keras's kernel has the channels and then their results; flax's has all results, group by group: in the same order."""
    import keras

    x = draw(2, 7, 6, 4)
    layer = keras.layers.DepthwiseConv2D(
        (3, 2), strides=2, padding="same", depth_multiplier=multiplier, dtype="float64"
    )
    layer.build(x.shape)
    tree = {"k": draw(*layer.kernel.shape), "b": draw(4 * multiplier)}
    assert tree["k"].shape == (3, 2, 4, multiplier)
    layer.kernel.assign(tree["k"])
    layer.bias.assign(tree["b"])
    want = np.asarray(layer(x))
    plan = make_plan(rule_file(DEPTHWISE.format(strides=2)), MemorySource(tree))
    assert plan.steps[0].layouts == ("P Q C M -> (C M) 1 P Q",)
    module = loaded(torch.nn.Conv2d(4, 4 * multiplier, (3, 2), stride=2, groups=4), converted(DEPTHWISE.format(strides=2), tree))  # fmt: skip
    same(last(module(torch.nn.functional.pad(first(x), (0, 0, 1, 1)))), want)
    flax = linen.Conv(4 * multiplier, (3, 2), strides=2, feature_group_count=4, param_dtype=jnp.float64)
    grouped = {"kernel": jnp.asarray(tree["k"].reshape(3, 2, 1, -1)), "bias": jnp.asarray(tree["b"])}
    same(np.asarray(flax.apply({"params": grouped}, x)), want)


@pytest.mark.slow
def test_keras_separable_conv() -> None:
    """Two convolutions in torch; the bias is the second's. And along time, where a filter has one axis."""
    import keras

    x = draw(2, 7, 6, 4)
    layer = keras.layers.SeparableConv2D(5, (3, 2), depth_multiplier=3, dtype="float64")
    layer.build(x.shape)
    tree = {"k": draw(3, 2, 4, 3), "p": draw(1, 1, 12, 5), "b": draw(5)}
    for variable, value in zip(layer.variables, tree.values(), strict=True):
        variable.assign(value)
    rules = "- dimension_numbers: NHWC,HWCO->NHWC\n  axes: PQCM\n  from: k\n  conv: m.0\n- dimension_numbers: NHWC,HWIO->NHWC\n  axes: RSIO\n  from: p\n  bias: b\n  conv: m.1"
    module = torch.nn.Sequential(torch.nn.Conv2d(4, 12, (3, 2), groups=4, bias=False), torch.nn.Conv2d(12, 5, 1))
    same(last(loaded(module, converted(rules, tree))(first(x))), np.asarray(layer(x)))

    x = draw(2, 9, 4)
    along = keras.layers.DepthwiseConv1D(3, depth_multiplier=2, use_bias=False, dtype="float64")
    along.build(x.shape)
    tree = {"k": draw(3, 4, 2)}
    along.kernel.assign(tree["k"])
    rules = "- dimension_numbers: NWC,WCO->NWC\n  axes: PCM\n  from: k\n  conv: m"
    same(
        last(loaded(torch.nn.Conv1d(4, 8, 3, groups=4, bias=False), converted(rules, tree))(first(x))),
        np.asarray(along(x)),
    )


def test_a_check_of_a_depthwise_kernel(tmp_path: Path) -> None:
    """Results of one channel are neighbours in torch; a kernel that has them apart is caught and named."""
    from safetensors.numpy import load_file, save_file

    from convert.verify.layers.level import check_layers
    from convert.writing.execute import execute
    from convert.writing.written import open_written
    from support.weights_level import check_weights

    tree = {"k": draw(3, 2, 4, 3).astype(np.float32), "b": draw(12).astype(np.float32)}
    plan = make_plan(rule_file(DEPTHWISE.format(strides=1)), MemorySource(tree))
    out = tmp_path / "out.safetensors"
    list(execute(plan, out))
    level = check_layers(plan, open_written(out))
    assert level.verdict == "passed" and all(
        m.float64 is not None and m.float64.relative < 1e-14 for m in level.measures
    )
    tensors = load_file(out)
    apart = tree["k"].transpose(3, 2, 0, 1).reshape(12, 1, 3, 2)
    save_file(tensors | {"m.weight": np.ascontiguousarray(apart)}, out, metadata=dict(open_written(out).metadata))
    (finding,) = check_weights(plan, open_written(out)).findings
    assert finding.data["diagnosis"] == "results of one channel not adjacent"
    assert check_layers(plan, open_written(out)).verdict == "failed"


@pytest.mark.slow
def test_standardized_conv_of_big_vision_and_of_an_epsilon_inside() -> None:
    """vit_jax's StdConv: flax's Conv with (w - mean) / (std + 1e-5); and the variance with an epsilon, as others write it."""

    def outside(w: Any) -> Any:
        w = w - jnp.mean(w, axis=(0, 1, 2))
        return w / (jnp.std(w, axis=(0, 1, 2)) + 1e-5)

    def inside(w: Any) -> Any:
        mean, variance = w.mean((0, 1, 2)), w.var((0, 1, 2))
        return (w - mean) * jax.lax.rsqrt(variance + 0.01)

    for how, text in ((outside, "(w - mean) / (std + 1e-5)"), (inside, "(w-mean)/sqrt(var+0.01)")):

        class Standardized(linen.Conv):
            def param(self, name: str, *args: Any, **kwargs: Any) -> Any:
                value = super().param(name, *args, **kwargs)
                return how(value) if name == "kernel" else value  # noqa: B023

        x = draw(2, 6, 5, 3)
        layer = Standardized(4, (3, 2), padding="VALID", param_dtype=jnp.float64)
        params = drawn(layer.init(jax.random.key(0), x)["params"])
        tree = {"k": np.asarray(params["kernel"]), "b": np.asarray(params["bias"])}
        state = converted(conv_rule(2, "conv", f"weight_standardization: {text}"), tree)
        same(last(loaded(torch.nn.Conv2d(3, 4, (3, 2)), state)(first(x))), layer.apply({"params": params}, x))


def test_a_standardisation_rounds_once_and_cannot_be_undone() -> None:
    from convert.core.ops import inverse
    from convert.core.tensor_spec import TensorSpec
    from convert.core.weight_norm_ops import LossyError

    k = draw(3, 2, 5, 4).astype(np.float32)
    plan = make_plan(rule_file(conv_rule(2, "conv", "weight_standardization: (w - mean) / (std + 1e-5)")), MemorySource({"k": k, "b": np.zeros(4, np.float32)}))  # fmt: skip
    wide = k.astype(np.float64) - k.astype(np.float64).mean((0, 1, 2))
    want = (wide / (wide.std((0, 1, 2)) + 1e-5)).transpose(3, 2, 0, 1)
    np.testing.assert_array_equal(run(plan)["m.weight"], want.astype(np.float32))
    assert plan.steps[0].arithmetic == "standardised: (w - mean) / (std + 1e-05)"
    with pytest.raises(LossyError) as refused:
        inverse(plan.steps[0].parts[0].ops, TensorSpec(k.shape, "float32"))
    assert str(refused.value) == "'standardised: (w - mean) / (std + 1e-05)' has no inverse"


# ---- transposed convolutions


def transposed(module: torch.nn.Module, x: np.ndarray, plan: Any) -> torch.Tensor:
    """torch's module with the arguments that the plan says, and its result cropped as the plan says."""
    y = module(first(x))
    said = plan.layers[0]["target_padding"]
    if "F.pad" in said:
        y = torch.nn.functional.pad(
            y, [int(n) for n in said.split("F.pad(y, (")[1].split(")")[0].strip(",").split(",")]
        )
    return y


@pytest.mark.slow
@pytest.mark.parametrize(("library", "many"), BOTH)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_flax_conv_transpose(library: str, padding: str, turned: bool, many: int) -> None:
    kernel, strides = (3, 4, 2)[:many], (2, 2, 3)[:many]
    x = draw(2, *(4, 3, 2)[:many], 3)
    options: dict[str, Any] = {
        "strides": strides,
        "padding": padding,
        "transpose_kernel": turned,
        "param_dtype": jnp.float64,
    }
    if library == "linen":
        layer = linen.ConvTranspose(5, kernel, **options)
        params = drawn(layer.init(jax.random.key(0), x)["params"])
        want, tree = (
            layer.apply({"params": params}, x),
            {"k": np.asarray(params["kernel"]), "b": np.asarray(params["bias"])},
        )
    else:
        nn = nnx.ConvTranspose(3, 5, kernel, rngs=nnx.Rngs(0), **options)
        nn.bias[...] = jnp.asarray(draw(5))
        want, tree = nn(x), {"k": np.asarray(nn.kernel[...]), "b": np.asarray(nn.bias[...])}
    rules = conv_rule(many, "conv_transpose", f"transpose_kernel: {str(turned).lower()}", f"padding: {padding}", f"strides: {list(strides)}")  # fmt: skip
    plan = make_plan(rule_file(rules), MemorySource(tree))
    said = plan.layers[0]
    module = TRANSPOSED[many - 1](3, 5, kernel, stride=strides, padding=tuple(said["allowed_padding"][0]), output_padding=tuple(said["output_padding"]))  # fmt: skip
    same(last(transposed(loaded(module, converted(rules, tree)), x, plan)), want)


@pytest.mark.slow
def test_the_law_catches_a_transposed_kernel_that_is_not_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConvTranspose, "turned", lambda self, role, layer: ())
    with pytest.raises(AssertionError):
        test_flax_conv_transpose("linen", "SAME", False, 2)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3])
def test_equinox_conv_transpose(groups: int) -> None:
    """Its kernel has O first and O of all groups; its padding is torch's, which the rule says as jax.lax takes it."""
    import equinox as eqx

    layer = eqx.nn.ConvTranspose2d(6, 9, (3, 4), stride=(2, 3), padding=1, output_padding=1, dilation=(2, 1), groups=groups, key=jax.random.key(0), dtype=jnp.float64)  # fmt: skip
    x = draw(2, 6, 4, 5)
    tree = {"k": np.asarray(layer.weight), "b": draw(9, 1, 1)}
    layer = eqx.tree_at(lambda m: m.bias, layer, jnp.asarray(tree["b"]))
    rules = f"""
- dimension_numbers: NCHW,OIHW->NCHW
  axes: OIPQ
  feature_group_count: {groups}
  from: k
  bias: b
  padding: [[3, 4], [2, 3]]
  strides: [2, 3]
  dilation: [2, 1]
  conv_transpose: m
"""
    plan = make_plan(rule_file(rules), MemorySource(tree))
    assert plan.layers[0]["target_padding"] == "padding=(1, 1), output_padding=(1, 1)"
    module = torch.nn.ConvTranspose2d(
        6, 9, (3, 4), stride=(2, 3), padding=1, output_padding=1, dilation=(2, 1), groups=groups
    )
    same(loaded(module, converted(rules, tree))(torch.tensor(x)).numpy(), jax.vmap(layer)(x))


@pytest.mark.slow
def test_haiku_conv_transpose() -> None:
    import haiku as hk

    layer = hk.without_apply_rng(hk.transform(lambda x: hk.Conv2DTranspose(5, (3, 2), stride=2, name="m")(x)))
    x = draw(2, 4, 3, 3)
    params = drawn(layer.init(jax.random.key(0), x))
    tree = {"k": np.asarray(params["m"]["w"]), "b": np.asarray(params["m"]["b"])}
    rules = "- dimension_numbers: NHWC,HWOI->NHWC\n  axes: PQOI\n  from: k\n  bias: b\n  padding: SAME\n  strides: 2\n  conv_transpose: m"
    plan = make_plan(rule_file(rules), MemorySource(tree))
    said = plan.layers[0]
    module = torch.nn.ConvTranspose2d(3, 5, (3, 2), stride=2, padding=tuple(said["allowed_padding"][0]), output_padding=tuple(said["output_padding"]))  # fmt: skip
    same(last(transposed(loaded(module, converted(rules, tree)), x, plan)), layer.apply(params, x))


@pytest.mark.slow
def test_keras_conv_transpose_and_batch_normalization() -> None:
    """Keras stores H, W, O, I and turns the kernel, as flax does with transpose_kernel; here without its bias."""
    import keras

    x = draw(2, 4, 3, 3)
    layer = keras.layers.Conv2DTranspose(5, (4, 2), strides=2, padding="same", use_bias=False, dtype="float64")
    layer.build(x.shape)
    k = draw(*layer.kernel.shape)
    layer.kernel.assign(k)
    rules = "- dimension_numbers: NHWC,HWIO->NHWC\n  transpose_kernel: true\n  axes: PQOI\n  from: k\n  padding: SAME\n  strides: 2\n  conv_transpose: m"
    plan = make_plan(rule_file(rules), MemorySource({"k": k}))
    said = plan.layers[0]
    module = torch.nn.ConvTranspose2d(3, 5, (4, 2), stride=2, padding=tuple(said["allowed_padding"][0]), output_padding=tuple(said["output_padding"]), bias=False)  # fmt: skip
    same(last(transposed(loaded(module, converted(rules, {"k": k})), x, plan)), np.asarray(layer(x)))

    norm = keras.layers.BatchNormalization(dtype="float64")  # which computes in float32 all the same; so it is lifted
    norm.build(x.shape)
    tree = {f"vars/{n}": np.abs(draw(3)) + 0.3 for n in range(4)}
    for variable, value in zip(
        (norm.gamma, norm.beta, norm.moving_mean, norm.moving_variance), tree.values(), strict=True
    ):
        variable.assign(value)
    rules = BATCH.format(eps=1e-3, scale="vars/0", bias="vars/1", mean="vars/2", var="vars/3", axes="C")
    same(
        last(loaded(torch.nn.BatchNorm2d(3, eps=1e-3), converted(rules, tree))(first(x))),
        lift(lambda x: norm(x, training=False))(x),
    )


# ---- norms over channels

BATCH = """
- from: {scale}
  bias: {bias}
  mean: {mean}
  var: {var}
  multiplies_by: scale
  epsilon: {eps}
  momentum: 0.99
  axes: {axes}
  batch_norm: m
"""
FLAX = {
    "eps": 1e-5,
    "scale": "params/scale",
    "bias": "params/bias",
    "mean": "batch_stats/mean",
    "var": "batch_stats/var",
    "axes": "C",
}


@pytest.mark.parametrize("many", [0, 1, 2, 3])
def test_flax_batch_norm(many: int) -> None:
    """Statistics from another collection; momentum is 1 minus torch's; a counter that torch wants is written."""
    x = draw(3, *(4, 5, 2)[:many], 6) * 2 + 1
    layer = linen.BatchNorm(use_running_average=True, param_dtype=jnp.float64, dtype=jnp.float64)
    variables = drawn(layer.init(jax.random.key(0), x))
    state = converted(BATCH.format(**FLAX), names(variables))
    assert state["m.num_batches_tracked"].dtype == torch.int64 and state["m.num_batches_tracked"].shape == ()
    assert not state["m.num_batches_tracked"].item()
    module = (torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)[many](6)
    same(last(loaded(module, state)(first(x))), layer.apply(variables, x))
    (said,) = make_plan(rule_file(BATCH.format(**FLAX)), MemorySource(names(variables))).layers
    assert (said["source_momentum"], said["target_momentum"]) == (0.99, 0.01)


def test_momentum_is_the_share_that_is_kept() -> None:
    """One step of training in flax and, with what the plan says, in torch; torch's running variance is the unbiased one."""
    x = draw(50, 6)
    layer = linen.BatchNorm(use_running_average=False, momentum=0.9, param_dtype=jnp.float64, dtype=jnp.float64)
    variables = drawn(layer.init(jax.random.key(0), x))
    _, after = layer.apply(variables, x, mutable=["batch_stats"])
    rules = BATCH.format(**FLAX).replace("0.99", "0.9")
    said = make_plan(rule_file(rules), MemorySource(names(variables))).layers[0]["target_momentum"]
    module = torch.nn.BatchNorm1d(6, momentum=said).double()
    module.load_state_dict({n.removeprefix("m."): v for n, v in converted(rules, names(variables)).items()})
    module.train()(torch.tensor(x))
    same(module.running_mean.numpy(), after["batch_stats"]["mean"])
    old, new = np.asarray(variables["batch_stats"]["var"]), module.running_var.numpy()
    same(old * 0.9 + (new - old * 0.9) * 49 / 50, after["batch_stats"]["var"])


@pytest.mark.slow
def test_nnx_batch_and_group_norm() -> None:
    """nnx keeps statistics beside the parameters, each below `value`."""
    x = draw(2, 4, 3, 6)
    norm = nnx.BatchNorm(6, use_running_average=True, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    tree = {f"{name}/value": np.abs(draw(6)) + 0.2 for name in ("scale", "bias", "mean", "var")}
    for path, value in tree.items():
        getattr(norm, path.removesuffix("/value")).set_value(jnp.asarray(value))
    rules = BATCH.format(eps=1e-5, scale="scale", bias="bias", mean="mean", var="var", axes="C")
    same(last(loaded(torch.nn.BatchNorm2d(6), converted(rules, tree))(first(x))), norm(jnp.asarray(x)))
    group = nnx.GroupNorm(6, num_groups=None, group_size=2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    tree = {"scale": draw(6), "bias": draw(6)}
    group.scale[...], group.bias[...] = jnp.asarray(tree["scale"]), jnp.asarray(tree["bias"])
    rules = "- from: scale\n  bias: bias\n  multiplies_by: scale\n  epsilon: 1e-6\n  group_size: 2\n  axes: C\n  group_norm: m"
    assert make_plan(rule_file(rules), MemorySource(tree)).layers[0]["num_groups"] == 3
    same(last(loaded(torch.nn.GroupNorm(3, 6, eps=1e-6), converted(rules, tree))(first(x))), group(jnp.asarray(x)))


@pytest.mark.slow
def test_flax_and_equinox_group_norm() -> None:
    import equinox as eqx

    x = draw(2, 4, 3, 6) * 2 + 1
    rules = "- from: params/scale\n  bias: params/bias\n  multiplies_by: scale\n  epsilon: {}\n  num_groups: {}\n  axes: C\n  group_norm: m"
    for groups in (1, 2, 3, 6):
        layer = linen.GroupNorm(num_groups=groups, param_dtype=jnp.float64, dtype=jnp.float64, use_fast_variance=False)
        variables = drawn(layer.init(jax.random.key(0), x))
        module = loaded(
            torch.nn.GroupNorm(groups, 6, eps=1e-6), converted(rules.format(1e-6, groups), names(variables))
        )
        same(last(module(first(x))), layer.apply(variables, x))
    eqn = eqx.nn.GroupNorm(3, 6, dtype=jnp.float64)
    tree = {"params/scale": draw(6), "params/bias": draw(6)}
    eqn = eqx.tree_at(
        lambda m: (m.weight, m.bias), eqn, (jnp.asarray(tree["params/scale"]), jnp.asarray(tree["params/bias"]))
    )
    module = loaded(torch.nn.GroupNorm(3, 6), converted(rules.format(1e-5, 3), tree))
    same(last(module(first(x))), np.moveaxis(np.asarray(jax.vmap(eqn)(np.moveaxis(x, -1, 1))), 1, -1))


def test_haiku_batch_norm() -> None:
    """Its statistics are moving averages that are debiased: `average`, not `hidden`; all leaves have axes of size 1."""
    import haiku as hk

    x = draw(3, 4, 5, 6)
    layer = hk.without_apply_rng(
        hk.transform_with_state(lambda x, training: hk.BatchNorm(True, True, 0.9, name="m")(x, training))
    )
    params, state = layer.init(jax.random.key(0), x, True)
    params = drawn(params)
    state = {path: {key: np.abs(draw(*np.shape(v))) + 0.2 for key, v in of.items()} for path, of in state.items()}
    want, _ = layer.apply(params, state, x, False)
    tree = {f"params/{k}": np.asarray(v) for k, v in params["m"].items()}
    tree |= {
        f"state/{path.split('/')[-1]}/{k}": v for path, of in state.items() for k, v in of.items() if k == "average"
    }
    rules = BATCH.format(eps=1e-5, scale="params/scale", bias="params/offset", mean="state/mean_ema/average", var="state/var_ema/average", axes="...C")  # fmt: skip
    same(last(loaded(torch.nn.BatchNorm2d(6), converted(rules, tree))(first(x))), want)


def test_equinox_batch_norm() -> None:
    """mode="ema": the statistics of its State are those that it computes with."""
    import equinox as eqx

    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(6, axis_name="n", mode="ema", dtype=jnp.float64)
    tree = {"weight": draw(6), "bias": draw(6), "mean": draw(6), "var": np.abs(draw(6)) + 0.3}
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (jnp.asarray(tree["weight"]), jnp.asarray(tree["bias"])))
    state = state.set(layer.ema_state_index, (jnp.asarray(tree["mean"]), jnp.asarray(tree["var"])))
    x = draw(3, 6, 4)
    want, _ = jax.vmap(eqx.nn.inference_mode(layer), axis_name="n", in_axes=(0, None), out_axes=(0, None))(x, state)
    rules = BATCH.format(eps=1e-5, scale="weight", bias="bias", mean="mean", var="var", axes="C")
    same(loaded(torch.nn.BatchNorm1d(6), converted(rules, tree))(torch.tensor(x)).numpy(), want)


# ---- weights that are normalised at every call


def normalized(word: str, path: str, more: str = "", target: str = "m") -> str:
    return f"- einsum: ...D,DK->...K\n  from: params/dense/kernel\n  bias: params/dense/bias\n  {word}: {path}\n{more}  linear: {target}"


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["", "weight_norm", "old_weight_norm"])
def test_flax_weight_norm(kept: str) -> None:
    """Folded, and in both of torch's parametrizations."""
    x = draw(4, 6)

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            dense = linen.Dense(5, param_dtype=jnp.float64, name="dense")
            return linen.WeightNorm(dense, param_dtype=jnp.float64, name="wn")(x)

    variables = drawn(Outer().init(jax.random.key(0), x))
    target = f"{{module: m, parametrization: {kept}}}" if kept else "m"
    rules = normalized("weight_norm", "params/wn/dense/kernel/scale", target=target)
    state = converted(rules, names(variables))
    module: torch.nn.Module = torch.nn.Linear(6, 5)
    if kept == "weight_norm":
        module = torch.nn.utils.parametrizations.weight_norm(module)
    if kept == "old_weight_norm":
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            module = torch.nn.utils.weight_norm(module)
    same(loaded(module, state)(torch.tensor(x)).numpy(), Outer().apply(variables, x))


@pytest.mark.slow
def test_flax_weight_norm_of_a_convolution() -> None:
    x = draw(2, 5, 4, 3)

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            conv = linen.Conv(6, (3, 2), padding="VALID", param_dtype=jnp.float64, name="conv")
            return linen.WeightNorm(conv, param_dtype=jnp.float64, name="wn")(x)

    variables = drawn(Outer().init(jax.random.key(0), x))
    rules = conv_rule(2, "conv", "weight_norm: params/wn/conv/kernel/scale").replace("from: k", "from: params/conv/kernel").replace("bias: b", "bias: params/conv/bias")  # fmt: skip
    same(
        last(loaded(torch.nn.Conv2d(3, 6, (3, 2)), converted(rules, names(variables)))(first(x))),
        Outer().apply(variables, x),
    )
    kept = rules.replace("conv: m", "conv: {module: m, parametrization: weight_norm}")
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv2d(3, 6, (3, 2)))
    same(last(loaded(module, converted(kept, names(variables)))(first(x))), Outer().apply(variables, x))


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax_spectral_norm(library: str) -> None:
    """By one more step from the stored u; the stored sigma, which is another, would be wrong."""
    x = draw(4, 6)
    tree = {"params/dense/kernel": draw(6, 5), "params/dense/bias": draw(5), "u": draw(1, 5), "sigma": np.array(1.7)}
    if library == "linen":

        class Outer(linen.Module):
            @linen.compact
            def __call__(self, x: Any) -> Any:
                return linen.SpectralNorm(linen.Dense(5, name="dense"), name="sn")(x, update_stats=False)

        stats = {"sn": {f"dense/kernel/{key}": tree[key] for key in ("u", "sigma")}}
        params = {"dense": {key: tree[f"params/dense/{key}"] for key in ("kernel", "bias")}}
        want = Outer().apply({"params": params, "batch_stats": stats}, x)
    else:
        dense = nnx.Linear(6, 5, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        dense.kernel[...], dense.bias[...] = (
            jnp.asarray(tree["params/dense/kernel"]),
            jnp.asarray(tree["params/dense/bias"]),
        )
        outer = nnx.SpectralNorm(dense, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        outer.batch_stats[("kernel", "u")][...] = jnp.asarray(tree["u"])
        want = outer(jnp.asarray(x), update_stats=False)
    rules = normalized("spectral_norm", "u") + "\n- drop: sigma\n  because: found anew"
    same(loaded(torch.nn.Linear(6, 5), converted(rules, tree))(torch.tensor(x)).numpy(), want)


# ---- a map that is flattened


@pytest.mark.parametrize("target", ["", "CHW", "HWC"])
def test_a_map_flattened_before_a_dense(target: str) -> None:
    """flax flattens rows, columns, channels; torch channels, rows, columns, unless its code does otherwise."""
    x = draw(2, 3, 4, 5)
    layer = linen.Dense(7, param_dtype=jnp.float64)
    params = drawn(layer.init(jax.random.key(0), x.reshape(2, -1))["params"])
    head = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\naxes: {H: {is: rows, equals: 3}, W: {is: columns, equals: 4}, C: {is: channels, equals: 5}}\n"
    to = f"{{module: m, flattened: {target}}}" if target else "m"
    rules = f"- einsum: ...D,DK->...K\n  from: kernel\n  bias: bias\n  flattened: {{D: HWC}}\n  linear: {to}"
    state = converted(rules, names(params), head)
    given = torch.tensor(x).flatten(1) if target == "HWC" else first(x).flatten(1)
    same(loaded(torch.nn.Linear(60, 7), state)(given).numpy(), layer.apply({"params": params}, x.reshape(2, -1)))


def test_a_dense_that_makes_a_map() -> None:
    """The other way: its output axis, and its bias, become a map."""
    x = draw(2, 7)
    layer = linen.Dense(60, param_dtype=jnp.float64)
    params = drawn(layer.init(jax.random.key(0), x)["params"])
    head = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\naxes: {H: {is: rows, equals: 3}, W: {is: columns, equals: 4}, C: {is: channels, equals: 5}}\n"
    rules = "- einsum: ...D,DK->...K\n  from: kernel\n  bias: bias\n  flattened: {K: HWC}\n  linear: m"
    got = loaded(torch.nn.Linear(7, 60), converted(rules, names(params), head))(torch.tensor(x)).reshape(2, 5, 3, 4)
    same(last(got), np.asarray(layer.apply({"params": params}, x)).reshape(2, 3, 4, 5))


def test_a_batch_norm_over_a_flattened_map() -> None:
    """All of its tensors are in torch's order: channels first."""
    x = draw(4, 3, 2, 5)
    layer = linen.BatchNorm(use_running_average=True, param_dtype=jnp.float64, dtype=jnp.float64)
    variables = drawn(layer.init(jax.random.key(0), x.reshape(4, -1)))
    head = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\naxes: {H: {is: rows, equals: 3}, W: {is: columns, equals: 2}, D: {is: channels, equals: 5}}\n"
    rules = BATCH.format(**FLAX).replace("axes: C\n", "axes: C\n  flattened: {C: HWD}\n")
    state = converted(rules, names(variables), head)
    got = loaded(torch.nn.BatchNorm1d(30), state)(first(x).flatten(1)).reshape(4, 5, 3, 2)
    same(last(got), layer.apply(variables, x.reshape(4, -1)).reshape(x.shape))


LEAVES: dict[str, Callable[[], Tree]] = {"dense": lambda: {"kernel": draw(60, 7)}}


@pytest.mark.parametrize(
    ("axes", "key", "said"),
    [
        ("", "flattened: {D: HWC}", "kernel: float64[60,7] as D K: D is H W C flattened, and nothing gives H and W and C a size; declare it in `axes`, such as H: {is: ..., equals: 7}, or with --set H=7"),
        ("axes: {H: {is: r, equals: 3}, W: {is: c, equals: 4}, C: {is: d, equals: 4}}\n", "flattened: {D: HWC}", "D has 60 elements, and the map H=3 x W=4 x C=4 = 48"),
        ("", "flattened: {X: HWC}", "r.yaml:5:3: `flattened:` names X, and the leaf has the axes D K"),
        ("", "flattened: {D: DC}", "r.yaml:5:3: `flattened:` makes D of DC, which has D itself; give the axes of the map other letters"),
        ("", "flattened: {D: H}", "r.yaml:7:18: expected the letters of a map's axes in the order in which they are flattened, such as HWC, not 'H'"),
    ],
)  # fmt: skip
def test_what_cannot_be_flattened(axes: str, key: str, said: str) -> None:
    from convert import PlanError, RuleError

    head = f"model: m\ntitle: M\ntargets: {{torch: {{loads: T}}}}\n{axes}"
    with pytest.raises((PlanError, RuleError)) as refused:
        make_plan(
            rule_file(f"- einsum: ...D,DK->...K\n  from: kernel\n  {key}\n  linear: m", head),
            MemorySource(LEAVES["dense"]()),
        )
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("rules", "tree", "said"),
    [
        (normalized("weight_norm", "g"), {"params/dense/kernel": (3, 4), "params/dense/bias": (4,), "g": (3,)}, "params/dense/kernel: float64[3,4] -> m.weight: g has 3 numbers, and the weight 4 outputs"),
        (DEPTHWISE.format(strides=1), {"k": (3, 2, 4, 3), "b": (4,)}, "r.yaml:5: b: expected a bias for C=4 x M=3 = 12 channels, which k: float64[3,2,4,3] makes, got float64[4]; correct one of the two paths"),
        (DEPTHWISE.format(strides=1), {"k": (3, 2, 4, 3), "b": (4, 3)}, "b: float64[4,3] does not fit: a bias has one value for each of the output channels, which are C times M"),
        (DEPTHWISE.format(strides=1).replace("HWCO", "HWICO").replace("PQCM", "PQICM"), {}, "the kernel 'HWICO' in 'NHWC,HWICO->NHWC' has C and I: it has I where the channels of a group are summed, and C where each channel is convolved on its own"),
        (DEPTHWISE.format(strides=1) + "  feature_group_count: 4", {}, "the kernel of NHWC,HWCO->NHWC has no I, so every channel is its own group; leave feature_group_count out"),
        ("- from: s\n  multiplies_by: scale\n  epsilon: 1e-6\n  group_norm: m", {}, "a group norm has `num_groups` or `group_size`, one of the two"),
        ("- from: s\n  multiplies_by: scale\n  epsilon: 1e-6\n  num_groups: 4\n  group_norm: m", {"s": (6,)}, "s: float64[6] does not fit: 6 channels do not make 4 groups"),
        ("- from: s\n  multiplies_by: scale\n  epsilon: 1e-6\n  mean: m\n  var: v\n  batch_norm: m", {"s": (6,), "m": (6,), "v": (5,)}, "expected the shape of s: float64[6], got float64[5]; correct one of the two paths"),
        ("- from: s\n  multiplies_by: scale\n  epsilon: 1e-6\n  mean: m\n  var: v\n  momentum: 99\n  batch_norm: m", {}, "momentum is between 0 and 1, not 99"),
    ],
)  # fmt: skip
def test_what_does_not_fit(rules: str, tree: dict[str, tuple[int, ...]], said: str) -> None:
    from convert import PlanError, RuleError

    with pytest.raises((PlanError, RuleError)) as refused:
        make_plan(rule_file(rules), MemorySource({name: draw(*shape) for name, shape in tree.items()}))
    assert said in str(refused.value)
