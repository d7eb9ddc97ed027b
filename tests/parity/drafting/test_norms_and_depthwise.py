"""Drafts of norms without a scale or a bias, of Keras's depthwise kernels and its SpectralNormalization, from trees of the real
libraries: with the questions answered, what is converted computes what the library's layers compute."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert import draft_rules, open_source, parse_rules
from convert.planning.matching.match import cover
from convert.planning.planner import make_plan
from support.live_layers import names
from support.memory_source import MemorySource, run


def drafted(
    source: Any, values: dict[str, str], *changes: tuple[str, str], unscaled: tuple[str, ...] = ()
) -> tuple[str, dict[str, torch.Tensor]]:
    """A draft, which covers all and contradicts nothing, and what it makes: each question answered by its key, or as the draft
    guesses first; `unscaled` are layers that multiply by 1."""
    text = draft_rules(source)
    coverage = cover(parse_rules(text, "draft.yaml"), source)
    assert not coverage.findings and coverage.claimed == len(source.leaves)
    lines = text.splitlines()
    layer = ""
    for k, line in enumerate(lines):
        layer = line if line.startswith("- ") else layer
        asked = re.match(r"(- |  )(\w+): (&\w+ )?ask ", line)
        if asked:
            guess = lines[k + 1].removeprefix("  # ").split("    #")[0]
            said = f"{asked[2]}: {asked[3] or ''}{values[asked[2]]}" if asked[2] in values else guess
            bare = asked[2] == "multiplies_by" and any(f"/{name}/" in layer for name in unscaled)
            lines[k] = asked[1] + ("multiplies_by: 1" if bare else said)
    done = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    for old, new in changes:
        assert done.count(old) == 1, old
        done = done.replace(old, new)
    rules = parse_rules(done)
    assert not rules.questions
    return text, {name: torch.tensor(value.copy()) for name, value in run(make_plan(rules, source)).items()}


def fill(module: torch.nn.Module, name: str, state: dict[str, torch.Tensor]) -> torch.nn.Module:
    module.load_state_dict(
        {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}, strict=True
    )
    return module.eval().requires_grad_(False)


def close(got: torch.Tensor, want: Any) -> None:
    np.testing.assert_allclose(got.numpy(), np.asarray(want), rtol=1e-5, atol=1e-5)


def shaken(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: np.asarray(np.abs(np.asarray(x) + 0.3 * rng.normal(size=np.shape(x))) + 0.1, np.float32) if np.asarray(x).dtype == np.float32 else np.asarray(x) for k, x in tree.items()}  # fmt: skip


PAIRS = {"bn_a": (True, True), "bn_b": (False, True), "bn_c": (True, False), "bn_d": (False, False)}
X = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)


def through(state: dict[str, torch.Tensor], modules: dict[str, torch.nn.Module]) -> torch.Tensor:
    y = torch.tensor(X)
    for name, module in modules.items():
        y = fill(module, name, state)(y)
    return y


@pytest.mark.slow
def test_flax_linen() -> None:
    from flax import linen
    from flax.traverse_util import unflatten_dict

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            for name, (scaled, biased) in PAIRS.items():
                x = linen.BatchNorm(True, use_scale=scaled, use_bias=biased, name=name)(x)
            return linen.LayerNorm(use_scale=False, epsilon=1e-5, name="ln")(x)

    with jax.disable_jit():
        tree = shaken(names(Model().init(jax.random.key(0), X)))
        want = Model().apply(unflatten_dict(tree, sep="/"), X)
    text, state = drafted(MemorySource(tree), {"epsilon": "1e-5"})
    assert text.count("multiplies_by: 1    # guess: there is no scale") == 3
    modules = {name: torch.nn.BatchNorm1d(6) for name in PAIRS}
    close(through(state, {**modules, "ln": torch.nn.LayerNorm(6, eps=1e-5)}), want)


@pytest.mark.slow
def test_flax_nnx() -> None:
    from flax import nnx

    layers = {n: nnx.BatchNorm(6, use_scale=s, use_bias=b, use_running_average=True, rngs=nnx.Rngs(0)) for n, (s, b) in PAIRS.items()}  # fmt: skip
    fields = {n: [key for key in ("scale", "bias", "mean", "var") if getattr(layer, key) is not None] for n, layer in layers.items()}  # fmt: skip
    tree = shaken({f"{n}/{key}/value": np.ones(6, np.float32) for n, keys in fields.items() for key in keys})
    for path, value in tree.items():
        name, key, _ = path.split("/")
        getattr(layers[name], key).set_value(jnp.asarray(value))
    y = jnp.asarray(X)
    with jax.disable_jit():
        for layer in layers.values():
            y = layer(y)
    _, state = drafted(MemorySource(tree), {"epsilon": "1e-5"})
    close(through(state, {name: torch.nn.BatchNorm1d(6) for name in PAIRS}), y)


@pytest.mark.slow
def test_haiku() -> None:
    """And no leaf is dropped twice: the averages' counters are integers, which are dropped anyhow."""
    import haiku as hk

    def model(x: Any, training: bool) -> Any:
        for name, (scaled, biased) in PAIRS.items():
            x = hk.BatchNorm(scaled, biased, 0.9, name=name)(x, training)
        return hk.LayerNorm(-1, False, True, name="ln")(x)

    layer = hk.without_apply_rng(hk.transform_with_state(model))
    with jax.disable_jit():
        made = layer.init(jax.random.key(0), X, True)
        flat = {f"{top}/{m}/{k}": v for top, of in zip(("params", "state"), made, strict=True) for m, leaves in of.items() for k, v in leaves.items()}  # fmt: skip
        tree = shaken(flat)
        again = [{m: {k: tree[f"{top}/{m}/{k}"] for k in leaves} for m, leaves in of.items()} for top, of in zip(("params", "state"), made, strict=True)]  # fmt: skip
        want, _ = layer.apply(*again, X, False)
    one = {name.partition("/")[2]: value for name, value in tree.items()}  # hk.data_structures.merge(params, state)
    below = {f"net/{name}": value for name, value in one.items()}
    for given in (tree, one, below):
        text, state = drafted(MemorySource(given), {"epsilon": "1e-5"})
        assert text.count("_ema/hidden") == 1 and text.count("/counter") == 8 and "{hidden,counter}" not in text
        state = {name.removeprefix("net."): value for name, value in state.items()}
        assert sorted(re.findall("(batch|layer|rms)_norm: ask", text)) == [*4 * ["batch"], "layer"]
        modules = {name: torch.nn.BatchNorm1d(6) for name in PAIRS}
        close(through(state, {**modules, "ln": torch.nn.LayerNorm(6)}), want)


