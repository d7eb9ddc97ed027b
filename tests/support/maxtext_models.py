"""MaxText's Gemma 2, Gemma 3 and Llama 3 as plain JAX: its trees, names and shapes, and what it computes with them.

MaxText itself is not installed here. Facts are those of AI-Hypercomputer/maxtext@e591f30, read in its source: the leaves in
checkpoint_conversion/utils/param_mapping.py; blocks in models/gemma2.py, gemma3.py, llama2.py; attention, masks and the query's
scale in layers/attentions.py and attention_op.py; RoPE and the table in embeddings.py; head and scan in decoders.py. A scanned
stack is run by `jax.lax.scan` over axis 1 (base.yml, param_scan_axis). Everything is float32; MaxText itself casts the
table to bfloat16 for the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = dict[str, Any]
V, D, N, K, H, F = 37, 18, 6, 3, 8, 28  # no two axes of one leaf are alike; transformers wants D to be a multiple of N
PADDED = 4  # rows of Gemma 2's table that no token has
TOKENS = np.random.default_rng(5).integers(0, V, (2, 11))
WINDOW, CAP, FINAL_CAP = 4, 3.0, 2.0  # caps so low that they show
UNIT = 6  # layers of Gemma 3's scanned unit: five local ones and a global one


@dataclass(frozen=True)
class Model:
    """One of the families; `layers` is the number of a PyTorch model's layers."""

    family: str
    layers: int
    scan: bool

    @property
    def gemma(self) -> bool:
        return self.family.startswith("gemma")

    @property
    def rules(self) -> str:
        return f"maxtext-{self.family}"

    @property
    def settings(self) -> dict[str, Any]:
        """What a user must say of a model of no published size."""
        if self.family == "gemma2":
            return {
                "vocab_size": V,
                "sliding_window": WINDOW,
                "attn_logit_softcapping": CAP,
                "final_logit_softcapping": FINAL_CAP,
            }
        if self.family == "gemma3":
            return {"vocab_size": V, "sliding_window": WINDOW, "context_length": 64, "query_pre_attn_scalar": 10, "rope_factor_global": 8.0}  # fmt: skip
        return {"eos_token_id": 1, "bos_token_id": 2, "context_length": 64}  # of this small vocabulary

    def local(self, i: int) -> bool:
        return {"gemma2": i % 2 == 0, "gemma3": i % UNIT != UNIT - 1}.get(self.family, False)


# ---- trees


def layer(model: Model, rng: np.random.Generator) -> Tree:
    """The leaves of one layer, not stacked."""

    def kernel(*shape: int, fan: int) -> np.ndarray:
        return (rng.standard_normal(shape) / math.sqrt(fan)).astype(np.float32)

    def norm(width: int) -> Tree:
        return {"scale": (1 + 0.3 * rng.standard_normal(width)).astype(np.float32)}

    carried = 1.0 if model.family == "gemma3" else 1 / math.sqrt(H)
    attention: Tree = {
        "query": {"kernel": kernel(D, N, H, fan=D) * np.float32(carried)},
        "key": {"kernel": kernel(D, K, H, fan=D)},
        "value": {"kernel": kernel(D, K, H, fan=D)},
        "out": {"kernel": kernel(N, H, D, fan=N * H)},
    }
    if model.family == "gemma3":
        attention |= {"query_norm": norm(H), "key_norm": norm(H)}
    mlp = {
        "wi_0": {"kernel": kernel(D, F, fan=D)},
        "wi_1": {"kernel": kernel(D, F, fan=D)},
        "wo": {"kernel": kernel(F, D, fan=F)},
    }
    norms = (
        ("pre_self_attention_norm", "post_self_attention_norm", "pre_ffw_norm", "post_ffw_norm")
        if model.gemma
        else ("pre_self_attention_layer_norm", "post_self_attention_layer_norm")
    )
    return {"self_attention": attention, "mlp": mlp, **{name: norm(D) for name in norms}}


