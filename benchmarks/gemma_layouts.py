"""The weights of `checkpoints.py` in the layouts of Tunix and of MaxText. Needs NumPy alone: the environments of all converters import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Scratch, random_array, shapes

Array = np.ndarray[Any, np.dtype[Any]]
NORMS = ("pre_attention_norm", "post_attention_norm", "pre_ffw_norm", "post_ffw_norm")


def weights(size: str, folder: Path) -> dict[str, Array]:
    """Return the weights that `checkpoints.tree` has, by their names in the gemma package."""
    rng, scratch = np.random.default_rng(0), Scratch(folder)
    return {name: random_array(rng, shape, "bfloat16", scratch) for name, shape in shapes(size)}


def nested(leaves: dict[str, Array]) -> dict[str, Any]:
    """Return a tree of dictionaries from paths with slashes."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def tunix(flat: dict[str, Array]) -> dict[str, Any]:
    """Return the tree of Tunix: the names of the gemma package, and a kernel for each part of the feed-forward block."""
    out: dict[str, Array] = {}
    for name, x in flat.items():
        at = name.replace("layer_", "layers/", 1)
        if name.endswith("gating_einsum/w"):
            for part, matrix in zip(("gate_proj", "up_proj"), x, strict=True):
                out[at.replace("gating_einsum/w", f"{part}/kernel")] = matrix.T
        elif name.endswith("linear/w"):
            out[at.replace("linear/w", "down_proj/kernel")] = x
        else:
            out[at] = x
    return nested(out)


def maxtext(flat: dict[str, Array]) -> dict[str, Any]:
    """Return what MaxText keeps of a model that it did not train: its parameters, and the number of the step.

    Its norms multiply by `scale` alone, and its embedding is multiplied by the square root of the width: each is rounded to bfloat16 once.
    """
    table = flat["embedder/input_embedding"]
    flat = {
        name: (1 + x.astype(np.float32)).astype(x.dtype) if name.endswith("/scale") else x for name, x in flat.items()
    }
    rows = [
        (x.astype(np.float32) * np.float32(table.shape[1] ** 0.5)).astype(x.dtype) for x in np.array_split(table, 64)
    ]
    decoder: dict[str, Any] = {"decoder_norm": {"scale": flat["final_norm/scale"]}}
    layers = {name.split("/")[0] for name in flat if name.startswith("layer_")}
    for layer in sorted(layers):
        queries, (keys, values) = flat[f"{layer}/attn/q_einsum/w"], flat[f"{layer}/attn/kv_einsum/w"]
        gate, up = flat[f"{layer}/mlp/gating_einsum/w"]
        attention = {
            "query": {"kernel": queries.transpose(1, 0, 2)},
            "key": {"kernel": keys.transpose(1, 0, 2)},
            "value": {"kernel": values.transpose(1, 0, 2)},
            "out": {"kernel": flat[f"{layer}/attn/attn_vec_einsum/w"]},
            "query_norm": {"scale": flat[f"{layer}/attn/_query_norm/scale"]},
            "key_norm": {"scale": flat[f"{layer}/attn/_key_norm/scale"]},
        }
        feed_forward = {"wi_0": gate.T, "wi_1": up.T, "wo": flat[f"{layer}/mlp/linear/w"]}
        norms = {
            name.replace("attention", "self_attention"): {"scale": flat[f"{layer}/{name}/scale"]} for name in NORMS
        }
        parts = {"self_attention": attention, "mlp": {name: {"kernel": x} for name, x in feed_forward.items()}}
        decoder[layer.replace("layer_", "layers_")] = parts | norms
    parameters = {"decoder": decoder, "token_embedder": {"embedding": np.concatenate(rows)}}
    return {"params": {"params": parameters}, "step": np.zeros((), np.int32)}