@pytest.mark.slow
def test_keras(tmp_path: Path) -> None:
    """Three arrays of a batch norm are asked about: its first is the scale or the bias. SpectralNormalization's are dropped."""
    import keras

    layers = keras.layers
    rng = np.random.default_rng(0)
    model = keras.Sequential(
        [
            layers.Input((9, 8, 4)),
            layers.DepthwiseConv2D((3, 2), depth_multiplier=2),
            layers.BatchNormalization(scale=False),
            layers.SeparableConv2D(6, 3, depth_multiplier=3),
            layers.BatchNormalization(center=False),
            layers.SpectralNormalization(layers.Conv2D(5, 2)),
            layers.BatchNormalization(scale=False, center=False),
            layers.LayerNormalization(scale=False),
        ]
    )
    for variable in model.variables:
        if "seed" not in variable.path:
            shape, shift = variable.shape, 1.0 if "var" in variable.path else 0.0
            variable.assign(np.abs(rng.normal(size=shape)) * 0.3 + 0.2 if shift else rng.normal(size=shape) * 0.3)
    x = rng.normal(size=(2, 9, 8, 4)).astype(np.float32)
    want = np.asarray(model(x, training=False))
    model.save_weights(tmp_path / "m.weights.h5")
    source = open_source(tmp_path / "m.weights.h5")
    bare = "layers/batch_normalization_0/vars/0"
    text, state = drafted(
        source,
        {"epsilon": "1e-3", "padding": "VALID"},
        *((f"from: {path}", f"bias: {path}") for path in (bare, "layers/layer_normalization/vars/0")),
        unscaled=("batch_normalization_0", "layer_normalization"),
    )
    assert text.count("Keras numbers the arrays: is this one the scale or the bias?") == 3
    assert text.count("guess: a SpectralNormalization") == 2 and "vector_u" not in text
    torch_layers: dict[str, torch.nn.Module] = {
        "layers.depthwise_conv2d": torch.nn.Conv2d(4, 8, (3, 2), groups=4),
        "layers.batch_normalization_0": torch.nn.BatchNorm2d(8, eps=1e-3),
        "layers.separable_conv2d.depthwise": torch.nn.Conv2d(8, 24, 3, groups=8, bias=False),
        "layers.separable_conv2d.pointwise": torch.nn.Conv2d(24, 6, 1),
        "layers.batch_normalization_1": torch.nn.BatchNorm2d(6, eps=1e-3),
        "layers.spectral_normalization.layer": torch.nn.Conv2d(6, 5, 2),
        "layers.batch_normalization_2": torch.nn.BatchNorm2d(5, eps=1e-3),
    }
    y = torch.tensor(np.moveaxis(x, -1, 1).copy())
    for name, module in torch_layers.items():
        y = fill(module, name, state)(y)
    y = fill(torch.nn.LayerNorm(5, eps=1e-3), "layers.layer_normalization", state)(y.movedim(1, -1))
    close(y, want)