def _stack(trees: list[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *trees)


def variables(model: Model) -> Tree:
    """What linen calls the variables: ``{"params": {"decoder": ..., "token_embedder": ...}}``."""
    rng = np.random.default_rng([3, model.layers])
    every = [layer(model, rng) for _ in range(model.layers)]
    if model.family == "gemma2":  # a unit of two layers in one scope
        words = ("local", "global")
        units = [
            {f"{name}_{words[p]}": leaves for p in range(2) for name, leaves in every[2 * u + p].items()}
            for u in range(model.layers // 2)
        ]
        layers = {"layers": _stack(units)} if model.scan else {f"layers_{u}": unit for u, unit in enumerate(units)}
    elif model.family == "gemma3" and model.scan:
        whole = model.layers // UNIT * UNIT
        layers = {"layers": {f"layers_{p}": _stack(every[p:whole:UNIT]) for p in range(UNIT)}}
        if every[whole:]:
            layers["layers_remainder"] = {f"layers_{q}": x for q, x in enumerate(every[whole:])}
    else:
        layers = {"layers": _stack(every)} if model.scan else {f"layers_{i}": x for i, x in enumerate(every)}
    norm = {"scale": (1 + 0.3 * rng.standard_normal(D)).astype(np.float32)}
    decoder: Tree = {**layers, "decoder_norm": norm}
    if not model.gemma:
        decoder["logits_dense"] = {"kernel": (rng.standard_normal((D, V)) / math.sqrt(D)).astype(np.float32)}
    rows = V + PADDED if model.family == "gemma2" else V
    table = rng.standard_normal((rows, D)).astype(np.float32)
    return {"params": {"decoder": decoder, "token_embedder": {"embedding": table}}}


def train_state(model: Model) -> Tree:
    """What a training run saves: the variables below `params`, and what is no weight."""
    made = variables(model)
    moments = jax.tree.map(np.zeros_like, made["params"])
    count = np.asarray(7, np.int32)
    return {"params": made, "opt_state": {"mu": {"params": moments}, "count": count}, "step": count}


def flat(tree: Tree, prefix: str = "") -> dict[str, np.ndarray]:
    """Name -> leaf, keys joined with ``/``."""
    found: dict[str, np.ndarray] = {}
    for key, value in tree.items():
        name = f"{prefix}/{key}" if prefix else key
        found |= flat(value, name) if isinstance(value, dict) else {name: value}
    return found


# ---- what MaxText computes


def _norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon) * scale


def _halves(x: jax.Array, base: float, factor: float = 1.0) -> jax.Array:
    """RotaryEmbedding: feature k and k + H/2 are a pair; positions are divided by the factor."""
    angle = jnp.arange(x.shape[1])[:, None, None] / (factor * base ** (2 * jnp.arange(H // 2) / H))
    one, two = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [one * jnp.cos(angle) - two * jnp.sin(angle), two * jnp.cos(angle) + one * jnp.sin(angle)], -1
    )


def _neighbours(x: jax.Array, base: float) -> jax.Array:
    """LLaMARotaryEmbedding: feature 2k and 2k + 1 are a pair; low frequencies are divided by 8, with a ramp between."""
    frequency = base ** -(2 * np.arange(H // 2) / H)
    wavelength = 2 * np.pi / frequency
    ramp = np.clip((8192 / wavelength - 1) / (4 - 1), 0, 1)
    angle = jnp.arange(x.shape[1])[:, None, None] * jnp.asarray(
        (1 - ramp) * frequency / 8 + ramp * frequency, jnp.float32
    )
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = [even * jnp.cos(angle) - odd * jnp.sin(angle), odd * jnp.cos(angle) + even * jnp.sin(angle)]
    return jnp.stack(turned, axis=-1).reshape(x.shape)


def _attend(model: Model, p: Tree, x: jax.Array, local: bool) -> jax.Array:
    q = jnp.einsum("btd,dnh->btnh", x, p["query"]["kernel"])
    k = jnp.einsum("btd,dkh->btkh", x, p["key"]["kernel"])
    v = jnp.einsum("btd,dkh->btkh", x, p["value"]["kernel"])
    if model.family == "gemma3":
        q, k = _norm(q, p["query_norm"]["scale"], 1e-6), _norm(k, p["key_norm"]["scale"], 1e-6)
    turn: Callable[[jax.Array], jax.Array] = {
        "gemma2": lambda y: _halves(y, 1e4),
        "gemma3": lambda y: _halves(y, 1e4) if local else _halves(y, 1e6, 8.0),
        "llama3": lambda y: _halves(y, 5e5),
        "llama3.1": lambda y: _neighbours(y, 5e5),
    }[model.family]
    q, k = turn(q), turn(k)
    if model.family == "gemma3":
        q = q / math.sqrt(model.settings["query_pre_attn_scalar"])
    grouped = q.reshape(*q.shape[:2], K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k)
    if model.family == "gemma2":
        scores = jnp.tanh(scores / CAP) * CAP
    distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
    seen = (distance >= 0) & (distance < WINDOW if local else True)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)
    return jnp.einsum("btnh,nhd->btd", y, p["out"]["kernel"])


def _block(model: Model, p: Tree, x: jax.Array, local: bool) -> jax.Array:
    def mlp(y: jax.Array) -> jax.Array:
        gate = jax.nn.gelu if model.gemma else jax.nn.silu
        return (gate(y @ p["mlp"]["wi_0"]["kernel"]) * (y @ p["mlp"]["wi_1"]["kernel"])) @ p["mlp"]["wo"]["kernel"]

    def norm(name: str, y: jax.Array) -> jax.Array:
        return _norm(y, p[name]["scale"], 1e-6 if model.gemma else 1e-5)

    if model.gemma:
        x = x + norm(
            "post_self_attention_norm", _attend(model, p["self_attention"], norm("pre_self_attention_norm", x), local)
        )
        return x + norm("post_ffw_norm", mlp(norm("pre_ffw_norm", x)))
    x = x + _attend(model, p["self_attention"], norm("pre_self_attention_layer_norm", x), local)
    return x + mlp(norm("post_self_attention_layer_norm", x))


def _unit(model: Model, p: Tree, x: jax.Array) -> jax.Array:
    """What is scanned: two layers of Gemma 2, six of Gemma 3, one of Llama."""
    if model.family == "gemma2":
        for word in ("local", "global"):
            own = {key.removesuffix(f"_{word}"): leaves for key, leaves in p.items() if key.endswith(f"_{word}")}
            x = _block(model, own, x, word == "local")
        return x
    if model.family == "gemma3":
        for k in range(len(p)):
            x = _block(model, p[f"layers_{k}"], x, model.local(k))
        return x
    return _block(model, p, x, False)


def logits(model: Model, tree: Tree, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """What MaxText says to `tokens`, given its variables as it stores them."""
    decoder: Mapping[str, Any] = tree["params"]["decoder"]
    table = jnp.asarray(tree["params"]["token_embedder"]["embedding"])
    with jax.default_matmul_precision("highest"):
        x = table[tokens]
        if "layers" in decoder:
            units = jax.tree.map(lambda leaf: jnp.moveaxis(jnp.asarray(leaf), 1, 0), decoder["layers"])
            x, _ = jax.lax.scan(lambda carry, p: (_unit(model, p, carry), None), x, units)
        if "layers_remainder" in decoder:
            x = _unit(model, decoder["layers_remainder"], x)
        for k in range(sum(key.startswith("layers_") and key != "layers_remainder" for key in decoder)):
            p = decoder[f"layers_{k}"]
            x = _block(model, p, x, model.local(k)) if model.family == "gemma3" else _unit(model, p, x)
        x = _norm(x, decoder["decoder_norm"]["scale"], 1e-6 if model.gemma else 1e-5)
        y = x @ table.T / math.sqrt(D) if model.gemma else x @ decoder["logits_dense"]["kernel"]
        if model.family == "gemma2":
            y = jnp.tanh(y / FINAL_CAP) * FINAL_CAP
    return np.asarray(y)[..., :V]
