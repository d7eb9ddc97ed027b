"""The programs that the conversion is compared with; each command runs one of them in its process.

python benchmarks/peers.py read CKPT [THREADS]  TensorStore reads and decodes every leaf, largest first: the lower bound
python benchmarks/peers.py script CKPT OUT      a typical script: Orbax restore, NumPy, transposes, save_file
python benchmarks/peers.py huggingface CKPT OUT the steps of transformers' script for Gemma 3 (flat layout, text only)
python benchmarks/peers.py save FILE OUT        safetensors' save_file of tensors in memory; prints the seconds of the call
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def read(checkpoint: str, threads: str = "1") -> None:
    """Read and decode each leaf with TensorStore, and drop it. Only the names come from this package."""
    from convert.checkpoints.access import Boundary
    from convert.checkpoints.orbax.arrays import read_array
    from convert.checkpoints.orbax.reader import OrbaxSource

    source = OrbaxSource(Path(checkpoint), Boundary(Path(checkpoint)))

    def one(name: str) -> None:
        read_array(source._store, source._arrays[name], True)

    names = sorted(source.leaves, key=lambda name: -source.leaves[name].spec.nbytes)
    with ThreadPoolExecutor(int(threads)) as pool:
        list(pool.map(one, names))


def script(checkpoint: str, out: str) -> None:
    """Transpose every matrix and split every stack; all tensors are in memory before they are written."""
    import orbax.checkpoint as ocp
    from safetensors.numpy import save_file

    flat: dict[str, Array] = {}

    def walk(node: dict[str, Any], at: list[str]) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, [*at, key])
                continue
            array = np.asarray(value)
            if "stacked" in "/".join(at):
                for k, part in enumerate(array):
                    flat[".".join([*at, key, str(k)])] = np.ascontiguousarray(part.T if part.ndim == 2 else part)
            else:
                flat[".".join([*at, key])] = np.ascontiguousarray(array.T if array.ndim == 2 else array)

    walk(ocp.StandardCheckpointer().restore(checkpoint), [])
    save_file(flat, out)


def huggingface(checkpoint: str, out: str) -> None:
    """The steps of huggingface/transformers@c1a83ac src/transformers/models/gemma3/convert_gemma3_weights.py, rewritten.

    No package contains the script. It restores the whole checkpoint, converts each leaf to float32 and then to bfloat16
    with torch, loads a model on the meta device, and calls `save_pretrained`. Tokenizer and generation config are left out.
    """
    import orbax.checkpoint as ocp
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    tree = ocp.PyTreeCheckpointer().restore(checkpoint)
    arrays = {f"{path}/{key}": value for path, leaves in tree.items() for key, value in leaves.items()}
    vocabulary, width = arrays["transformer/embedder/input_embedding"].shape
    heads, _, head = arrays["transformer/layer_0/attn/q_einsum/w"].shape
    config = Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=arrays["transformer/layer_0/mlp/linear/w"].shape[0],
        num_hidden_layers=1 + max(int(name.split("/")[1].split("_")[1]) for name in arrays if "/layer_" in name),
        num_attention_heads=heads,
        num_key_value_heads=arrays["transformer/layer_0/attn/kv_einsum/w"].shape[1],
        head_dim=head,
        dtype="bfloat16",
    )
    state = {}
    for name, leaf in arrays.items():
        for key, weight in _gemma3(name.removeprefix("transformer/"), np.asarray(leaf)):
            state[key] = torch.from_numpy(weight.astype("float32")).type(torch.bfloat16)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    model.load_state_dict(state, assign=True, strict=True)
    model.save_pretrained(out)


NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn/_query_norm": "self_attn.q_norm",
    "attn/_key_norm": "self_attn.k_norm",
}


def _gemma3(name: str, x: Array) -> Iterator[tuple[str, Array]]:
    path, _, leaf = name.rpartition("/")
    if leaf == "input_embedding":
        yield "model.embed_tokens.weight", x
    elif path == "final_norm":
        yield "model.norm.weight", x
    elif path.startswith("layer_"):
        number, part = path.removeprefix("layer_").split("/", 1)
        at = f"model.layers.{number}."
        if part in NORMS:
            yield f"{at}{NORMS[part]}.weight", x
        elif part == "attn/attn_vec_einsum":
            yield f"{at}self_attn.o_proj.weight", x.reshape(-1, x.shape[-1]).T
        elif part == "attn/q_einsum":
            yield f"{at}self_attn.q_proj.weight", x.swapaxes(1, 2).reshape(-1, x.shape[1])
        elif part == "attn/kv_einsum":
            for letter, half in zip("kv", x, strict=True):
                yield f"{at}self_attn.{letter}_proj.weight", half.swapaxes(1, 2).reshape(-1, half.shape[1])
        elif part == "mlp/gating_einsum":
            yield f"{at}mlp.gate_proj.weight", x[0]
            yield f"{at}mlp.up_proj.weight", x[1]
        elif part == "mlp/linear":
            yield f"{at}mlp.down_proj.weight", x.T


def save(ready: str, out: str) -> None:
    """Write tensors from memory: the lower bound of writing."""
    tensors: dict[str, Array] = {}
    with Path(ready).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        start = file.tell()
        for name, entry in header.items():
            dtype = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}[entry["dtype"]]
            begin, end = entry["data_offsets"]
            file.seek(start + begin)
            tensors[name] = np.frombuffer(file.read(end - begin), np.uint8).view(dtype).reshape(entry["shape"])
    from safetensors.numpy import save_file

    started = time.perf_counter()
    save_file(tensors, out)
    print(time.perf_counter() - started)


if __name__ == "__main__":
    {"read": read, "script": script, "huggingface": huggingface, "save": save}[sys.argv[1]](*sys.argv[2:])
