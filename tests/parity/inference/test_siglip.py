"""SigLIP's two towers, as big_vision has them: `convert infer` gives the tensors that the shipped rules give, to the byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from support.command_line import Run
from support.goldens import golden_io, relative_error
from support.inferred import layer_norm
from support.paths import GOLDEN

pytestmark = pytest.mark.slow

CHECKPOINT = GOLDEN / "siglip" / "ckpt.npz"


def _dense(w: Mapping[str, Any], at: str, x: Any) -> Any:
    return x @ w[f"{at}/kernel"] + w[f"{at}/bias"]


def _norm(w: Mapping[str, Any], at: str, x: Any) -> Any:
    return layer_norm(x, w[f"{at}/scale"], w[f"{at}/bias"])


def _attend(w: Mapping[str, Any], at: str, x: Any, to: Any) -> Any:
    q, k, v = (
        jnp.einsum("btd,dnh->btnh", of, w[f"{at}/{part}/kernel"]) + w[f"{at}/{part}/bias"]
        for part, of in (("query", x), ("key", to), ("value", to))
    )
    seen = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1]), -1)
    return jnp.einsum("bnts,bsnh,nhd->btd", seen, v, w[f"{at}/out/kernel"]) + w[f"{at}/out/bias"]


def _mlp(w: Mapping[str, Any], at: str, x: Any) -> Any:
    return _dense(w, f"{at}/Dense_1", jax.nn.gelu(_dense(w, f"{at}/Dense_0", x), approximate=True))


def _encoder(w: Mapping[str, Any], at: str, x: Any) -> Any:
    k = 0
    while f"{at}/encoderblock_{k}/LayerNorm_0/scale" in w:
        block = f"{at}/encoderblock_{k}"
        y = _norm(w, f"{block}/LayerNorm_0", x)
        x = x + _attend(w, f"{block}/MultiHeadDotProductAttention_0", y, y)
        x = x + _mlp(w, f"{block}/MlpBlock_0", _norm(w, f"{block}/LayerNorm_1", x))
        k += 1
    return _norm(w, f"{at}/encoder_norm", x)


def forward(parameters: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The embeddings of images and texts, each of length 1, and their logits."""
    w = {name.removeprefix("params/"): leaf for name, leaf in parameters.items()}
    pixels, kernel = inputs["pixels"], w["img/embedding/kernel"]
    x = jax.lax.conv_general_dilated(
        pixels, kernel, kernel.shape[:2], "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = (x + w["img/embedding/bias"]).reshape(len(x), -1, kernel.shape[-1]) + w["img/pos_embedding"]
    x = _encoder(w, "img/Transformer", x)
    head = "img/MAPHead_0"
    probe = jnp.tile(w[f"{head}/probe"], (len(x), 1, 1))
    x = _attend(w, f"{head}/MultiHeadDotProductAttention_0", probe, x)
    image = (x + _mlp(w, f"{head}/MlpBlock_0", _norm(w, f"{head}/LayerNorm_0", x)))[:, 0]
    y = _encoder(w, "txt/Encoder_0", w["txt/Embed_0/embedding"][inputs["tokens"]] + w["txt/pos_embedding"])
    text = _dense(w, "txt/head", y[:, -1])
    image, text = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (image, text))
    logits = image @ text.T * jnp.exp(w["t"]) + w["b"]
    return {"image": image, "text": text, "logits": logits}


PAIR = """
import numpy as np
from transformers import AutoConfig, SiglipModel

from convert import Reference
from parity.inference.test_siglip import forward


def build(weights):
    module = SiglipModel(AutoConfig.for_model(**CONFIG))
    module.load_state_dict(weights, strict=True, assign=True)
    return module.eval()


def run(module, inputs):
    given = inputs["pixels"].movedim(-1, 1)
    made = module(input_ids=inputs["tokens"].long(), pixel_values=given)
    return {"image": made.image_embeds, "text": made.text_embeds, "logits": made.logits_per_image}


def inputs(seed):
    rng = np.random.default_rng(seed)
    return {"pixels": rng.uniform(-1, 1, (3, 12, 12, 3)).astype(np.float32), "tokens": rng.integers(2, 101, (2, 7)).astype(np.int32)}


def pair(plan):
    return Reference(inputs=inputs, jax=forward, build=build, run=run, outputs=("image", "text", "logits"), reduction=40, depth=5)
"""


def test_the_function_is_big_visions() -> None:
    io, weights = golden_io("siglip"), dict(np.load(CHECKPOINT))
    got = forward(weights, {"pixels": io["pixels"], "tokens": io["tokens"]})
    assert relative_error(got["image"], io["image"]) < 1e-5
    assert relative_error(got["text"], io["text"]) < 1e-5


def test_the_tensors_of_the_shipped_rules(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run("siglip", CHECKPOINT, "shipped")
    config = json.loads(Path("shipped/config.json").read_text())
    Path("siglip_pair.py").write_text(f"CONFIG = {config!r}\n{PAIR}")
    run("infer", CHECKPOINT, "mine.yaml", "--reference", "siglip_pair:pair")
    run("mine.yaml", CHECKPOINT, "mine.safetensors")
    mine, shipped = load_file("mine.safetensors"), load_file("shipped/model.safetensors")
    assert mine.keys() == shipped.keys()
    assert [name for name in shipped if mine[name].tobytes() != shipped[name].tobytes()] == []
