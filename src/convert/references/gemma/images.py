"""Gemma 3 with its vision tower, PaliGemma 1 and 2: the equations of gemma and big_vision in plain JAX, against transformers.

Sources: gemma 3.3.0 ``gemma/multimodal/vision_utils.py``, ``vision.py``, ``gm/nn/_modules.py`` (Embedder.encode_vision);
google-research/big_vision@0127fb6 ``models/vit.py``, ``models/ppp/gemma.py``, ``models/proj/paligemma/paligemma.py``.
tests/models/test_gemma_images_check.py compares the values with those that the real code gave for the golden checkpoints.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.gemma import jax_model
from convert.references.gemma.jax_model import LOGITS, Gemma
from convert.references.gemma.text import BEYOND, UNLIMITED, build, config_facts, model_of
from convert.references.loading import on, ready
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.plan_facts import require_model
from convert.references.protocol import INPUT, Arrays, JaxSide, Reference

TEXT = {"gemma3_vision": "gemma3", "paligemma1": "gemma1", "paligemma2": "gemma2"}  # model -> its text model
TABLE = "model.language_model.embed_tokens.weight"
TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
BEFORE, PREFIX = 3, 4  # tokens before an image of Gemma 3; tokens of PaliGemma's prefix after the image
_BLOCK = re.compile(r"(?P<before>.*)Transformer/encoderblock/(?P<inner>.+)")
_LAYER = re.compile(r"layers/(?P<rest>(?P<i>\d+)/)?(?P<inner>.+)")


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint, for sequences with an image and text before or after it.

    Raises:
        ConvertError: the plan is not of one of these models to transformers, or lacks a fact.
    """
    require_model(plan, TEXT, ("transformers",))
    soft = int(plan.facts.get("mm_tokens_per_image", plan.sizes["L"]))
    model, epsilon = model_of(plan, TEXT[plan.rules.model]), float(plan.facts["vision_epsilon"])
    causal = plan.rules.model == "gemma3_vision"
    return pair(plan, model, soft, causal, partial(run_jax, model, epsilon, soft))


def pair(plan: Plan, model: Gemma, soft: int, causal: bool, jax: JaxSide) -> Reference:
    """Return the two models, of which the JAX side is given.

    Args:
        soft: number of tokens of an image.
        causal: whether text before the image sees only what is before it; otherwise there is a prefix that all see.
    """
    sizes = plan.sizes
    steps = max(max((window + BEYOND for window in model.windows if window), default=0), soft + UNLIMITED)

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        tokens = rng.integers(1, model.vocabulary, (2, steps)).astype(np.int32)
        image, prefix = np.zeros((2, 2, steps), np.int32)
        for k in range(2):
            start = BEFORE + k if causal else 0
            image[k, start : start + soft] = 1
            prefix[k, : soft + PREFIX + k] = 0 if causal else 1
        pixels = rng.uniform(-1, 1, (2, sizes["Z"], sizes["Z"], sizes["R"])).astype(np.float32)
        return {
            "tokens": np.where(image, 0, tokens).astype(np.int32),
            "image": image,
            "prefix": prefix,
            "pixels": pixels,
        }

    return Reference(
        inputs=inputs,
        jax=jax,
        build=partial(build, plan, table=TABLE),
        run=partial(_run, causal),
        outputs=(LOGITS,),
        logits=(LOGITS,),
        reduction=max(sizes[letter] for letter in "DFWM"),
        depth=sizes["i"] + sizes["j"],
        facts=partial(_facts, plan),
    )


# ---- JAX


