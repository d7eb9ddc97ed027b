"""Attention layers of five libraries against torch.nn.MultiheadAttention and separate projections, in float64, with masks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from support.paths import DOCS

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

from convert import PlanError, RuleError
from convert.numerics.lift_jax import lift
from convert.planning.planner import make_plan
from convert.rules.attention_macro import LIBRARIES
from support.memory_source import HEAD, MemorySource, rule_file, run

HEADS, WIDTH, KEYS, VALUES = 3, 12, 7, 10
QUERY_TIME, KEY_TIME = 5, 6
TREE = dict[str, np.ndarray]
Attend = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@pytest.fixture(autouse=True, scope="module")
def float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.disable_jit():
        yield


def given(keys: int, values: int) -> tuple[np.ndarray, ...]:
    """Queries, keys, values, and a mask that is true where a query may look; each query sees something."""
    rng = np.random.default_rng(0)
    mask = rng.random((2, QUERY_TIME, KEY_TIME)) < 0.6
    mask[..., 1] = True
    sizes = ((QUERY_TIME, WIDTH), (KEY_TIME, keys), (KEY_TIME, values))
    return (*(rng.standard_normal((2, *size)) for size in sizes), mask)


def drawn(tree: Any) -> Any:
    """Every leaf random: biases are zeros to begin with."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) * 0.4), tree)


def flat(tree: Any) -> TREE:
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path): np.asarray(x) for path, x in found}


def of_linen(keys: int, values: int) -> tuple[TREE, Attend]:
    layer = linen.MultiHeadDotProductAttention(HEADS, param_dtype=jnp.float64, qkv_features=WIDTH, out_features=WIDTH)
    q, k, v, _ = given(keys, values)
    params = drawn(layer.init(jax.random.key(0), q, k, v)["params"])
    return flat(params), lambda q, k, v, mask: layer.apply({"params": params}, q, k, v, mask=mask[:, None])


def of_nnx(keys: int, values: int) -> tuple[TREE, Attend]:
    kwargs = {"in_kv_features": keys} if keys != WIDTH else {}
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, WIDTH, param_dtype=jnp.float64, dtype=jnp.float64, decode=False, rngs=nnx.Rngs(0), **kwargs)  # fmt: skip
    state = drawn(nnx.state(layer, nnx.Param))
    nnx.update(layer, state)
    leaves = {"/".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(state)}
    # jax.nn.dot_product_attention has its logits and its softmax in float32, whatever it is given
    return leaves, lift(lambda q, k, v, mask: layer(q, k, v, mask=mask[:, None], deterministic=True))


def of_haiku(keys: int, values: int) -> tuple[TREE, Attend]:
    def forward(q: Any, k: Any, v: Any, mask: Any) -> Any:
        init = hk.initializers.RandomNormal()
        return hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=init, model_size=WIDTH, name="a")(
            q, k, v, mask[:, None]
        )

    net = hk.without_apply_rng(hk.transform(forward))
    params = drawn(net.init(jax.random.key(0), *given(keys, values)))
    return {name.removeprefix("a/"): x for name, x in flat(params).items()}, lambda *args: net.apply(params, *args)


def of_equinox(keys: int, values: int) -> tuple[TREE, Attend]:
    biases = {f"use_{word}_bias": True for word in ("query", "key", "value", "output")}
    layer = eqx.nn.MultiheadAttention(HEADS, WIDTH, key_size=keys, value_size=values, output_size=WIDTH, qk_size=WIDTH // HEADS, vo_size=WIDTH // HEADS, key=jax.random.key(0), **biases)  # fmt: skip
    arrays, static = eqx.partition(layer, eqx.is_array)
    layer = eqx.combine(drawn(arrays), static)
    leaves = {}
    for word in ("query_proj", "key_proj", "value_proj", "output_proj"):
        leaves |= {f"{word}/{name}": np.asarray(getattr(getattr(layer, word), name)) for name in ("weight", "bias")}
    return leaves, lambda q, k, v, mask: np.stack([np.asarray(layer(*one)) for one in zip(q, k, v, mask, strict=True)])


def of_keras(keys: int, values: int) -> tuple[TREE, Attend]:
    import keras

    layer = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, output_shape=WIDTH, dtype="float64")
    q, k, v, _ = given(keys, values)
    layer(q, v, k)
    rng = np.random.default_rng(1)
    leaves = {}
    for word in ("query", "key", "value", "output"):
        dense = getattr(layer, f"_{word}_dense")  # the attribute's name is the path in a .weights.h5
        for n, variable in enumerate((dense.kernel, dense.bias)):
            variable.assign(rng.standard_normal(variable.shape) * 0.4)
            leaves[f"{word}_dense/vars/{n}"] = np.asarray(variable)
    return leaves, lift(lambda q, k, v, mask: layer(q, v, k, attention_mask=mask))


