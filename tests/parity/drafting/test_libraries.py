"""Drafts for trees of real libraries, their questions answered: what is converted computes what the library's model computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert import PlanError, draft_rules, open_source, parse_rules, plan_conversion
from convert.planning.matching.match import cover
from convert.planning.planner import make_plan
from support.drafts import answered, tree
from support.memory_source import MemorySource, run

pytestmark = pytest.mark.slow  # takes long, as each test starts programs or models of its own

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

WIDTH, HEADS, TIME, BATCH, LAYERS = 12, 3, 7, 2, 4


def shaken(tree: Any, seed: int = 0) -> Any:
    """Fresh biases are zeros and scales ones: a lost one would not show."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.asarray(x + 0.3 * rng.normal(size=x.shape), np.float32), tree)


def source_of(tree: Any) -> MemorySource:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return MemorySource({"/".join(str(k.key) for k in path): np.asarray(value) for path, value in leaves})


def converted(source: Any, answers: dict[str, dict[str, Any]], more: str = "") -> dict[str, Any]:
    """The tensors that a draft with its questions answered makes; the draft itself covers all and converts nothing."""
    text = draft_rules(source)
    draft = parse_rules(text, "draft.yaml")
    coverage = cover(draft, source)
    assert not coverage.findings and coverage.claimed == len(source.leaves)
    with pytest.raises(PlanError):
        make_plan(draft, source)
    rules = parse_rules(answered(text, answers, more))
    assert not rules.questions
    return {name: torch.tensor(np.asarray(value)) for name, value in run(plan_conversion(rules, source)).items()}


def loaded(module: Any, tensors: dict[str, Any]) -> Any:
    module.load_state_dict(tensors, strict=True)
    return module.eval()


# ---- flax linen


def linen_attention() -> tuple[Any, Any, Any]:
    import flax.linen as nn

    layer = nn.MultiHeadDotProductAttention(HEADS, qkv_features=WIDTH)
    x = np.random.default_rng(1).normal(size=(BATCH, TIME, WIDTH)).astype(np.float32)
    params = shaken(layer.init(jax.random.key(0), x, x))
    return params, x, np.asarray(layer.apply(params, x, x))


def test_linen_attention_becomes_torchs() -> None:
    params, x, want = linen_attention()
    made = converted(source_of({"params": {"attn": params["params"]}}), {"attn": {"attention": 0}})
    module = loaded(torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), {k.removeprefix("attn."): v for k, v in made.items()})  # fmt: skip
    x = torch.tensor(x)
    np.testing.assert_allclose(module(x, x, x)[0].detach(), want, atol=2e-6)


def test_linen_attention_becomes_projections() -> None:
    params, x, want = linen_attention()
    made = converted(source_of({"params": {"attn": params["params"]}}), {"attn": {"attention": 1}})
    assert set(made) == {f"attn.{m}_proj.{k}" for m in ("q", "k", "v", "out") for k in ("weight", "bias")}

    def heads(name: str) -> Any:
        y = torch.tensor(x) @ made[f"attn.{name}_proj.weight"].T + made[f"attn.{name}_proj.bias"]
        return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    y = torch.nn.functional.scaled_dot_product_attention(heads("q"), heads("k"), heads("v")).transpose(1, 2).flatten(2)
    y = y @ made["attn.out_proj.weight"].T + made["attn.out_proj.bias"]
    np.testing.assert_allclose(y, want, atol=2e-6)


