"""Writes the golden cases of T5X whose networks are flaxformer's: LongT5, Pix2Struct and Switch Transformers, on a CPU.

Neither flaxformer nor pix2struct is a package on PyPI. Their networks run from copies of their repositories in the environment of the tests:

    git clone https://github.com/google/flaxformer && git -C flaxformer checkout 399ea3a
    git clone https://github.com/google-research/pix2struct && git -C pix2struct checkout 945f27e
    pip install --no-deps --target /some/folder chex==0.1.92 toolz gin-config==0.5.0
    PYTHONPATH=flaxformer:pix2struct:/some/folder:src:tests python tests/golden/make_flaxformer.py

What the gin files in flaxformer/t5x/configs/{longt5,moe} and pix2struct/configs/models bind is written here: T5X is not needed, and of gin a decorator. Empty
modules stand for aqt (quantised layers), and for seqio, TensorFlow and T5X (feature converters and the training loop).
Each case is one file, t5x/CASE.npz, as `make_t5x.py` writes it, with the parameters' names in flaxformer's save format.
"""

from __future__ import annotations

import sys
import types
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from convert.numerics.lift_jax import float64, lift
from support.drawn_cases import DrawnCases, drawn

HERE = Path(__file__).parent / "t5x"
SIZES = {"vocab_size": 23, "emb_dim": 12, "num_heads": 3, "num_encoder_layers": 2, "num_decoder_layers": 3, "head_dim": 4, "mlp_dim": 20}  # fmt: skip
LONG = {"local_radius": 5, "tokens_per_block": 4}
CASES: dict[str, dict[str, Any]] = {
    "longt5-local": LONG,
    "longt5-tglobal": LONG,
    "pix2struct": {"positions": 9, "patch": 2},  # rows of the tables of positions, side of a patch
    "switch": {"num_experts": 5, "num_encoder_layers": 2, "num_decoder_layers": 4},
    "switch-c": {"num_experts": 5},
}


class _Empty(types.ModuleType):
    """A module in which every name is a class without contents."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Anything(metaclass=_Meta):
    def __init__(self, *_: Any, **__: Any) -> None: ...


def _stand_ins() -> None:
    quantised = ("", ".jax_legacy", ".jax_legacy.jax", *(f".jax_legacy.jax.{name}" for name in ("flax_layers", "quant_config", "quantization")))  # fmt: skip
    for name in (*(f"aqt{below}" for below in quantised), "seqio", "t5x", "t5x.models", "tensorflow"):
        sys.modules[name] = _Empty(name)


def network(case: str) -> Any:
    """Return upstream's module with the bindings of its gin files, in float32 and without dropout."""
    from flaxformer.architectures.t5 import t5_architecture
    from flaxformer.components import dense, embedding, layer_norm, relative_position_biases
    from flaxformer.components.attention import dense_attention

    heads = {"num_heads": SIZES["num_heads"], "head_dim": SIZES["head_dim"], "use_bias": False, "dropout_rate": 0.0}
    buckets = {"num_buckets": 32, "max_distance": 128, "num_heads": SIZES["num_heads"], "dtype": np.float32}
    attention = partial(dense_attention.MultiHeadDotProductAttention, **heads)
    mlp = partial(dense.MlpBlock, use_bias=False, intermediate_dim=SIZES["mlp_dim"], activations=("gelu", "linear"), intermediate_dropout_rate=0.0, final_dropout_rate=0.0)  # fmt: skip
    no_dropout = partial(nn.Dropout, rate=0.0, broadcast_dims=(-2,))
    around = {"dropout_factory": no_dropout, "layer_norm_factory": layer_norm.T5LayerNorm}
    words = partial(embedding.Embed, num_embeddings=SIZES["vocab_size"], features=SIZES["emb_dim"], cast_input_dtype=np.int32, one_hot=True, name="token_embedder")  # fmt: skip

    def decoder_layer(shared_relative_position_bias: Any = None) -> Any:
        return t5_architecture.DecoderLayer(
            self_attention=attention(), encoder_decoder_attention=attention(), mlp=mlp(),
            shared_relative_position_bias=shared_relative_position_bias, **around,
        )  # fmt: skip

    def decoder(shared_token_embedder: Any = None) -> Any:
        own = {} if shared_token_embedder is not None else {"token_embedder_factory": words}
        return t5_architecture.Decoder(
            layer_factory=decoder_layer, num_layers=SIZES["num_decoder_layers"], shared_token_embedder=shared_token_embedder, **around, **own,
            shared_relative_position_bias_factory=partial(relative_position_biases.RelativePositionBiases, **buckets),
            output_logits_factory=partial(dense.DenseGeneral, features=SIZES["vocab_size"], use_bias=False),
        )  # fmt: skip

    ends = {"input_dropout_factory": no_dropout, "output_dropout_factory": no_dropout, "layer_norm_factory": layer_norm.T5LayerNorm}  # fmt: skip
    if case == "pix2struct":
        return _pix2struct(decoder, attention, mlp, around, ends)
    if case.startswith("switch"):
        return _switch(case, attention, mlp, words, buckets, around)
    from flaxformer.architectures.longt5 import long_attention, longt5_architecture, relative_position_biases_general

    local = {"local_radius": LONG["local_radius"], **heads}
    if case == "longt5-local":
        long = partial(long_attention.EncoderLocalSelfAttention, **local)
    else:
        long = partial(long_attention.EtcTransientGlobalSelfAttention, tokens_per_block=LONG["tokens_per_block"], **local)  # fmt: skip
    general = partial(relative_position_biases_general.RelativePositionBiasesGeneral, **buckets)
    side = {} if case == "longt5-local" else {"shared_side_relpos_bias_factory": general}

    def encoder_layer(shared_relpos_bias: Any, shared_side_relpos_bias: Any = None) -> Any:
        return longt5_architecture.LongEncoderLayer(
            attention_factory=long, mlp=mlp(), shared_relpos_bias=shared_relpos_bias,
            shared_side_relpos_bias=shared_side_relpos_bias, **around,
        )  # fmt: skip

    def encoder(shared_token_embedder: Any) -> Any:
        return longt5_architecture.LongEncoder(
            layer_factory=encoder_layer, num_layers=SIZES["num_encoder_layers"], shared_token_embedder=shared_token_embedder,
            shared_relpos_bias_factory=general, **side, **ends,
        )  # fmt: skip

    return longt5_architecture.LongEncoderDecoder(
        encoder_factory=encoder, decoder_factory=decoder, shared_token_embedder_factory=words
    )


