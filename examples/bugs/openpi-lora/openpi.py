"""A small π0 of openpi with LoRA, and what openpi's own converter makes of it.

openpi.py save CKPT.npz
openpi.py export CKPT.npz BASE.safetensors OUT.safetensors     # OUT: what its converter writes; BASE: the weights by their PyTorch names
"""

import sys

import numpy as np
from safetensors.numpy import load_file, save_file

V, D, E, N, K, H, LAYERS, RANK = 32, 16, 8, 2, 1, 8, 2, 3
W, HEADS, PATCH, PATCHES, STATE = 8, 2, 4, 4, 5
ATTENTION, BLOCK = "PaliGemma/llm/layers/attn", "PaliGemma/img/Transformer/encoderblock"


def save(out: str) -> None:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) / 4

    tree = {"PaliGemma/llm/embedder/input_embedding": draw(V, D)}
    for after, width, inner in (("", D, 24), ("_1", E, 12)):  # PaliGemma, and the action expert
        shapes = {"q_einsum": (N, width, H), "kv_einsum": (2, K, width, H), "attn_vec_einsum": (N, H, width)}
        for name, shape in shapes.items():
            tree[f"{ATTENTION}/{name}{after}/w"] = draw(LAYERS, *shape)
            tree[f"{ATTENTION}/{name}{after}/lora_a"] = draw(LAYERS, *shape[:-1], RANK)
            tree[f"{ATTENTION}/{name}{after}/lora_b"] = draw(LAYERS, *shape[:-2], RANK, shape[-1])
        for name, shape in {"gating_einsum": (2, width, inner), "linear": (inner, width)}.items():
            at = f"PaliGemma/llm/layers/mlp{after}/{name}"
            tree[at] = draw(LAYERS, *shape)
            tree[f"{at}_lora_a"] = draw(LAYERS, *shape[:-1], RANK)
            tree[f"{at}_lora_b"] = draw(LAYERS, *shape[:-2], RANK, shape[-1])
        tree |= {f"PaliGemma/llm/layers/pre_{x}_norm{after}/scale": draw(LAYERS, width) for x in ("attention", "ffw")}
        tree[f"PaliGemma/llm/final_norm{after}/scale"] = draw(width)

    def layer(at: str, inputs: tuple[int, ...], outputs: tuple[int, ...], stacked: tuple[int, ...] = ()) -> None:
        tree.update({f"{at}/kernel": draw(*stacked, *inputs, *outputs), f"{at}/bias": draw(*stacked, *outputs)})

    for name in ("query", "key", "value"):
        layer(f"{BLOCK}/MultiHeadDotProductAttention_0/{name}", (W,), (HEADS, W // HEADS), (LAYERS,))
    layer(f"{BLOCK}/MultiHeadDotProductAttention_0/out", (HEADS, W // HEADS), (W,), (LAYERS,))
    layer(f"{BLOCK}/MlpBlock_0/Dense_0", (W,), (12,), (LAYERS,))
    layer(f"{BLOCK}/MlpBlock_0/Dense_1", (12,), (W,), (LAYERS,))
    layer("PaliGemma/img/embedding", (PATCH, PATCH, 3), (W,))
    layer("PaliGemma/img/head", (W,), (D,))
    for at, stacked in (
        (f"{BLOCK}/LayerNorm_0", (LAYERS,)),
        (f"{BLOCK}/LayerNorm_1", (LAYERS,)),
        ("PaliGemma/img/Transformer/encoder_norm", ()),
    ):
        tree |= {f"{at}/scale": 1 + draw(*stacked, W), f"{at}/bias": draw(*stacked, W)}
    tree["PaliGemma/img/pos_embedding"] = draw(1, PATCHES, W)
    layer("state_proj", (STATE,), (E,))
    layer("action_in_proj", (STATE,), (E,))
    layer("action_out_proj", (E,), (STATE,))
    layer("action_time_mlp_in", (2 * E,), (E,))
    layer("action_time_mlp_out", (E,), (E,))
    np.savez(out, **{f"params/{name}": leaf for name, leaf in tree.items()})


def export(checkpoint: str, base: str, out: str) -> None:
    """Physical-Intelligence/openpi@15a9616 examples/convert_jax_model_to_pytorch.py.

    It renames and turns the leaves that it knows. Those with LoRA keep their JAX names, and `load_state_dict(strict=False)` passes over
    every name that the model does not have.
    """
    tree, model = np.load(checkpoint), load_file(base)
    named = {**model, **{name: leaf for name, leaf in tree.items() if "lora" in name}}
    save_file({name: value for name, value in named.items() if name in model}, out)


if __name__ == "__main__":
    {"save": save, "export": export}[sys.argv[1]](*sys.argv[2:])
