"""The golden cases of Gemma 4 and Gemma 3n: settings that a user must give, and the models that load the converted directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import convert
from convert.numerics.lift_torch import lifted
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly, relative_error
from support.paths import GOLDEN

ALL = DrawnCases(GOLDEN / "gemma4")
CASES = ("gemma3n", "gemma4-e2b", "gemma4-e4b", "gemma4-31b", "gemma4-26b-a4b")
OF_INTEGERS = DrawnCases(GOLDEN / "gemma4-int")  # beside CASE.npz, what Orbax saved of the integers and scales
INTEGERS = OF_INTEGERS.names
SHOWN = {"gemma4-26b-a4b": "gemma, with its router's input"}  # in the table of families
WORDS = {"L": "sliding_attention", "G": "full_attention"}


def golden(case: str) -> DrawnCases:
    """Return the golden cases of which this is one."""
    return OF_INTEGERS if case in INTEGERS else ALL


def settings(case: str) -> dict[str, Any]:
    """What a user must say of a model of no published size; taken from the configuration it was made with."""
    config = golden(case).config(case)
    said = {
        "vocab_size": config["num_embed"],
        "sliding_window": config["sliding_window_size"],
        "context_length": 64,
    }
    if config["final_logit_softcap"] is not None:
        said["final_logit_softcapping"] = config["final_logit_softcap"]
    if "shared" in config:
        pattern = config["pattern"] * config["layers"]
        said["attention_pattern"] = [WORDS[x] for x in pattern[: config["layers"]]]
        said["kv_shared_layers"] = round(config["shared"] * config["layers"])
    if "activation_sparsity_pattern" in config:
        said["activation_sparsity"] = config["activation_sparsity_pattern"]
    elif "shared" in config:
        said["double_wide_mlp"] = "override_kv_shared_ffw_hidden" in config
    if "top_k_experts" in config:
        said |= {"experts_per_token": config["top_k_experts"], "router_input": "residual"}
    return said


def write(case: str, folder: Path) -> Path:
    """Write the leaves of a case with the names of the NESTED layout; a case of integers lies there as upstream saved it."""
    if case in INTEGERS:
        return OF_INTEGERS.folder / case
    folder.mkdir(exist_ok=True)
    np.savez(folder / "ckpt.npz", **ALL.leaves(case))  # type: ignore[arg-type]
    return folder / "ckpt.npz"


def converted(case: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """Write a case and convert it; return both."""
    source = write(case, folder)
    convert.convert("gemma", source, folder / "out", settings=settings(case), **options)
    return source, folder / "out"


def logits(case: str, out: Path, dtype: torch.dtype, *, as_gemma: bool = True) -> np.ndarray:
    """What transformers' model says to the golden's tokens.

    Args:
        as_gemma: whether the router of experts gets what gemma 4.0.1 gives it, behind the norm, and not what transformers does.
    """
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=dtype, attn_implementation="eager"
    )
    assert not any(report.values()), report
    for layer in model.model.layers if as_gemma and golden(case).config(case).get("enable_moe") else ():
        layer.router.register_forward_pre_hook(lambda _, given, layer=layer: (layer.pre_feedforward_layernorm_2(given[0]),))  # fmt: skip
    with torch.no_grad():
        return model.eval()(torch.tensor(golden(case).values(case, "in")["tokens"]).long()).logits.numpy()


def errors(case: str, out: Path, **options: Any) -> tuple[float, float]:
    """Relative error against the recorded logits of the JAX model, in float32 and in float64 with casts removed."""
    single = logits(case, out, torch.float32, **options)
    with lifted():
        double = logits(case, out, torch.float64, **options)
    wanted = (golden(case).values(case, kind)["logits"] for kind in ("out", "out64"))
    single, double = map(relative_error, (single, double), wanted)
    return single, double


SIZES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {  # gm/nn/gemma4/_gemma4.py
    "4-e2b": ("gemma4-e2b", {"layers": 35, "period": 5, "D": 1536, "N": 8, "K": 1, "F": 6144, "P": 256, "shared": 20, "wide": 2}, {"num_kv_shared_layers": 20}),
    "4-e4b": ("gemma4-e4b", {"layers": 42, "period": 6, "D": 2560, "N": 8, "K": 2, "F": 10240, "P": 256, "shared": 18, "wide": 1}, {"num_kv_shared_layers": 18}),
    "4-31b": ("gemma4-31b", {"layers": 60, "period": 6, "D": 5376, "N": 32, "K": 16, "L": 4, "F": 21504}, {"num_global_key_value_heads": 4}),
    "4-26b-a4b": ("gemma4-26b-a4b", {"layers": 30, "period": 6, "D": 2816, "N": 16, "K": 8, "L": 2, "F": 2112, "E": 128, "X": 704}, {"top_k_experts": 8, "num_experts": 128}),
}  # fmt: skip


def published(version: str) -> SpecsOnly:
    """The tree of a published model: the golden's names, the shapes of the release."""
    case, size, _ = SIZES[version]
    D, N, K, F, P, L, E, X, layers = (size.get(x, 0) for x in ("D", "N", "K", "F", "P", "L", "E", "X", "layers"))
    shapes: dict[str, tuple[int, ...]] = {
        "embedder/input_embedding": (262144, D),
        "embedder/per_layer_embeddings": (262144, layers, P),
        "embedder/per_layer_model_projection/w": (D, layers, P),
        "embedder/per_layer_projection_norm/scale": (P,),
        "final_norm/scale": (D,),
    }
    names = ALL.leaves(case)
    found = {name: shape for name, shape in shapes.items() if name in names}
    for i in range(layers):
        wide = i % size["period"] == size["period"] - 1
        H, f = 512 if wide else 256, F * (size.get("wide", 1) if i >= layers - size.get("shared", 0) else 1)
        shapes = {
            "attn/q_einsum/w": (N, D, H), "attn/attn_vec_einsum/w": (N, H, D), "attn/kv_einsum/w": (2, K, D, H), "attn/k_einsum/w": (L, D, H),
            "attn/query_norm/scale": (H,), "attn/key_norm/scale": (H,), "skip_scale": (1,), "mlp/gating_einsum": (2, f, D), "mlp/linear": (f, D),
            "mlp2/gating_einsum": (2, f, D), "mlp2/linear": (f, D), "mlp/router_logits/w": (D, E), "mlp/gating_einsum/w": (E, 2, X, D),
            "mlp/linear/w": (E, X, D), "mlp/per_expert_scale": (E,), "per_layer_input_gate/w": (D, P), "per_layer_projection/w": (P, D),
        }  # fmt: skip
        of = f"layer_{int(wide)}/"  # of the golden: local and global layers in turns
        rests = [name.removeprefix(of) for name in names if name.startswith(of)]
        found |= {f"layer_{i}/{rest}": shapes.get(rest, (D,)) for rest in rests}
    return SpecsOnly({name: (shape, "bfloat16") for name, shape in found.items()})