def _pix2struct(decoder: Any, attention: Any, mlp: Any, around: Any, ends: Any) -> Any:
    from flaxformer.architectures.t5 import t5_architecture
    from flaxformer.components import dense, embedding
    from pix2struct import models

    def layer(shared_relative_position_bias: Any = None) -> Any:
        return t5_architecture.EncoderLayer(
            attention=attention(), mlp=mlp(), shared_relative_position_bias=shared_relative_position_bias, **around
        )

    patches = partial(
        models.PatchEmbed, num_extra_embedders=2,
        patch_projection_factory=partial(dense.DenseGeneral, features=SIZES["emb_dim"], use_bias=True, name="patch_projection"),
        embedder_factory=partial(embedding.PositionEmbed, num_embeddings=CASES["pix2struct"]["positions"], features=SIZES["emb_dim"]),
    )  # fmt: skip

    def encoder(shared_token_embedder: Any = None) -> Any:
        return models.ImageEncoder(
            layer_factory=layer, num_layers=SIZES["num_encoder_layers"], token_embedder_factory=patches, **ends
        )

    return models.ImageEncoderTextDecoder(encoder_factory=encoder, decoder_factory=decoder)


def _switch(case: str, attention: Any, gated: Any, words: Any, buckets: Any, around: Any) -> Any:
    """Experts in every second layer and the embeddings as the head (Base, Large), or everywhere and a head of its own (C)."""
    from flaxformer.architectures.moe import moe_architecture, moe_layers, routing
    from flaxformer.architectures.t5 import t5_architecture
    from flaxformer.components import dense, relative_position_biases

    sizes = SIZES | CASES[case]
    every = 1 if case == "switch-c" else 2
    mlp = partial(gated, activations=("relu",))

    def experts() -> Any:
        router = routing.TokensChooseMaskedRouter(
            router_weights=routing.RouterWeights(use_bias=False, dtype=np.float32), num_selected_experts=1, jitter_noise=0.0,
            dtype=np.float32, ignore_padding_tokens=False, batch_prioritized_routing=False,
        )  # fmt: skip
        count = sizes["num_experts"]
        return moe_layers.MoeLayer(
            num_experts=count, max_group_size=8192, train_capacity_factor=1.25, eval_capacity_factor=float(count), expert=mlp(),
            router=router, num_expert_partitions=count, num_model_partitions=1, dropout_rate=0.0, dtype=np.float32,
        )  # fmt: skip

    def encoder_layer(layer: Any, block: Any, shared_relative_position_bias: Any = None) -> Any:
        return layer(
            attention=attention(), mlp=block(), shared_relative_position_bias=shared_relative_position_bias, **around
        )

    def decoder_layer(layer: Any, block: Any, shared_relative_position_bias: Any = None) -> Any:
        return layer(
            self_attention=attention(), encoder_decoder_attention=attention(), mlp=block(),
            shared_relative_position_bias=shared_relative_position_bias, **around,
        )  # fmt: skip

    bias = partial(relative_position_biases.RelativePositionBiases, **buckets)
    dropout, norm = around["dropout_factory"], around["layer_norm_factory"]

    def encoder(shared_token_embedder: Any) -> Any:
        return moe_architecture.SparseEncoder(
            num_layers=sizes["num_encoder_layers"], num_sparse_layers=sizes["num_encoder_layers"] // every,
            layer_factory=partial(encoder_layer, t5_architecture.EncoderLayer, mlp),
            sparse_layer_factory=partial(encoder_layer, moe_architecture.SparseEncoderLayer, experts),
            shared_token_embedder=shared_token_embedder, shared_relative_position_bias_factory=bias,
            input_dropout_factory=dropout, output_dropout_factory=dropout, layer_norm_factory=norm,
        )  # fmt: skip

    def decoder(shared_token_embedder: Any) -> Any:
        head = partial(dense.DenseGeneral, features=sizes["vocab_size"], use_bias=False)
        return moe_architecture.SparseDecoder(
            num_layers=sizes["num_decoder_layers"], num_sparse_layers=sizes["num_decoder_layers"] // every,
            layer_factory=partial(decoder_layer, t5_architecture.DecoderLayer, mlp),
            sparse_layer_factory=partial(decoder_layer, moe_architecture.SparseDecoderLayer, experts),
            shared_token_embedder=shared_token_embedder, shared_relative_position_bias_factory=bias,
            output_logits_factory=head if case == "switch-c" else None, **around,
        )  # fmt: skip

    return t5_architecture.EncoderDecoder(
        encoder_factory=encoder, decoder_factory=decoder, shared_token_embedder_factory=words
    )


