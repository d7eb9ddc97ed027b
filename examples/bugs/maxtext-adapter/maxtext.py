"""A small Llama 3.1 of MaxText with LoRA, and what MaxText's export makes of its adapter.

maxtext.py save CKPT.npz
maxtext.py export CKPT.npz BASE.safetensors OUT.safetensors     # OUT: its adapter, merged into BASE
"""

import sys

import numpy as np
from safetensors.numpy import load_file, save_file

V, D, N, K, H, F, LAYERS, RANK, ALPHA = 32, 16, 2, 1, 8, 24, 2, 3, 6
# path -> shape of the kernel, number of its input axes, module of transformers
KERNELS = {
    "self_attention/query": ((D, N, H), 1, "self_attn.q_proj"),
    "self_attention/key": ((D, K, H), 1, "self_attn.k_proj"),
    "self_attention/value": ((D, K, H), 1, "self_attn.v_proj"),
    "self_attention/out": ((N, H, D), 2, "self_attn.o_proj"),
    "mlp/wi_0": ((D, F), 1, "mlp.gate_proj"),
    "mlp/wi_1": ((D, F), 1, "mlp.up_proj"),
    "mlp/wo": ((F, D), 1, "mlp.down_proj"),
}
NORMS = ("pre_self_attention_layer_norm", "post_self_attention_layer_norm")


def save(out: str) -> None:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) / 4

    tree = {"token_embedder/embedding": draw(V, D), "decoder/decoder_norm/scale": 1 + draw(D), "decoder/logits_dense/kernel": draw(D, V)}  # fmt: skip
    for i in range(LAYERS):
        tree |= {f"decoder/layers_{i}/{norm}/scale": 1 + draw(D) for norm in NORMS}
        for path, (shape, inputs, _) in KERNELS.items():
            tree[f"decoder/layers_{i}/{path}/kernel"] = draw(*shape)
            # qwix 0.1.8 flattens the axes of a dot_general: A (inputs, rank), B (rank, outputs)
            tree[f"decoder/layers_{i}/{path}/kernel_lora_a"] = draw(int(np.prod(shape[:inputs])), RANK)
            tree[f"decoder/layers_{i}/{path}/kernel_lora_b"] = draw(RANK, int(np.prod(shape[inputs:])))
    np.savez(out, **{f"params/{name}": leaf for name, leaf in tree.items()})


def export(checkpoint: str, base: str, out: str) -> None:
    """AI-Hypercomputer/maxtext@e591f30 checkpoint_conversion/to_huggingface.py, `_transform_weights_to_adapter`.

    Both factors are transposed and nothing else: the hooks that the same file applies to a weight (RoPE's pairs, 1/sqrt(H)) are
    not applied to `lora_B`.
    """
    tree, state = np.load(checkpoint), load_file(base)
    for i in range(LAYERS):
        for path, (_, _, module) in KERNELS.items():
            at = f"params/decoder/layers_{i}/{path}/kernel"
            lora_a, lora_b = (tree[f"{at}_lora_{x}"].T.astype(np.float64) for x in "ab")
            weight = state[f"model.layers.{i}.{module}.weight"]
            weight[...] = weight + ALPHA / RANK * lora_b @ lora_a  # peft, merge_and_unload
    save_file(state, out)


if __name__ == "__main__":
    {"save": save, "export": export}[sys.argv[1]](*sys.argv[2:])