LIVE: dict[str, Callable[[int, int], tuple[TREE, Attend]]] = {
    "flax.linen.MultiHeadDotProductAttention": of_linen,
    "flax.nnx.MultiHeadAttention": of_nnx,
    "haiku.MultiHeadAttention": of_haiku,
    "equinox.nn.MultiheadAttention": of_equinox,
    "keras.layers.MultiHeadAttention": of_keras,
}
SAME, OWN = (WIDTH, WIDTH), (KEYS, VALUES)


def rule(name: str, target: str = "net.attn", axes: str = "", more: str = "") -> str:
    letters = axes or ("DNH" if len(LIBRARIES[name].heads) == 2 else "DE")
    return f"- attention: {target}\n  layer: {name}\n  from: params/attn\n  axes: {letters}\n  bias: true\n{more}"


def converted(name: str, rules: str, tree: TREE) -> dict[str, torch.Tensor]:
    plan = make_plan(rule_file(rules), MemorySource({f"params/attn/{k}": x for k, x in tree.items()}))
    return {key.removeprefix("net.attn."): torch.tensor(x) for key, x in run(plan).items()}


def torch_attention(tensors: dict[str, torch.Tensor], keys: int, values: int) -> Attend:
    own = {} if keys == values == WIDTH else {"kdim": keys, "vdim": values}
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, **own)
    module.load_state_dict(tensors, strict=True)

    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
        hidden = torch.tensor(~mask).repeat_interleave(HEADS, 0)  # torch's masks are true where a query may not look
        with torch.no_grad():
            return module(*map(torch.tensor, (q, k, v)), attn_mask=hidden, need_weights=False)[0].numpy()

    return attend


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVE)
def test_the_real_layer_is_torchs(name: str) -> None:
    assert {*LIVE} == {*LIBRARIES}
    tree, want = LIVE[name](*SAME)
    x = given(*SAME)
    tensors = converted(name, rule(name), tree)
    assert {*tensors} == {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    got, right = torch_attention(tensors, *SAME)(*x), np.asarray(want(*x))
    assert np.abs(got - right).max() <= 1e-12
    rows = torch.cat([tensors["in_proj_weight"][WIDTH : 2 * WIDTH], tensors["in_proj_weight"][:WIDTH], tensors["in_proj_weight"][2 * WIDTH :]])  # fmt: skip
    swapped = torch_attention({**tensors, "in_proj_weight": rows}, *SAME)(*x)
    turned = torch_attention({**tensors, "out_proj.weight": tensors["out_proj.weight"].T.contiguous()}, *SAME)(*x)
    assert min(np.abs(swapped - right).max(), np.abs(turned - right).max()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LIVE if "nnx" not in name])
def test_keys_and_values_with_widths_of_their_own(name: str) -> None:
    tree, want = LIVE[name](*OWN)
    x = given(*OWN)
    axes = ("DNH" if len(LIBRARIES[name].heads) == 2 else "DE") + "KV"
    tensors = converted(name, rule(name, axes=axes), tree)
    assert {"q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"} < {*tensors}
    assert np.abs(torch_attention(tensors, *OWN)(*x) - np.asarray(want(*x))).max() <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "axes"), [(SAME, "DNH"), (OWN, "DNHKV")])