def test_a_scanned_transformer_becomes_torchs_encoder_layers() -> None:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.LayerNorm(name="norm1")(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(y, y)
            y = nn.Dense(19, name="up")(nn.LayerNorm(name="norm2")(x))
            return x + nn.Dense(WIDTH, name="down")(nn.gelu(y)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            return nn.RMSNorm(name="norm")(scan(name="layers")(x, None)[0])

    x = np.random.default_rng(1).normal(size=(BATCH, TIME, WIDTH)).astype(np.float32)
    params = shaken(Net().init(jax.random.key(0), x))
    source = source_of(params)
    assert len(parse_rules(draft_rules(source)).rules) == 6  # two of them are one `attention` rule
    made = converted(
        source,
        {
            "layers/attention": {"attention": "layers.{s}.self_attn"},
            "layers/up/kernel": {"linear": "layers.{s}.linear1", "+": ["activation: gelu_tanh"]},
            "layers/down/kernel": {"linear": "layers.{s}.linear2"},
            "layers/norm{1,2}/scale": {"multiplies_by": 0, "epsilon": 0, "layer_norm": "layers.{s}.norm{1,2}"},
            "norm/scale": {"multiplies_by": 0, "epsilon": 0, "rms_norm": 0},
        },
    )
    torch_layers = [
        torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 19, 0.0, lambda y: torch.nn.functional.gelu(y, approximate="tanh"), 1e-6, True, True
        )
        for _ in range(LAYERS)
    ]
    module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch_layers), "norm": torch.nn.RMSNorm(WIDTH, 1e-6)})
    loaded(module, made)
    y = torch.tensor(x)
    for layer in module["layers"]:
        y = layer(y)
    np.testing.assert_allclose(module["norm"](y).detach(), Net().apply(params, x), atol=2e-5)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_linen_cells_in_a_stack_are_layers_and_directions_of_one_module(kind: str, both: bool) -> None:
    """The first layer has another width of input: the others are one rule, whose numbers are layers or directions."""
    import flax.linen as nn

    hidden, layers = 5, 2 if both else 3
    cell = {"GRU": nn.GRUCell, "LSTM": nn.OptimizedLSTMCell, "RNN": nn.SimpleCell}[kind]

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(layers):
                ahead = nn.RNN(cell(hidden))
                x = nn.Bidirectional(ahead, nn.RNN(cell(hidden)))(x) if both else ahead(x)
            return x

    x = np.random.default_rng(1).normal(size=(BATCH, TIME, 4)).astype(np.float32)
    with jax.disable_jit():
        params = shaken(Net().init(jax.random.key(0), x))
        want = np.asarray(Net().apply(params, x))
    word, name = kind.lower(), cell.__name__
    ways = 'direction: "{forward,backward}"'
    wanted = {"{0,1}": f"layer: 0, {ways}", "{2,3}": f"layer: 1, {ways}"} if both else {"0": "layer: 0", "{1,2}": 'layer: "{1,2}"'}  # fmt: skip
    source = source_of(params)
    assert [rule.kind_name for rule in parse_rules(draft_rules(source)).rules] == [word, word]
    made = converted(source, {f"{name}_{n}": {"cell": 0, word: f"{{module: rnn, {rest}}}"} for n, rest in wanted.items()})  # fmt: skip
    module = {"GRU": torch.nn.GRU, "LSTM": torch.nn.LSTM, "RNN": torch.nn.RNN}[kind](4, hidden, layers, batch_first=True, bidirectional=both)  # fmt: skip
    loaded(module, {key.removeprefix("rnn."): value for key, value in made.items()})
    np.testing.assert_allclose(module(torch.tensor(x))[0].detach(), want, atol=2e-6)


# ---- Haiku


def test_a_haiku_lstm_and_attention() -> None:
    hk = pytest.importorskip("haiku")

    def forward(x: Any) -> Any:
        cell = hk.LSTM(5)
        y, _ = hk.dynamic_unroll(cell, x, cell.initial_state(x.shape[1]))
        y = hk.Linear(WIDTH)(y)
        z = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=hk.initializers.VarianceScaling())
        return z(y, y, y)

    net = hk.without_apply_rng(hk.transform(forward))
    x = np.random.default_rng(1).normal(size=(TIME, BATCH, 4)).astype(np.float32)
    params = shaken(net.init(jax.random.key(0), x))
    source = source_of({f"{m}/{k}": v for m, of in params.items() for k, v in of.items()})
    answers = {"lstm": {"lstm": 0}, "multi_head_attention": {"attention": "attn"}, "linear/w": {"linear": 0}}
    module = torch.nn.ModuleDict(
        {
            "lstm": torch.nn.LSTM(4, 5),
            "linear": torch.nn.Linear(5, WIDTH),
            "attn": torch.nn.MultiheadAttention(WIDTH, HEADS),
        }
    )
    loaded(module, converted(source, answers))
    y = module["linear"](module["lstm"](torch.tensor(x))[0])
    got = module["attn"](*[y.transpose(0, 1)] * 3)[0].transpose(0, 1)  # Haiku attends over the axis before the last
    np.testing.assert_allclose(got.detach(), np.asarray(net.apply(params, x)), atol=2e-5)


