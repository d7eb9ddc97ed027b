"""Writes the golden case gemma3-vision: the flax code of gemma 3.3.0 with its vision tower, saved by Orbax, on a CPU.

It runs in the environment of the tests, with three wheels beside it:

    pip install -e '.[test]' && pip install --no-deps --target /some/folder gemma==3.3.0 chex==0.1.92 toolz
    PYTHONPATH=/some/folder python tests/golden/make_gemma3_vision.py

Of kauldron, which needs TensorFlow, gemma's modules use type annotations and one identity layer; `_stand_in_for_kauldron`
has those. Every equation is upstream's. Weights, inputs and outputs are the same on every run of one machine; Orbax adds
timestamps and random file names.
"""

from __future__ import annotations

import shutil
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import orbax.checkpoint as ocp

HERE = Path(__file__).parent
SEED, NOISE = 11, 0.1
LAYERS, VOCABULARY, SIDE, TOKENS = 7, 131, 12, 4  # images of 12 x 12 in patches of 2 x 2, pooled to 2 x 2 tokens
BEGIN, END = 5, 6  # <start_of_image>, <end_of_image>; 255999 and 256000 in the published vocabulary


class _Annotations:
    """jaxtyping's annotations as kauldron writes them: `Float["B L D"]`, the array's type left out."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getitem__(self, axes: Any) -> Any:
        return self.of[jax.Array, axes]


def _stand_in_for_kauldron() -> None:
    """The names of kauldron that gemma's modules use."""
    arrays = {name: _Annotations(getattr(jaxtyping, name)) for name in ("Bool", "Float", "Int", "UInt8")}
    typing, ktyping = types.ModuleType("kauldron.typing"), types.ModuleType("kauldron.ktyping")  # of gemma 3 and 4
    for module in (typing, ktyping):
        vars(module).update(
            arrays,
            Array=_Annotations(jaxtyping.Shaped),
            PRNGKey=jax.Array,
            PyTree=jaxtyping.PyTree,
            typechecked=lambda f: f,
            array_type_meta=types.SimpleNamespace(is_array_type=lambda annotation: False),
        )
    kd = types.ModuleType("kauldron.kd")
    kd.sharding = types.SimpleNamespace(ShardingTree=Any)  # type: ignore[attr-defined]
    kd.nn = types.SimpleNamespace(Identity=type("Identity", (nn.Module,), {"__call__": lambda self, x: x}))  # type: ignore[attr-defined]
    kontext = types.ModuleType("kauldron.kontext")
    vars(kontext).update(Key=Any, REQUIRED="__required__")
    utils = types.ModuleType("kauldron.utils")
    vars(utils)["immutabledict"] = types.SimpleNamespace(ImmutableDict=dict)
    kauldron = types.ModuleType("kauldron")
    vars(kauldron).update(kd=kd, kontext=kontext, typing=typing, ktyping=ktyping, utils=utils, __path__=[])
    sys.modules |= {m.__name__: m for m in (kauldron, kd, kontext, typing, ktyping, utils)}


def randomize(params: dict, rng: np.random.Generator) -> dict:
    """Upstream's initial values, and normal numbers on top: biases and norm scales, which are 0 or 1 there, are not."""
    leaves, tree = jax.tree_util.tree_flatten(params)
    drawn = [leaf + NOISE * rng.standard_normal(leaf.shape, np.float32) for leaf in map(np.asarray, leaves)]
    return jax.tree_util.tree_unflatten(tree, [jnp.asarray(leaf) for leaf in drawn])