def inputs(case: str) -> dict[str, Any]:
    rng = np.random.default_rng(31)
    words = rng.integers(1, SIZES["vocab_size"], (2, 150)).astype(np.int32)  # beyond the last bucket, 128
    words[1, -9:] = 0  # padding
    given = {"encoder_input_tokens": words, "decoder_input_tokens": rng.integers(1, SIZES["vocab_size"], (2, 13)).astype(np.int32)}  # fmt: skip
    if case == "pix2struct":
        side, last = CASES[case]["patch"], CASES[case]["positions"]
        pixels = rng.standard_normal((2, 14, 3 * side * side))
        places = rng.integers(1, last, (2, 14, 2))
        given["encoder_input_tokens"] = np.concatenate([places, pixels], -1).astype(np.float32)
        given["encoder_input_tokens"][1, -3:] = 0
    return given


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    _stand_ins()
    from flaxformer.architectures.common import param_remapping

    print(f"Python {sys.version.split()[0]}, {', '.join(f'{n} {version(n)}' for n in ('flax', 'jax', 'numpy'))}")
    for case in sys.argv[1:] or CASES:
        model, texts = network(case), inputs(case)
        given = {**texts, "decoder_target_tokens": texts["decoder_input_tokens"]}

        def saved(params: Any, model: Any = model) -> Any:
            return param_remapping.filter_out_metadata(model.to_save_format(params))

        def made(model: Any = model, given: Any = given) -> Any:
            return saved(model.init(jax.random.key(0), enable_dropout=False, **given)["params"])

        tree = jax.eval_shape(made)
        leaves = {name: drawn(f"{case}/{name}", leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}

        def logits(leaves: Any, given: Any, model: Any = model) -> Any:
            params = model.from_save_format(unflatten_dict(leaves, sep="/"))
            return model.apply({"params": params}, enable_dropout=False, **given)[:, ::4]

        with float64():
            exact = np.asarray(lift(logits)(leaves, given))
        rounded = np.asarray(jax.jit(logits)(leaves, given))
        DrawnCases(HERE).save(case, {**SIZES, **CASES[case]}, leaves, texts, {"logits": rounded}, {"logits": exact})
        drift = np.abs(exact - rounded).max() / np.abs(exact).max()
        print(f"{case}: {len(leaves)} leaves, logits {np.abs(exact).mean():.2f} on average, drift {drift:.1e}")


if __name__ == "__main__":
    main()
