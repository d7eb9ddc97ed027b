"""Writes `from-pytorch/`: what transformers' own code makes of PyTorch weights for its Flax classes.

transformers 5 has no Flax classes; 4.49.0 is run in an environment of its own (Python 3.10), on a CPU and without torch:

    python3.10 -m venv env
    env/bin/pip install transformers==4.49.0 jax==0.4.30 jaxlib==0.4.30 flax==0.8.5 numpy==1.26.4 scipy==1.12.0 safetensors
    env/bin/python tests/golden/make_from_pytorch.py

Each case has `in`, a directory with `model.safetensors` and `config.json` as `from_pretrained` loads it, and `out`, with the
`flax_model.msgpack` that `FlaxModel.from_pretrained(in).save_pretrained(out)` wrote. The values of the tensors are drawn by their
names, from a stream that is frozen for good.
"""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import transformers
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

OUT = Path(__file__).parent / "from-pytorch"
D, F, V = 8, 12, 19
BERT = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": F, "max_position_embeddings": 7, "type_vocab_size": 2}  # fmt: skip
GPT2 = {"vocab_size": V, "n_embd": D, "n_layer": 2, "n_head": 2, "n_inner": F, "n_positions": 7}


def bert() -> dict[str, tuple[int, ...]]:
    """Return the tensors of BertForMaskedLM."""
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (V, D),
        "bert.embeddings.position_embeddings.weight": (7, D),
        "bert.embeddings.token_type_embeddings.weight": (2, D),
        "cls.predictions.bias": (V,),
        "cls.predictions.transform.dense.weight": (D, D),
        "cls.predictions.transform.dense.bias": (D,),
    }
    norms = ["bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"]
    for k in range(2):
        layer = f"bert.encoder.layer.{k}."
        dense = {f"attention.self.{one}": (D, D) for one in ("query", "key", "value")}
        dense |= {"attention.output.dense": (D, D), "intermediate.dense": (F, D), "output.dense": (D, F)}
        for name, shape in dense.items():
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
        norms += [f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"]
    return shapes | {f"{norm}.{role}": (D,) for norm in norms for role in ("weight", "bias")}


def gpt2() -> dict[str, tuple[int, ...]]:
    """Return the tensors of GPT2LMHeadModel; its Conv1D stores (in, out)."""
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (V, D), "transformer.wpe.weight": (7, D)}
    norms = ["transformer.ln_f"]
    for k in range(2):
        layer = f"transformer.h.{k}."
        conv = {"attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D), "mlp.c_fc": (D, F), "mlp.c_proj": (F, D)}
        for name, shape in conv.items():
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[1:]}
        norms += [f"{layer}ln_1", f"{layer}ln_2"]
    return shapes | {f"{norm}.{role}": (D,) for norm in norms for role in ("weight", "bias")}


CASES = {
    "bert": (
        bert,
        transformers.FlaxBertForMaskedLM,
        transformers.BertConfig(**BERT, architectures=["BertForMaskedLM"]),
    ),
    "gpt2": (
        gpt2,
        transformers.FlaxGPT2LMHeadModel,
        transformers.GPT2Config(**GPT2, architectures=["GPT2LMHeadModel"]),
    ),
}


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    for case, (shapes, model, config) in CASES.items():
        given, made = OUT / case / "in", OUT / case / "out"
        given.mkdir(parents=True)
        config.save_pretrained(given)
        tensors = {name: drawn(name, shape) for name, shape in shapes().items()}
        save_file(tensors, given / "model.safetensors", metadata={"format": "pt"})
        loaded = model.from_pretrained(given)  # values that it does not find are random: the test would see them
        loaded.save_pretrained(made)
        (made / "generation_config.json").unlink(missing_ok=True)
        print(case, len(flatten_dict(loaded.params)), "leaves")


if __name__ == "__main__":
    main()