def test_haiku_batch_norm_has_its_statistics_in_the_state() -> None:
    source = tree(
        params__conv2_d__w=(3, 3, 2, 5),
        params__conv2_d__b=(5,),
        params__batch_norm__scale=(1, 1, 1, 5),
        params__batch_norm__offset=(1, 1, 1, 5),
        **{f"state__batch_norm__~__{k}_ema__{w}": (1, 1, 1, 5) for k in ("mean", "var") for w in ("average", "hidden")},
        **{f"state__batch_norm__~__{k}_ema__counter": () for k in ("mean", "var")},
    )
    answers = {
        "params/conv2_d/w": {"padding": 0, "conv": 0},
        "params/batch_norm/scale": {"multiplies_by": 0, "epsilon": 1, "batch_norm": 0},
    }
    made = converted(source, answers)
    for name, leaf in (("running_mean", "mean"), ("running_var", "var")):
        stored = source.arrays[f"state/batch_norm/~/{leaf}_ema/average"]
        np.testing.assert_array_equal(made[f"batch_norm.{name}"], stored.reshape(5))


# ---- Keras


def test_a_keras_conv_net(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    layers = keras.layers
    inputs = keras.Input((9, 8, 3))
    x = layers.Conv2D(5, 3, padding="same", use_bias=False)(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.DepthwiseConv2D(3, padding="same")(x)
    x = layers.Conv2D(7, (3, 2), padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(4)(layers.Flatten()(x)))
    rng = np.random.default_rng(3)
    model.set_weights([np.abs(0.4 * rng.normal(size=w.shape) + 0.1).astype(np.float32) + 0.1 for w in model.get_weights()])  # fmt: skip
    model.save_weights(tmp_path / "net.weights.h5")
    source = open_source(tmp_path / "net.weights.h5")
    made = converted(
        source,
        {
            "layers/conv2d_0/vars/0": {"padding": 0, "conv": "stem"},
            "layers/conv2d_1/vars/0": {"padding": 0, "conv": "mix", "+": ["activation: relu"]},
            "layers/conv2d/vars/0": {"padding": 0, "conv": "stem"},
            "layers/depthwise_conv2d/vars/0": {"padding": 0, "conv": "apart"},
            "layers/batch_normalization/vars/0": {"multiplies_by": 0, "epsilon": 2, "batch_norm": "norm"},
            "layers/dense/vars/0": {"flattened": 0, "linear": "head"},
        },
        "  R: {is: rows, equals: 9}\n  S: {is: columns, equals: 8}\n",
    )
    module = torch.nn.ModuleDict(
        {
            "stem": torch.nn.Conv2d(3, 5, 3, padding=1, bias=False),
            "norm": torch.nn.BatchNorm2d(5, eps=1e-3),
            "apart": torch.nn.Conv2d(5, 5, 3, padding=1, groups=5),
            "mix": torch.nn.Conv2d(5, 7, (3, 2)),
            "head": torch.nn.Linear(7 * 9 * 8, 4),
        }
    )
    loaded(module, made)
    x = rng.normal(size=(2, 9, 8, 3)).astype(np.float32)
    y = module["apart"](module["norm"](module["stem"](torch.tensor(x).permute(0, 3, 1, 2))))
    y = torch.relu(module["mix"](torch.nn.functional.pad(y, (0, 1, 1, 1))))
    np.testing.assert_allclose(module["head"](y.flatten(1)).detach(), np.asarray(model(x)), rtol=2e-4)


# ---- pairs


@pytest.mark.parametrize(("scale", "factor"), [(0, 1.0), (1, 16 / 3)])
def test_a_lora_pair_is_merged_with_the_scale_that_is_asked_for(scale: int, factor: float) -> None:
    shapes = {"kernel": (7, 7), "lora_a": (7, 3), "lora_b": (3, 7)}
    source = tree(**{f"params__q_{k}__{name}": shape for k in (0, 1) for name, shape in shapes.items()})
    assert "(in, out), as the first of its pair has the inputs" in draft_rules(source)
    made = converted(source, {"q_{i}/kernel": {"plus": scale, "linear": "layers.{i}.q"}})
    leaves = {name: value.astype(float) for name, value in source.arrays.items()}
    for k in (0, 1):
        want = leaves[f"params/q_{k}/kernel"] + factor * leaves[f"params/q_{k}/lora_a"] @ leaves[f"params/q_{k}/lora_b"]
        np.testing.assert_allclose(made[f"layers.{k}.q.weight"], want.T, rtol=1e-6)


def test_nnxs_pair_is_not_scaled() -> None:
    shapes = {"kernel": (7, 5), "bias": (5,), "lora/lora_a": (7, 3), "lora/lora_b": (3, 5)}
    source = tree(**{f"up__{name}": shape for name, shape in shapes.items()})
    made = converted(source, {"up/kernel": {"linear": 0}})
    leaves = source.arrays
    want = leaves["up/kernel"] + leaves["up/lora/lora_a"] @ leaves["up/lora/lora_b"]
    np.testing.assert_allclose(made["up.weight"], want.T, rtol=1e-5)
