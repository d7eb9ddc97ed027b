"""timm's tensors in transformers' tower of SigLIP, with the names of its modules: timm is in another environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

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


def in_transformers(out: Path) -> tuple[Any, torch.nn.Module]:
    """Return transformers' tower with timm's tensors, and the Dense behind it."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    args = json.loads((out / "config.json").read_text())["model_args"]
    config = SiglipVisionConfig(
        hidden_size=args["embed_dim"], num_hidden_layers=args["depth"], num_attention_heads=args["num_heads"],
        intermediate_size=round(args["embed_dim"] * args["mlp_ratio"]), image_size=args["img_size"], patch_size=args["patch_size"],
        hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    config._attn_implementation = "eager"
    given = load_file(out / "model.safetensors")
    head = torch.nn.Identity() if args["num_classes"] == 0 else torch.nn.Linear(args["embed_dim"], args["num_classes"])
    head.load_state_dict({name: given.pop(f"head.{name}") for name in head.state_dict()})
    model = SiglipVisionModel(config)
    model.load_state_dict(renamed(given), strict=True)
    return model.requires_grad_(False).eval(), head.requires_grad_(False)
