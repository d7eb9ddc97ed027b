"""Trees of Gemma: the golden ones as arrays, those of the published sizes as shapes; and conversions that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from support.goldens import SpecsOnly, checkpoint


def arrays(case: str) -> dict[str, np.ndarray]:
    source = convert.open_source(checkpoint(case))
    return {name: source.read(name) for name in source.leaves}


SIZES = {  # google-deepmind/gemma@7691fd4 gm/nn/_gemma.py; Gemma 1: gemma/transformer.py before v3
    "1-2b": (18, 2048, 8, 1, 256, 16384),
    "1-7b": (28, 3072, 16, 16, 256, 24576),
    "2-2b": (26, 2304, 8, 4, 256, 9216),
    "2-9b": (42, 3584, 16, 8, 256, 14336),
    "2-27b": (46, 4608, 32, 16, 128, 36864),
    "3-270m": (18, 640, 4, 1, 256, 2048),
    "3-1b": (26, 1152, 4, 1, 256, 6912),
    "3-4b": (34, 2560, 8, 4, 256, 10240),
    "3-12b": (48, 3840, 16, 8, 256, 15360),
    "3-27b": (62, 5376, 32, 16, 128, 21504),
}


def published(version: str, rows: int | None = None) -> SpecsOnly:
    """The FLAT tree of a published size."""
    layers, D, N, K, H, F = SIZES[version]
    generation = int(version[0])
    rows = rows or (262144 if generation == 3 else 256128)
    shapes: dict[str, tuple[int, ...]] = {"embedder/input_embedding": (rows, D), "final_norm/scale": (D,)}
    for i in range(layers):
        at = f"layer_{i}"
        if N == K:
            shapes[f"{at}/attn/qkv_einsum/w"] = (3, N, D, H)
        else:
            shapes |= {f"{at}/attn/q_einsum/w": (N, D, H), f"{at}/attn/kv_einsum/w": (2, K, D, H)}
        gate = (2, F, D) if generation == 3 or version in ("2-9b", "2-27b") else (2, D, F)
        shapes |= {
            f"{at}/attn/attn_vec_einsum/w": (N, H, D),
            f"{at}/mlp/gating_einsum/w": gate,
            f"{at}/mlp/linear/w": (F, D),
        }
        norms = [
            "pre_attention_norm",
            "pre_ffw_norm",
            *(["post_attention_norm", "post_ffw_norm"] if generation > 1 else []),
        ]
        shapes |= {f"{at}/{norm}/scale": (D,) for norm in norms}
        if generation == 3:
            shapes |= {f"{at}/attn/_{norm}_norm/scale": (H,) for norm in ("query", "key")}
    return SpecsOnly({f"transformer/{name}": (shape, "bfloat16") for name, shape in shapes.items()})


def refuse(tree: Any, model: str, out: Path, **options: Any) -> str:
    with pytest.raises(convert.PlanError) as refused:
        convert.convert(model, tree, out, **options)
    assert not out.exists() and list(out.parent.iterdir()) == []
    return str(refused.value)