def transformer() -> Any:
    """Upstream's Transformer, small. Width and heads x head width are equal in the tower, as in the published models."""
    from gemma.gm.nn import _config, _modules, _transformer
    from gemma.gm.vision import _token_utils
    from gemma.multimodal import vision, vision_utils

    special = types.SimpleNamespace(START_OF_IMAGE=BEGIN, END_OF_IMAGE=END)
    _token_utils._tokenizer = types.SimpleNamespace(Gemma3Tokenizer=types.SimpleNamespace(special_tokens=special))
    kinds = _modules.AttentionType
    tower = vision.SigLiPFromPatches(
        siglip_encoder=vision_utils.ViTModel(patch_size=(2, 2), width=24, depth=3, mlp_dim=40, num_heads=3),
        siglip_exit=vision.VisionExit(output_length=TOKENS),
        num_mm_tokens_per_image_prepool=36,
        num_mm_tokens_per_image=TOKENS,
        image_height=SIDE,
        image_width=SIDE,
    )
    config = _config.TransformerConfig(
        num_embed=VOCABULARY,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=_config.make_attention_layers_types(
            (kinds.LOCAL_SLIDING,) * 5 + (kinds.GLOBAL,), num_layers=LAYERS
        ),
        sliding_window_size=8,
        transpose_gating_einsum=True,
        local_base_frequency=10_000,
        global_base_frequency=1_000_000,
        vision_encoder=tower,
    )
    return _transformer.Transformer(config=config, dtype=jnp.float32)


def every_position(model: Any, tokens: jax.Array, images: jax.Array) -> tuple[jax.Array, ...]:
    """Upstream's call, in which logits of image tokens are left out, without leaving them out."""
    from gemma.gm.utils import _types

    inputs = model._encode_and_get_inputs(tokens=tokens, images=images)
    x, _ = model._apply_attention(inputs, None)
    expanded = _types.Input(text=tokens, images=images, config=model.config.input_config).tokens_with_mm
    return expanded, model._encode_vision(images), model.embedder.decode(x)


def main() -> None:
    """Replaces the golden case."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    _stand_in_for_kauldron()
    names = ("gemma", "flax", "orbax-checkpoint", "jax", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {version(name)}' for name in names)}")
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(10, 100, (2, 9)).astype(np.int32)
    tokens[0, [2, 6]] = tokens[1, [1, 4]] = BEGIN  # two images each, at different places
    images = rng.integers(0, 256, (2, 2, SIDE, SIDE, 3)).astype(np.uint8)
    model = transformer()
    variables = randomize(model.init(jax.random.key(SEED), jnp.asarray(tokens), images=jnp.asarray(images)), rng)
    folder = HERE / "gemma3-vision"
    if folder.exists():
        shutil.rmtree(folder)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "ckpt", variables["params"])
    # Orbax writes the absolute path into this file, whose presence alone counts.
    (folder / "ckpt" / "commit_success.txt").write_text("Checkpoint commit was successful.")
    with ocp.StandardCheckpointer() as checkpointer:  # the outputs are those of what lies on disk
        params = checkpointer.restore(folder / "ckpt", variables["params"])

    expanded, soft_tokens, logits = model.apply(
        {"params": params}, jnp.asarray(tokens), jnp.asarray(images), method=every_position
    )
    patches = model.vision_encoder.patchify_images(jnp.asarray(images))
    n = SIDE // 2
    pixels = np.asarray(patches).reshape(2, 2, n, n, 2, 2, 3).transpose(0, 1, 2, 4, 3, 5, 6).reshape(images.shape)
    outputs = {
        "soft_tokens": soft_tokens,
        "logits": logits,
        "short_logits": model.apply({"params": params}, jnp.asarray(tokens), images=jnp.asarray(images)).logits,
        "text_logits": model.apply({"params": params}, jnp.asarray(tokens)).logits,
    }
    apart = np.abs(outputs["short_logits"][:, :, None] - logits[:, None]).max(-1).min(-1)
    assert apart.max() < 1e-5, "every row of upstream's own call is among them"
    np.savez(folder / "io.npz", tokens=tokens, images=images, pixels=pixels, expanded=expanded, **outputs)
    leaves = jax.tree_util.tree_leaves(params)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{len(leaves)} leaves, {sum(leaf.size for leaf in leaves)} parameters, {size:,} bytes")
    print(f"logits: {float(jnp.abs(logits).mean()):.2f} on average, {float(jnp.abs(logits).max()):.2f} at most")


if __name__ == "__main__":
    main()
