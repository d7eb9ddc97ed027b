"""Writes the golden cases of diffusers' flax classes: Stable Diffusion's UNet, VAE and ControlNet, on a CPU.

diffusers 0.35.2 has the flax classes, and no package of the tests goes with it. In an environment of its own, with Python 3.11:

    pip install torch==2.13.0 diffusers==0.35.2 transformers==4.49.0 jax==0.4.38 flax==0.10.2 numpy==2.2.6 && pip install .
    PYTHONPATH=src:tests python tests/golden/make_diffusers.py [CASE ...]

diffusers/CASE.npz: the config.json and names and shapes of the leaves that `save_pretrained` wrote, inputs, and what the flax class computed from
them, in float32 with matmul precision `highest` and in float64 with casts removed. The weights are those of `drawn` in
tests/support/drawn_cases.py. DIGEST.json: SHA-256 of the msgpack file, the drift of float32, with `jax.jit` as recorded and without it, and what diffusers' own
`from_flax=True` makes of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from convert.numerics.lift_jax import float64, lift
from support import diffusers_cases
from support.drawn_cases import DrawnCases, drawn
from support.goldens import relative_error

HERE = Path(__file__).parent / "diffusers"
UNET = {"sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 12}
DOWN, UP = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
VAE = {
    "sample_size": 8,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 8,
}
CONTROL = {"conditioning_embedding_out_channels": (6, 6, 8, 10)}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "unet": ("UNet2DConditionModel", {**UNET, "layers_per_block": 2, "attention_head_dim": 4, "down_block_types": DOWN, "up_block_types": UP}),
    "unet.linear": ("UNet2DConditionModel", {**UNET, "attention_head_dim": (2, 4), "use_linear_projection": True, "only_cross_attention": (True, False), "down_block_types": DOWN, "up_block_types": UP}),
    "unet.sdxl": ("UNet2DConditionModel", {
        **UNET, "attention_head_dim": (2, 4), "use_linear_projection": True, "transformer_layers_per_block": (1, 3), "down_block_types": DOWN[::-1], "up_block_types": UP[::-1],
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 58, "flip_sin_to_cos": False, "freq_shift": 1,
    }),
    "unet.equal": ("UNet2DConditionModel", {**UNET, "block_out_channels": (32, 32, 32), "attention_head_dim": 8, "mid_block_type": None, "cross_attention_dim": 32, "down_block_types": (DOWN[0], *DOWN), "up_block_types": (*UP, UP[1])}),
    "vae": ("AutoencoderKL", {**VAE, "block_out_channels": (8, 16), "layers_per_block": 2, "latent_channels": 4}),
    "vae.equal": ("AutoencoderKL", {**VAE, "block_out_channels": (8, 8), "latent_channels": 6}),
    "controlnet": ("ControlNetModel", {**UNET, **CONTROL, "attention_head_dim": 4, "down_block_types": DOWN}),
    "controlnet.linear": ("ControlNetModel", {**UNET, **CONTROL, "attention_head_dim": (2, 4), "use_linear_projection": True, "down_block_types": DOWN[::-1], "controlnet_conditioning_channel_order": "bgr"}),
}  # fmt: skip


def inputs_of(case: str, config: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Draw the inputs that the class takes: two images, two times, texts of five tokens."""
    rng = np.random.RandomState(zlib.crc32(case.encode()) ^ 1)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(np.float32)

    if case.startswith("vae"):
        return {"sample": normal(2, 3, 8, 8), "latents": normal(2, config["latent_channels"], 3, 5)}
    found = {"sample": normal(2, 4, 8, 8), "timesteps": np.array([3, 701], np.int32), "encoder_hidden_states": normal(2, 5, config["cross_attention_dim"])}  # fmt: skip
    if config.get("addition_embed_type"):
        found |= {"text_embeds": normal(2, 10), "time_ids": rng.randint(0, 64, (2, 6)).astype(np.float32)}
    if case.startswith("controlnet"):
        found |= {"sample": normal(2, 4, 4, 4), "controlnet_cond": normal(2, 3, 32, 32)}
    return found


def run(case: str, model: Any, leaves: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Run the flax class; return its outputs by name."""
    variables = {"params": unflatten_dict(dict(leaves), sep="/")}
    if case.startswith("vae"):
        posterior = model.apply(variables, given["sample"], method=model.encode).latent_dist
        decoded = model.apply(variables, given["latents"], method=model.decode).sample
        return {
            "mean": posterior.mean.transpose(0, 3, 1, 2),
            "logvar": posterior.logvar.transpose(0, 3, 1, 2),
            "decoded": decoded,
        }
    args = [given[name] for name in ("sample", "timesteps", "encoder_hidden_states")]
    if case.startswith("controlnet"):
        down, mid = model.apply(variables, *args, given["controlnet_cond"], return_dict=False)
        return {**{f"down{k}": x for k, x in enumerate(down)}, "mid": mid}
    added = {name: given[name] for name in ("text_embeds", "time_ids") if name in given}
    return {"sample": model.apply(variables, *args, added or None).sample}


def make(case: str) -> dict[str, Any]:
    """Write a case; return what DIGEST.json says about it."""
    name, config = CASES[case]
    model = getattr(diffusers, f"Flax{name}")(**config)
    shapes = flatten_dict(jax.eval_shape(lambda: model.init_weights(jax.random.PRNGKey(0))), sep="/")
    leaves = {leaf: drawn(f"{case}/{leaf}", tuple(x.shape)) for leaf, x in shapes.items()}
    given = inputs_of(case, config)
    with float64():
        exact = {key: np.asarray(x) for key, x in lift(lambda *args: run(case, model, *args))(leaves, given).items()}
    rounded = {key: np.asarray(x) for key, x in jax.jit(lambda *args: run(case, model, *args))(leaves, given).items()}
    assert all(x.dtype == np.float64 and np.isfinite(x).all() and x.std() > 1e-3 for x in exact.values())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(
            folder, params=unflatten_dict({key: jnp.asarray(x) for key, x in leaves.items()}, sep="/")
        )
        stated = json.loads((Path(folder) / "config.json").read_text())
        digest = hashlib.sha256((Path(folder) / "diffusion_flax_model.msgpack").read_bytes()).hexdigest()
        DrawnCases(HERE).save(case, stated, leaves, given, rounded, exact)
        peer = from_flax(case, folder)
    steps = run(case, model, leaves, {key: jnp.asarray(x) for key, x in given.items()})
    found = {"sha256": digest, "from_flax": peer}
    for key, outputs in (("drift", rounded), ("drift_without_jit", steps)):
        found[key] = float(f"{max(relative_error(outputs[name], x) for name, x in exact.items()):.1e}")
    return found


def from_flax(case: str, folder: str) -> str:
    """Return what diffusers' own loader makes of the checkpoint: the error of its outputs, or why it does not load."""
    try:
        peer = getattr(diffusers, CASES[case][0]).from_pretrained(folder, from_flax=True).eval()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).partition(' for ')[0]}"
    return f"{diffusers_cases.errors(diffusers_cases.as_flax(peer), case):.1e}"


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    logging.disable(logging.WARNING)
    digests_at = HERE / "DIGEST.json"
    digests = json.loads(digests_at.read_text()) if digests_at.exists() else {}
    for case in sys.argv[1:] or CASES:
        digests[case] = make(case)
        print(f"{case}: {(HERE / f'{case}.npz').stat().st_size:,} bytes, {digests[case]}", flush=True)
        digests_at.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