def equinox_model(mode: str) -> tuple[Any, Any]:
    import equinox as eqx

    class Model(eqx.Module):
        a: Any
        drop: Any
        b: Any
        ln: Any

        def __init__(self) -> None:
            self.a = eqx.nn.BatchNorm(6, "n", mode=mode)
            self.drop = eqx.nn.Linear(6, 6, key=jax.random.key(0))
            self.b = eqx.nn.BatchNorm(6, "n", mode=mode, channelwise_affine=False)
            self.ln = eqx.nn.LayerNorm(6, use_weight=False)

    model: tuple[Any, Any] = eqx.nn.make_with_state(Model)()
    return model


@pytest.mark.slow
def test_equinox_statistics_lie_in_its_state_in_the_order_of_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import equinox as eqx

    from convert.checkpoints.formats.skeleton import write_skeleton

    with jax.disable_jit():
        shape = equinox_model("ema")
        leaves, tree = jax.tree.flatten(shape)
        rng = np.random.default_rng(0)
        leaves = [jnp.asarray(np.abs(rng.normal(size=x.shape)) + 0.2, x.dtype) if getattr(x, "dtype", None) == jnp.float32 else x for x in leaves]  # fmt: skip
        model, state = jax.tree.unflatten(tree, leaves)
        eqx.tree_serialise_leaves(tmp_path / "m.eqx", (model, state))
        monkeypatch.setattr(sys.modules[__name__], "made", lambda: equinox_model("ema"), raising=False)
        (tmp_path / "m.json").write_text(write_skeleton(f"{__name__}:made"))
        infer = eqx.nn.inference_mode(model)

        def run_it(x: Any) -> Any:
            y, _ = infer.a(x, state)
            y, _ = infer.b(infer.drop(y), state)
            return infer.ln(y)

        want = jax.vmap(run_it, axis_name="n")(jnp.asarray(X))
    source = open_source(tmp_path / "m.eqx", skeleton=tmp_path / "m.json")
    text, tensors = drafted(source, {"epsilon": "1e-5", "einsum": '"...D,FD->...F"'})
    assert text.count("batch_norm: ask") == 2 and "momentum: ask" not in text
    y = fill(torch.nn.BatchNorm1d(6), "0.a", tensors)(torch.tensor(X))
    y = fill(torch.nn.BatchNorm1d(6), "0.b", tensors)(fill(torch.nn.Linear(6, 6), "0.drop", tensors)(y))
    close(fill(torch.nn.LayerNorm(6), "0.ln", tensors)(y), want)


def test_equinox_statistics_that_are_divided_at_inference_are_asked_about() -> None:
    """`mode="batch"` keeps sums that it divides by 1 - momentum**counter; and what does not pair up is no guess."""
    shapes: dict[str, Any] = {"0/a/weight": (6,), "0/a/bias": (6,), "0/a/inference": bool, "1/0": int, "1/1/0": (6,), "1/1/1": (6,)}  # fmt: skip
    arrays = {k: np.zeros(s, np.float32) if isinstance(s, tuple) else np.array(0, s) for k, s in shapes.items()}
    text = draft_rules(MemorySource(arrays))
    assert "momentum: ask    # question: mode=\"batch\": Equinox divides both statistics by 1 - momentum**counter at inference, which rules cannot express: divide them in the checkpoint first. Which momentum?" in text  # fmt: skip
    assert "for training only" not in text and text.count("momentum: 0.99") == 1
    two = {**arrays, "1/2": np.array(False), "1/3/0": np.zeros(6, np.float32), "1/3/1": np.zeros(6, np.float32)}
    assert "batch_norm" not in draft_rules(MemorySource(two))