def test_separate_projections(sizes: tuple[int, int], axes: str) -> None:
    name = "flax.linen.MultiHeadDotProductAttention"
    tree, want = of_linen(*sizes)
    target = '{module: net.attn, projections: "{q,k,v}_proj", output: o_proj}'
    t = converted(name, rule(name, target, axes), tree)
    q, k, v, mask = given(*sizes)
    parts = [torch.nn.functional.linear(torch.tensor(x), t[f"{p}_proj.weight"], t[f"{p}_proj.bias"]) for p, x in (("q", q), ("k", k), ("v", v))]  # fmt: skip
    heads = [x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in parts]
    y = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=torch.tensor(mask)[:, None])
    got = torch.nn.functional.linear(y.transpose(1, 2).flatten(2), t["o_proj.weight"], t["o_proj.bias"])
    assert np.abs(got.numpy() - np.asarray(want(q, k, v, mask))).max() <= 1e-12


def test_without_biases_and_stacked() -> None:
    tree = {name: np.stack([x, x + 1]) for name, x in of_linen(*SAME)[0].items() if "bias" not in name}
    text = rule("flax.linen.MultiHeadDotProductAttention", "net.attn.{i}", more="  stacked: {i: 0}\n")
    tensors = converted("", text.replace("bias: true", "bias: false"), tree)
    assert {*tensors} == {f"{i}.{name}" for i in (0, 1) for name in ("in_proj_weight", "out_proj.weight")}
    assert np.array_equal(tensors["1.in_proj_weight"].numpy(), tensors["0.in_proj_weight"].numpy() + 1)


@pytest.mark.slow
def test_heads_that_are_together_as_wide_as_torch_cannot_have_them_are_refused() -> None:
    layer = linen.MultiHeadDotProductAttention(HEADS, qkv_features=WIDTH + HEADS, out_features=WIDTH)
    x = jnp.zeros((1, 2, WIDTH))
    tree = flat(layer.init(jax.random.key(0), x, x, x)["params"])
    with pytest.raises(PlanError) as caught:
        converted("", rule("flax.linen.MultiHeadDotProductAttention"), tree)
    assert "width of torch.nn.MultiheadAttention, which is that of all heads together" in str(caught.value)
    target = '{module: net.attn, projections: "{q,k,v}_proj"}'
    assert converted("", rule("flax.linen.MultiHeadDotProductAttention", target), tree)["q_proj.weight"].shape == (
        15,
        12,
    )


@pytest.mark.slow
def test_norms_of_queries_and_keys_are_not_lost() -> None:
    layer = linen.MultiHeadDotProductAttention(HEADS, normalize_qk=True)
    x = jnp.zeros((1, 2, WIDTH))
    tree = flat(layer.init(jax.random.key(0), x, x, x)["params"])
    with pytest.raises(PlanError, match="params/attn/query_ln/scale: no rule matches this leaf"):
        converted("", rule("flax.linen.MultiHeadDotProductAttention"), tree)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("DNH", "DE", "D N H, or D N H K V if keys and values have their own widths, got 'DE'"),
        ("flax.linen", "flax.lenen", "expected one of flax.linen.MultiHeadDotProductAttention"),
        ("net.attn", "{module: net, projections: qkv}", "expected names of three Linears in `projections`"),
        ("  bias: true\n", "  einsum: a\n", "unknown key 'einsum' in an `attention` rule"),
    ],
)
def test_rules_that_say_too_little(old: str, new: str, message: str) -> None:
    text = rule("flax.linen.MultiHeadDotProductAttention", axes="DNHKV" if "projections" in new else "")
    with pytest.raises(RuleError) as caught:
        rule_file(text.replace(old, new))
    assert message in str(caught.value)


def test_the_examples_of_the_page_are_rules() -> None:
    facts = "facts: {min_timescale: 1, max_timescale: 10000, lora_alpha: 16, image_size: 224, posemb: sincos2d}\n"
    attention, layers = (
        re.findall(r"```yaml\n(.*?)```", (DOCS / "guides" / page).read_text(), re.DOTALL)
        for page in ("attention.md", "layers.md")
    )
    lora = [example for example in layers if "lora" in example]
    assert len(attention) == 4 and len(lora) == 2
    for example in (*attention, *lora):
        rule_file(example, HEAD + facts)