def unstacked(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of each layer apart, from any layout: ``layer_2/...``, ``img/Transformer/encoderblock_1/...``."""
    (prefix,) = {name.removesuffix("pos_embedding") for name in weights if name.endswith("pos_embedding")}
    out: dict[str, Any] = {}
    for name, value in weights.items():
        short = f"img/{name.removeprefix(prefix)}" if name.startswith(prefix) else name
        block, layer = _BLOCK.fullmatch(short), _LAYER.fullmatch(short)
        if block is not None:
            for j in range(value.shape[0]):
                out[f"{block['before']}Transformer/encoderblock_{j}/{block['inner']}"] = value[j]
        elif layer is not None and layer["i"] is None:
            out |= {f"layer_{i}/{layer['inner']}": value[i] for i in range(value.shape[0])}
        elif layer is not None:
            out[f"layer_{layer['i']}/{layer['inner']}"] = value
        else:
            out[short] = value
    return out


def run_jax(
    model: Gemma, epsilon: float, soft: int, weights: Mapping[str, Any], inputs: Mapping[str, Any]
) -> OrderedDict[str, Any]:
    """Return the values at boundaries, by the names of transformers' submodules, and the logits [batch, time, token].

    Args:
        epsilon: of the tower's norms.
        soft: number of tokens of an image.
        inputs: ``tokens``, ``image`` (1 at the tokens of an image) and ``prefix`` (1 where every position sees every other),
            [batch, time]; ``pixels`` [images, height, width, colours], in the order of the batch.
    """
    import jax.numpy as jnp

    w = unstacked(weights)
    values: OrderedDict[str, Any] = OrderedDict()
    x = tower(w, values, inputs["pixels"], epsilon)
    if "img/head/kernel" in w:
        x = x @ w["img/head/kernel"] + w["img/head/bias"]
    else:  # VisionExit averages over squares of patches; Embedder.encode_vision
        side, cells = math.isqrt(x.shape[1]), math.isqrt(soft)
        x = x.reshape(len(x), cells, side // cells, cells, side // cells, -1).mean((2, 4)).reshape(len(x), soft, -1)
        x = x * (jnp.mean(jnp.square(x), -1, keepdims=True) + jax_model.EPSILON) ** -0.5
        x = x * (1 + w["embedder/mm_soft_embedding_norm/scale"]) @ w["embedder/mm_input_projection/w"]
    values[PROJECTOR] = x
    tokens, image = inputs["tokens"], inputs["image"] > 0
    places = jnp.arange(tokens.shape[1])
    first = image & ~jnp.pad(image, ((0, 0), (1, 0)))[:, :-1]
    block = jnp.cumsum(first, axis=1) * image  # 1, 2, ...: the image of a position
    if "img/head/kernel" in w:
        both = (inputs["prefix"] > 0)[:, None, :]  # every position sees the prefix, which sees nothing else
    else:
        both = (block[:, :, None] == block[:, None, :]) & image[:, None, :]
    sees = (places[None, None, :] <= places[None, :, None]) | both
    text = jax_model.run(model, w, tokens, jax_model.Images(image, x.reshape(len(tokens), -1, x.shape[-1]), sees))
    for name, value in text.items():
        values[name.replace("model.", "model.language_model.", 1)] = value
    return values


def tower(w: Mapping[str, Any], values: Any, pixels: Any, epsilon: float) -> Any:
    """Run SigLIP's encoder, [images, patches, width], and put the values at its boundaries into `values`."""
    import jax
    import jax.numpy as jnp

    def norm(name: str, leaf: str, x: Any) -> Any:
        centred = x - jnp.mean(x, -1, keepdims=True)
        y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + epsilon)
        values[name] = y * w[f"img/Transformer/{leaf}/scale"] + w[f"img/Transformer/{leaf}/bias"]
        return values[name]

    kernel = w["img/embedding/kernel"]
    n, height, width, colours = pixels.shape
    rows, columns = height // kernel.shape[0], width // kernel.shape[1]
    patches = pixels.reshape(n, rows, kernel.shape[0], columns, kernel.shape[1], colours)
    x = jnp.einsum("nhpwqr,pqrd->nhwd", patches, kernel) + w["img/embedding/bias"]
    values[f"{TOWER}.embeddings.patch_embedding"] = jnp.moveaxis(x, -1, 1)
    x = x.reshape(n, rows * columns, -1) + w["img/pos_embedding"]
    j = 0
    while f"img/Transformer/encoderblock_{j}/LayerNorm_0/scale" in w:
        name, leaf = f"{TOWER}.encoder.layers.{j}", f"encoderblock_{j}"
        y, at = (
            norm(f"{name}.layer_norm1", f"{leaf}/LayerNorm_0", x),
            f"img/Transformer/{leaf}/MultiHeadDotProductAttention_0",
        )
        q, k, v = (
            jnp.einsum("nld,dab->nlab", y, w[f"{at}/{m}/kernel"]) + w[f"{at}/{m}/bias"]
            for m in ("query", "key", "value")
        )
        for part, value in (("q", q), ("k", k), ("v", v)):
            values[f"{name}.self_attn.{part}_proj"] = value.reshape(*value.shape[:2], -1)
        probs = jax.nn.softmax(jnp.einsum("nlab,nmab->nalm", q / math.sqrt(q.shape[-1]), k), axis=-1)
        y = jnp.einsum("nalm,nmab->nlab", probs, v)
        values[f"{name}.self_attn.out_proj{INPUT}"] = y.reshape(*y.shape[:2], -1)
        y = jnp.einsum("nlab,abd->nld", y, w[f"{at}/out/kernel"]) + w[f"{at}/out/bias"]
        values[f"{name}.self_attn.out_proj"] = y
        x = x + y
        y, at = norm(f"{name}.layer_norm2", f"{leaf}/LayerNorm_1", x), f"img/Transformer/{leaf}/MlpBlock_0"
        y = values[f"{name}.mlp.fc1"] = y @ w[f"{at}/Dense_0/kernel"] + w[f"{at}/Dense_0/bias"]
        y = values[f"{name}.mlp.fc2{INPUT}"] = jax.nn.gelu(y, approximate=True)
        y = values[f"{name}.mlp.fc2"] = y @ w[f"{at}/Dense_1/kernel"] + w[f"{at}/Dense_1/bias"]
        x = values[name] = x + y
        j += 1
    return norm(f"{TOWER}.post_layernorm", "encoder_norm", x)


# ---- PyTorch


def _run(gemma3: bool, module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    with ready(module) as (device, dtype):
        image = on(device, inputs["image"]).bool()
        ids = on(device, inputs["tokens"]).long().masked_fill(image, module.config.image_token_id)
        kinds = image if gemma3 else on(device, inputs["prefix"]) == 0  # PaliGemma: 1 for what is causal
        pixels = on(device, inputs["pixels"]).to(dtype).movedim(-1, 1).contiguous()
        made = module(input_ids=ids, pixel_values=pixels, token_type_ids=kinds.long(), use_cache=False)
        return {LOGITS: made.logits}


def _facts(plan: Plan, module: Any) -> Mapping[str, Mapping[str, Any]]:
    config = module.config
    texts = [f"model.language_model.layers.{i}.mlp" for i in range(config.text_config.num_hidden_layers)]
    images = [f"{TOWER}.encoder.layers.{j}.mlp" for j in range(config.vision_config.num_hidden_layers)]
    blocks = [Block(at, f"{at}.gate_proj", f"{at}.down_proj", f"{at}.up_proj") for at in texts]
    blocks += [Block(at, f"{at}.fc1", f"{at}.fc2") for at in images]
    facts = config_facts(config.text_config)
    absent = {
        name: None for name in facts if plan.facts.get(name, "") is None
    }  # null in config.json, which is compared
    return {**common_facts(module, blocks), "": {**facts, **absent}}
