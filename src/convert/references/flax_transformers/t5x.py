"""T5X's T5 and UMT5: the equations of t5x/examples/t5 and scalable_t5, which are those of equations.py, against transformers 5.23."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from convert.planning.plan import Plan
from convert.references.flax_transformers.t5 import LOGITS, encoder_decoder
from convert.references.plan_facts import require_model
from convert.references.protocol import Reference

MODELS = {"t5x-1.0": LOGITS, "t5x-1.1": LOGITS, "t5x-mt5": LOGITS, "t5x-umt5": LOGITS, "t5x-umt5-tied": LOGITS}
_LAYER = re.compile(r"(?P<side>encoder|decoder)/layers_(?P<layer>\d+)/(?P<rest>.+)")
_SCANNED = re.compile(r"(?P<side>encoder|decoder)/(?P=side)/(?P<rest>.+)")
_SUBLAYERS = {  # of a layer: what transformers calls it; {} is the number of the feed-forward block
    "attention": "0/SelfAttention",
    "self_attention": "0/SelfAttention",
    "encoder_decoder_attention": "1/EncDecAttention",
    "mlp": "{}/DenseReluDense",
    "relpos_bias": "0/SelfAttention",
    "pre_attention_layer_norm": "0",
    "pre_self_attention_layer_norm": "0",
    "pre_cross_attention_layer_norm": "1",
    "pre_mlp_layer_norm": "{}",
}
_LEAVES = {
    "scale": "layer_norm/weight",
    "rel_embedding": "relative_attention_bias/embedding",
    **{f"{part}/kernel": f"{part[0]}/kernel" for part in ("query", "key", "value", "out")},
    "out/kernel": "o/kernel",
}
_OTHERS = {
    "token_embedder/embedding": "shared/embedding",
    "encoder/encoder_norm/scale": "encoder/final_layer_norm/weight",
    "decoder/decoder_norm/scale": "decoder/final_layer_norm/weight",
    "decoder/logits_dense/kernel": "lm_head/kernel",
    "encoder/relpos_bias/rel_embedding": "encoder/block/0/layer/0/SelfAttention/relative_attention_bias/embedding",
    "decoder/relpos_bias/rel_embedding": "decoder/block/0/layer/0/SelfAttention/relative_attention_bias/embedding",
}


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint; texts as in `t5.reference`.

    Raises:
        ConvertError: the plan is of another model, or lacks a fact.
    """
    require_model(plan, MODELS)
    scales_head = plan.rules.model not in ("t5x-1.1", "t5x-mt5")
    prefix = f"{plan.root}/" if plan.root else ""

    def leaves(weights: Mapping[str, Any]) -> dict[str, Any]:
        named = named_as_in_transformers({name.removeprefix(prefix): leaf for name, leaf in weights.items()})
        if scales_head and "lm_head/kernel" in named:  # UMT5's class divides its input where T5X does not
            named["lm_head/kernel"] *= plan.sizes["D"] ** 0.5
        return named

    return encoder_decoder(plan, LOGITS, True, scales_head, leaves)


def named_as_in_transformers(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return T5X's leaves, by the names and in the shapes of transformers' flax classes: layer by layer, heads joined."""
    named: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if found := _SCANNED.fullmatch(name):
            for layer in range(leaf.shape[1]):
                _put(named, found["side"], layer, found["rest"], leaf[:, layer])
        elif found := _LAYER.fullmatch(name):
            _put(named, found["side"], int(found["layer"]), found["rest"], leaf)
        elif name in _OTHERS:
            named[_OTHERS[name]] = leaf.T if name.endswith("rel_embedding") else leaf
    return named


def _put(named: dict[str, Any], side: str, layer: int, rest: str, leaf: Any) -> None:
    sublayer, _, last = rest.partition("/")
    place = _SUBLAYERS[sublayer].format(1 if side == "encoder" else 2)
    if last == "rel_embedding":
        leaf = leaf.T
    elif sublayer.endswith("attention") and leaf.ndim == 3:
        leaf = leaf.reshape(-1, leaf.shape[-1]) if last == "out/kernel" else leaf.reshape(leaf.shape[0], -1)
    named[f"{side}/block/{layer}/layer/{place}/{_LEAVES.get(last, last)}"] = leaf
