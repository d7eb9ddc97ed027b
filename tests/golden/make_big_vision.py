"""Writes the golden cases paligemma1, paligemma2 and siglip: the flax code of big_vision, saved as .npz, on a CPU.

big_vision is no package. It runs from a copy of its repository, in the environment of the tests:

    pip install -e '.[test]' && pip install --no-deps --target /some/folder ml_collections
    git clone https://github.com/google-research/big_vision && git -C big_vision checkout 0127fb6
    PYTHONPATH=big_vision:/some/folder python tests/golden/make_big_vision.py

Of `big_vision.utils`, which needs TensorFlow, the models use nothing when they run; an empty module stands for it. `save` writes
what upstream's `utils.load_checkpoint_np` reads and the published files hold: the tree's keys joined by "/", and bfloat16 as
NumPy writes it without knowing it, two bytes of void. Weights, inputs and outputs are the same on every run of one machine.
"""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

HERE = Path(__file__).parent
NOISE = 0.1
SIDE, ROWS = 12, 101  # images of 12 x 12 in patches of 2 x 2; rows of the table
TOWER = {"patch_size": (2, 2), "width": 24, "depth": 3, "mlp_dim": 40, "num_heads": 3}
# Widths are equal where they are in the published models, heads x head width among them: a wrong transpose loads.
LLM = {"width": 32, "depth": 3, "mlp_dim": 48, "num_heads": 4, "head_dim": 8, "norm_eps": 1e-6, "vocab_size": ROWS}
SECOND = {"num_kv_heads": 2, "final_logits_softcap": 3.0, "attn_logits_softcap": 5.0, "post_norms": True}


def randomize(params: dict, rng: np.random.Generator) -> dict:
    """Upstream's initial values, and normal numbers on top: biases and norm scales, which are 0 or 1 there, are not."""
    leaves, tree = jax.tree_util.tree_flatten(params)
    drawn = [leaf + NOISE * rng.standard_normal(leaf.shape, np.float32) for leaf in map(np.asarray, leaves)]
    return jax.tree_util.tree_unflatten(tree, drawn)


def save(case: str, params: dict, outputs: dict[str, Any]) -> None:
    """Writes a golden case."""
    folder = HERE / case
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    flat = {f"params/{name}": np.asarray(x) for name, x in flatten_dict(params, sep="/").items()}
    np.savez(folder / "ckpt.npz", **{k: x.view("V2") if x.dtype == jnp.bfloat16 else x for k, x in flat.items()})
    np.savez(folder / "io.npz", **outputs)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{case}: {len(flat)} leaves, {sum(x.size for x in flat.values())} parameters, {size:,} bytes")
    for name, x in outputs.items():
        print(f"  {name} {x.shape}: {float(np.abs(x).mean()):.2f} on average, {float(np.abs(x).max()):.2f} at most")


def paligemma_model(llm: dict[str, Any], scan: bool) -> Any:
    """Return upstream's model."""
    from big_vision.models.ppp import gemma
    from big_vision.models.proj.paligemma import paligemma as upstream
    from ml_collections import ConfigDict

    gemma.get_config = lambda variant: ConfigDict({**LLM, **llm, "variant": variant})
    return upstream.Model(img={**TOWER, "pool_type": "none", "scan": scan}, llm={"scan": scan, "vocab_size": ROWS})


def read_by_paligemma(model: Any, params: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the embeddings of the images, and the logits."""
    logits, out = model.apply({"params": params}, given["pixels"], given["tokens"], given["mask_ar"])
    return {"soft_tokens": out["img/zimg"], "logits": logits}


def paligemma(case: str, seed: int, llm: dict[str, Any], scan: bool, dtype: Any) -> None:
    """The image and a prefix see each other; the rest of the text is causal."""
    rng = np.random.default_rng(seed)
    model = paligemma_model(llm, scan)
    pixels = rng.uniform(-1, 1, (2, SIDE, SIDE, 3)).astype(np.float32)
    tokens = rng.integers(1, ROWS, (2, 9)).astype(np.int32)
    mask_ar = np.repeat([[0, 0, 0, 0, 1, 1, 1, 1, 1]], 2, 0).astype(np.int32)
    params = model.init(jax.random.key(seed), pixels, tokens, mask_ar)["params"]
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), randomize(params, rng))
    run = jax.tree.map(lambda x: x.astype(jnp.float32), params)  # the outputs are those of what lies on disk
    given = {"pixels": pixels, "tokens": tokens, "mask_ar": mask_ar}
    save(case, params, given | jax.tree.map(np.asarray, read_by_paligemma(model, run, given)))


def siglip_model() -> Any:
    """Return upstream's two towers, of different depth and as wide as each other."""
    from big_vision.models.proj.image_text import two_towers

    text = {"width": 24, "depth": 2, "mlp_dim": 36, "num_heads": 2, "vocab_size": ROWS}
    return two_towers.Model(image={**TOWER, "pool_type": "map"}, text=text, out_dim=(None, 24), bias_init=-10.0)


def read_by_siglip(model: Any, params: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the embeddings and their logits."""
    image, words, out = model.apply({"params": params}, given["pixels"], given["tokens"])
    logits = image @ words.T * out["t"] + out["b"]  # big_vision/trainers/proj/image_text/siglip.py
    return {"image": image, "text": words, "logits": logits}


def siglip() -> None:
    rng = np.random.default_rng(23)
    model = siglip_model()
    pixels = rng.uniform(-1, 1, (3, SIDE, SIDE, 3)).astype(np.float32)
    tokens = rng.integers(2, ROWS, (2, 7)).astype(np.int32)
    params = randomize(model.init(jax.random.key(23), pixels, tokens)["params"], rng)
    given = {"pixels": pixels, "tokens": tokens}
    save("siglip", params, given | jax.tree.map(np.asarray, read_by_siglip(model, params, given)))


def stand_in_for_utils() -> None:
    """An empty module in place of `big_vision.utils`."""
    utils = sys.modules["big_vision.utils"] = types.ModuleType("big_vision.utils")
    import big_vision

    big_vision.utils = utils


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    stand_in_for_utils()
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{n} {version(n)}' for n in ('flax', 'jax', 'numpy'))}")
    paligemma("paligemma1", 17, {"num_kv_heads": 1}, scan=True, dtype=jnp.float32)
    paligemma("paligemma2", 19, SECOND, scan=False, dtype=jnp.bfloat16)
    siglip()


if __name__ == "__main__":
    main()
