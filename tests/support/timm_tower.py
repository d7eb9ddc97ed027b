"""timm's tensors with the names of transformers' tower of SigLIP."""

from __future__ import annotations

from collections.abc import Mapping

import torch

NAMES = {  # parts of timm's names -> those of transformers' SiglipVisionModel, the first that fit first
    "patch_embed.proj": "embeddings.patch_embedding",
    "pos_embed": "embeddings.position_embedding.weight",
    "attn_pool.latent": "head.probe",
    "attn_pool.proj": "head.attention.out_proj",
    "attn_pool.norm": "head.layernorm",
    "attn_pool": "head",
    "blocks": "encoder.layers",
    "attn.proj": "self_attn.out_proj",
    "attn.qkv": "self_attn.qkv_proj",
    ".norm1": ".layer_norm1",
    ".norm2": ".layer_norm2",
}


def renamed(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of timm's tower with transformers' names, without the head."""
    given, found = dict(given), {}
    for role in ("weight", "bias"):
        if f"attn_pool.q.{role}" in given:
            found[f"head.attention.in_proj_{role}"] = torch.cat(
                [given.pop(f"attn_pool.{name}.{role}") for name in ("q", "kv")]
            )
        found[f"post_layernorm.{role}"] = given.pop(f"norm.{role}")
    given["pos_embed"] = given["pos_embed"][0]
    for name, x in given.items():
        for part, other in NAMES.items():
            name = name.replace(part, other)
        if "qkv_proj" in name:
            found |= {name.replace("qkv", role): rows for role, rows in zip("qkv", x.chunk(3), strict=True)}
        else:
            found[name] = x
    return found
